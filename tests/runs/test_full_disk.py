"""A disk without space: what could not be written is named, whoever found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from small_models import some_talks

from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.logs import write_conversations
from lightning_mtrl.runs.atomic import naming_when_full, write_text
from lightning_mtrl.runs.checkpoint import CheckpointState, load_checkpoint, save_checkpoint
from lightning_mtrl.runs.loggers import Clock, CsvLogger

# Every write to this device fails as on a full disk.
FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


def test_a_text_that_finds_no_space_is_named(tmp_path: Path) -> None:
    (tmp_path / ".a.json.unfinished").symlink_to(FULL)
    with pytest.raises(UserError, match=r"/a\.json cannot be written: no space is left") as told:
        write_text(tmp_path / "a.json", "x")
    assert isinstance(told.value.__cause__, OSError)
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_conversations_that_find_no_space_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / f".{name}.unfinished").symlink_to(FULL)
    with pytest.raises(UserError, match=rf"/{name} cannot be written: no space is left"):
        write_conversations(tmp_path / name, some_talks(2))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_finds_no_space_is_named_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "kept"
    save_checkpoint(place, CheckpointState(1, {}, {}, {}))
    usual = Path.open

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        return usual(FULL if path.suffix == ".pt" else path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    state = CheckpointState(2, {}, {"policy": {"state": torch.zeros(100_000)}}, {})
    with pytest.raises(UserError, match=r"/kept cannot be written: no space is left"):
        save_checkpoint(place, state)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert load_checkpoint(place).iteration == 1


def test_the_words_of_safetensors_are_understood_too() -> None:
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(UserError, match=r"^w cannot be written: no space"), naming_when_full(Path("w")):
        raise error


def test_a_metric_that_finds_no_space_is_named(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "metrics.csv", Clock())
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").symlink_to(FULL)
    with pytest.raises(UserError, match=r"metrics\.csv cannot be written: no space is left"):
        logger.log_metrics({"a/b": 1.0})


def test_what_names_its_part_already_and_what_is_no_lack_of_space_goes_on_as_it_is() -> None:
    for error in (UserError("a: no space is left"), ValueError("shapes differ"), OSError(5, "broken")):
        with pytest.raises(type(error)) as raised, naming_when_full(Path("x")):
            raise error
        assert raised.value is error
