"""Two processes do together what one does alone, whoever has more of the work, and whatever fails where."""

from __future__ import annotations

from typing import Any

import pytest
import two_processes

pytestmark = pytest.mark.distributed

# Two processes add the same fp32 numbers in another order; how far that leads depends on the processor.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return two_processes.found_alone()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_processes.found_by_two(tmp_path_factory.mktemp("two"))


def _apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest difference of two steps' weights."""
    pairs = [pair for x, y in zip(a["weights"], b["weights"], strict=True) for pair in zip(x, y, strict=True)]
    assert len(pairs) > 20
    return max(float((x - y).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("rows", two_processes.ROWS)
def test_two_steps_move_the_weights_as_in_one_process(
    alone: dict[str, Any], both: list[dict[str, Any]], rows: int
) -> None:
    # With one row, the second process has none; with seven, it has fewer than the first.
    for found in both:
        assert _apart(found["steps"][rows], alone["steps"][rows]) < ROUNDING
        assert found["steps"][rows]["losses"] == pytest.approx(alone["steps"][rows]["losses"], rel=ROUNDING)
    assert _apart(both[0]["steps"][rows], both[1]["steps"][rows]) == 0.0


@pytest.mark.parametrize("rows", two_processes.ROWS)
def test_what_is_logged_is_of_the_whole_step(
    alone: dict[str, Any], both: list[dict[str, Any]], rows: int
) -> None:
    expected = dict(alone["steps"][rows]["logged"])
    assert {"policy/loss", "policy/ratio_deviation", "policy/clip_fraction_turn", "value/loss"} <= {*expected}
    for found in both:
        assert dict(found["steps"][rows]["logged"]) == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


def test_one_process_that_runs_out_of_memory_halves_its_own_passes(
    alone: dict[str, Any], both: list[dict[str, Any]]
) -> None:
    for found in both:
        assert _apart(found["memory"], alone["steps"][8]) < ROUNDING
        assert found["memory"]["losses"] == pytest.approx(alone["steps"][8]["losses"], rel=ROUNDING)
        # Four rows, then two, then one; said once a module, by all, and remembered for the second step.
        assert [text.partition(";")[0] for text in found["memory"]["said"]] == [
            f"Out of memory in a training pass of {role!r} over {rows} rows"
            for role in ("policy", "value")
            for rows in (4, 2)
        ]
        name, message = found["no memory"]
        assert name == "UserError"
        assert "a training pass of 'policy' over one row does not fit into memory" in message


def test_a_step_that_is_not_finite_on_one_process_is_skipped_on_both(both: list[dict[str, Any]]) -> None:
    for found in both:
        assert len([text for text in found["not finite"]["said"] if "was skipped" in text]) == 2
    assert _apart(both[0]["not finite"], both[1]["not finite"]) == 0.0


def test_a_collection_is_the_same_whoever_held_which_conversation(
    alone: dict[str, Any], both: list[dict[str, Any]]
) -> None:
    expected = alone["collected"]
    assert 0 < len(expected["conversations"]) < 14
    assert sum(expected["dropped"].values()) + len(expected["conversations"]) == 14
    assert both[0]["collected"] == both[1]["collected"] == expected
    for found in (alone, *both):
        name, message = found["nothing collected"]
        assert name == "UserError"
        assert "every conversation failed" in message
        assert "(14 times)" in message


def test_what_fails_on_one_process_fails_on_both(both: list[dict[str, Any]]) -> None:
    first, second = both
    assert first["a mistake of the second"] == second["a mistake of the second"]
    assert first["a mistake of the second"] == ("UserError", "it is broken here")
    assert first["a fault of the second"] == (
        "AnotherFailed",
        "process 1 failed: KeyError: 'it is broken here'",
    )
    assert second["a fault of the second"] == ("KeyError", "'it is broken here'")


def test_work_is_dealt_out_and_comes_back_in_order(alone: dict[str, Any], both: list[dict[str, Any]]) -> None:
    for found in (alone, *both):
        assert found["dealt"] == [0, 10, 20, 30, 40]
        assert found["from the first"] == 0


def test_work_of_one_process_that_waits_for_others_is_refused_before_it_hangs(
    alone: dict[str, Any], both: list[dict[str, Any]]
) -> None:
    for found in (alone, *both):
        assert found["waiting inside"] == (
            "ValueError",
            "work that one process does for all must not wait for the others",
        )
