from __future__ import annotations

import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mtrl.errors import UserError
from lightning_mtrl.runs import checkpoint
from lightning_mtrl.runs.checkpoint import (
    CheckpointState,
    latest_checkpoint,
    load_checkpoint,
    load_progress,
    prune_checkpoints,
    save_checkpoint,
)
from lightning_mtrl.runs.folder import RunFolder

# Writes one checkpoint after another, all values of number n equal to n, until it is killed. With a number of
# file events it kills itself there, between the parts of a checkpoint.
WRITER = """
import os, signal, sys
import torch
from lightning_mtrl.runs.checkpoint import CheckpointState, save_checkpoint
from lightning_mtrl.runs.folder import RunFolder

folder, last_event = RunFolder(sys.argv[1]), int(sys.argv[2])
events = 0

def count(name, arguments):
    global events
    if armed and name in ("open", "os.rename", "os.remove", "shutil.rmtree", "os.mkdir", "os.rmdir"):
        events += 1
        if events == last_event:
            os.kill(os.getpid(), signal.SIGKILL)

armed = False
sys.addaudithook(count)
number = 0
while True:
    values = {"w": torch.full((64, 64), float(number))}
    optimizers = {"policy": {"step": torch.tensor(number)}}
    state = CheckpointState(number, {"policy": values}, optimizers, {"n": number})
    armed = last_event > 0 and number == 1
    save_checkpoint(folder.checkpoint(number % 3 if last_event == 0 else 0), state)
    if armed:
        sys.exit(0)
    print(number, flush=True)
    number += 1
"""


def example(number: int = 3) -> CheckpointState:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    shared = torch.arange(6.0)
    tensors = {
        "policy": {"a": shared[:3], "b": shared, "half": torch.ones(2, dtype=torch.bfloat16)},
        "generators": {"cpu": torch.get_rng_state()},
    }
    return CheckpointState(number, tensors, {"policy": optimizer.state_dict()}, {"seeds": [1, 2], "step": 7})


def assert_same(one: CheckpointState, other: CheckpointState) -> None:
    assert (one.iteration, one.loop) == (other.iteration, other.loop)
    torch.testing.assert_close(dict(one.tensors), dict(other.tensors), rtol=0, atol=0)
    torch.testing.assert_close(dict(one.optimizers), dict(other.optimizers), rtol=0, atol=0)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    state = example()
    save_checkpoint(tmp_path / "c", state)
    assert_same(load_checkpoint(tmp_path / "c"), state)


def test_progress_is_read_without_weights_but_not_from_a_damaged_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", example())
    for file in (*(tmp_path / "c").glob("*.safetensors"), *(tmp_path / "c").glob("*.pt")):
        file.unlink()
    assert load_progress(tmp_path / "c") == CheckpointState(3, {}, {}, {"seeds": [1, 2], "step": 7})
    (tmp_path / "c" / "loop.json").write_text("{}")
    with pytest.raises(UserError, match=r"loop\.json is not what was written"):
        load_progress(tmp_path / "c")


def test_a_restored_optimizer_steps_like_the_original(tmp_path: Path) -> None:
    def steps(layer: torch.nn.Linear, optimizer: torch.optim.Optimizer, number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()

    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    steps(layer, optimizer, 2)
    save_checkpoint(
        tmp_path / "c", CheckpointState(1, {"policy": layer.state_dict()}, {"policy": optimizer.state_dict()})
    )
    state, copy = load_checkpoint(tmp_path / "c"), torch.nn.Linear(3, 2)
    copy.load_state_dict(dict(state.tensors["policy"]))
    restored = torch.optim.AdamW(copy.parameters(), lr=0.5)
    restored.load_state_dict(dict(state.optimizers["policy"]))
    steps(layer, optimizer, 3)
    steps(copy, restored, 3)
    assert torch.equal(layer.weight, copy.weight)


def test_the_newest_checkpoint_is_found_by_number(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert latest_checkpoint(folder) is None
    for number in (2, 10001, 9):
        save_checkpoint(folder.checkpoint(number), example(number))
    (folder.checkpoints / ".iteration-99999.unfinished").mkdir()
    assert latest_checkpoint(folder) == folder.checkpoint(10001)


def test_a_run_that_never_had_a_checkpoint_is_told_from_one_that_lost_them(tmp_path: Path) -> None:
    folder = RunFolder.create("seed: 0\n", tmp_path / "run")
    folder.rollouts(0).parent.mkdir()
    folder.rollouts(0).write_text("of pi_0")
    assert latest_checkpoint(folder) is None
    folder.rollouts(1).write_text("of pi_1, so there was a checkpoint of it")
    with pytest.raises(UserError, match=r"checkpoints is empty.*lost.*fit --config .*config\.yaml"):
        latest_checkpoint(folder)
    save_checkpoint(folder.checkpoint(1), example(1))
    assert latest_checkpoint(folder) == folder.checkpoint(1)
    folder.rollouts(1).unlink()
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(UserError, match=r"checkpoints is missing"):
        latest_checkpoint(folder)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for number in range(4):
        save_checkpoint(folder.checkpoint(number), CheckpointState(number))
    prune_checkpoints(folder, None)
    assert len(list(folder.checkpoints.iterdir())) == 4
    prune_checkpoints(folder, 2)
    assert sorted(folder.checkpoints.iterdir()) == [folder.checkpoint(2), folder.checkpoint(3)]


PARTS = ["tensors-policy.safetensors", "tensors-generators.safetensors", "optimizer-policy.pt", "loop.json"]


@pytest.mark.parametrize("part", [*PARTS, "manifest.json"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    folder = RunFolder(tmp_path)
    save_checkpoint(folder.checkpoint(1), example(1))
    save_checkpoint(folder.checkpoint(2), example(2))
    (folder.checkpoint(2) / part).unlink()
    newest = latest_checkpoint(folder)
    assert newest == folder.checkpoint(2), "a damaged checkpoint must not be passed over in silence"
    with pytest.raises(UserError, match=rf"iteration-0002/{part} is missing"):
        load_checkpoint(newest)


@pytest.mark.parametrize("part", PARTS)
def test_one_altered_bit_is_noticed(tmp_path: Path, part: str) -> None:
    save_checkpoint(tmp_path / "c", example())
    file = tmp_path / "c" / part
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{part} is not what was written"):
        load_checkpoint(tmp_path / "c")


def test_every_part_was_tried() -> None:
    assert {f"tensors-{name}.safetensors" for name in example().tensors} < set(PARTS)
    assert {f"optimizer-{name}.pt" for name in example().optimizers} < set(PARTS)


def test_a_manifest_that_is_not_json_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", example())
    (tmp_path / "c" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        load_checkpoint(tmp_path / "c")


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code from a checkpoint ran",)


def test_code_in_an_optimizer_part_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "c", CheckpointState(0, {}, {"policy": {"trap": Trap()}}))
    with pytest.raises(UserError, match=r"optimizer-policy\.pt cannot be read"):
        load_checkpoint(tmp_path / "c")
    assert capsys.readouterr().out == ""
    assert pickle.loads(pickle.dumps(Trap())) is None
    assert "ran" in capsys.readouterr().out, "the trap itself must work"


def test_a_group_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        save_checkpoint(tmp_path / "c", CheckpointState(0, {"../policy": {}}))
    assert list(tmp_path.iterdir()) == []


def kill_at_event(folder: Path, event: int) -> int:
    writer = subprocess.run(
        [sys.executable, "-c", WRITER, str(folder), str(event)], capture_output=True, text=True
    )
    assert writer.returncode in (0, -signal.SIGKILL), writer.stderr
    return writer.returncode


def test_killed_at_any_file_of_a_checkpoint_leaves_a_whole_one(tmp_path: Path) -> None:
    # One process start costs seconds, so every third event is tried; all kinds of event are among them.
    killed = 0
    for event in (1, 4, 7, 10, 13, 16, 19):
        folder = RunFolder(tmp_path / str(event))
        killed += kill_at_event(folder.path, event) != 0
        folder.config.write_text("seed: 0\n")
        newest = latest_checkpoint(RunFolder.open(folder.path))
        assert newest is not None
        state = load_checkpoint(newest)
        assert set(state.tensors["policy"]["w"].unique().tolist()) == {float(state.iteration)}
        assert state.loop == {"n": state.iteration}
        assert [path.name for path in folder.checkpoints.iterdir()] == ["iteration-0000"]
    assert killed >= 4


def test_killed_at_a_random_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), "0"], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(4):
        writer.stdout.readline()
    time.sleep(random.uniform(0.0, 0.05))
    writer.kill()
    writer.communicate()
    folder.config.write_text("seed: 0\n")
    RunFolder.open(tmp_path)
    found = sorted(folder.checkpoints.iterdir())
    assert found == [folder.checkpoint(number) for number in range(3)]
    for path in found:
        state = load_checkpoint(path)
        assert set(state.tensors["policy"]["w"].unique().tolist()) == {float(state.iteration)}


def test_a_part_that_is_lost_while_a_checkpoint_is_written_is_no_gap_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.write_json

    def lose(path: Path, value: Any) -> None:
        (path.parent / "tensors-policy.safetensors").unlink(missing_ok=True)
        write(path, value)

    monkeypatch.setattr(checkpoint, "write_json", lose)
    state = CheckpointState(1, {"policy": {"weight": torch.ones(2)}})
    with pytest.raises(FileNotFoundError, match=r"tensors-policy\.safetensors"):
        save_checkpoint(tmp_path / "iteration-0001", state)
    assert not list(tmp_path.iterdir())
