"""The processes that a run has started on its machine: when one dies, all end, and a line says which."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from subprocess import Popen
from types import TracebackType
from typing import Any

from lightning.fabric import Fabric

FAILED = 1  # exit code
LOOK_SECONDS = 0.2
REAPED_SECONDS = 1.0  # until a process whose connections are gone is known to be dead
GRACE_SECONDS = 5.0  # in which the first process can say itself what another one told it before it ended


def watch_started(fabric: Fabric) -> None:
    """Watch the processes that Fabric has started from this one, if it has.

    Lightning's own observer kills the first process without a word on standard error, so its list of what to
    observe is emptied, and it ends.
    """
    launcher: Any = getattr(fabric.strategy, "launcher", None)
    started: list[Popen[bytes]] = getattr(launcher, "procs", [])
    if started:
        Watch(list(started)).start()
        started.clear()


class Watch(threading.Thread):
    """Looks at processes until all have ended well, or one has not; then all end.

    A process that died also breaks whatever this one was just telling it, and the error of that says nothing
    of the reason. So before any error ends this process, it looks once more.

    Args:
        processes: in the order of their ranks, the first of which has rank 1.
    """

    def __init__(self, processes: Sequence[Popen[bytes]]) -> None:
        super().__init__(daemon=True, name="watch")
        self._processes = processes
        self._ending = threading.Lock()
        self._show, sys.excepthook = sys.excepthook, self._show_error

    def run(self) -> None:
        """Look now and then."""
        while (dead := self._dead()) is None:
            if all(process.poll() == 0 for process in self._processes):
                return
            time.sleep(LOOK_SECONDS)
        if dead[1] > 0:  # of its own accord; the first process has probably been told why
            time.sleep(GRACE_SECONDS)
        self._end(*dead)

    def _show_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        for _ in range(round(REAPED_SECONDS / LOOK_SECONDS)):
            if (dead := self._dead()) is not None and dead[1] < 0:
                self._end(*dead)
            time.sleep(LOOK_SECONDS)
        self._show(kind, error, trace)

    def _dead(self) -> tuple[int, int] | None:
        """Rank and exit code of a process that has not ended well."""
        codes = ((rank, process.poll()) for rank, process in enumerate(self._processes, start=1))
        return next(((rank, code) for rank, code in codes if code), None)

    def _end(self, rank: int, code: int) -> None:
        self._ending.acquire()  # and never released: this ends the process
        died = self._processes[rank - 1].pid
        print(
            f"error: process {rank} of {len(self._processes) + 1} (PID {died}) {how_it_ended(code)}, so the "
            f"run cannot go on. `fit --resume RUN_DIR` continues it from its newest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        for process in self._processes:
            if process.poll() is None:
                process.kill()  # it may wait for the one that died, which no gentler signal ends
        os._exit(FAILED)


def how_it_ended(code: int) -> str:
    """What the exit code of a process says; below 0 it is the number of a signal.

    >>> how_it_ended(-9)
    'was killed by SIGKILL, as the system does where memory runs out'
    """
    if code > 0:
        return f"ended with exit code {code}; what it said stands above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    reason = ", as the system does where memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{reason}"
