"""What an environment is: the other side of the conversation, in text. Environments never see tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lightning_mtrl.well_formed import lone_surrogate


@dataclass(frozen=True)
class Observation:
    """The start of a conversation.

    Attributes:
        text: the first message that the agent sees, from the user.
        system: instructions for the agent, or None. A chat template's own default system text is
            used only when the template adds one by itself.
        info: hidden facts for evaluators, never shown to the agent.
    """

    text: str
    system: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _expect_text("Observation.text", self.text)
        if self.system is not None:
            _expect_text("Observation.system", self.system, "a text or None")
        _expect(isinstance(self.info, Mapping), "Observation.info", self.info, "a dictionary")


@dataclass(frozen=True)
class Transition:
    """What follows a response.

    Attributes:
        observation: text shown to the agent next; may be empty when the conversation ended.
        reward: reward for having arrived here.
        terminated: the problem itself ended the conversation (success, the customer left, ...).
        truncated: a limit of the environment cut it off; the outcome is then not known.
        info: facts for evaluators. The keys "sent", "reply" and "disposition" (see
            `lightning_mtrl.conversation.Turn`) are kept with the turn; "outcome" on the last
            transition is the conversation's outcome, otherwise the sum of rewards is.
    """

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _expect_text("Transition.observation", self.observation, "a text (it may be empty)")
        # Numbers of NumPy and torch have it too, and no text has.
        _expect(hasattr(type(self.reward), "__float__"), "Transition.reward", self.reward, "a number")
        for name in ("terminated", "truncated"):
            value = getattr(self, name)
            truth = isinstance(value, bool | int) or hasattr(value, "dtype")
            _expect(truth, f"Transition.{name}", value, "True or False")
        _expect(isinstance(self.info, Mapping), "Transition.info", self.info, "a dictionary")
        for key in ("sent", "reply"):
            if isinstance(self.info.get(key), str):
                _expect_text(f"Transition.info[{key!r}]", self.info[key])


def _expect(holds: bool, name: str, value: object, expected: str) -> None:
    """A wrong type is told where the environment makes it, and costs that conversation alone."""
    if not holds:
        raise TypeError(f"{name} is {value!r:.60}, but {expected} was expected")


def _expect_text(name: str, value: object, expected: str = "a text") -> None:
    """The same for words, which can be neither tokenized nor stored where a character of theirs is broken."""
    _expect(isinstance(value, str), name, value, expected)
    if lone_surrogate(str(value)) is not None:
        raise ValueError(f"{name} holds half of a character (a lone surrogate)")


@runtime_checkable
class Environment(Protocol):
    """One conversation at a time; the collector works on a deep copy for each conversation.

    An environment backed by a language model may make `step` a coroutine (`async def step`).
    An environment that knows its optimum also has `optimum(gamma) -> Optimum`; one that keeps situations
    apart to validate on has `held_out() -> Environment`, which is the same with those.

    One that has to clean up behind a conversation has `close() -> None`, plain or a coroutine. It is called
    on the conversation's own copy once nothing more is asked of it: when it ended, when a limit or a failure
    ended it, and when the collection was stopped. What it raises costs nothing; it is counted and logged.
    """

    def reset(self, seed: int) -> Observation:
        """Start a conversation; equal seeds give equal customers and equal luck."""
        ...

    def step(self, response: str | None) -> Transition:
        """Answer the agent's response; None means that the agent abstained."""
        ...


def held_out(environment: Environment) -> Environment:
    """The environment to validate on: with situations that it keeps apart, if it does that."""
    kept: Environment = environment.held_out() if hasattr(environment, "held_out") else environment
    return kept


def close(environment: Environment) -> Any:
    """Let an environment clean up behind its conversation, if it does that.

    Returns:
        What it returns, which has to be awaited where its `close` is a coroutine.
    """
    clean_up = getattr(environment, "close", None)
    return clean_up() if callable(clean_up) else None


@dataclass(frozen=True)
class Optimum:
    """Exact values of an environment for agents that see only what the agent sees.

    Attributes:
        success_rate: probability of success of the agent that maximises the discounted return.
        mean_return: its expected discounted return.
        greedy_success_rate: probability of success of the agent that maximises, in each turn, the
            probability of success in that very turn.
        greedy_return: that agent's expected discounted return.
    """

    success_rate: float
    mean_return: float
    greedy_success_rate: float
    greedy_return: float
