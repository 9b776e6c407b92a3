"""A value of the wrong type is refused where an environment makes it, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.rollouts.environment_calls import Failure, ask


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"observation": None},
            r"Transition.observation is None, but a text \(it may be empty\) was expected",
        ),
        ({"observation": 5}, "Transition.observation is 5, but"),
        ({"reward": "1"}, "Transition.reward is '1', but a number was expected"),
        ({"reward": None}, "Transition.reward is None, but"),
        ({"terminated": "no"}, "Transition.terminated is 'no', but True or False was expected"),
        ({"truncated": None}, "Transition.truncated is None, but"),
        ({"info": ["a"]}, r"Transition.info is \['a'\], but a dictionary was expected"),
    ],
)
def test_a_wrong_type_costs_its_conversation_and_is_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        Transition(**{"observation": "x", **given})
    (failure,) = ask([lambda: Transition(**{"observation": "x", **given})], Transition)
    assert isinstance(failure, Failure)
    assert failure.cause.startswith("TypeError: Transition.")


@pytest.mark.parametrize("given", [{"text": None}, {"text": b"x"}, {"system": 3}, {"info": None}])
def test_an_observation_is_of_texts(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(TypeError, match=f"Observation.{name} is "):
        Observation(**{"text": "x", **given})


@pytest.mark.parametrize("reward", [1, 0.5, np.float32(0.5), torch.tensor(0.5), True])
@pytest.mark.parametrize("over", [True, np.bool_(True), torch.tensor(True), 1])
def test_numbers_and_truth_values_of_numpy_and_torch_will_do(reward: Any, over: Any) -> None:
    assert float(Transition("", reward, terminated=over).reward) in (0.5, 1.0)
