from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_mtrl.errors import UserError
from lightning_mtrl.runs.summary import Summary


def row(iteration: int, rate: float = 0.5) -> dict[str, object]:
    return {"iteration": iteration, "success_rate": rate, "success_rate_interval": (0.4, 0.6)}


def test_a_new_summary_holds_the_promised_keys(tmp_path: Path) -> None:
    Summary(tmp_path / "summary.json").write()
    content = json.loads((tmp_path / "summary.json").read_text())
    assert list(content) == ["versions", "seconds", "optimum_success_rate", "optimum_return", "iterations"]
    assert content["optimum_success_rate"] is None
    assert content["iterations"] == []
    assert {"python", "torch", "lightning_mtrl"} < set(content["versions"])


def test_a_summary_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    summary = Summary(tmp_path / "summary.json", seconds=12.5, optimum_success_rate=0.9)
    summary.put(row(0))
    summary.put(row(1))
    summary.write()
    again = Summary.open(tmp_path / "summary.json")
    assert (again.seconds, again.optimum_success_rate) == (12.5, 0.9)
    assert again.iterations[1] == {"iteration": 1, "success_rate": 0.5, "success_rate_interval": [0.4, 0.6]}


def test_a_redone_iteration_replaces_its_row_and_those_after_it(tmp_path: Path) -> None:
    summary = Summary(tmp_path / "summary.json")
    for number in range(4):
        summary.put(row(number))
    summary.put(row(2, rate=0.7))
    assert [(kept["iteration"], kept["success_rate"]) for kept in summary.iterations] == [
        (0, 0.5),
        (1, 0.5),
        (2, 0.7),
    ]


def test_numbers_of_torch_and_numpy_become_json_and_nan_becomes_null(tmp_path: Path) -> None:
    summary = Summary(tmp_path / "summary.json")
    measured = {"kl": torch.tensor(0.25), "q_loss": float("nan"), "conversations": np.int64(3)}
    summary.put({"iteration": 0, **measured, "seconds": {"collect": np.float32(0.5)}, "dropped": {}})
    summary.write()
    assert json.loads((tmp_path / "summary.json").read_text())["iterations"] == [
        {
            "iteration": 0,
            "kl": 0.25,
            "q_loss": None,
            "conversations": 3,
            "seconds": {"collect": 0.5},
            "dropped": {},
        }
    ]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"iterations": [{}]}', '{"iterations": [], "more": 1}'])
def test_what_is_no_summary_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary\.json is not a summary"):
        Summary.open(tmp_path / "summary.json")
