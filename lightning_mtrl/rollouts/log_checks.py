"""What the values of a log's record must be; otherwise it is left out, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_mtrl.conversation import DISPOSITIONS, Conversation, Turn
from lightning_mtrl.well_formed import is_finite, lone_surrogate

WHOLE = 2**63  # whole numbers stay below, as tensors and columns hold them
ROUNDING = 1e-3  # nats by which a log-probability of a server may be above 0
SUM_ROUNDING = 1e-6  # of outcomes of turns, beside the outcome
TELLING = (None, "accepted", "abstained")  # dispositions that say what was suggested, without the suggestion


class Unreadable(ValueError):
    """A record that is left out: a short cause to count by, and what was found and expected."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse values of a record that would otherwise be converted, or fail with Python's words.

    Raises:
        Unreadable: if its outcomes are no finite numbers, how it ended is neither true nor false, or its
            prompt ends where it has no message.
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
    first, number = record.get("prompt_messages", 0), len(record["messages"])
    if type(first) is not int or not 0 <= first <= number:
        detail = f"prompt_messages is {first!r:.60}; a whole number from 0 to {number} was expected."
        raise Unreadable("bad value", detail)


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
        Unreadable: if a text holds half of a character, a reward is no finite number or of no response, or
            token ids or log-probabilities are none.
    """
    for place, text in _texts(conversation):
        if text is not None and (half := lone_surrogate(text)) is not None:
            detail = f"{place} holds {half!r}, half of a character; whole ones were expected."
            raise Unreadable("lone surrogate", detail)
    if not all(map(is_finite, conversation.rewards)):
        raise Unreadable("bad value", "turn_details holds a reward; a finite number was expected there.")
    if not all(-WHOLE <= number < WHOLE for number in (conversation.group, conversation.seed)):
        raise Unreadable(
            "bad value", "group or seed is larger than 64 bits; a number of a group was expected."
        )
    for ids in _all_ids(conversation):
        if ids and not _are_ids(ids):
            raise Unreadable("bad tokens", "tokens holds what is no id; whole numbers from 0 were expected.")
    for number, turn in enumerate(conversation.turns, 1):
        if turn.behaviour_logprobs and (wrong := _wrong_logprobs(turn)):
            raise Unreadable("bad tokens", f"behaviour_logprobs of response {number} {wrong}.")
    if turn_outcomes and len(turn_outcomes) != len(conversation.turns):
        raise Unreadable(
            "bad value",
            f"{len(turn_outcomes)} turn_outcomes for {len(conversation.turns)}; one a response was expected.",
        )


def adds_up(conversation: Conversation) -> bool:
    """Whether the outcomes of turns add up to the outcome, where that is known.

    Environments may reward more than the outcome; in the logs of others it is rather a mistake.
    """
    outcome = conversation.outcome
    return outcome is None or math.isclose(
        sum(conversation.rewards), outcome, rel_tol=SUM_ROUNDING, abs_tol=SUM_ROUNDING
    )


def _all_ids(conversation: Conversation) -> Iterator[tuple[int, ...]]:
    yield conversation.prompt_ids
    for turn in conversation.turns:
        yield from (turn.response_ids, turn.observation_ids)


def _are_ids(ids: tuple[Any, ...]) -> bool:
    """Whether all are whole numbers from 0; as few steps as can be, since a log may hold millions."""
    return set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < WHOLE


def _wrong_logprobs(turn: Turn) -> str | None:
    """What is wrong with a turn's log-probabilities; None where nothing is."""
    values: tuple[Any, ...] = turn.behaviour_logprobs
    if len(values) != len(turn.response_ids):
        return f"are {len(values)} for {len(turn.response_ids)} ids; one each, or none, was expected"
    # A NaN or an infinity stays one in the sum, which takes a tenth of the time of looking at each.
    if not set(map(type, values)) <= {int, float} or not is_finite(sum(values)):
        return "hold what is no finite number; a log-probability in nats was expected"
    worst = max(values)
    return f"hold {worst:g}; no log-probability is above 0" if worst > ROUNDING else None


def _texts(conversation: Conversation) -> Iterator[tuple[str, str | None]]:
    """What is tokenized, or names the conversation, with its place."""
    yield from (("id", conversation.id), ("policy", conversation.policy))
    for number, message in enumerate(conversation.prompt, 1):
        yield f"message {number} of the prompt", message.content
    for number, turn in enumerate(conversation.turns, 1):
        yield from ((f"response {number}", text) for text in (turn.response, turn.sent))
        yield from ((f"the answer to response {number}", text) for text in (turn.observation, turn.reply))
