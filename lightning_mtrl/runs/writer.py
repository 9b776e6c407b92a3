"""One run at a time writes a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_mtrl.errors import UserError


class BeingWritten(UserError):
    """Another process writes the run."""


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a run's folder; a process that is killed lets go of it.

    Raises:
        BeingWritten: if another one writes it.
    """
    if sys.platform == "win32":
        yield  # its folders cannot be locked
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BeingWritten(
                f"another process is writing the run {folder}, or is stopped in the middle of it. Wait until "
                f"it ends, or end it, and then resume."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
