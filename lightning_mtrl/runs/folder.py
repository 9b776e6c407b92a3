"""The folder of a run: where everything lies, and how it is made, opened and found again."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

from lightning_mtrl.errors import UserError
from lightning_mtrl.runs.atomic import tidy, write_text
from lightning_mtrl.runs.writer import BeingWritten, only_writer
from lightning_mtrl.speaker import is_first

DEFAULT_PARENT = Path("runs")


class RunFolder:
    """Paths of a run. The constructor touches no disk; `create` and `open` do.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(cls, config: str, run_dir: Path | str | None = None, name: str = "run") -> RunFolder:
        """Make the folder of a new run and write its configuration.

        Args:
            config: text of config.yaml, the resolved configuration.
            run_dir: the folder; None means runs/NAME, or runs/NAME-2 and so on where that exists.
            name: NAME.

        Raises:
            UserError: if `run_dir` is given and is not an empty or a new folder.
        """
        folder = cls(_unique(DEFAULT_PARENT / name) if run_dir is None else _claimed(Path(run_dir)))
        # From now on, a run without this folder is one that lost it.
        folder.checkpoints.mkdir()
        write_text(folder.config, config)
        return folder

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Open the folder of an existing run, and finish what a killed process left half done.

        What a process that is still running has half done is left to it.

        Raises:
            UserError: if there is no run; it names what is missing.
        """
        folder = cls(path)
        if not folder.path.is_dir():
            raise UserError(f"{path} is not a run: there is no such folder. {_existing_runs()}")
        if not folder.config.is_file():
            raise UserError(
                f"{path} is not a run: it has no {folder.config.name}, which `fit` writes first. "
                + _existing_runs()
            )
        if is_first():
            with suppress(BeingWritten), only_writer(folder.path):
                tidy(folder.path)
        return folder

    def discard(self) -> None:
        """Remove the folder of a run that could not begin, so that its name is free again."""
        shutil.rmtree(self.path)

    @property
    def has_results(self) -> bool:
        """Whether a policy has been measured, so that there is something to keep."""
        return self.summary.is_file()

    @property
    def is_new(self) -> bool:
        """Whether no process has worked in the folder since it was made."""
        made = {self.config.name, self.checkpoints.name, self.report.name}
        return all(path.name in made for path in self.path.glob("*"))

    @property
    def config(self) -> Path:
        """The resolved configuration, enough to repeat the run."""
        return self.path / "config.yaml"

    @property
    def summary(self) -> Path:
        """One row for each policy; see `lightning_mtrl.runs.summary.Summary`."""
        return self.path / "summary.json"

    @property
    def metrics(self) -> Path:
        """All logged numbers in long form: iteration, step, name, value."""
        return self.path / "metrics.csv"

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints."""
        return self.path / "checkpoints"

    @property
    def policy_adapter(self) -> Path:
        """The latest policy as a peft folder."""
        return self.path / "adapters" / "policy"

    def served(self, shared: str | None = None) -> Path:
        """The folder, of this run alone, of the adapters that a server has loaded (`data.server`).

        Args:
            shared: folder of several runs (`data.server.adapter_folder`), in which this one gets its own. Its
                name has a digest of the run folder's place on the disk, since runs of several machines may
                have equal paths.
        """
        if shared is None:
            return self.path / "served"
        place = self.path.resolve()
        digest = hashlib.sha256(f"{place}/{place.stat().st_ino}".encode()).hexdigest()
        return Path(shared) / f"{place.name}-{digest[:12]}"

    @property
    def figures(self) -> Path:
        """The folder of what was drawn at the end of the run."""
        return self.path / "figures"

    @property
    def report(self) -> Path:
        """The page that `report` makes of the run; no process that trains writes or reads it."""
        return self.path / "report.html"

    def rollouts(self, iteration: int, file_format: str = "parquet") -> Path:
        """The conversations of an iteration; `file_format` is "parquet" or "jsonl"."""
        return self.path / "rollouts" / f"{version_name(iteration)}.{file_format}"

    def all_rollouts(self) -> list[Path]:
        """The files of conversations that are there, in order of their iterations."""
        return sorted((self.path / "rollouts").glob("iteration-*.*"))

    def checkpoint(self, iteration: int) -> Path:
        """The folder of the checkpoint written when an iteration was done."""
        return self.checkpoints / version_name(iteration)


def version_name(iteration: int) -> str:
    """Name of a policy version and of its files.

    >>> version_name(3)
    'iteration-0003'
    """
    return f"iteration-{iteration:04d}"


def _claimed(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise UserError(
            f"run_dir is {str(path)!r}, which is a file. Pass --run_dir with a new or an empty folder."
        )
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        there = RunFolder(path).config.is_file()
        other = f", or continue the run that is there with `fit --resume {path}`" if there else ""
        raise UserError(
            f"run_dir is {str(path)!r}, which is not empty. Pass --run_dir with a new folder{other}."
        )
    return path


def _unique(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            # The creation itself is the claim, so two runs that start together get two folders.
            candidate.mkdir()
        except FileExistsError:
            number += 1
        else:
            return candidate


def _existing_runs() -> str:
    found = sorted(config.parent for config in DEFAULT_PARENT.glob("*/config.yaml"))
    return (
        f"There are: {', '.join(map(str, found))}."
        if found
        else f"There are no runs under {DEFAULT_PARENT}/."
    )
