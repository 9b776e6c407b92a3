from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.loggers import Clock, RunLog


@pytest.fixture(autouse=True)
def files_are_named_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard takes files begun in one second by name, where 10 comes before 9.

    Processes of a run begin at different times; the loggers of a test do not.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))


class Logging(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, value: torch.Tensor) -> torch.Tensor:
        self.log("policy/loss", value)
        return self.layer(value[None]).sum()


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0}).Reload()


def rows(file: Path) -> list[tuple[str, ...]]:
    with file.open(newline="") as stream:
        return [tuple(row) for row in csv.reader(stream)]


def test_what_a_module_logs_under_fabric_lands_on_the_loops_step(tmp_path: Path) -> None:
    clock = Clock()
    log = RunLog(RunFolder(tmp_path), ["tensorboard", "csv"], clock)
    fabric = Fabric(accelerator="cpu", devices=1, loggers=log.loggers)
    module = fabric.setup(Logging())
    for step in range(3):
        clock.iteration, clock.step = step // 2, step
        module.training_step(torch.tensor(step / 2))
    log.close()
    assert [(e.step, e.value) for e in events(tmp_path).Scalars("policy/loss")] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
    ]
    assert rows(tmp_path / "metrics.csv") == [
        ("iteration", "step", "name", "value"),
        ("0", "0", "policy/loss", "0.0"),
        ("0", "1", "policy/loss", "0.5"),
        ("1", "2", "policy/loss", "1.0"),
    ]


def test_a_step_that_is_given_counts(tmp_path: Path) -> None:
    log = RunLog(RunFolder(tmp_path), ["csv", "tensorboard"], Clock(step=5))
    for logger in log.loggers:
        logger.log_metrics({"a": 1.0}, step=9)
    log.close()
    assert rows(tmp_path / "metrics.csv")[1:] == [("0", "9", "a", "1.0")]
    assert [e.step for e in events(tmp_path).Scalars("a")] == [9]


def test_texts_figures_and_histograms_reach_tensorboard(tmp_path: Path) -> None:
    log = RunLog(RunFolder(tmp_path), ["tensorboard"], Clock(step=2))
    log.text("samples/first", "**Hello**")
    figure = Figure()
    figure.add_subplot().plot([0, 1])
    log.figure("critic/calibration", figure)
    log.histogram("critic/q", torch.tensor([0.0, float("nan"), 1.0]))
    log.histogram("critic/none", torch.tensor([float("inf")]))
    log.close()
    found = events(tmp_path)
    tags = found.Tags()
    assert tags["images"] == ["critic/calibration"]
    assert tags["histograms"] == ["critic/q"]
    assert tags["tensors"] == ["samples/first/text_summary"]
    assert found.Histograms("critic/q")[0].histogram_value.num == 2
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_without_loggers_everything_can_still_be_called(tmp_path: Path) -> None:
    log = RunLog(RunFolder(tmp_path), [], Clock())
    log.metrics({"a": 1.0})
    log.text("a", "b")
    log.figure("a", Figure())
    log.histogram("a", torch.ones(2))
    log.flush()
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_writes_what_came_after_its_checkpoint_once(tmp_path: Path) -> None:
    folder, clock = RunFolder(tmp_path), Clock(rows=0, summaries=0)
    log = RunLog(folder, ["csv", "tensorboard"], clock)
    for clock.step in (1, 2, 3, 4):
        clock.iteration = (clock.step - 1) // 2
        log.metrics({"loss": float(clock.step), "odd, name": -1.0})
    clock.iteration = 2  # the report on the policy of iteration 1 stands before the checkpoint
    log.metrics({"success_rate": 0.5})
    log.flush()
    checkpoint = Clock(clock.iteration, clock.step, clock.rows, clock.summaries)
    for clock.step in (5, 6):
        log.metrics({"loss": float(clock.step)})
    log.flush()
    with folder.metrics.open("a") as file:
        file.write("2,6,cut o")  # killed while it wrote

    log = RunLog(folder, ["csv", "tensorboard"], checkpoint)
    for checkpoint.step in (5, 6):
        log.metrics({"loss": 10.0 + checkpoint.step})
    log.close()
    kept = [(row[0], row[1], row[2], row[3]) for row in rows(folder.metrics) if row[2] != "odd, name"]
    assert kept == [
        ("iteration", "step", "name", "value"),
        ("0", "1", "loss", "1.0"),
        ("0", "2", "loss", "2.0"),
        ("1", "3", "loss", "3.0"),
        ("1", "4", "loss", "4.0"),
        ("2", "4", "success_rate", "0.5"),
        ("2", "5", "loss", "15.0"),
        ("2", "6", "loss", "16.0"),
    ]
    shown = events(tmp_path)
    assert [e.value for e in shown.Scalars("loss")] == [1.0, 2.0, 3.0, 4.0, 15.0, 16.0]
    assert [e.value for e in shown.Scalars("success_rate")] == [0.5]


def shown_by_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    shown = events(folder)
    return {name: [(e.step, e.value) for e in shown.Scalars(name)] for name in shown.Tags()["scalars"]}


def begin_iteration(log: RunLog, number: float) -> None:
    """What is logged of an iteration's rollouts, at the step at which the iteration before ended."""
    log.metrics({"rollouts/outcome": number})
    log.histogram("rollouts/response_tokens", torch.ones(int(number)))
    log.text("conversations/0", f"conversation {number}")
    figure = Figure()
    figure.add_subplot().plot([0, 1])
    log.figure("critic/calibration", figure)


def test_of_one_step_only_what_came_after_the_checkpoint_is_cut(tmp_path: Path) -> None:
    """A run killed twice: each process collects again at step 8, where its checkpoint was written."""
    folder, clock = RunFolder(tmp_path), Clock(rows=0, summaries=0)
    log = RunLog(folder, ["csv", "tensorboard"], clock)
    begin_iteration(log, 1)
    clock.step = 8
    log.metrics({"policy/loss": 0.5, "validation/success_rate": 0.25})
    log.flush()
    kept = (clock.step, clock.rows, clock.summaries)
    assert kept == (8, 3, 6)
    for number in (2, 3, 4):
        begin_iteration(log, number)
        clock.step = 16
        log.metrics({"policy/loss": float(number)})
        log.flush()  # and killed here, but for the last one
        if number < 4:
            file = max(tmp_path.glob("events.*"), key=lambda path: path.stat().st_mtime)
            with file.open("ab") as stream:
                stream.write(b"\x40\x00\x00\x00\x00\x00\x00\x00cut off")
            clock = Clock(0, *kept)
            log = RunLog(folder, ["csv", "tensorboard"], clock)
            assert (clock.rows, clock.summaries) == kept[1:]
    log.close()
    found = shown_by_tensorboard(tmp_path)
    assert found == {
        "rollouts/outcome": [(0, 1.0), (8, 4.0)],
        "policy/loss": [(8, 0.5), (16, 4.0)],
        "validation/success_rate": [(8, 0.25)],
    }
    shown = events(tmp_path)
    assert [(h.step, h.histogram_value.num) for h in shown.Histograms("rollouts/response_tokens")] == [
        (0, 1),
        (8, 4),
    ]
    texts = shown.Tensors("conversations/0/text_summary")
    assert [e.tensor_proto.string_val[0] for e in texts] == [b"conversation 1", b"conversation 4"]
    assert [image.step for image in shown.Images("critic/calibration")] == [0, 8]
    with (tmp_path / "metrics.csv").open(newline="") as stream:
        logged = [(row["name"], (int(row["step"]), float(row["value"]))) for row in csv.DictReader(stream)]
    assert sorted(logged) == sorted((name, value) for name, values in found.items() for value in values)


def test_a_run_that_starts_again_shows_nothing_of_its_first_attempt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for value in (1.0, 2.0):
        log = RunLog(folder, ["tensorboard"], Clock(rows=0, summaries=0))
        log.metrics({"rollouts/outcome": value})
        log.close()
    assert shown_by_tensorboard(tmp_path) == {"rollouts/outcome": [(0, 2.0)]}
    assert len(list(tmp_path.glob("events.*"))) == 1


def test_rows_that_are_there_stay_when_nothing_is_said_about_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for value in (1.0, 2.0):
        log = RunLog(folder, ["csv", "tensorboard"], Clock())
        log.metrics({"loss": value})
        log.close()
    assert [row[3] for row in rows(folder.metrics)] == ["value", "1.0", "2.0"]
    assert log.clock.rows == log.clock.summaries == 2
    assert shown_by_tensorboard(tmp_path) == {"loss": [(0, 1.0), (0, 2.0)]}


WHOLE = "iteration,step,name,value\n0,1,loss,0.25\n0,2,loss,0.5\n1,3,loss,0.75\n"


@pytest.mark.parametrize(
    ("damaged", "kept"),
    [
        pytest.param(WHOLE[:-3], ["0.25", "0.5"], id="end cut off"),
        pytest.param(WHOLE.replace("0,2,loss,0.5", "0,2,lo"), ["0.25", "0.75"], id="half a line"),
        pytest.param(WHOLE.replace("0.5", "half"), ["0.25", "0.75"], id="no number"),
        pytest.param(WHOLE.replace("loss", "x,loss"), [], id="other columns"),
        pytest.param(WHOLE.partition("\n")[2], ["0.5", "0.75"], id="no header"),
        pytest.param("\0" * 300_000, [], id="zeros"),
        pytest.param("", [], id="empty"),
        pytest.param(None, [], id="gone"),
    ],
)
def test_a_damaged_metrics_file_stays_beside_the_new_one_and_is_told(
    tmp_path: Path, damaged: str | None, kept: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, asides = RunFolder(tmp_path), [tmp_path / f"metrics-broken-{number}.csv" for number in (1, 2)]
    for aside in asides:
        if damaged is not None:
            folder.metrics.write_text(damaged)
        clock = Clock(rows=3)
        RunLog(folder, ["csv"], clock).close()
        assert [row[3] for row in rows(folder.metrics)] == ["value", *kept]
        assert clock.rows == len(kept)
        assert caplog.messages[-1].startswith(f"{folder.metrics} is not as the run wrote it")
        assert aside.is_file() == (damaged is not None)
        if damaged is not None:
            assert aside.read_text() == damaged
            assert str(aside) in caplog.messages[-1]
        else:
            folder.metrics.unlink()


def test_a_metrics_file_of_a_killed_run_is_cut_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(WHOLE + "1,4,lo")
    RunLog(folder, ["csv"], Clock(rows=2)).close()
    assert [row[3] for row in rows(folder.metrics)] == ["value", "0.25", "0.5"]
    assert caplog.messages == []
    assert list(tmp_path.iterdir()) == [folder.metrics]
