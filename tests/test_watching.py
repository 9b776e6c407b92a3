from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import subprocess, sys, time
from lightning_mtrl import watching
watching.GRACE_SECONDS = 0.1
waits = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({seconds})"])
ends = subprocess.Popen([sys.executable, "-c", "{ends}"])
print(waits.pid, ends.pid, flush=True)
watching.Watch([waits, ends]).start()
{meanwhile}
"""
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def _done(ends: str, seconds: int, meanwhile: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """The process that watched one which waits some seconds and one which ends; number of the latter."""
    program = PROGRAM.format(ends=ends, seconds=seconds, meanwhile=meanwhile)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return done, int(done.stdout.split()[1])


@pytest.mark.parametrize(
    ("ends", "meanwhile", "said"),
    [
        (KILLED, "time.sleep(60)", "was killed by SIGKILL, as the system does where memory runs out, so the"),
        # The end of the other process broke what this one was just telling it.
        (KILLED, "raise RuntimeError('connection closed by peer')", "was killed by SIGKILL"),
        (
            "import sys; sys.exit(3)",
            "time.sleep(60)",
            "ended with exit code 3; what it said stands above, so",
        ),
    ],
)
def test_when_one_process_dies_all_end_and_one_line_says_which(ends: str, meanwhile: str, said: str) -> None:
    # The pipe of the output would stay open, and this not end in time, if the waiting process were alive.
    done, died = _done(ends, 600, meanwhile)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: process 2 of 3 (PID {died}) {said}")
    assert "`fit --resume RUN_DIR`" in line


def test_an_error_of_another_kind_is_told_as_it_is() -> None:
    done, _ = _done("pass", 3, "raise RuntimeError('of its own')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: of its own"


def test_processes_that_end_well_are_left_alone() -> None:
    done, _ = _done("pass", 1, "time.sleep(3)")
    assert (done.returncode, done.stderr) == (0, "")
