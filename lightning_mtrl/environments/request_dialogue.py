"""A request that leaves something out, and a user who tells it when asked: the shape of ITPO's three tasks.

The tasks are those of ITPO (arXiv:2603.23550): tutoring, writing, and medical advice with a user who is
played by rules. What differs between them is a `Case`; the course of a conversation is here, once.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, ClassVar, Literal, NamedTuple

from lightning_mtrl.environments.protocol import Observation, Optimum, Transition

SOLVED = 0.5  # an outcome above this counts as a success

DECLINES = "No more questions, please."
INVITATION = "Any question?"
SMALL_TALK = ("One moment.", "Let me see.", "Hm.")
PLEASED, DISPLEASED = "Great, thanks!", "That is not it."
AGENT_SMALL_TALK = ("Sure.", "I see.", "All right.")


class Move(NamedTuple):
    """What a response does.

    Attributes:
        kind: "ask", "deliver" (the answer, the text, the diagnosis) or "chat".
        slot: what a question is about.
    """

    kind: str
    slot: str = ""


class Prospects(NamedTuple):
    """What the best delivery brings: its chance of an outcome above `SOLVED`, and its mean outcome."""

    success: float
    mean: float


class Case(ABC):
    """One request, with all that its user knows. Equal cases look alike to the agent until it asks."""

    @property
    @abstractmethod
    def opening(self) -> str:
        """The user's first message."""

    @property
    @abstractmethod
    def withheld(self) -> tuple[str, ...]:
        """The facts that the request leaves out; the agent can see which they are, not what they are."""

    @abstractmethod
    def read(self, text: str) -> Move:
        """What a response does, by rules that also read free text."""

    @abstractmethod
    def tell(self, slot: str) -> str:
        """The user's words to a question about a slot: a withheld fact, a stated one again, or neither."""

    @abstractmethod
    def score(self, text: str) -> float:
        """Outcome in [0, 1] of what was delivered."""

    @abstractmethod
    def prospects(self, told: frozenset[str]) -> Prospects:
        """What is possible with these withheld facts, for an agent that sees only what the agent sees."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Hidden facts for evaluators."""


@dataclass(frozen=True)
class Patience:
    """How a user leads the conversation.

    Attributes:
        questions: questions that the user answers; later ones are declined.
        before: messages before the one that invites a question; one of these numbers, drawn evenly.
        after: responses between the one to the invitation and the last one; drawn in the same way.
    """

    questions: int = 1
    before: tuple[int, ...] = (0, 1, 2)
    after: tuple[int, ...] = (4,)

    def __post_init__(self) -> None:
        if self.questions < 1 or not self.before or not self.after or min(self.before + self.after) < 0:
            raise ValueError(f"a user answers at least one question and counts messages from 0, got {self}")

    @property
    def most_turns(self) -> int:
        """Responses in the longest conversation."""
        return max(self.before) + max(self.after) + 2

    @property
    def fewest_turns(self) -> int:
        """Responses that every conversation has room for."""
        return min(self.before) + min(self.after) + 2


class RequestDialogue(ABC):
    """A user whose request leaves a fact out, and who tells it only when asked.

    The user opens with the request, makes small talk, once invites a question, makes small talk again, and
    at last demands the result; what the agent says then is taken for the result. The agent may ask or
    deliver at any time. The user answers the first thing that a message asks about, and only so many
    messages (`Patience.questions`; one in size "tiny"): a question about something else costs the chance.
    The conversation ends with the delivery, at the latest in the turn of the demand, always terminated; the
    reward arrives then and equals the outcome. An abstention counts as small talk.

    The last transition's info holds "outcome", "tokens" (words between white space of all messages after
    the first one, the user's included; the last thanks too) and "pivotal_turn", counted from 1:

    1. outcome above 0.5 and something was told: the turn whose question raised the prospects of the best
       delivery most (the first such turn).
    2. outcome above 0.5 and nothing was told (a lucky guess), or an outcome of at most 0.5 where what was
       told allows more (a slip): the turn of the delivery.
    3. otherwise too little was told. If nothing had been asked when the invitation was answered with
       something else: that turn. Else, if the user has no answers left: the last turn that spent one without
       learning anything new. Else the turn of the delivery, which came too early.

    In successes it is the turn to praise most, in failures the turn to blame most. In size "tiny" it is the
    turn in which the exact chance of success of the mediocre scripted agent changes most.

    Args:
        size: "tiny" for a model trained from scratch on such talk, "natural" for a real chat model.
        patience: how the user leads; null is the size's own.
    """

    tiny_model: ClassVar[str] = "tasks"
    demand: ClassVar[str]
    natural_patience: ClassVar[Patience] = Patience(
        questions=3, before=(0,), after=(3,)
    )  # 5 responses at most
    instructions: ClassVar[str]

    def __init__(self, size: Literal["tiny", "natural"] = "tiny", patience: Patience | None = None) -> None:
        if size not in ("tiny", "natural"):
            raise ValueError(f"size must be 'tiny' or 'natural', got {size!r}")
        self.size = size
        self.patience = patience or (self.natural_patience if size == "natural" else Patience())

    @abstractmethod
    def draw(self, rng: random.Random) -> Case:
        """A case at random."""

    @abstractmethod
    def situations(self) -> Sequence[tuple[Case, float]]:
        """Cases whose prospects, weighted, are those of all cases; weights sum to 1."""

    def reset(self, seed: int) -> Observation:
        """Draw a case and the course of the conversation."""
        self._rng = rng = random.Random(seed)
        self.case = self.draw(rng)
        before, after = rng.choice(self.patience.before), rng.choice(self.patience.after)
        self.invited_turn, self.last_turn = before + 1, before + after + 2
        self.turn, self._words = 0, 0
        self.questions_left = self.patience.questions
        self.told: dict[str, int] = {}
        self._asked: list[int] = []
        self._wasted: list[int] = []
        system = self.instructions if self.size == "natural" else None
        return Observation(_join(self.case.opening, self._cue()), system, info=self.case.facts())

    @property
    def cue(self) -> str:
        """What the user's latest message calls for: "question", "delivery", or nothing ("")."""
        if self.turn + 1 == self.last_turn:
            return "delivery"
        return "question" if self.turn + 1 == self.invited_turn and self.questions_left else ""

    def step(self, response: str | None) -> Transition:
        """Answer a question, take a delivery, or make small talk."""
        said = response or ""
        demanded = self.cue == "delivery"
        self.turn += 1
        self._words += len(said.split())
        move = self.case.read(said)
        if demanded or move.kind == "deliver":
            return self._end(self.case.score(said))
        reply = self._answer(move.slot) if move.kind == "ask" else ""
        cue = self._cue()
        text = _join(reply, cue) or self._rng.choice(SMALL_TALK)
        self._words += len(text.split())
        return Transition(text, info={"cue": self.cue})

    def optimum(self, gamma: float) -> Optimum:
        """Values of the best agent and of the greedy one, which delivers at once.

        The user tells what is asked for, so the best agent asks for facts as long as that is worth the
        delay, and delivers. Exact in size "tiny"; in size "natural" the best known (a fixed sample of
        cases, no luck in guessing numbers). The success rate is the share of outcomes above 0.5.
        """
        return _optimum(type(self), self.size, self.patience, gamma)

    def _answer(self, slot: str) -> str:
        self._asked.append(self.turn)
        if not self.questions_left:
            return DECLINES
        self.questions_left -= 1
        if slot in self.case.withheld and slot not in self.told:
            self.told[slot] = self.turn
        else:
            self._wasted.append(self.turn)
        return self.case.tell(slot)

    def _cue(self) -> str:
        return {"question": INVITATION, "delivery": self.demand, "": ""}[self.cue]

    def _end(self, outcome: float) -> Transition:
        thanks = PLEASED if outcome > SOLVED else DISPLEASED
        self._words += len(thanks.split())
        info = {"outcome": outcome, "tokens": self._words, "pivotal_turn": self._pivotal_turn(outcome)}
        return Transition(thanks, outcome, terminated=True, info=info)

    def _pivotal_turn(self, outcome: float) -> int:
        allowed = self.case.prospects(frozenset(self.told)).mean
        if outcome > SOLVED and self.told:
            return self._decisive_turn()
        if outcome > SOLVED or allowed > SOLVED:
            return self.turn
        if self.invited_turn < self.turn and not any(turn <= self.invited_turn for turn in self._asked):
            return self.invited_turn
        return self._wasted[-1] if self._wasted and not self.questions_left else self.turn

    def _decisive_turn(self) -> int:
        """The turn whose question raised the prospects most."""
        gains: list[tuple[float, int]] = []
        told: frozenset[str] = frozenset()
        for slot, turn in self.told.items():
            more = told | {slot}
            gains.append((self.case.prospects(more).mean - self.case.prospects(told).mean, -turn))
            told = more
        return -max(gains)[1]


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


@lru_cache(maxsize=32)
def _optimum(kind: type[RequestDialogue], size: Any, patience: Patience, gamma: float) -> Optimum:
    environment = kind(size, patience)
    most = min(patience.questions, patience.fewest_turns - 1)
    success = value = greedy_success = greedy = 0.0
    for case, weight in environment.situations():
        plans = [
            (gamma ** len(asked) * case.prospects(frozenset(asked)).mean, frozenset(asked))
            for number in range(min(most, len(case.withheld)) + 1)
            for asked in combinations(case.withheld, number)
        ]
        best, asked = max(plans, key=lambda plan: plan[0])
        at_once = case.prospects(frozenset())
        success += weight * case.prospects(asked).success
        value += weight * best
        greedy_success += weight * at_once.success
        greedy += weight * at_once.mean
    return Optimum(success, value, greedy_success, greedy)
