from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import subprocess, sys, time
from lightning_mtrl import watching
watching.GRACE_SECONDS = 0.1
sleeps = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
ends = subprocess.Popen([sys.executable, "-c", "{ends}"])
print(sleeps.pid, ends.pid, flush=True)
watching.Watch([sleeps, ends]).start()
time.sleep({seconds})
sleeps.kill()
"""
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def _done(ends: str, seconds: int) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    program = textwrap.dedent(PROGRAM).format(ends=ends, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return done, [int(number) for number in done.stdout.split()]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (KILLED, "was killed by SIGKILL, as the system does where memory runs out, so the run cannot go on"),
        ("import sys; sys.exit(3)", "ended with exit code 3; what it said stands above, so the run cannot"),
    ],
)
def test_when_one_process_dies_all_end_and_one_line_says_which(ends: str, said: str) -> None:
    done, (_, died) = _done(ends, seconds=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: process 2 of 3 (PID {died}) {said}")
    assert "`fit --resume RUN_DIR`" in line
    # The output's pipe would still be open, and `run` not back, if the sleeping process were alive.


def test_processes_that_end_well_are_left_alone() -> None:
    done, _ = _done("pass", seconds=2)
    assert (done.returncode, done.stderr) == (0, "")
