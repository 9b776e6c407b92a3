"""Two processes never write one run, and who only reads it disturbs nobody."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.writer import BeingWritten, only_writer

HOLD = "import sys; from pathlib import Path; from lightning_mtrl.runs.writer import only_writer\n" + (
    "with only_writer(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


def test_a_process_that_is_killed_lets_go_of_its_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        told = f"another process is writing the run {tmp_path}"
        with pytest.raises(BeingWritten, match=told), only_writer(tmp_path):
            pass
        other.kill()
    with only_writer(tmp_path):
        assert not list(tmp_path.iterdir())


def test_what_a_running_process_has_not_finished_is_left_to_it(tmp_path: Path) -> None:
    folder = RunFolder.create("seed: 1\n", tmp_path / "run")
    unfinished = folder.path / ".summary.json.unfinished"
    unfinished.write_text("{")
    with only_writer(folder.path):
        RunFolder.open(folder.path)
        assert unfinished.exists()
    RunFolder.open(folder.path)
    assert not unfinished.exists()


def test_who_only_tidies_a_run_for_an_instant_keeps_nobody_from_writing_it(tmp_path: Path) -> None:
    held = only_writer(tmp_path)
    held.__enter__()
    release = threading.Timer(0.3, held.__exit__, (None, None, None))
    release.start()
    with only_writer(tmp_path, patience_seconds=30.0):
        release.join()
        with pytest.raises(BeingWritten), only_writer(tmp_path, patience_seconds=0.1):
            pass
