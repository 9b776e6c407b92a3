"""The grid of ITPO's table 1 on the embedded tasks: credit x advantage x task x seeds.

    python benchmarks/table1.py --output runs/table1

Every run is what `python -m lightning_mtrl fit` makes of the composed files of configs/, in a folder of its
own. A grid that was stopped goes on where it was: finished runs are kept, a broken one is resumed. At the end
it writes table.md, table.json, and the figures of the paper as PNG and for TensorBoard.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_mtrl.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_mtrl.credit.probe import PRMProbe
    from table1_report import Curve

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TASKS = ("math_tutoring", "document_writing", "medical_recommendation")
# Rows of the paper's table 1, and Norm-ITPO by its text; --credits and --advantages have all combinations.
PAPER = {
    "gae": ("outcome", "prime", "itpo", "norm_itpo"),
    "rloo": ("trajectory_share", "uniform", "llm_judge", "prime", "itpo", "norm_itpo", "norm_itpo_paper"),
    "grpo": ("trajectory_share", "norm_itpo"),
}


@dataclass(frozen=True)
class Cell:
    """A field of the table: names of files under configs/tasks, configs/credit and configs/advantage."""

    task: str
    credit: str
    advantage: str

    def files(self, size: str) -> list[Path]:
        """The configuration files of a run, later ones over earlier ones."""
        parts = [f"tasks/{self.task}", f"credit/{self.credit}", f"advantage/{self.advantage}", f"size/{size}"]
        return [CONFIGS / f"{name}.yaml" for name in ("itpo", *parts)]


@dataclass(frozen=True)
class Job:
    """One run of a cell."""

    cell: Cell
    seed: int
    size: str
    folder: Path
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.cell.task} {self.cell.credit} {self.cell.advantage} seed {self.seed}"


def run_folder(output: Path, cell: Cell, seed: int) -> Path:
    """Where a run lives."""
    return output / cell.task / f"{cell.credit}-{cell.advantage}" / f"seed-{seed}"


def chosen_cells(
    tasks: Sequence[str], credits: Sequence[str] | None, advantages: Sequence[str] | None
) -> list[Cell]:
    """The paper's rows, or the product of what is named."""
    if credits is None and advantages is None:
        rows = [(credit, advantage) for advantage, named in PAPER.items() for credit in named]
    else:
        rows = list(itertools.product(credits or names("credit"), advantages or names("advantage")))
    return [Cell(task, credit, advantage) for task in tasks for credit, advantage in rows]


def names(folder: str) -> list[str]:
    """What there is to choose from."""
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml"))


def run(job: Job) -> str:
    """Do a run, or what is left of it; returns one line that tells what came of it."""
    # Here, since a worker process needs them and the command line does not.
    from dataclasses import replace

    from lightning_mtrl.loop import PolicyIterationLoop
    from lightning_mtrl.parsing import load_config, to_yaml
    from lightning_mtrl.runs.folder import RunFolder
    from lightning_mtrl.runs.summary import Summary

    config = load_config(*job.cell.files(job.size), overrides=[*job.overrides, f"--seed={job.seed}"])
    text = to_yaml(replace(config, run_dir=None))
    folder = RunFolder(job.folder)
    if folder.config.is_file() and folder.config.read_text("utf-8") != text:
        raise UserError(f"{job.folder} holds a run with another configuration; choose another --output")
    summary = Summary.open(folder.summary)
    if len(summary.iterations) <= config.loop.iterations:
        if folder.config.is_file():
            folder = RunFolder.open(job.folder)
        else:
            shutil.rmtree(job.folder, ignore_errors=True)
            folder = RunFolder.create(text, job.folder)
        with (job.folder / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
            PolicyIterationLoop(config, folder).run()
        summary = Summary.open(folder.summary)
    first, last = (summary.iterations[place]["mean_return"] for place in (0, -1))
    return f"outcome {first:.3f} -> {last:.3f}, {summary.seconds:.0f} s"


def _check(job: Job) -> None:
    """Refuse options that no run could work with, before any begins."""
    from lightning_mtrl.parsing import load_config

    load_config(*job.cell.files(job.size), overrides=job.overrides)


def run_all(jobs: Sequence[Job], workers: int) -> list[str]:
    """Do all runs, each on one thread; returns the names of those that failed."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    failed: list[str] = []
    start = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run, job): job for job in jobs}
        for number, done in enumerate(as_completed(waiting), start=1):
            line, failure = _told(done)
            left = (time.monotonic() - start) / number * (len(jobs) - number) / 60
            print(f"[{number}/{len(jobs)}, {left:.0f} min left] {waiting[done].name}: {line}", flush=True)
            failed += [waiting[done].name] if failure else []
    return failed


def _told(done: Future[str]) -> tuple[str, bool]:
    try:
        return done.result(), False
    except Exception as error:  # One run that fails must not cost the others.
        if not isinstance(error, UserError):
            traceback.print_exception(error)
        return f"FAILED, {type(error).__name__}: {error}", True


def jobs_of(cells: Iterable[Cell], options: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that a grid that is stopped early has some of everything."""
    overrides = (
        f"--loop.iterations={options.iterations}",
        f"--validation.conversations={options.validation}",
        '--loggers=["csv"]',
        "--fabric.threads=1",
        *(f"--{setting}" for setting in options.set),
    )
    return [
        Job(cell, seed, options.size, run_folder(options.output, cell, seed), overrides)
        for seed in range(options.seeds)
        for cell in cells
    ]


def report(output: Path, cells: Sequence[Cell], seeds: int) -> str:
    """Write table and figures of what has finished; returns the table."""
    # Here, since they draw: the command line and the workers do not need them.
    from torch.utils.tensorboard import SummaryWriter

    import table1_figures as figures
    from table1_report import best_known, markdown, read_curve, row_of, write_report

    curves: dict[Cell, list[Curve]] = {}
    probes: dict[Cell, list[PRMProbe]] = {}
    for cell, seed in itertools.product(cells, range(seeds)):
        folder = run_folder(output, cell, seed)
        if (curve := read_curve(folder)) is not None:
            curves.setdefault(cell, []).append(curve)
            if (probe := figures.read_probe(folder)) is not None:
                probes.setdefault(cell, []).append(probe)
    tasks = list(dict.fromkeys(cell.task for cell in curves))
    best = {t: best_known(c for cell, runs in curves.items() if cell.task == t for c in runs) for t in tasks}
    rows = [row_of(c.task, c.credit, c.advantage, runs, best[c.task]) for c, runs in curves.items()]
    write_report(output, rows, best)
    with SummaryWriter(str(output / "tensorboard")) as writer:
        for task in tasks:
            for name, figure in _figures_of(task, curves, probes).items():
                figure.savefig(output / f"{task}-{name}.png", dpi=120)
                writer.add_figure(f"{task}/{name}", figure)
    return markdown(rows, best)


def _figures_of(
    task: str, curves: Mapping[Cell, list[Curve]], probes: Mapping[Cell, list[PRMProbe]]
) -> dict[str, Figure]:
    import table1_figures as figures
    from lightning_mtrl.credit.probe_figures import reward_dynamics

    shown = {f"{c.credit} {c.advantage}": runs for c, runs in curves.items() if c.task == task}
    known = {f"{c.credit} {c.advantage}": runs for c, runs in probes.items() if c.task == task}
    found = {"learning_curves": figures.learning_curves(task, shown)}
    if known:
        found["kendall_tau"] = figures.kendall_taus(task, known)
        found["turn_agreement"] = figures.ranking_agreement(task, "turn", known)
        found["token_agreement"] = figures.ranking_agreement(task, "token", known)
        found["score_slope"] = figures.score_slopes(task, known)
        label = next((name for name in known if name.startswith("norm_itpo")), next(iter(known)))
        found["reward_dynamics"] = reward_dynamics(known[label][0])
    return found


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the grid, new or to go on with")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=names("tasks"), metavar="TASK")
    parser.add_argument("--credits", nargs="+", choices=names("credit"), metavar="CREDIT")
    parser.add_argument("--advantages", nargs="+", choices=names("advantage"), metavar="ADVANTAGE")
    parser.add_argument("--size", default="tiny", choices=names("size"))
    parser.add_argument("--seeds", type=_count, default=5, help="runs of each cell")
    parser.add_argument("--iterations", type=_count, default=12)
    parser.add_argument(
        "--validation", type=_count, default=256, help="conversations that measure each policy"
    )
    parser.add_argument("--jobs", type=_count, default=os.cpu_count() or 1, help="runs at the same time")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="options of fit, for all runs"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid and report it; returns the exit status."""
    options = _options(arguments)
    cells = chosen_cells(options.tasks, options.credits, options.advantages)
    jobs = jobs_of(cells, options)
    try:
        _check(jobs[0])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = run_all(jobs, options.jobs)
    if failed:
        # No table of what is there from before, which would be taken for that of these runs.
        print(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    print(report(options.output, cells, options.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
