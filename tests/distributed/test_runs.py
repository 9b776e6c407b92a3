"""Whole runs of two processes: parameters, numbers and files of one process, however they are launched."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trusting
from transformers import AutoModelForCausalLM

from lightning_mtrl.config import FabricConfig, RunConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.launching import join, launch
from lightning_mtrl.rollouts.logs import read_conversations
from lightning_mtrl.runs.checkpoint import load_checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
COMMON = """
seed: 3
fabric: {accelerator: cpu, threads: 1}
model: {name: tiny, lora_rank: 4, context_length: 384}
environment: {class_path: lightning_mtrl.environments.SuggestedResponse, init_args: {size: tiny}}
loop: {iterations: 1}
validation: {conversations: 5, sample_conversations: 1}
"""
ITERATIVE_PPO = """
data: {conversations: 14, max_turns: 6, max_response_tokens: 8, batch_size: 5, earlier_share: 0.25}
algorithm:
  class_path: trusting.TrustingIterativePPO
  init_args:
    evaluation: {epochs: 1, learning_rate: 1.0e-4}
    improvement:
      rounds: 1
      states: 7
      samples: 3
      epochs: 1
      minibatch_states: 3
      certificate_states: 5
      learning_rate: 1.0e-4
      accept: always
"""
ITPO = """
data: {conversations: 12, group_size: 2, max_turns: 6, max_response_tokens: 8}
algorithm:
  class_path: lightning_mtrl.algorithms.ITPO
  init_args:
    settings: {minibatch_groups: 3, learning_rate: 1.0e-4}
    prm: {minibatch_groups: 3, learning_rate: 1.0e-4}
"""
OUTCOME_ONLY = """
data: {max_turns: 4, max_response_tokens: 8, validation_share: 0.0}
algorithm: {class_path: lightning_mtrl.algorithms.OutcomeOnly, init_args: {settings: {learning_rate: 1.0e-4}}}
"""
CONFIGS = {"iterative_ppo": ITERATIVE_PPO, "itpo": ITPO, "outcome_only": OUTCOME_ONLY}
TWO = ["--fabric.devices=2"]
FULL = ["--model.fine_tuning=full"]


def begun(command: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(Path(trusting.__file__).parent)])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", *command], env={**os.environ, "PYTHONPATH": path}, text=True, **pipes
    )


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out, err


def begun_fit(name: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    config = folder / f"{name}.yaml"
    config.write_text(COMMON + CONFIGS[name])
    return begun(["lightning_mtrl", "fit", f"--config={config}", *options])


def apart(a: Path, b: Path, iteration: int = 1) -> float:
    """Largest difference of all trained weights of two runs after an iteration."""
    one, two = (load_checkpoint(run / "checkpoints" / f"iteration-{iteration:04d}") for run in (a, b))
    assert {*one.tensors} == {*two.tensors} >= {"policy"}
    pairs = [(w, two.tensors[name][key]) for name, ws in one.tensors.items() for key, w in ws.items()]
    assert len(pairs) > 40
    return max(float((x - y).abs().max()) for x, y in pairs)


def metrics(run: Path) -> dict[tuple[str, ...], float]:
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.reader(file) if not row[2].startswith("time/")][1:]
    found = {tuple(row[:3]): float(row[3]) for row in rows}
    assert len(found) == len(rows) > 40
    return found


def conversations(run: Path) -> list[dict[str, Any]]:
    return [
        c.to_json() for c in read_conversations(run / "rollouts" / "iteration-0000.parquet").conversations
    ]


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations in one process; one in two processes, then resumed by two for another one."""
    folder = tmp_path_factory.mktemp("ppo")
    alone = begun_fit("iterative_ppo", folder, f"--run_dir={folder / 'alone'}", "--loop.iterations=2")
    out, _ = ended(begun_fit("iterative_ppo", folder, f"--run_dir={folder / 'both'}", *TWO))
    assert out.count("Run folder") == out.count("policy 1:") == 1
    assert "2 processes" in out
    ended(alone)
    resume = ["lightning_mtrl", "fit", f"--resume={folder / 'both'}", "--loop.iterations=2"]
    out, _ = ended(begun(resume))
    assert out.count("Resumed after iteration 1.") == 1
    return folder


@pytest.fixture(scope="module")
def itpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process; two by Lightning's own launcher that save memory; two nodes by torchrun on loopback."""
    folder = tmp_path_factory.mktemp("itpo")
    alone = begun_fit("itpo", folder, f"--run_dir={folder / 'alone'}")
    saving = ["--model.gradient_checkpointing=true"]
    ended(begun_fit("itpo", folder, f"--run_dir={folder / 'saving'}", *TWO, *saving))
    ended(alone)
    meeting = port()
    nodes = [torchrun(folder, meeting) for _ in range(2)]
    outs = [ended(node)[0] for node in nodes]
    assert sorted(out.count("Run folder") for out in outs) == [0, 1]
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full fine-tuning: two iterations in one process; one by two that share weights, and one more alone."""
    folder = tmp_path_factory.mktemp("full")
    alone = begun_fit("itpo", folder, f"--run_dir={folder / 'alone'}", *FULL, "--loop.iterations=2")
    ended(begun_fit("itpo", folder, f"--run_dir={folder / 'both'}", *TWO, *FULL, "--fabric.strategy=fsdp"))
    ended(alone)
    ended(begun(["lightning_mtrl", "export", f"--run={folder / 'both'}", f"--output={folder / 'model'}"]))
    resume = ["lightning_mtrl", "fit", f"--resume={folder / 'both'}", "--loop.iterations=2"]
    ended(begun([*resume, "--fabric.devices=1"]))
    return folder


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(folder: Path, meeting: int) -> subprocess.Popen[str]:
    """One of two machines, which meet on loopback."""
    options = [f"--config={folder / 'itpo.yaml'}", f"--run_dir={folder / 'nodes'}", "--fabric.num_nodes=2"]
    launcher = [
        *("torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_id=here"),
        *("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{meeting}", "--local_addr=127.0.0.1"),
    ]
    return begun([*launcher, "-m", "lightning_mtrl", "fit", *options])


def test_iterative_ppo_has_the_parameters_of_one_process(ppo: Path) -> None:
    assert apart(ppo / "alone", ppo / "both") < 1e-5


def test_a_run_of_two_processes_is_resumed_by_two(ppo: Path) -> None:
    assert apart(ppo / "alone", ppo / "both", iteration=2) < 1e-5


@pytest.mark.parametrize("run", ["saving", "nodes"])
def test_itpo_has_the_parameters_of_one_process(itpo: Path, run: str) -> None:
    assert apart(itpo / "alone", itpo / run) < 1e-5


def test_shared_weights_are_those_of_one_process(full: Path) -> None:
    assert apart(full / "alone", full / "both") < 1e-5


def test_a_run_with_shared_weights_is_resumed_by_one_process(full: Path) -> None:
    assert apart(full / "alone", full / "both", iteration=2) < 1e-5
    steps = [load_checkpoint(full / run / "checkpoints" / "iteration-0002") for run in ("alone", "both")]
    for one, two in zip(*(step.optimizers["policy"]["state"].values() for step in steps), strict=True):
        assert torch.allclose(one["exp_avg"], two["exp_avg"], atol=1e-5)


def test_a_run_with_shared_weights_is_exported_whole(full: Path) -> None:
    kept = load_checkpoint(full / "both" / "checkpoints" / "iteration-0001").tensors["policy"]
    exported = AutoModelForCausalLM.from_pretrained(full / "model", dtype=torch.float32)
    parameters = dict(exported.named_parameters())
    assert {*parameters} == {*kept}
    assert all(torch.equal(parameters[name], value) for name, value in kept.items())


def test_numbers_and_conversations_are_those_of_one_process(ppo: Path, itpo: Path) -> None:
    for alone, run in ((ppo / "alone", ppo / "both"), (itpo / "alone", itpo / "nodes")):
        assert metrics(run) == pytest.approx(metrics(alone), abs=1e-4, nan_ok=True)
        texts = [[c["messages"] for c in conversations(r)] for r in (alone, run)]
        assert texts[0] == texts[1]
        assert len(texts[0]) > 10


def test_only_the_first_process_writes(ppo: Path, itpo: Path) -> None:
    for run in (ppo / "both", itpo / "nodes", itpo / "saving"):
        assert json.loads((run / "summary.json").read_text())["iterations"][-1]["iteration"] >= 1
        assert (run / "adapters" / "policy" / "adapter_model.safetensors").is_file()
        assert not list(run.rglob(".*"))
    # One more for the resumed session.
    assert len(list((ppo / "both").glob("events.out.*"))) == 2
    assert len(list((itpo / "nodes").glob("events.out.*"))) == 1
    assert [path.name for path in itpo.iterdir() if path.is_dir()].count("nodes") == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # All seven are one group, which is held by one process; the other has none.
        (
            "itpo",
            ["--data.conversations=7", "--data.group_size=7", "--data.validation_share=0"],
        ),
        ("outcome_only", ["--data.conversations=1", "--validation.conversations=1"]),
        (
            "outcome_only",
            ["--data.conversations=1", "--validation.conversations=1", *FULL, "--fabric.strategy=fsdp"],
        ),
    ],
)
def test_a_run_ends_though_a_process_has_no_conversation(
    tmp_path: Path, name: str, options: list[str]
) -> None:
    ended(begun_fit(name, tmp_path, f"--run_dir={tmp_path / 'run'}", *TWO, *options))
    found = conversations(tmp_path / "run")
    assert len(found) == int(options[0].partition("=")[2])


def test_fresh_responses_are_read_by_a_base_that_is_shared_out(tmp_path: Path) -> None:
    evaluation = "{epochs: 1, trunk: frozen, target: expected_sarsa, next_samples: 2}"
    ended(
        begun_fit(
            *("iterative_ppo", tmp_path, f"--run_dir={tmp_path / 'run'}", *TWO, *FULL),
            *("--fabric.strategy=fsdp", f"--algorithm.init_args.evaluation={evaluation}"),
        )
    )
    logged = {name: value for (_, _, name), value in metrics(tmp_path / "run").items()}
    assert 0.0 < logged["critic/q_loss"] < 2.0
    assert 0.0 <= logged["policy/near_data"] <= 1.0


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    late = begun_fit("outcome_only", tmp_path, f"--run_dir={tmp_path / 'run'}", *TWO, "--data.group_size=3")
    _, err = ended(late, code=2)
    assert err.count("error:") == 1
    model = begun_fit(
        "outcome_only", tmp_path, f"--run_dir={tmp_path / 'run'}", *TWO, "--model.context_length=9"
    )
    _, err = ended(model, code=2)
    assert err.count("error: model.context_length is 9") == err.count("error:") == 1
    assert not (tmp_path / "run").exists()


def test_a_process_that_is_killed_is_named_and_ends_the_run(tmp_path: Path) -> None:
    fit = begun_fit("itpo", tmp_path, f"--run_dir={tmp_path / 'run'}", *TWO, "--loop.iterations=50")
    assert fit.stdout is not None
    while "policy 0" not in fit.stdout.readline():
        assert fit.poll() is None, "it ended before its first line"
    (started,) = Path(f"/proc/{fit.pid}/task/{fit.pid}/children").read_text().split()
    os.kill(int(started), signal.SIGKILL)
    out, err = ended(fit, code=1)
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: process 1 of 2 (PID {started}) was killed by SIGKILL")
    assert "`fit --resume RUN_DIR`" in line
    assert "zombies" not in out + err


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ("ddp_spawn", "several processes run with 'ddp'"),
        ("deepspeed", "weights are shared out among processes by 'fsdp'"),
    ],
)
def test_other_strategies_are_refused_before_a_process_starts(strategy: str, problem: str) -> None:
    config = FabricConfig(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(UserError, match=f"fabric.strategy is '{strategy}'.*{problem}.*fabric.strategy ddp"):
        launch(config)


def test_adapters_are_not_shared_out() -> None:
    with pytest.raises(UserError, match=r"fabric.strategy is 'fsdp'.*'lora'.*Pass --fabric.strategy ddp"):
        RunConfig(fabric=FabricConfig(devices=2, strategy="fsdp"))


def test_a_command_that_runs_alone_refuses_several_processes() -> None:
    with pytest.raises(UserError, match=r"fabric.devices x fabric.num_nodes is 2, but only `fit`"):
        join(FabricConfig(accelerator="cpu", devices=2), [])
