"""Conversations as plain data: what was said, by whom, and how it ended. No tensors here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_mtrl.errors import UserError

DISPOSITIONS = ("accepted", "edited", "influenced", "rejected", "abstained")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt: `role` is "system", "user" or "assistant"."""

    role: str
    content: str


def describe_sent(response: str | None, sent: str, reply: str) -> str:
    """The observation of a suggestion: what came back, and what was really sent where that differs.

    The state of the Suggested Response problem holds the suggestion *and* the message that the
    business sent (Iterative PPO, arXiv:2511.21638, section 2.1). The suggestion is the assistant's
    message; this text is the user's message that follows it. The other party's words come first, so that
    right after a response a language model already predicts the reaction to it. Logs and environments
    share this one rendering, so a policy meets the same text in both.

    Args:
        response: the agent's suggestion, or None when it abstained.
        sent: the message that the business sent; empty when the business left.
        reply: the customer's next message; empty when the customer left.
    """
    if not sent:
        return "(The business left.)"
    words = reply or "(The customer left.)"
    return words if sent == response else f"{words} (Sent instead: {sent})"


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the agent and the observation after it.

    Attributes:
        response: text that the policy sampled; None when the agent abstained (a bare end-of-turn).
        observation: text shown to the agent after the response; it belongs to the next state.
        reward: reward observed after the response (the outcome o_{i+1} of the next message).
        sent: the message that was really delivered, when it can differ from the response.
        reply: the other party's own words, when `observation` says more than them.
        disposition: how a suggestion was treated, one of `DISPOSITIONS`; None in ordinary chat.
        explored: True when this response was drawn from a flattened distribution for coverage.
        trained: False when this response must not be learned from, as OpenAI's `weight` 0 says; it is
            context for what follows.
        response_ids: the sampled token ids, end-of-turn token included when it was sampled.
        behaviour_logprobs: log-probability in nats of each of `response_ids` under the policy that
            sampled it, at temperature 1 and without truncation of the distribution.
        observation_ids: ids appended after the response: template glue, observation, and (unless the
            conversation ended here) the header that opens the next response. Never trained on.
        info: facts for evaluators (hidden state, metrics); never shown to the agent.
    """

    response: str | None
    observation: str = ""
    reward: float = 0.0
    sent: str | None = None
    reply: str | None = None
    disposition: str | None = None
    explored: bool = False
    trained: bool = True
    response_ids: tuple[int, ...] = ()
    behaviour_logprobs: tuple[float, ...] = ()
    observation_ids: tuple[int, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One episode: a prompt, turns, and an outcome.

    Attributes:
        id: unique among the rollouts it belongs to.
        prompt: the messages before the first response.
        turns: in order; at least one for a conversation that is trained on.
        outcome: score of the finished conversation; None when it is unknown (a simulator or judge
            failed, or a limit cut it off before an outcome could show).
        terminated: the problem itself ended the conversation.
        truncated: a limit (turns, context) cut it off. Never both.
        group: conversations of one policy with the same `seed` and `group` share the same initial state. Both
            are 0 where no group is known, as in a log.
        seed: seed of the environment and of this conversation's random stream.
        policy: name of the policy version that produced it, such as "iteration-0002".
        prompt_ids: token ids of the rendered prompt, ending with the header that opens a response.
        explored_turn: number (from 1) of the turn that was drawn, before the conversation began, to have an
            explored response, reached or not; 0 for none. Returns of turns *before* it are not the policy's.
        metadata: anything else that is JSON (persona, customer id, segment, ...).
    """

    id: str
    prompt: tuple[Message, ...]
    turns: tuple[Turn, ...]
    outcome: float | None = None
    terminated: bool = True
    truncated: bool = False
    group: int = 0
    seed: int = 0
    policy: str = ""
    prompt_ids: tuple[int, ...] = ()
    explored_turn: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Logs of versions that did not write the draw have the flags of turns alone.
        flagged = (number for number, turn in enumerate(self.turns, start=1) if turn.explored)
        object.__setattr__(self, "explored_turn", max(self.explored_turn, *flagged, 0))
        if self.terminated and self.truncated:
            raise ValueError(f"conversation {self.id!r} is both terminated and truncated; it can be one")

    @property
    def rewards(self) -> list[float]:
        """Reward after each response, one a turn."""
        return [turn.reward for turn in self.turns]

    @property
    def plain_prompt(self) -> tuple[Message, ...]:
        """The prompt without the persona (`metadata["persona"]`), under which the policy would have acted."""
        persona, first = self.metadata.get("persona"), self.prompt[:1]
        if not isinstance(persona, str) or not first or first[0].role != "system":
            return self.prompt
        system = first[0].content
        if system == persona:
            return self.prompt[1:]
        return (Message("system", system.removesuffix(f"\n\n{persona}")), *self.prompt[1:])

    @property
    def has_tokens(self) -> bool:
        """True when the ids that were sampled are at hand, so that nothing is tokenized again."""
        return bool(self.prompt_ids) and all(turn.response_ids for turn in self.turns)

    def token_ids(self) -> list[int]:
        """All ids in order: the prompt, then response and observation of every turn."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += (*turn.response_ids, *turn.observation_ids)
        return ids

    def to_json(self) -> dict[str, Any]:
        """The logged form: one JSON object, from which `from_json` makes an equal conversation.

        Our token record is under "tokens" when there is one, and under "turn_details" what the messages do
        not say about a turn, such as `Turn.info`.
        """
        messages: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in self.prompt]
        for number, turn in enumerate(self.turns, start=1):
            messages += _messages_of(turn, last=number == len(self.turns))
        record: dict[str, Any] = {
            "id": self.id,
            "messages": messages,
            "outcome": self.outcome,
            "turn_outcomes": self.rewards,
            "policy": self.policy,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "group": self.group,
            "seed": self.seed,
            "prompt_messages": len(self.prompt),
            "explored_turn": self.explored_turn,
            "metadata": dict(self.metadata),
        }
        if self.prompt_ids or any(turn.response_ids or turn.observation_ids for turn in self.turns):
            record["tokens"] = {
                "prompt_ids": list(self.prompt_ids),
                "turns": [
                    {
                        "response_ids": list(turn.response_ids),
                        "behaviour_logprobs": list(turn.behaviour_logprobs),
                        "observation_ids": list(turn.observation_ids),
                        "explored": turn.explored,
                    }
                    for turn in self.turns
                ],
            }
        details = [_details(turn, read) for turn, read in zip(self.turns, _turns_in(record), strict=True)]
        return record | ({"turn_details": details} if any(details) else {})

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Conversation:
        """Read the logged form back.

        Raises:
            UserError: if two messages of the assistant follow each other, or a role is unknown.
        """
        messages = list(record["messages"])
        first = record.get("prompt_messages")
        if first is None:
            first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        turns = _turns_in({**record, "prompt_messages": first})
        outcome = record.get("outcome")
        if outcome is not None and not record.get("turn_outcomes") and turns:
            turns[-1] = replace(turns[-1], reward=float(outcome))
        # Who says no more than that it did not end says that it was cut off.
        truncated = bool(record.get("truncated", not record.get("terminated", True)))
        return cls(
            id=str(record["id"]),
            prompt=tuple(Message(m["role"], m["content"]) for m in messages[:first]),
            turns=tuple(turns),
            outcome=None if outcome is None else float(outcome),
            terminated=bool(record.get("terminated", not truncated)),
            truncated=truncated,
            group=int(record.get("group", 0)),
            seed=int(record.get("seed", 0)),
            policy=str(record.get("policy", "")),
            prompt_ids=tuple((record.get("tokens") or {}).get("prompt_ids", ())),
            explored_turn=int(record.get("explored_turn") or 0),
            metadata=dict(record.get("metadata") or {}),
        )


def _turns_in(record: Mapping[str, Any]) -> list[Turn]:
    """The turns of a record that says where its prompt ends, as far as it tells them."""
    rewards = list(record.get("turn_outcomes") or [])
    name, first = str(record.get("id", "?")), record["prompt_messages"]
    turns = _turns_of(name, list(record["messages"]), first, rewards)
    if tokens := record.get("tokens"):
        turns = [_with_tokens(turn, kept) for turn, kept in zip(turns, tokens["turns"], strict=True)]
    if details := record.get("turn_details"):
        turns = [_with_details(turn, kept) for turn, kept in zip(turns, details, strict=True)]
    return turns


def _details(turn: Turn, read: Turn) -> dict[str, Any]:
    """What has to be added to a turn that was read back to make it equal."""
    names = (f.name for f in fields(Turn) if getattr(turn, f.name) != getattr(read, f.name))
    return {name: getattr(turn, name) for name in names}


def _with_details(turn: Turn, kept: Mapping[str, Any]) -> Turn:
    changes: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in kept.items()}
    return replace(turn, **changes)


def _messages_of(turn: Turn, last: bool) -> list[dict[str, Any]]:
    assistant: dict[str, Any] = {"role": "assistant", "content": turn.response or ""}
    reply = turn.observation
    if turn.sent is not None:
        said = turn.response if turn.disposition == "abstained" else turn.response or ""
        assistant |= {"content": turn.sent, "suggestion": said, "disposition": turn.disposition}
        reply = turn.reply or ""
    messages = [assistant]
    if turn.observation or not last:
        messages.append({"role": "user", "content": reply})
    return messages


def _turns_of(name: str, messages: list[Any], first: int, rewards: list[float]) -> list[Turn]:
    turns: list[Turn] = []
    position = first
    while position < len(messages):
        message = messages[position]
        if message["role"] != "assistant":
            raise UserError(
                f"conversation {name!r}: messages[{position}] is from {message['role']!r}, but a response of "
                f"'assistant' was expected there. Join messages in a row, or set 'prompt_messages'."
            )
        reply, shown = "", position + 1 < len(messages)
        if shown:
            following = messages[position + 1]
            if following["role"] not in ("user", "tool"):
                raise UserError(
                    f"conversation {name!r}: messages[{position}] and messages[{position + 1}] are from "
                    f"'assistant' and {following['role']!r}; a turn is one response and then one 'user' "
                    f"message. Join them."
                )
            reply = following["content"]
        reward = float(rewards[len(turns)]) if len(turns) < len(rewards) else 0.0
        turns.append(_turn_of(message, reply, shown, reward))
        position += 2
    return turns


def _turn_of(message: Mapping[str, Any], reply: str, shown: bool, reward: float) -> Turn:
    trained, sent = bool(message.get("weight", 1)), message["content"] or ""
    said, disposition = message.get("suggestion"), message.get("disposition")
    if said is None and disposition is None:  # a null is a key that is not there, as exports write it
        return Turn(sent or None, reply, reward, trained=trained)
    response = (sent if said is None and disposition == "accepted" else said) or None
    observation = describe_sent(response, sent, reply) if shown else ""
    return Turn(response, observation, reward, sent, reply, disposition, trained=trained)


def _with_tokens(turn: Turn, kept: Mapping[str, Any]) -> Turn:
    return replace(
        turn,
        response_ids=tuple(kept["response_ids"]),
        behaviour_logprobs=tuple(kept["behaviour_logprobs"]),
        observation_ids=tuple(kept["observation_ids"]),
        explored=bool(kept.get("explored", False)),
    )
