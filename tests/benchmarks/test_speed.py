from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _figures(script: str, output: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *options, "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(output.read_text())
    assert found["machine"]["torch"]
    return found


def test_ours_and_the_peer_say_the_same_greedily(tmp_path: Path) -> None:
    shape = ("--conversations", "6", "--turns", "3", "--response-tokens", "6")
    found = _figures("rollouts.py", tmp_path / "r.json", "--model", "tiny", "--check", *shape)
    (row,) = found["rows"]
    assert row["same"]
    assert row["ours"]["all"][0]["tokens"] == row["peer"]["all"][0]["tokens"] > 0


def test_no_step_is_faster_than_its_floor(tmp_path: Path) -> None:
    found = _figures("limits.py", tmp_path / "l.json", "--model", "tiny", "--rows", "4", "--steps", "3")
    (row,) = found["decoding"]
    assert 0 < row["floor"] < row["ours"]


def test_what_needs_a_gpu_says_that_it_was_not_run(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for script in ("rollouts.py", "limits.py", "iteration.py"):
        assert _figures(script, tmp_path / "g.json", "--model", "tiny", "--gpu")["gpu"] == "not run"
