"""What an environment said, as plain data: whatever it is made of, it can be kept, written and read again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_mtrl.conversation import DISPOSITIONS
from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.well_formed import is_finite, json_value

_LARGEST = 3.4e38  # reward that float32 holds, in which returns are computed
TURN_KEYS = ("sent", "reply", "disposition", "outcome")


def plain(answer: Any) -> Any:
    """An observation or a transition whose flags are truth values, its reward a float, its info JSON.

    A reward that float32 cannot hold becomes NaN, and "sent" and "reply" stay what they are; `fault_of`
    refuses them. Anything else than the two comes back as it is.

    Raises:
        Exception: where a flag is neither true nor false, such as an array of several, or info holds itself.
    """
    if isinstance(answer, Observation):
        return replace(answer, info=json_value(answer.info))
    if not isinstance(answer, Transition):
        return answer
    return replace(
        answer,
        reward=_number(answer.reward),
        terminated=bool(answer.terminated),
        truncated=bool(answer.truncated),
        info=_plain_info(answer.info),
    )


def fault_of(transition: Transition) -> str | None:
    """Why a plain answer of an environment cannot be used; None when it can."""
    info = transition.info
    if transition.terminated and transition.truncated:
        return "the environment both terminated and truncated"
    if not is_finite(transition.reward):
        return "reward is not a finite number"
    for key in ("sent", "reply"):
        if not isinstance(info.get(key), str | None):
            return f"{key} is neither a text nor None"
    if (disposition := info.get("disposition")) not in (None, *DISPOSITIONS):
        return f"disposition is {disposition!r:.40}, which is none of {', '.join(DISPOSITIONS)}"
    if "outcome" in info and transition.terminated:
        return None if is_finite(info["outcome"]) else "no outcome"
    return None


def _number(reward: Any) -> float:
    number = float(reward) if is_finite(reward) else math.nan
    return number if abs(number) <= _LARGEST else math.nan


def _plain_info(info: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = json_value(info)
    # What is no text must not become one, as NaN would.
    kept |= {key: info[key] for key in ("sent", "reply") if key in info}
    # A fraction or a decimal has no form in JSON, but an outcome of it is a number.
    return kept | {key: float(info[key]) for key in ("outcome",) if is_finite(info.get(key))}
