"""Learning curves of what the README promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lightning_mtrl.evaluation.intervals import mean_interval
from lightning_mtrl.rollouts.logs import read_conversations

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_plans_instead_of_grabbing(tmp_path: Path) -> None:
    """Three iterations from pi_0 lead beyond the greedy agent and most of the way to the optimum.

    On five seeds (0 to 4) the third policy had success rates of 0.83 to 0.85 with 512 conversations each; the
    bound of 0.70 is 7 standard errors below the lowest, so chance in the measurement alone raises a false
    alarm less than once in 10^11. The spread of learning itself is known from those five seeds only.
    """
    run = tmp_path / "run"
    command = [sys.executable, "-m", "lightning_mtrl", "fit", f"--run_dir={run}", "--seed=0"]
    options = [f"--config={ROOT / 'configs' / 'quickstart.yaml'}", "--loop.iterations=3"]
    # A process of its own, since Fabric's seeding leaves environment variables behind.
    subprocess.run([*command, *options], check=True, capture_output=True)
    summary = json.loads((run / "summary.json").read_text())
    first, last = summary["iterations"][0], summary["iterations"][-1]
    assert 0.1 < first["success_rate"] < 0.4
    assert last["success_rate"] > 0.70
    assert last["success_rate_interval"][0] > first["success_rate_interval"][1]


def _done(*arguments: object) -> None:
    path = os.pathsep.join([str(ROOT / "tests" / "plugins"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "lightning_mtrl", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _outcomes(file: Path, *options: str, conversations: int) -> list[float]:
    """Talk to the environment, which the steps never see, with the policy that the options name."""
    config = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"
    _done("collect", config, f"--output={file}", f"--conversations={conversations}", *options)
    return [float(c.outcome or 0.0) for c in read_conversations(file, strict=True).conversations]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_three_steps_from_logs_raise_the_true_value_at_every_step(tmp_path: Path) -> None:
    """Logs of 1,280 conversations a step, of `SuggestedResponse`, whose object the steps cannot even make.

    With seed 0 the success rate of 1,000 fresh conversations was 0.320, 0.436, 0.593 and 0.783. The smallest
    rise, 0.116, is 6.4 standard errors of a difference of two means of 1,500 outcomes, and the test asks for
    1.96: chance in the measurement alone raises a false alarm less than once in 10^5 for each step. The
    spread of learning itself is known from that run only; the logs have the same seeds on every machine. Of
    the first 500 conversations of each policy, `compare` finds every rise (the smallest with a power of 97%).
    """
    policy: list[str] = []
    measured = []
    for number in range(4):
        plain = ["--seed=1000000", "--data.explore_share=0", *policy]
        measured.append(_outcomes(tmp_path / f"measured-{number}.jsonl", *plain, conversations=1500))
        if number == 3:
            break
        logs, run = tmp_path / f"logs-{number}.jsonl", tmp_path / f"step-{number + 1}"
        _outcomes(logs, f"--seed={100 * number}", *policy, conversations=1280)
        settings = ["--environment=hidden_environment.Hidden", "--algorithm.improvement.rounds=3"]
        start = [f"--run={tmp_path / f'step-{number}'}"] if number else []
        config = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"
        _done("improve", *(start or [config]), *settings, f"--logs={logs}", f"--run_dir={run}")
        policy = [f"--model.adapter={run / 'adapters' / 'policy'}"]
    rises = [fmean(after) - fmean(before) for before, after in pairwise(measured)]
    assert min(rises) > 0, (rises, list(map(fmean, measured)))
    for before, after in pairwise(measured):
        gains = [a - b for a, b in zip(after, before, strict=True)]
        assert mean_interval(gains)[0] > 0, list(map(fmean, measured))
    for before, after in pairwise(range(4)):
        found = _compared(tmp_path, f"measured-{before}.jsonl", f"measured-{after}.jsonl", conversations=500)
        assert found["p_value"] < 0.05, (before, found)
        assert found["difference"] > 0


def _compared(folder: Path, baseline: str, candidate: str, conversations: int) -> dict[str, Any]:
    """What `compare` finds in the first conversations of two logs."""
    for name in (baseline, candidate):
        lines = (folder / name).read_text().splitlines(keepends=True)[:conversations]
        (folder / f"first-{name}").write_text("".join(lines))
    output = folder / "compared.json"
    logs = (f"--baseline={folder / f'first-{baseline}'}", f"--candidate={folder / f'first-{candidate}'}")
    _done("compare", *logs, f"--output={output}")
    found: dict[str, Any] = json.loads(output.read_text())
    return found
