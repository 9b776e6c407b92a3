from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_mtrl.errors import UserError
from lightning_mtrl.runs.atomic import replacing_folder, tidy, write_json, write_text
from lightning_mtrl.runs.folder import RunFolder


def test_runs_of_one_name_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [str(RunFolder.create("seed: 0\n", name="quickstart").path) for _ in range(3)]
    assert made == ["runs/quickstart", "runs/quickstart-2", "runs/quickstart-3"]
    assert Path("runs/quickstart-2/config.yaml").read_text() == "seed: 0\n"


def test_an_empty_folder_can_become_a_run(tmp_path: Path) -> None:
    assert RunFolder.create("seed: 0\n", tmp_path).config.is_file()


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"not empty\. Pass --run_dir with a new folder\.$"):
        RunFolder.create("seed: 0\n", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    # Only a run can be gone on with.
    RunFolder.create("seed: 0\n", tmp_path / "run")
    with pytest.raises(UserError, match=r"not empty.*continue the run that is there with `fit --resume"):
        RunFolder.create("seed: 0\n", tmp_path / "run")


def test_a_file_is_no_run_dir(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder.create("seed: 0\n", tmp_path / "file")


def test_opening_what_is_no_run_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder.create("seed: 0\n", name="real")
    with pytest.raises(UserError, match=r"no such folder.*There are: runs/real"):
        RunFolder.open("runs/reel")
    with pytest.raises(UserError, match=r"it has no config\.yaml"):
        RunFolder.open(tmp_path)


def test_paths_of_a_run_are_those_that_the_documentation_promises() -> None:
    folder = RunFolder("runs/x")
    paths = [folder.config, folder.summary, folder.metrics, folder.rollouts(3), folder.rollouts(12, "jsonl")]
    paths += [folder.checkpoint(3), folder.policy_adapter]
    assert [path.relative_to("runs/x").as_posix() for path in paths] == [
        "config.yaml",
        "summary.json",
        "metrics.csv",
        "rollouts/iteration-0003.parquet",
        "rollouts/iteration-0012.jsonl",
        "checkpoints/iteration-0003",
        "adapters/policy",
    ]


def test_text_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "summary.json"
    write_json(file, {"seconds": 1.5})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(file, {"seconds": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "\ud800")
    assert json.loads(file.read_text()) == {"seconds": 1.5}


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "policy"
    for content in ("old", "new"):
        with replacing_folder(target) as folder:
            (folder / content).write_text(content)
            assert not (target / content).exists()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_folder_that_fails_while_it_is_filled_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "policy"
    with replacing_folder(target) as folder:
        (folder / "old").write_text("old")

    def fill() -> None:
        with replacing_folder(target) as folder:
            (folder / "new").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill()
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("made_again", [False, True])
def test_a_folder_that_another_process_removes_is_told_and_never_published(
    made_again: bool, tmp_path: Path
) -> None:
    target = tmp_path / "policy"
    with replacing_folder(target) as folder:
        (folder / "old").write_text("old")

    def fill() -> None:
        with replacing_folder(target) as folder:
            (folder / "weights").write_text("new")
            tidy(tmp_path)
            if made_again:
                write_text(folder / "manifest.json", "{}")  # which makes a missing folder

    with pytest.raises(UserError, match=r"\.policy\.unfinished was removed by another process"):
        fill()
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_process_killed_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "adapters" / ".policy.replaced").mkdir(parents=True)
    (tmp_path / "adapters" / ".policy.replaced" / "weights").write_text("old")
    (tmp_path / "adapters" / ".policy.unfinished").mkdir()
    (tmp_path / ".summary.json.unfinished").write_text("{")
    tidy(tmp_path)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == [
        "adapters/policy/weights"
    ]
