"""What the values of a log's record must be; otherwise it is left out, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_mtrl.conversation import DISPOSITIONS, Conversation
from lightning_mtrl.well_formed import is_finite, lone_surrogate

TELLING = (None, "accepted", "abstained")  # dispositions that say what was suggested, without the suggestion


class Unreadable(ValueError):
    """A record that is left out: a short cause to count by, and what was found and expected."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse values of a record that would otherwise be converted, or fail with Python's words.

    Raises:
        Unreadable: if its outcomes are no finite numbers, or how it ended is neither true nor false.
    """
    outcomes = record.get("turn_outcomes", [])
    if not isinstance(outcomes, list):
        raise Unreadable("bad value", f"turn_outcomes is {outcomes!r}; a list of numbers was expected.")
    for name, number in [("outcome", record.get("outcome", 0)), *(("turn_outcomes", o) for o in outcomes)]:
        if not isinstance(number, int | float) or not is_finite(number):
            raise Unreadable("bad value", f"{name} holds {number!r:.60}; a finite number was expected.")
    for name in ("terminated", "truncated"):
        if record.get(name, False) not in (False, True):  # any text, such as "no", would count as true
            raise Unreadable("bad value", f"{name} is {record[name]!r:.60}; true or false was expected.")


def check_message(index: int, kept: Mapping[str, Any]) -> None:
    """Refuse values of a message, besides its text, that cannot be.

    Args:
        index: of the message.
        kept: what it says of "suggestion", "disposition", "outcome" and "weight"; nothing that is null.

    Raises:
        Unreadable: if one is of another kind, or nothing says what the suggestion was.
    """
    expectations: dict[str, tuple[Callable[[Any], bool], str]] = {
        "suggestion": (lambda v: isinstance(v, str), "a text or null"),
        "disposition": (lambda v: v in DISPOSITIONS, f"one of {', '.join(DISPOSITIONS)}"),
        "outcome": (lambda v: v in (0, 1), "0 or 1, the flag of one message"),
        "weight": (lambda v: v in (0, 1), "0 or 1"),
    }
    for name, value in kept.items():
        holds, expected = expectations[name]
        if not holds(value):
            detail = f"messages[{index}].{name} is {value!r:.60}; {expected} was expected."
            raise Unreadable("bad value", detail)
    if "suggestion" not in kept and kept.get("disposition") not in TELLING:
        detail = f"messages[{index}] was {kept['disposition']}; the 'suggestion' that was so was expected."
        raise Unreadable("no suggestion", detail)


def check_conversation(conversation: Conversation, turn_outcomes: Any) -> None:
    """Refuse what could not be tokenized, named or computed with.

    Args:
        conversation: as the record gave it.
        turn_outcomes: of that record; None where it has none.

    Raises:
        Unreadable: if a text holds half of a character, or a reward is no finite number or of no response.
    """
    for place, text in _texts(conversation):
        if text is not None and (half := lone_surrogate(text)) is not None:
            detail = f"{place} holds {half!r}, half of a character; whole ones were expected."
            raise Unreadable("lone surrogate", detail)
    if not all(map(is_finite, conversation.rewards)):
        raise Unreadable("bad value", "turn_details holds a reward; a finite number was expected there.")
    if turn_outcomes and len(turn_outcomes) != len(conversation.turns):
        raise Unreadable(
            "bad value",
            f"{len(turn_outcomes)} turn_outcomes for {len(conversation.turns)}; one a response was expected.",
        )


def _texts(conversation: Conversation) -> Iterator[tuple[str, str | None]]:
    """What is tokenized, or names the conversation, with its place."""
    yield from (("id", conversation.id), ("policy", conversation.policy))
    for number, message in enumerate(conversation.prompt, 1):
        yield f"message {number} of the prompt", message.content
    for number, turn in enumerate(conversation.turns, 1):
        yield from ((f"response {number}", text) for text in (turn.response, turn.sent))
        yield from ((f"the answer to response {number}", text) for text in (turn.observation, turn.reply))
