from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import fake_algorithms
import pytest

from lightning_mtrl import cli
from lightning_mtrl.config import RunConfig
from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import load_config
from lightning_mtrl.rollouts.logs import write_conversations
from lightning_mtrl.runs.checkpoint import CheckpointState, save_checkpoint
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.writer import only_writer

Started = list[tuple[RunConfig, RunFolder]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """The loops that were run, in an empty working folder.

    A seed of 13 cannot be assembled, 14 fails before pi_0 is measured, 15 after it.
    """
    fake_algorithms.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    runs: Started = []

    class Loop:
        def __init__(self, config: RunConfig, folder: RunFolder) -> None:
            self.given = (config, folder)
            if config.seed == 13:
                folder.metrics.write_text("begun")
                raise UserError("model.name is 'nowhere', which is no model")

        def run(self) -> None:
            config, folder = self.given
            folder.metrics.write_text("begun")
            if config.seed == 15:
                folder.summary.write_text("measured")
            if config.seed in (14, 15):
                raise UserError("model.context_length is 3, which is too short")
            runs.append(self.given)

    loop = ModuleType("lightning_mtrl.loop")
    loop.__dict__["PolicyIterationLoop"] = Loop
    monkeypatch.setitem(sys.modules, "lightning_mtrl.loop", loop)
    Path("small.yaml").write_text("data: {conversations: 8}\nloop: {iterations: 2}\n")
    return runs


def test_a_new_run_leaves_a_configuration_that_repeats_it(started: Started) -> None:
    assert cli.main(["fit", "--config", "small.yaml", "--seed", "4"]) == 0
    (config, folder) = started[0]
    assert folder.path == Path("runs/small")
    assert (config.seed, config.data.conversations) == (4, 8)
    assert load_config(folder.config) == config
    assert cli.main(["fit", "--config", str(folder.config)]) == 0
    assert started[1][1].path == Path("runs/small-2")
    assert started[1][0] == config


def test_a_given_folder_is_used_once(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "--config=small.yaml", "--run_dir", "mine"]) == 0
    assert cli.main(["fit", "--config=small.yaml", "--run_dir", "mine"]) == 2
    assert "run_dir is 'mine', which is not empty" in capsys.readouterr().err
    assert [folder.path for _, folder in started] == [Path("mine")]


def test_a_run_that_cannot_begin_leaves_no_folder(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", "--seed=13", "--run_dir=mine"]) == 2
    assert "model.name is 'nowhere'" in capsys.readouterr().err
    assert not Path("mine").exists()


def test_only_a_run_that_measured_nothing_goes_with_its_mistake(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", "--seed=14", "--run_dir=nothing"]) == 2
    assert cli.main(["fit", "--seed=15", "--run_dir=something"]) == 2
    assert capsys.readouterr().err.count("model.context_length is 3") == 2
    assert not Path("nothing").exists()
    assert Path("something/summary.json").read_text() == "measured"


def test_a_resumed_run_keeps_its_folder_and_its_configuration(started: Started) -> None:
    cli.main(["fit", "--config=small.yaml", "--seed=4"])
    assert cli.main(["fit", "--resume", "runs/small"]) == 0
    assert started[1][0] == started[0][0]
    assert started[1][1].path == Path("runs/small")


def test_a_resumed_run_can_be_given_more_iterations(started: Started) -> None:
    cli.main(["fit", "--config=small.yaml"])
    assert cli.main(["fit", "--resume=runs/small", "--loop.iterations=9"]) == 0
    assert started[1][0].loop.iterations == 9
    assert load_config("runs/small/config.yaml").loop.iterations == 9


@pytest.mark.parametrize(
    "change", ["--seed=5", "--data.conversations=16", "--environment.max_turns=3", "--run_dir=x"]
)
def test_what_would_make_it_another_run_cannot_change(
    started: Started, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["fit", "--config=small.yaml"])
    assert cli.main(["fit", "--resume=runs/small", change]) == 2
    message = capsys.readouterr().err
    told = {
        "--seed": "seed is 5 and differs from that of the run runs/small, ",
        "--data.conversations": "data.conversations is 16 and differs from that of the run runs/small, ",
        "--environment.max_turns": "environment.init_args.max_turns is 3 and differs from that of the run",
        "--run_dir": "run_dir is 'x' and differs from that of the run runs/small, None, but",
    }
    assert told[change.partition("=")[0]] in message
    assert len(started) == 1


def test_a_run_that_another_process_writes_is_not_resumed(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["fit", "--config=small.yaml"])
    before = Path("runs/small/config.yaml").read_bytes()
    with only_writer(Path("runs/small")):
        assert cli.main(["fit", "--resume=runs/small", "--loop.iterations=9"]) == 2
    assert "another process is writing the run runs/small" in capsys.readouterr().err
    assert Path("runs/small/config.yaml").read_bytes() == before
    assert len(started) == 1
    assert cli.main(["fit", "--resume=runs/small", "--loop.iterations=9"]) == 0


def _lost(file: Path) -> None:
    file.unlink()


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
@pytest.mark.parametrize("damage", [_lost, _emptied, _cut_off])
def test_a_resumed_run_whose_stored_conversations_are_damaged_is_refused_before_any_work(
    started: Started,
    damage: Callable[[Path], None],
    file_format: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--data.earlier_share=0.5", f"--data.file_format={file_format}"]
    cli.main(["fit", "--config=small.yaml", *options])
    folder = started[0][1]
    talk = Conversation("c", (Message("user", "a"),), (Turn("b", "c", 1.0),), 1.0)
    for number in range(2):
        write_conversations(folder.rollouts(number, file_format), [talk])
    save_checkpoint(folder.checkpoint(2), CheckpointState(2))
    again = ["fit", "--resume=runs/small", "--loop.iterations=3"]
    assert cli.main(again) == 0
    damaged = folder.rollouts(1, file_format)
    damage(damaged)
    capsys.readouterr()
    assert cli.main(again) == 2
    message = capsys.readouterr().err
    assert str(damaged) in message
    assert "data.earlier_share is 0.5" in message
    assert "Put the file back, or start a new run" in message
    assert len(started) == 2
    # Nothing will be collected, so that the file is not needed.
    assert cli.main([*again[:2], "--loop.iterations=2"]) == 0


def test_stored_conversations_that_nobody_learns_from_again_may_be_gone(started: Started) -> None:
    cli.main(["fit", "--config=small.yaml"])
    save_checkpoint(started[0][1].checkpoint(2), CheckpointState(2))
    assert cli.main(["fit", "--resume=runs/small", "--loop.iterations=3"]) == 0


def test_a_resumed_run_that_cannot_begin_keeps_its_folder(started: Started) -> None:
    RunFolder.create("seed: 13\n", "old")
    assert cli.main(["fit", "--resume", "old"]) == 2
    assert Path("old/config.yaml").is_file()


def test_what_is_no_run_cannot_be_resumed(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes").mkdir()
    assert cli.main(["fit", "--resume", "notes"]) == 2
    assert "it has no config.yaml" in capsys.readouterr().err
    assert cli.main(["fit", "--resume"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert started == []
