"""A plan of memory for people: what is held, what each phase adds, and what to change."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_mtrl.planning.memory_plan import PHASES, MemoryPlan

_NAMES = 3  # parts that the advice names


def show(plan: MemoryPlan, console: Console | None = None) -> None:
    """Print a plan.

    Args:
        plan: what is expected.
        console: where; None for the standard output.
    """
    console = console or Console()
    console.print(_phases(plan))
    console.print(_steps(plan))
    for line in (*_verdict(plan), *_assumptions(plan)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def readable(size: int) -> str:
    """Bytes for people.

    >>> readable(0), readable(1536), readable(3 * 2**20), readable(5 * 2**30)
    ('-', '1.5 KiB', '3.0 MiB', '5.00 GiB')
    """
    if size == 0:
        return "-"
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def _phases(plan: MemoryPlan) -> Table:
    """One row for each part, one column for each phase."""
    table = Table(title="Expected memory at the peak of each phase", title_justify="left", box=SIMPLE)
    table.add_column("")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for part in plan.held:
        table.add_row(part.name, *[readable(part.size)] * len(PHASES))
    table.add_section()
    largest = {phase: plan.largest(phase) for phase in PHASES}
    added = {phase: {part.name: part.size for part in step.parts} for phase, step in largest.items()}
    for name in dict.fromkeys(name for sizes in added.values() for name, size in sizes.items() if size):
        table.add_row(name, *(readable(added[phase].get(name, 0)) for phase in PHASES))
    table.add_section()
    table.add_row("total", *(readable(plan.total(phase)) for phase in PHASES))
    return table


def _steps(plan: MemoryPlan) -> Table:
    """What the phases do, each with what it needs for itself."""
    title = "What the phases do; the largest of each counts"
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for name in ("phase", "step", "size"):
        table.add_column(name)
    for name in ("adds", "activations", "checkpointed"):
        table.add_column(name, justify="right")
    for step in plan.steps:
        shown = map(readable, step.activations) if step.activations else ("", "")
        table.add_row(step.phase, step.name, step.shape, readable(step.size), *shown)
    return table


def _verdict(plan: MemoryPlan) -> list[str]:
    device = plan.device
    peak = f"The peak is {readable(plan.peak)}, in {plan.peak_phase}"
    if device.size is None:
        return [
            f"{peak}. There is no such device here ({device.kind}), so what it has is not known.",
            _advice(plan),
        ]
    has = f"{peak}; {device.name} has {readable(device.size)}"
    if plan.fits:
        return [f"{has}, so it fits."]
    return [f"{has}, so it does not fit.", _advice(plan)]


def _advice(plan: MemoryPlan) -> str:
    named = [f"{part.name} {readable(part.size)} ({part.key})" for part in plan.advice[:_NAMES]]
    return f"To make it smaller, change what the largest parts depend on: {'; '.join(named)}."


def _assumptions(plan: MemoryPlan) -> list[str]:
    copies = (
        f"Copies of weights and optimizer state to go back to take up to {readable(plan.beside)} of the "
        f"machine's own memory."
    )
    return [
        *([copies] if plan.beside else []),
        f"For conversations of up to {plan.tokens} tokens; --plan_tokens gives another length. Weights and "
        f"optimizer state are exact, the rest is an estimate (docs/memory.md).",
    ]
