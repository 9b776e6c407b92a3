from __future__ import annotations

import csv
from pathlib import Path

import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.loggers import Clock, RunLog


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
    folder, clock = RunFolder(tmp_path), Clock(rows=0)
    log = RunLog(folder, ["csv", "tensorboard"], clock)
    for clock.step in (1, 2, 3, 4):
        clock.iteration = (clock.step - 1) // 2
        log.metrics({"loss": float(clock.step), "odd, name": -1.0})
    clock.iteration = 2  # the report on the policy of iteration 1 stands before the checkpoint
    log.metrics({"success_rate": 0.5})
    log.flush()
    checkpoint = Clock(clock.iteration, clock.step, clock.rows)
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


def test_rows_that_are_there_stay_when_nothing_is_said_about_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for value in (1.0, 2.0):
        log = RunLog(folder, ["csv"], Clock())
        log.metrics({"loss": value})
        log.close()
    assert [row[3] for row in rows(folder.metrics)] == ["value", "1.0", "2.0"]
    assert log.clock.rows == 2
