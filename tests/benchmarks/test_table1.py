"""The grid of table 1: its runs are those of `fit`, it goes on where it was, and its table adds up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import table1
from lightning_mtrl import cli
from lightning_mtrl.errors import UserError
from table1 import Cell, Job
from table1_report import Curve, best_known, markdown, row_of

# Set by the runs, and put back after the test.
CHANGED = (
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)
SMALL = ("data.conversations=8", "data.group_size=4", "model.lora_rank=4")


def curve(*outcomes: float) -> Curve:
    return Curve(outcomes, tokens=20.0, conversations=64, seconds=3.0)


def test_the_rows_of_the_paper_are_cells_that_exist() -> None:
    cells = table1.chosen_cells(table1.TASKS, None, None)
    assert len(cells) == 39
    assert all(file.is_file() for cell in cells for size in ("tiny", "natural") for file in cell.files(size))
    everything = table1.chosen_cells(["suggested_response"], table1.names("credit"), None)
    assert len(everything) == 10 * 4


def test_conversations_to_a_target_are_read_off_the_line_between_two_policies() -> None:
    assert curve(0.2, 0.4, 0.8).conversations_to(0.5) == pytest.approx(64 + 16)
    assert curve(0.2, 0.4, 0.8).conversations_to(0.8) == pytest.approx(128)
    assert curve(0.6, 0.4).conversations_to(0.5) == 0
    assert math.isinf(curve(0.2, 0.4).conversations_to(0.5))


def test_a_row_is_the_mean_of_its_seeds_with_an_interval() -> None:
    curves = [curve(0.2, 0.9, 0.8), curve(0.2, 0.4, 0.6)]
    assert best_known(curves) == 0.9
    row = row_of("t", "c", "a", curves, 0.5)
    assert row.outcome == pytest.approx(0.7)
    # Two values: the mean +- 12.706 times half their difference.
    assert row.outcome_interval == pytest.approx((0.7 - 1.2706, 0.7 + 1.2706), abs=1e-4)
    assert row.score == pytest.approx(0.7 - 0.001)
    assert row.worst_drop == pytest.approx(0.05)
    assert row.needed == pytest.approx((64 * 0.25 / 0.7 + 64 * 1.25) / 2)
    assert row.reached == 2
    unreached = row_of("t", "c", "a", curves, 0.95)
    assert (unreached.needed, unreached.reached) == (math.inf, 1)
    assert "more than was run" in markdown([unreached], {"t": 0.95})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_grid_makes_the_runs_of_fit_and_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in CHANGED:
        monkeypatch.setenv(variable, "1")
    grid = tmp_path / "grid"
    options = [
        f"--output={grid}", "--tasks", "math_tutoring", "--credits", "norm_itpo", "uniform",
        "--advantages", "rloo", "--seeds=1", "--iterations=1", "--validation=8", "--jobs=2", "--set", *SMALL,
    ]  # fmt: skip
    assert table1.main(options) == 0
    written = (grid / "table.md").read_text()
    assert written in capsys.readouterr().out
    kept = json.loads((grid / "table.json").read_text())
    assert [row["credit"] for row in kept["rows"]] == ["norm_itpo", "uniform"]
    names = ("learning_curves", "kendall_tau", "turn_agreement", "token_agreement", "score_slope")
    assert {f"math_tutoring-{n}.png" for n in (*names, "reward_dynamics")} == {
        p.name for p in grid.glob("*.png")
    }
    assert list((grid / "tensorboard").glob("events*"))

    cell = Cell("math_tutoring", "norm_itpo", "rloo")
    files = [f"--config={file}" for file in cell.files("tiny")]
    own = ["--loop.iterations=1", "--validation.conversations=8", "--fabric.threads=1", "--seed=0"]
    assert cli.main(["fit", *files, *own, *(f"--{s}" for s in SMALL), f"--run_dir={tmp_path / 'fit'}"]) == 0
    adapter = Path("adapters/policy/adapter_model.safetensors")
    runs = [table1.run_folder(grid, cell, 0), tmp_path / "fit"]
    assert runs[0].joinpath(adapter).read_bytes() == runs[1].joinpath(adapter).read_bytes()

    before = {path: path.stat().st_mtime_ns for path in grid.rglob("summary.json")}
    assert table1.main(options) == 0
    assert before == {path: path.stat().st_mtime_ns for path in grid.rglob("summary.json")}


def test_a_folder_with_another_configuration_is_not_taken_for_a_finished_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 3\n")
    with pytest.raises(UserError, match="another configuration; choose another --output"):
        table1.run(Job(Cell("math_tutoring", "uniform", "rloo"), 0, "tiny", folder, ()))
    assert (folder / "config.yaml").read_text() == "seed: 3\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--set", "data.group_size=1"], "data.group_size is 1"),
        (["--set", "foo=1"], "foo"),
        (["--seeds", "0"], "0 is less than 1"),
        (["--jobs", "0"], "0 is less than 1"),
    ],
)
def test_options_that_no_run_could_work_with_are_refused_at_once(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid"
    try:
        status = table1.main([f"--output={grid}", "--credits", "prime", "--advantages", "rloo", *options])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert told in capsys.readouterr().err
    assert not grid.exists()


def test_one_seed_has_no_interval() -> None:
    assert "80.0 |" in markdown([row_of("t", "c", "a", [curve(0.2, 0.8)], 0.9)], {"t": 0.9})
