"""The folder of a run: where everything lies, and how it is made, opened and found again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lightning_mtrl.errors import UserError
from lightning_mtrl.runs.atomic import tidy, write_text

DEFAULT_PARENT = Path("runs")
# Processes that the first one starts, on this machine, learn the run's folder from here.
_SHARED = "LIGHTNING_MTRL_RUN_DIR"
_RANKS = ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID")


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

        Of several processes only the first writes. Processes that Fabric starts from the first one get its
        folder; processes that torchrun or SLURM start need `run_dir`, since they cannot agree on a name.

        Args:
            config: text of config.yaml, the resolved configuration.
            run_dir: the folder; None means runs/NAME, or runs/NAME-2 and so on where that exists.
            name: NAME.

        Raises:
            UserError: if `run_dir` is given and not empty, or is missing where it is needed.
        """
        if _rank(os.environ) > 0:
            return cls(_known_folder(run_dir))
        if run_dir is None and _started_by_others(os.environ):
            raise UserError(
                "run_dir is null, but several processes share this run and cannot agree on a name. "
                f"Pass --run_dir, such as --run_dir {DEFAULT_PARENT / name}."
            )
        path = _claimed(Path(run_dir)) if run_dir is not None else _unique(DEFAULT_PARENT / name)
        folder = cls(path)
        write_text(folder.config, config)
        folder.share()
        return folder

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Open the folder of an existing run, and finish what a killed process left half done.

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
        if _rank(os.environ) == 0:
            tidy(folder.path)
            folder.share()
        return folder

    def share(self) -> None:
        """Let processes that this one starts know the folder."""
        os.environ[_SHARED] = str(self.path.resolve())

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

    def rollouts(self, iteration: int, file_format: str = "parquet") -> Path:
        """The conversations of an iteration; `file_format` is "parquet" or "jsonl"."""
        return self.path / "rollouts" / f"{version_name(iteration)}.{file_format}"

    def checkpoint(self, iteration: int) -> Path:
        """The folder of the checkpoint written when an iteration was done."""
        return self.checkpoints / version_name(iteration)


def version_name(iteration: int) -> str:
    """Name of a policy version and of its files.

    >>> version_name(3)
    'iteration-0003'
    """
    return f"iteration-{iteration:04d}"


def _rank(environment: Mapping[str, str]) -> int:
    return max((int(environment[name]) for name in _RANKS if environment.get(name, "").isdigit()), default=0)


def _started_by_others(environment: Mapping[str, str]) -> bool:
    sizes = (environment.get(name, "1") for name in ("WORLD_SIZE", "SLURM_NTASKS"))
    return any(size.isdigit() and int(size) > 1 for size in sizes)


def _known_folder(run_dir: Path | str | None) -> Path:
    known = run_dir if run_dir is not None else os.environ.get(_SHARED)
    if known is None:
        raise UserError("run_dir is null, but several processes share this run. Pass --run_dir.")
    return Path(known)


def _claimed(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise UserError(
            f"run_dir is {str(path)!r}, which is a file. Pass --run_dir with a new or an empty folder."
        )
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise UserError(
            f"run_dir is {str(path)!r}, which is not empty. Pass --run_dir with a new folder, "
            f"or continue the run that is there with `fit --resume {path}`."
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
