"""H12: a run that was killed and resumed leaves the very bytes of one that was never killed."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import killable
import pytest
import torch

from lightning_mtrl import cli
from lightning_mtrl.rollouts.logs import read_conversations
from lightning_mtrl.runs.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow  # two runs for each place, of about 20 seconds
ROOT = Path(__file__).parents[2]
ITERATIONS = 4
CONFIG = """
seed: 7
fabric: {accelerator: cpu, threads: 1}
model: {name: tiny, lora_rank: 4, lora_dropout: 0.1, context_length: 384}
environment:
  class_path: lightning_mtrl.environments.SuggestedResponse
  init_args: {size: tiny}
data:
  conversations: 24
  max_turns: 8
  max_response_tokens: 12
  batch_size: 8
  explore_share: 0.25
  earlier_share: 0.25
algorithm:
  class_path: killable.KillableIterativePPO
  init_args:
    evaluation: {epochs: 2, learning_rate: 1.0e-3}
    improvement:
      rounds: 2
      states: 8
      samples: 2
      minibatch_states: 4
      certificate_states: 8
      learning_rate: 1.0e-3
      value_role: value
      kl_target: 0.1
      accept: always
loop: {iterations: 4, stop_when_converged: false}
validation: {conversations: 8, sample_conversations: 1}
"""


def _fit(arguments: list[str], kill: str = "") -> subprocess.CompletedProcess[str]:
    """`fit` in a process of its own, which may be told where to kill itself."""
    path = os.pathsep.join([str(ROOT), str(Path(killable.__file__).parent)])
    return subprocess.run(
        [sys.executable, "-m", "lightning_mtrl", "fit", *arguments],
        env={**os.environ, "PYTHONPATH": path, killable.VARIABLE: kill},
        capture_output=True,
        text=True,
        check=False,
    )


def _new(folder: Path, kill: str = "") -> subprocess.CompletedProcess[str]:
    config = folder.with_suffix(".yaml")
    config.write_text(CONFIG)
    return _fit(["--config", str(config), "--run_dir", str(folder)], kill)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "unbroken"
    done = _new(run)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(
    scope="module",
    params=[
        "inside improve:2",
        "inside checkpoint:2",
        "between phases:2",
        "inside evaluate:0",
        "before the policy is saved:3",
        "after checkpoint:3",  # nothing is left to do, so the policy to deploy must be there already
    ],
)
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "killed"
    killed = _new(run, kill=request.param)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    place, _, iteration = request.param.partition(":")
    finished = int(iteration) + int(place == "after checkpoint")
    assert len(list((run / "checkpoints").glob("iteration-*"))) == finished
    assert bool(list((run / "checkpoints").glob(".*"))) == (place == "inside checkpoint")
    done = _fit(["--resume", str(run)])
    assert done.returncode == 0, done.stderr
    assert (f"Resumed after iteration {finished}." in done.stdout) == (finished > 0)
    assert ("ended before its first checkpoint, so it starts again" in done.stdout) == (finished == 0)
    return run


def _files(folder: Path) -> dict[str, bytes]:
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _summary(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in summary["iterations"]]
    return {**{k: v for k, v in summary.items() if k != "seconds"}, "iterations": rows}


def _metrics(run: Path) -> list[list[str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [row for row in csv.reader(file) if not row[2].startswith("time/")]


def test_every_checkpoint_holds_the_same_weights_optimizers_and_loop(unbroken: Path, resumed: Path) -> None:
    for number in range(1, ITERATIONS + 1):
        name = f"checkpoints/iteration-{number:04d}"
        ours, theirs = load_checkpoint(unbroken / name), load_checkpoint(resumed / name)
        assert set(ours.tensors) == set(ours.optimizers) == {"critic", "policy", "value"}
        assert _equal(ours.tensors, theirs.tensors)
        assert _equal(ours.optimizers, theirs.optimizers)
        assert _equal(ours.loop, theirs.loop)
    tensors = [name for name in _files(unbroken / "checkpoints") if name.endswith(".safetensors")]
    assert len(tensors) == 3 * ITERATIONS
    for name in tensors:
        assert (unbroken / "checkpoints" / name).read_bytes() == (resumed / "checkpoints" / name).read_bytes()


def test_the_policy_to_deploy_has_the_same_bytes(unbroken: Path, resumed: Path) -> None:
    assert _files(unbroken / "adapters" / "policy") == _files(resumed / "adapters" / "policy")


def test_summary_metrics_and_rollouts_are_the_same(unbroken: Path, resumed: Path) -> None:
    assert _summary(unbroken) == _summary(resumed)
    assert [row["iteration"] for row in _summary(unbroken)["iterations"]] == [0, 1, 2, 3, 4]
    assert len(_metrics(unbroken)) > 100
    assert _metrics(unbroken) == _metrics(resumed)
    for number in range(ITERATIONS):
        file = f"rollouts/iteration-{number:04d}.parquet"
        ours, theirs = (read_conversations(run / file).conversations for run in (unbroken, resumed))
        assert len(ours) > 0
        assert [c.to_json() for c in ours] == [c.to_json() for c in theirs]


def test_nothing_half_written_is_left(resumed: Path) -> None:
    assert not list(resumed.rglob(".*"))


def test_the_run_had_work_to_do(unbroken: Path) -> None:
    states = [load_checkpoint(path) for path in sorted((unbroken / "checkpoints").iterdir())]
    for before, after in pairwise(states):
        assert not _equal(before.tensors["policy"], after.tensors["policy"])
        assert not _equal(before.tensors["value"], after.tensors["value"])
    # A critic that got no better keeps its weights.
    assert any(not _equal(a.tensors["critic"], b.tensors["critic"]) for a, b in pairwise(states))
    assert len({json.dumps(c.to_json()["messages"]) for c in _conversations(unbroken)}) > 10


def _conversations(run: Path) -> list[Any]:
    return [c for file in (run / "rollouts").iterdir() for c in read_conversations(file).conversations]


@pytest.mark.parametrize("command", [["fit", "--resume"], ["validate", "--run"]])
def test_a_run_whose_checkpoints_are_gone_is_refused(
    unbroken: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    shutil.rmtree(run / "checkpoints")
    kept = _files(run)
    assert cli.main([*command, str(run)]) == 2
    message = capsys.readouterr().err
    assert f"{run / 'checkpoints'} is missing" in message
    assert "Put the folder back, or start a new run with `fit --config" in message
    assert _files(run) == kept


@pytest.mark.parametrize("part", ["optimizer-policy.pt", "optimizer-critic.pt", "tensors-value.safetensors"])
def test_a_checkpoint_without_one_of_its_parts_is_refused(
    unbroken: Path, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    (run / "checkpoints" / f"iteration-{ITERATIONS:04d}" / part).unlink()
    kept = _files(run / "adapters")
    assert cli.main(["fit", "--resume", str(run), "--loop.iterations", "5"]) == 2
    message = capsys.readouterr().err
    assert part in message
    assert "Traceback" not in message
    assert _files(run / "adapters") == kept
