"""Options that commands share, and what they read and write, looked at before a model library is imported."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, restricted_number_type

from lightning_mtrl.errors import UserError
from lightning_mtrl.runs.folder import RunFolder

_LOG_ENDINGS = (".jsonl", ".parquet")
# As in a configuration; `messages` says it in words.
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])


def add_run_options(parser: ArgumentParser, described: str = "folder of the run") -> None:
    """Add the options that name a policy of a run."""
    parser.add_argument("--run", "--run_dir", type=str, required=True, help=described)
    parser.add_argument("--iteration", type=NonNegativeInt | None, help="which policy; null: the newest")


def open_run(options: Namespace) -> RunFolder:
    """Open the run that the options of `add_run_options` name.

    Raises:
        UserError: if there is no such run, or it has no checkpoint of that iteration.
    """
    folder = RunFolder.open(options.run)
    wanted = options.iteration
    if wanted and not folder.checkpoint(wanted).is_dir():
        names = (path.name.rpartition("-")[2] for path in folder.checkpoints.glob("iteration-*"))
        found = sorted(int(name) for name in names if name.isdecimal() and int(name))
        there = ", ".join(["0 (pi_0)", *map(str, found)])
        raise UserError(
            f"--iteration is {wanted}, but {folder.path} has no checkpoint of it. There are: {there}."
        )
    return folder


def expect_writable(option: str, path: Path) -> None:
    """Refuse a place where nothing can be made.

    Raises:
        UserError: if a folder above it is a file, or may not be written to.
    """
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise UserError(
            f"{option} is {str(path)!r}, but {above} is no folder, so nothing can be put there. Name another "
            f"place."
        )
    try:
        # Tried, since permissions do not tell it of every file system, and of root they tell nothing.
        with TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise UserError(
            f"{option} is {str(path)!r}, but {above} may not be written to ({error.strerror}). Name another "
            f"place."
        ) from None


def log_output(name: str) -> Path:
    """The file that --output names, for conversations; its folder is made.

    Raises:
        UserError: if nothing can be written there, or its name ends in another way.
    """
    path = Path(name)
    if path.suffix not in _LOG_ENDINGS:
        raise UserError(
            f"--output is {name!r}, but a file that ends with {' or '.join(_LOG_ENDINGS)} was expected."
        )
    if path.is_dir():
        raise UserError(f"--output is {name!r}, which is a folder; give a file.")
    expect_writable("--output", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
