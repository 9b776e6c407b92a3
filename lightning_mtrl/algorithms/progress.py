"""What a person sees while a critic is fitted or a policy improved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_mtrl.speaker import is_first

T = TypeVar("T")


class PhaseProgress:
    """A bar over the passes or rounds of a phase, with numbers that tell how it goes.

    Only a terminal of the first process shows it, and it is gone when the phase is over: the phase's results
    are printed anyway.

    Args:
        phase: "evaluate" or "improve".
        unit: what is counted, such as "epoch".
        console: where; standard error by default.
    """

    def __init__(self, phase: str, unit: str, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn(f"{phase}: {unit}"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not (console.is_terminal and is_first()),
        )
        self._task = self._bar.add_task(phase, total=None, facts="")

    def over(self, items: Iterable[T], total: int) -> Iterator[T]:
        """Give the items one after another and count those that are done."""
        self._bar.update(self._task, total=total)
        with self._bar:
            for item in items:
                yield item
                self._bar.advance(self._task)

    def show(self, **facts: float) -> None:
        """Put numbers beside the bar, by name."""
        text = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in facts.items())
        self._bar.update(self._task, facts=text)
