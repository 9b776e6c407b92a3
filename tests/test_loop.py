"""When a run is over, and what resuming it does then."""

from __future__ import annotations

import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from whole_runs import end_with_the_test

from lightning_mtrl import cli, recorder
from lightning_mtrl.config import LoopConfig
from lightning_mtrl.loop import PolicyIterationLoop
from lightning_mtrl.parsing import load_config
from lightning_mtrl.runs.checkpoint import CheckpointState, load_checkpoint
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.summary import Summary

CONFIG = """
seed: 3
fabric: {accelerator: cpu, threads: 1}
model: {name: tiny, lora_rank: 4, context_length: 384}
environment: {class_path: lightning_mtrl.environments.SuggestedResponse, init_args: {size: tiny}}
data: {conversations: 8, max_turns: 4, max_response_tokens: 8, batch_size: 8}
algorithm: {class_path: converging.Converging, init_args: {settings: {epochs: 1, learning_rate: 1.0e-3}}}
loop: {iterations: 4}
validation: {conversations: 4, sample_conversations: 0}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that converged after two of four iterations."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "config.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patched:
        end_with_the_test(patched)
        assert cli.main(["fit", f"--config={folder / 'config.yaml'}", f"--run_dir={folder / 'run'}"]) == 0
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to resume."""
    end_with_the_test(monkeypatch)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def policies(run: Path) -> list[int]:
    return [row["iteration"] for row in Summary.open(run / "summary.json").iterations]


def weights(run: Path, iteration: int) -> bytes:
    return (run / "checkpoints" / f"iteration-{iteration:04d}" / "tensors-policy.safetensors").read_bytes()


def test_a_run_that_converged_stays_so_when_it_is_resumed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert policies(run) == [0, 1, 2]
    assert [load_checkpoint(path).loop["converged"] for path in sorted((run / "checkpoints").iterdir())] == [
        False,
        True,
    ]
    deployed = (run / "adapters" / "policy" / "adapter_model.safetensors").read_bytes()
    for options in ([], ["--loop.iterations=9"]):
        assert cli.main(["fit", "--resume", str(run), *options]) == 0
        said = capsys.readouterr().out
        assert "The run converged after 2 iterations, so nothing is left to do." in said
        assert "pass --loop.stop_when_converged false" in said
    assert policies(run) == [0, 1, 2]
    assert (run / "adapters" / "policy" / "adapter_model.safetensors").read_bytes() == deployed


def test_a_run_that_converged_goes_on_when_that_is_no_reason_to_stop(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", "--resume", str(run), "--loop.stop_when_converged=false"]) == 0
    assert policies(run) == [0, 1, 2, 3, 4]
    assert "nothing is left" not in capsys.readouterr().out


def test_a_run_killed_right_after_its_last_checkpoint_has_the_last_policy_of_the_unbroken_one(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end_with_the_test(monkeypatch)
    (tmp_path / "config.yaml").write_text(CONFIG)
    run = tmp_path / "run"

    def killed(*_: object) -> None:
        if (run / "checkpoints" / "iteration-0002").exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(recorder, "prune_checkpoints", killed)
        assert cli.main(["fit", f"--config={tmp_path / 'config.yaml'}", f"--run_dir={run}"]) != 0
    assert cli.main(["fit", "--resume", str(run)]) == 0
    assert "The run converged after 2 iterations" in capsys.readouterr().out
    assert policies(run) == policies(finished) == [0, 1, 2]
    assert weights(run, 2) == weights(finished, 2) != weights(run, 1)


def test_a_run_with_all_iterations_done_says_how_to_go_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", "--resume", str(run), "--loop.iterations=2"]) == 0
    capsys.readouterr()
    again = ["fit", "--resume", str(run), "--loop.stop_when_converged=false"]
    assert cli.main(again) == 0
    said = capsys.readouterr().out
    assert "Resumed after iteration 2." in said
    assert "All iterations are done: loop.iterations is 2, so nothing is left to do." in said
    assert "pass --loop.iterations with more than 2" in said
    assert policies(run) == [0, 1, 2]
    assert cli.main([*again, "--loop.iterations=3"]) == 0
    assert policies(run) == [0, 1, 2, 3]


def test_a_resumed_run_does_not_keep_its_checkpoint_in_memory(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as large as all weights and optimizers together, and put into them once."""
    loaded: list[weakref.ref[CheckpointState]] = []

    def noted(path: Path) -> CheckpointState:
        state = load_checkpoint(path)
        loaded.append(weakref.ref(state))
        return state

    monkeypatch.setattr(recorder, "load_checkpoint", noted)
    config = replace(load_config(run / "config.yaml"), loop=LoopConfig(iterations=3))
    loop = PolicyIterationLoop(config, RunFolder.open(run))
    (kept,) = loaded
    assert kept() is not None
    assert loop.recorder.resume(loop.parts) == 2
    gc.collect()
    assert kept() is None
    assert loop.recorder.checkpointed is not None
    assert loop.recorder.checkpointed.loop["converged"]
    loop.recorder.close(loop.parts)
