"""A few conversations of a run, as they are shown: the best, the median and the worst outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.report.wording import share
from lightning_mtrl.rollouts.behaviour import coverage_of

MOST_TURNS = 20
MOST_CHARACTERS = 3000  # of one text
SUCCESS = 0.5  # an outcome above it is a success, as in the validation
RANKS = ("best", "median", "worst")


@dataclass(frozen=True)
class Bubble:
    """One text of a conversation.

    Attributes:
        kind: "system", "user" or "assistant".
        text: what was said; empty for a response that abstains.
        notes: what is known of it: its number, reward, value and so on.
    """

    kind: str
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One conversation as it is shown.

    Attributes:
        id: of the conversation.
        outcome: as text.
        is_success: whether its outcome counts as one.
        ended: how it ended, in a word.
        facts: what was hidden from the agent.
        bubbles: what was said, in order.
        left_out: turns that are not shown.
    """

    id: str
    outcome: str
    is_success: bool
    ended: str
    facts: str
    bubbles: tuple[Bubble, ...]
    left_out: int


def chosen(conversations: Sequence[Conversation]) -> dict[str, Conversation]:
    """Conversations by their place in the order of outcomes, "best", "median" and "worst".

    Those of the policy's own behaviour are preferred to those that were made to differ for coverage. Fewer
    than three give fewer; equal outcomes are told apart by the sum of rewards, then by length.
    """
    known = [c for c in conversations if c.outcome is not None]
    own = [c for c in known if coverage_of(c) is None] or known
    ordered = sorted(own, key=lambda c: (-(c.outcome or 0.0), -sum(c.rewards), len(c.turns), c.id))
    places = {"best": 0, "median": len(ordered) // 2, "worst": len(ordered) - 1}
    found: dict[str, Conversation] = {}
    for rank in ("best", "worst", "median"):  # so that two are the two ends
        if ordered and ordered[places[rank]] not in found.values():
            found[rank] = ordered[places[rank]]
    return found


def sample_of(conversation: Conversation) -> Sample:
    """A conversation as it is shown."""
    outcome, facts = conversation.outcome, conversation.metadata.get("facts")
    facts = facts if isinstance(facts, dict) else {}
    told = "; ".join(f"{name}: {_plain(value)}" for name, value in facts.items())
    shown = conversation.turns[:MOST_TURNS]
    bubbles = [_of_message(message) for message in conversation.prompt]
    for number, turn in enumerate(shown, start=1):
        bubbles.append(Bubble("assistant", _cut(turn.response or ""), _notes(conversation, number, turn)))
        if turn.observation:
            bubbles.append(Bubble("user", _cut(turn.observation)))
    return Sample(
        id=conversation.id,
        outcome="unknown" if outcome is None else f"{outcome:.4g}",
        is_success=outcome is not None and outcome > SUCCESS and not conversation.truncated,
        ended="cut off by a limit" if conversation.truncated else "",
        facts=_cut(told),
        bubbles=tuple(bubbles),
        left_out=len(conversation.turns) - len(shown),
    )


def _of_message(message: Message) -> Bubble:
    return Bubble(message.role, _cut(message.content))


def _notes(conversation: Conversation, number: int, turn: Turn) -> tuple[str, ...]:
    metadata = conversation.metadata
    notes = [f"turn {number}"]
    if turn.disposition:
        notes.append(turn.disposition)
    if turn.reward:
        notes.append(f"reward {turn.reward:.3g}")
    values = metadata.get("turn_values")
    if isinstance(values, list) and number <= len(values) and isinstance(values[number - 1], int | float):
        notes.append(f"value {share(values[number - 1])}")
    if metadata.get("pivotal_turn") == number:
        notes.append("decided the outcome")
    return (*notes, "explored") if turn.explored else tuple(notes)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} …"
