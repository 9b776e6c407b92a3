"""What a run tells people in words."""

from __future__ import annotations

from typing import Any

import pytest
from small_models import some_talks

from lightning_mtrl.algorithms import ITPO, IterativePPO, OutcomeOnly
from lightning_mtrl.runs.texts import policy_line, sample_text


def test_values_stand_beside_the_turns_under_the_name_that_the_algorithm_gives_them() -> None:
    assert (IterativePPO.turn_value_name, ITPO.turn_value_name) == ("Q", "reward")
    conversation = some_talks(3)[2]
    text = sample_text(conversation, [0.25, -0.5, 1.0], ITPO.turn_value_name)
    for place, value in enumerate(("0.25", "-0.50", "1.00"), start=1):
        assert f"**response {place}** (reward {value}): said" in text
    assert "**response 1**: said" in sample_text(conversation, None, OutcomeOnly.turn_value_name)
    assert text.startswith("**user**: y")
    assert text.endswith("**outcome**: 0")


def _row(**fields: Any) -> dict[str, Any]:
    return {
        "iteration": 1,
        "success_rate": 0.25,
        "success_rate_interval": [0.1, 0.4],
        "mean_return": 0.5,
        "conversations": 20,
        "turns": 2.0,
        "accepted": True,
        "kl": 0.25,
        "seconds": {"collect": 1.0, "improve": 2.0},
        **fields,
    }


def test_a_policys_line_says_what_its_row_holds() -> None:
    assert policy_line(_row(), 0.75) == (
        "policy 1: success rate 0.250 [0.100, 0.400] of 0.750 possible, return 0.500, 2.0 turns; step taken, "
        "KL 0.25 nats a response, 3 s"
    )


@pytest.mark.parametrize("kl", [None, 0.0, -0.0, 0.004, -0.004, -1e-9])
def test_a_kl_that_rounds_to_zero_is_left_out(kl: float | None) -> None:
    assert "KL" not in policy_line(_row(kl=kl), None)


def test_a_kl_below_zero_that_is_more_than_rounding_shows() -> None:
    assert "KL -0.01 nats a response" in policy_line(_row(kl=-0.006), None)


def test_no_zero_has_a_sign() -> None:
    assert "return 0.000," in policy_line(_row(mean_return=-1e-4), None)
    assert "(reward 0.00)" in sample_text(some_talks(1)[0], [-0.001], "reward")
