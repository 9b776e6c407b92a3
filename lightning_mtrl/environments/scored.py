"""Any environment with an outcome of your own: a Python function, or a metric of torchmetrics."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from lightning_mtrl.environments.protocol import Environment, Observation, Transition, close, held_out
from lightning_mtrl.errors import UserError


@dataclass(frozen=True)
class Talk:
    """A finished conversation, as a score sees it.

    Attributes:
        prompt: what the environment said first.
        responses: the agent's, None where it abstained.
        observations: what the environment said to each.
        facts: hidden facts of the first observation, and what the last transition tells.
        outcome: the environment's own: what it gave as such, else the sum of its rewards.
    """

    prompt: str
    responses: tuple[str | None, ...]
    observations: tuple[str, ...]
    facts: Mapping[str, Any]
    outcome: float


Score = Callable[[Talk], float]


class Scored:
    """An environment whose outcome is what `score` says of the whole conversation.

    The score takes the place of all rewards: it comes with the last transition, and others have none.
    Success counts from 0.5, so a score in [0, 1] is what the reports are for. A score that raises, or is not
    finite, costs that conversation, which is counted and never taken for 0.

    Args:
        environment: the other side of the conversation.
        score: a function of a `Talk`, by its import path, or an object that can be called with one.
    """

    def __init__(self, environment: Environment, score: Score) -> None:
        if not callable(score):
            raise UserError(f"score is {score!r}, but a function of a conversation was expected.")
        self.environment, self.score = environment, score
        if hasattr(environment, "tiny_model"):
            self.tiny_model = environment.tiny_model

    def held_out(self) -> Scored:
        """The same with the situations that the environment keeps to validate on."""
        return Scored(held_out(self.environment), self.score)

    def reset(self, seed: int) -> Any:
        """Start a conversation of the environment."""
        begun: Any = self.environment.reset(seed)
        return self._later(begun, self._begin) if inspect.isawaitable(begun) else self._begin(begun)

    def step(self, response: str | None) -> Any:
        """Let the environment answer, and score the conversation when it is over."""
        answer: Any = self.environment.step(response)
        self._responses.append(response)
        return self._later(answer, self._heard) if inspect.isawaitable(answer) else self._heard(answer)

    def close(self) -> Any:
        """Let the environment clean up behind the conversation, if it does that."""
        return close(self.environment)

    async def _later(self, waiting: Awaitable[Any], then: Callable[[Any], Any]) -> Any:
        return then(await waiting)

    def _begin(self, first: Observation) -> Observation:
        self._first, self._rewards = first, 0.0
        self._responses: list[str | None] = []
        self._observations: list[str] = []
        return first

    def _heard(self, answer: Transition) -> Transition:
        self._observations.append(answer.observation)
        self._rewards += answer.reward
        info = {key: value for key, value in answer.info.items() if key != "outcome"}
        if not answer.terminated:
            return replace(answer, reward=0.0, info=info)
        own = answer.info.get("outcome")
        talk = Talk(
            self._first.text,
            tuple(self._responses),
            tuple(self._observations),
            {**self._first.info, **info},
            self._rewards if own is None else float(own),
        )
        found = float(self.score(talk))
        if not math.isfinite(found):
            raise ValueError(f"the score is {found}, but a finite number was expected")
        return replace(answer, reward=found, info={**info, "outcome": found})


class MetricScore:
    """A metric of torchmetrics as a score: what the agent said last against a hidden fact.

    Args:
        metric: for one prediction and its target, such as `torchmetrics.text.BLEUScore`.
        target: key of the fact.
        listed: the metric wants a list of targets for each prediction, as BLEU does.
        sign: -1 for a metric of errors, which is better when smaller.
    """

    def __init__(self, metric: Any, target: str, listed: bool = False, sign: float = 1.0) -> None:
        if not (callable(metric) and hasattr(metric, "reset")):
            raise UserError(f"metric is {metric!r}, but a metric of torchmetrics was expected.")
        self.metric, self.target, self.listed, self.sign = metric, target, listed, sign

    def __call__(self, talk: Talk) -> float:
        """The metric of one conversation."""
        if self.target not in talk.facts:
            raise KeyError(f"there is no fact {self.target!r}; there are {sorted(talk.facts)}")
        wanted = talk.facts[self.target]
        said = talk.responses[-1] or ""
        self.metric.reset()
        value = cast(Any, self.metric)([said], [[wanted] if self.listed else wanted])
        return self.sign * float(value)
