"""One record of a log as a conversation, or the reason why it cannot be one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.log_checks import Unreadable, check_conversation, check_message, check_record
from lightning_mtrl.rollouts.tokens import opening_as_prompt
from lightning_mtrl.well_formed import json_value

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "tool": "tool",
    "observation": "tool",
}
MARK = b"\xef\xbb\xbf"  # byte-order mark of UTF-8
ROUNDING = 1e-6  # a return may be so far out of its range, since it is a sum of floats


@dataclass(frozen=True)
class Demands:
    """What a reader asks of a record, beyond that it is a conversation.

    Attributes:
        outcome: it says how it ended; one that a limit cut off need not.
        returns: range that the discounted return after each response must be in; None for any.
        gamma: discount for each response, in (0, 1].
        join_consecutive: messages of one role that follow each other become one, instead of being refused.
    """

    outcome: bool = False
    returns: tuple[float, float] | None = None
    gamma: float = 1.0
    join_consecutive: bool = False


def parsed(record: Any) -> Mapping[str, Any]:
    """The JSON object of a line; what is no line is an object already.

    Raises:
        Unreadable: if it is neither.
    """
    if isinstance(record, bytes):
        record = _json(record)
    if not isinstance(record, Mapping):
        raise Unreadable("not an object", f"found {type(record).__name__}; a JSON object was expected.")
    return record


def conversation_of(record: Mapping[str, Any], default_id: str, demands: Demands) -> Conversation:
    """The conversation of a record, in our form, OpenAI's or ShareGPT's.

    Raises:
        Unreadable: if it is none, or not what is demanded.
    """
    kept = {"id": default_id} | {key: value for key, value in record.items() if value is not None}
    kept |= {key: _as_json(kept[key]) for key in ("metadata", "turn_details") if key in kept}
    kept["messages"] = _messages(kept, demands.join_consecutive and "prompt_messages" not in kept)
    try:
        check_record(kept)
        conversation = Conversation.from_json(flagged(kept, record.get("outcome", 0) is None))
        check_conversation(conversation, kept.get("turn_outcomes"))
    except UserError as error:
        raise Unreadable("turns", str(error)) from error
    except Unreadable:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Unreadable("bad value", f"a value does not fit ({error!r}).") from error
    if "prompt_messages" not in kept:
        conversation = opening_as_prompt(conversation)
    if not conversation.turns:
        raise Unreadable("no response", "no response to a user; at least one message of it was expected.")
    _check_demands(conversation, demands)
    return conversation


def _as_json(given: Any) -> Any:
    """What JSON can say of it; a NaN beside a key is a value that is missing, as data frames write it."""
    if isinstance(given, Mapping):
        given = {key: value for key, value in given.items() if value == value}
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError):
        return json_value(given)
    except RecursionError as error:
        raise Unreadable("bad value", "metadata or turn_details nest too deeply.") from error
    return given


def _json(line: bytes) -> Any:
    try:
        return json.loads(line.removeprefix(MARK).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Unreadable("not UTF-8", f"not UTF-8 ({error}); a text in UTF-8 was expected.") from error
    except RecursionError as error:
        raise Unreadable("not JSON", "lists or objects nest too deeply to be read.") from error
    except ValueError as error:
        if not line.endswith(b"\n"):
            detail = f"the file ends within a JSON object ({_complaint(error)}); a whole line was expected."
            raise Unreadable("cut off", detail) from error
        detail = f"not JSON ({_complaint(error)}); one JSON object a line was expected."
        raise Unreadable("not JSON", detail) from error


def _complaint(error: ValueError) -> str:
    """What is wrong with a line, and where in it: its own "line 1" would be taken for the file's."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return str(error)


def _check_demands(conversation: Conversation, demands: Demands) -> None:
    if demands.outcome and conversation.outcome is None and not conversation.truncated:
        raise Unreadable(
            "no outcome",
            "no outcome; a number in 'outcome' was expected (or in a file of outcomes, joined by id).",
        )
    if demands.returns is None or conversation.outcome is None:
        return
    low, high = demands.returns
    total, worst = 0.0, conversation.outcome
    for reward in reversed(conversation.rewards):
        total = reward + demands.gamma * total
        worst = worst if low - ROUNDING <= total <= high + ROUNDING else total
    if not low - ROUNDING <= worst <= high + ROUNDING:
        raise Unreadable(
            "outcome out of range",
            f"its outcome or return is {worst:g}; a number from {low:g} to {high:g} was expected.",
        )


def flagged(record: Mapping[str, Any], unknown: bool = False) -> Mapping[str, Any]:
    """The record with the flags of its messages as outcomes.

    A flag is the o_i of the user's i-th message (Iterative PPO, arXiv:2511.21638, section 2.1): it is the
    reward of the response before that message, and the first that is 1 ends the conversation, so what was
    said afterwards is cut. Without a flag of 1 the record's own outcome holds. Where it has none, it is 0 if
    the user answered every response, with a flag each time; else it is not known.

    Args:
        record: with messages in our form, and without values that are null.
        unknown: the record says itself that its outcome is not known.

    Raises:
        Unreadable: for a flag that no response could have earned, or one that contradicts the record.
    """
    messages = record["messages"]
    flags = {place: message["outcome"] for place, message in enumerate(messages) if "outcome" in message}
    if not flags:
        return record
    said = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if record.get("turn_outcomes"):
        raise Unreadable("bad value", "messages have outcome flags, and there are turn_outcomes; give one.")
    won = next((place for place, flag in flags.items() if flag), None)
    if won is None:
        cut = record.get("truncated", not record.get("terminated", True))
        lost = bool(said) and _all_flagged(messages[said[0] :]) and not (unknown or cut)
        return {**record, "outcome": record.get("outcome", 0.0 if lost else None)}
    if not said or said[0] > won:
        raise Unreadable("outcome first", f"messages[{won}] has the outcome before any response.")
    if record.get("outcome", 1) != 1:
        detail = f"outcome is {record['outcome']:g}, but the outcome flag of messages[{won}] is 1."
        raise Unreadable("bad value", detail)
    earned = [0.0] * (sum(place < won for place in said) - 1) + [1.0]
    return {**record, "messages": messages[: won + 1], "outcome": 1.0, "turn_outcomes": earned}


def _all_flagged(messages: list[dict[str, Any]]) -> bool:
    """Whether the user has the last word, and every message of theirs a flag."""
    flags = ["outcome" in message for message in messages if message["role"] == "user"]
    return bool(messages[-1]["role"] == "user" and all(flags))


def _messages(record: Mapping[str, Any], join: bool) -> list[dict[str, Any]]:
    """Messages in our form, from OpenAI's or ShareGPT's."""
    found = record.get("messages", record.get("conversations"))
    if not isinstance(found, list) or not all(isinstance(message, Mapping) for message in found):
        raise Unreadable("no messages", "no list of messages; 'messages' or 'conversations' was expected.")
    messages = [_message(index, message) for index, message in enumerate(found)]
    if "messages" not in record and isinstance(record.get("system"), str):
        messages.insert(0, {"role": "system", "content": record["system"]})
    return _joined(messages) if join else messages


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of one role that follow each other as one, with a line break between their texts."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last: dict[str, Any] = joined[-1] if joined else {"role": None}
        plain = not {"suggestion", "disposition"} & (message.keys() | last.keys())
        if message["role"] != last["role"] or not plain:
            joined.append(dict(message))
            continue
        last["content"] = "\n".join(filter(None, [last["content"], message["content"]]))
        flags = [last.pop("outcome", None), message.get("outcome")]
        if 1 in flags or None not in flags:  # one flag of 0 does not tell what the other message would have
            last["outcome"] = max(filter(None, flags), default=0)
        if weights := [m["weight"] for m in (last, message) if "weight" in m]:
            last["weight"] = min(weights)
    return joined


def _message(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """A message in our form. A null says that a key is not there: exports write the same keys everywhere."""
    message = {key: value for key, value in given.items() if value is not None}
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        roles = ", ".join(ROLES)
        raise Unreadable("unknown role", f"messages[{index}] is from {role!r}; one of {roles} was expected.")
    if message.get("tool_calls") or message.get("function_call"):
        raise Unreadable("tool call", f"messages[{index}] calls a tool; responses in text were expected.")
    said = ("suggestion", "disposition") if ROLES[role] == "assistant" else ()
    kept = {key: message[key] for key in (*said, "outcome", "weight") if key in message}
    check_message(index, kept)
    if said and "outcome" in kept:
        raise Unreadable("bad value", "a response has an outcome flag; only the messages of others have one.")
    return {
        "role": ROLES[role],
        "content": _text(index, message.get("content", message.get("value"))),
        **kept,
    }


def _text(index: int, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Unreadable("not text", f"messages[{index}].content is more than text; text was expected.")
    return "\n".join(map(str, texts))
