"""Full fine-tuning whose weights two processes share does what one process does, in half the room."""

from __future__ import annotations

from typing import Any

import pytest
import sharded_processes
import torch
import two_processes
from torch import Tensor

from lightning_mtrl.processes import Processes

pytestmark = pytest.mark.distributed
Weights = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return sharded_processes.found_by(Processes())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_processes.found_by_two(tmp_path_factory.mktemp("shared"), sharded_processes.__file__)


def _apart(a: Weights, b: Weights) -> float:
    pairs = [(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x]
    assert len(pairs) > 40
    return max(float((x - y).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("rows", sharded_processes.ROWS)
def test_two_steps_move_all_weights_as_in_one_process(
    alone: dict[str, Any], both: list[dict[str, Any]], rows: int
) -> None:
    # With one row, the second process has none; with seven, it has fewer than the first.
    expected = alone["steps"][rows]
    for found in both:
        assert _apart(found["steps"][rows]["weights"], expected["weights"]) < 1e-5
        assert torch.tensor(found["steps"][rows]["losses"]).allclose(
            torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-5
        )
    assert _apart(both[0]["steps"][rows]["weights"], both[1]["steps"][rows]["weights"]) == 0.0


def test_one_process_that_runs_out_of_memory_halves_its_own_passes(
    alone: dict[str, Any], both: list[dict[str, Any]]
) -> None:
    for found in both:
        assert _apart(found["memory"]["weights"], alone["steps"][7]["weights"]) < 1e-5


def test_each_process_keeps_half_of_the_numbers_between_steps(
    alone: dict[str, Any], both: list[dict[str, Any]]
) -> None:
    whole = alone["numbers"]
    assert whole["in the model"] == 2 * whole["of the policy"]
    assert whole["stepped"] == whole["moments"] == whole["of the policy"]
    for found in both:
        numbers = found["numbers"]
        assert numbers["in the model"] == numbers["gradients"] == 0
        # All tensors of this model have an even number of elements, so that nothing is padded.
        assert 2 * numbers["stepped"] == 2 * numbers["moments"] == whole["of the policy"]
        assert numbers["of the policy"] == whole["of the policy"]


def test_a_checkpoint_of_two_processes_is_whole_and_goes_on(
    alone: dict[str, Any], both: list[dict[str, Any]]
) -> None:
    expected = alone["resumed"]
    for found in (alone, *both):
        assert _apart(found["resumed"]["began again"], found["resumed"]["went on"]) == 0.0
        assert _apart(found["resumed"]["went on"], expected["went on"]) < 1e-5
        for stored, wanted in zip(found["resumed"]["stored"], expected["stored"], strict=True):
            assert stored["state"].keys() == wanted["state"].keys()
            for number, values in wanted["state"].items():
                for name, value in values.items():
                    assert stored["state"][number][name].shape == value.shape
                    assert torch.allclose(stored["state"][number][name], value, atol=1e-5)


def test_steps_that_were_taken_back_leave_nothing_behind(
    alone: dict[str, Any], both: list[dict[str, Any]]
) -> None:
    for found in (alone, *both):
        assert _apart(found["taken back"]["again"], found["taken back"]["once"]) == 0.0
        assert _apart(found["taken back"]["once"], alone["taken back"]["once"]) < 1e-5


def test_a_role_is_not_read_while_it_is_shared_out(alone: dict[str, Any], both: list[dict[str, Any]]) -> None:
    assert alone["unready"] is None
    for found in both:
        assert found["unready"] == (
            "ValueError",
            "role 'policy' is shared out; read it inside of `whole` or `sampling`",
        )


def test_a_base_that_was_trained_is_not_taken_for_the_loaded_one(
    alone: dict[str, Any], both: list[dict[str, Any]]
) -> None:
    for found in (alone, *both):
        name, message = found["trained base"]
        assert name == "ValueError"
        assert message.startswith("the base was trained as 'policy'")
