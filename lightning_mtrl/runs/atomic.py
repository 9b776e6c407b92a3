"""Files and folders that are either there in full or not at all, whenever the process is killed.

Everything is written beside its place, flushed to the disk, and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_mtrl.errors import UserError

_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"


def write_text(path: Path, text: str) -> None:
    """Replace a text file; its folder is made when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path, _UNFINISHED)
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    _flush_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file.

    Raises:
        ValueError: for NaN or infinity, which JSON does not have.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Fill a new folder that takes the place of `path` once the block ends without an error.

    Between the two renames at the end there is no folder at `path` for an instant; a process killed just
    then leaves the old one beside it, and `tidy` puts it back.

    Yields:
        The folder to write into.

    Raises:
        UserError: if another process removed it meanwhile, also where a part written later made it again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, old = _beside(path, _UNFINISHED), _beside(path, _REPLACED)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    # While it is open, no other folder gets its number on the disk.
    made = os.open(beside, os.O_RDONLY)
    try:
        yield beside
        _expect_same(beside, made)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        os.close(made)
    _flush_tree(beside)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(beside, path)
    _flush_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder so that a half-removed one is never taken for a whole one."""
    beside = _beside(path, _UNFINISHED)
    os.rename(path, beside)
    shutil.rmtree(beside)


def tidy(folder: Path) -> None:
    """Finish what a killed process left under `folder`: unfinished parts go, replaced ones come back."""
    for left in sorted(folder.rglob(f".*{_REPLACED}")):
        place = left.with_name(left.name.removeprefix(".").removesuffix(_REPLACED))
        if place.exists():
            shutil.rmtree(left)
        else:
            os.rename(left, place)
    for left in sorted(folder.rglob(f".*{_UNFINISHED}")):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink(missing_ok=True)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _expect_same(folder: Path, handle: int) -> None:
    if not folder.exists() or not os.path.samestat(folder.stat(), os.fstat(handle)):
        raise UserError(
            f"{folder} was removed by another process while it was written. Let one process at a time write "
            f"there, and start again."
        )


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
