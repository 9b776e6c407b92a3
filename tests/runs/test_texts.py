"""What a run tells people in words."""

from __future__ import annotations

from small_models import some_talks

from lightning_mtrl.algorithms import ITPO, IterativePPO, OutcomeOnly
from lightning_mtrl.runs.texts import sample_text


def test_values_stand_beside_the_turns_under_the_name_that_the_algorithm_gives_them() -> None:
    assert (IterativePPO.turn_value_name, ITPO.turn_value_name) == ("Q", "reward")
    conversation = some_talks(3)[2]
    text = sample_text(conversation, [0.25, -0.5, 1.0], ITPO.turn_value_name)
    for place, value in enumerate(("0.25", "-0.50", "1.00"), start=1):
        assert f"**response {place}** (reward {value}): said" in text
    assert "**response 1**: said" in sample_text(conversation, None, OutcomeOnly.turn_value_name)
    assert text.startswith("**user**: y")
    assert text.endswith("**outcome**: 0")
