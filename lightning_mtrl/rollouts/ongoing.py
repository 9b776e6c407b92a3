"""A conversation while it is being held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.environments.protocol import Environment, Observation, Transition
from lightning_mtrl.rollouts.decoding import SampledResponse
from lightning_mtrl.rollouts.heard import TURN_KEYS
from lightning_mtrl.well_formed import is_finite

FINAL_KEYS = ("tokens", "pivotal_turn")  # of the last transition; kept with the conversation


class Chat(Protocol):
    """What collecting needs of `lightning_mtrl.rollouts.tokens.ChatTokenizer`."""

    @property
    def system_prompt(self) -> str | None: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def end_ids(self) -> Any: ...

    @property
    def header_ids(self) -> Any: ...

    def prompt_ids(self, messages: Any) -> list[int]: ...

    def observation_ids(self, text: str, *, finished: bool = True, last: bool = False) -> list[int]: ...

    def response_text(self, ids: Any) -> str | None: ...


@dataclass
class Ongoing:
    """What is known of a conversation so far; `close` turns it into plain data.

    Attributes:
        id: of the conversation.
        index: its place among the rollouts.
        group: number of its group.
        seed: seed of its environment.
        policy: name of the policy version.
        environment: its own copy.
        stream: its own random numbers.
        explored_turn: number (from 1) of the turn that is drawn from a flattened distribution; 0 for none.
        persona: text added to the system message, or None.
        prompt: the messages before the first response, persona included.
        prompt_ids: their token ids.
        facts: the hidden facts of the first observation.
        turns: so far.
        unsaid: ids that the policy has not read yet.
    """

    id: str
    index: int
    group: int
    seed: int
    policy: str
    environment: Environment
    stream: np.random.Generator
    explored_turn: int
    persona: str | None
    prompt: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    unsaid: list[int] = field(default_factory=list)

    @property
    def explores(self) -> bool:
        """Whether the next response is the one drawn for coverage."""
        return len(self.turns) + 1 == self.explored_turn

    def open(self, observation: Observation, chat: Chat) -> None:
        """Take the first observation, as `lightning_mtrl.rollouts.heard.plain` makes it."""
        parts = (observation.system or chat.system_prompt, self.persona)
        system = "\n\n".join(text for text in parts if text)
        opening = (Message("system", system),) if system else ()
        self.prompt = (*opening, Message("user", observation.text))
        self.unsaid = list(chat.prompt_ids(self.prompt))
        self.prompt_ids = tuple(self.unsaid)
        self.facts = observation.info

    def uniforms(self, size: int) -> NDArray[np.float32]:
        """Random numbers for the next response: always as many, however long it gets."""
        return self.stream.random(size, dtype=np.float32)

    def add(
        self, said: SampledResponse, text: str | None, transition: Transition, observation_ids: list[int]
    ) -> None:
        """Append a turn; the transition is a plain one, in which `fault_of` finds no fault."""
        info = transition.info
        self.turns.append(
            Turn(
                response=text,
                observation=transition.observation,
                reward=transition.reward,
                sent=info.get("sent"),
                reply=info.get("reply"),
                disposition=info.get("disposition"),
                explored=self.explores,
                response_ids=said.ids,
                behaviour_logprobs=said.logprobs,
                observation_ids=tuple(observation_ids),
                info={key: value for key, value in info.items() if key not in TURN_KEYS},
            )
        )
        self.unsaid = observation_ids

    def close(self, last: Transition) -> Conversation:
        """The finished conversation. It is truncated when the last transition did not terminate it.

        The outcome is what the environment gave on the last transition, else the sum of rewards; and
        None for a truncated conversation whose environment gave no finite number. What it gave under
        `FINAL_KEYS` is in the metadata, next to the hidden "facts" of the first observation.
        """
        outcome: Any = last.info.get("outcome")
        if outcome is None and last.terminated:
            outcome = math.fsum(turn.reward for turn in self.turns)
        metadata: dict[str, Any] = {"facts": dict(self.facts)} if self.facts else {}
        metadata |= {key: last.info[key] for key in FINAL_KEYS if key in last.info}
        if self.persona is not None:
            metadata["persona"] = self.persona
        return Conversation(
            id=self.id,
            prompt=self.prompt,
            turns=tuple(self.turns),
            outcome=float(outcome) if is_finite(outcome) else None,
            terminated=last.terminated,
            truncated=not last.terminated,
            group=self.group,
            seed=self.seed,
            policy=self.policy,
            prompt_ids=self.prompt_ids,
            explored_turn=self.explored_turn,
            metadata=metadata,
        )
