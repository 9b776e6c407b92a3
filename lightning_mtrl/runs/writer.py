"""One run at a time writes a folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_mtrl.errors import UserError

OPENING_SECONDS = 2.0  # a process that only opens a run holds it for an instant, while it tidies up
_LOOK_SECONDS = 0.05


class BeingWritten(UserError):
    """Another process writes the run."""


@contextmanager
def only_writer(folder: Path, patience_seconds: float = 0.0) -> Iterator[None]:
    """Keep other processes from writing a run's folder; a process that is killed lets go of it.

    Args:
        folder: of the run.
        patience_seconds: how long another one is waited for.

    Raises:
        BeingWritten: if another one writes it.
    """
    if sys.platform == "win32":
        yield  # its folders cannot be locked
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + patience_seconds
        while not _is_held(handle):
            if time.monotonic() >= until:
                raise BeingWritten(
                    f"another process is writing the run {folder}, or is stopped in the middle of it. Wait "
                    f"until it ends, or end it, and then resume."
                )
            time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(handle)


def _is_held(handle: int) -> bool:
    """Whether this process has the folder now."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True
