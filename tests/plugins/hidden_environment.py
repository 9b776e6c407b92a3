"""An environment that must not be made: proof that a program does without one."""

from __future__ import annotations

from lightning_mtrl.environments.protocol import Observation, Transition


class Hidden:
    """Speaks the language of the sales shop, but cannot be made."""

    tiny_model = "sales"

    def __init__(self) -> None:
        raise AssertionError("the environment was made, but only logs may be used")

    def reset(self, seed: int) -> Observation:
        raise AssertionError

    def step(self, response: str | None) -> Transition:
        raise AssertionError
