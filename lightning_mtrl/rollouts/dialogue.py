"""One conversation of the policy with somebody who answers at leisure, such as a person at a terminal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.decoding import Draw, SampledResponse
from lightning_mtrl.rollouts.engine import ConversationEngine
from lightning_mtrl.rollouts.sampling import SamplingConfig

if TYPE_CHECKING:
    from lightning_mtrl.rollouts.tokens import ChatTokenizer


@dataclass(frozen=True)
class Answer:
    """What the policy said.

    Attributes:
        text: None when it abstained.
        finished: False when the length limit cut it off.
    """

    text: str | None
    finished: bool


class Dialogue:
    """Holds a conversation; each message is read once, and the history never again.

    The model must be the same, and in the same state (as in `Backbone.sampling`), whenever it is made or
    responds.

    Args:
        model: a transformers causal language model.
        chat: its tokenizer. A control token in a message stays ordinary text.
        sampling: how responses are drawn.
        context_length: tokens that a conversation may hold.
        seed: of the draws; None takes another one each time.
        system: instructions for the policy; None for none.

    Raises:
        UserError: if the longest response leaves no room in the context for anything else.
    """

    def __init__(
        self,
        model: nn.Module,
        chat: ChatTokenizer,
        *,
        sampling: SamplingConfig,
        context_length: int,
        seed: int | None = None,
        system: str | None = None,
    ) -> None:
        self._chat, self._sampling, self._context_length = chat, sampling, context_length
        # Behind a response there is room for the header at which a critic reads, as in collected ones.
        self._room = sampling.max_response_tokens + len(chat.header_ids) + 1
        if self._room >= context_length:
            raise UserError(
                f"--max_response_tokens is {sampling.max_response_tokens}, but model.context_length is "
                f"{context_length}, which must hold the messages too. Pass a smaller number."
            )
        self._system = system
        self._stream = np.random.default_rng(seed)
        self._engine = ConversationEngine(
            model,
            rows=1,
            context_length=context_length,
            end_ids=chat.end_ids,
            sampling=sampling,
            pad_id=chat.pad_id,
        )
        self._prompt: tuple[Message, ...] = ()
        self._prompt_ids: tuple[int, ...] = ()
        self._turns: list[Turn] = []
        self._finished = True

    @property
    def conversation(self) -> Conversation:
        """What was said so far, with its ids; it ends with the last response and has no outcome."""
        return Conversation(
            id="dialogue",
            prompt=self._prompt,
            turns=tuple(self._turns),
            terminated=False,
            truncated=True,
            prompt_ids=self._prompt_ids,
        )

    def reset(self) -> None:
        """Forget what was said; the next message begins a conversation."""
        self._engine.release(0)
        self._turns, self._finished = [], True

    def has_room(self, text: str) -> bool:
        """Whether a message and a response to it fit the context behind what was said."""
        _, ids = self._following(text)
        return self._engine.length(0) + len(ids) + self._room <= self._context_length

    def fits(self, text: str) -> bool:
        """Whether a message and a response to it fit the context of a new conversation."""
        _, ids = self._opening(text)
        return len(ids) + self._room <= self._context_length

    def respond(self, text: str) -> Answer:
        """Take a message and sample the response to it.

        Raises:
            ValueError: if there is no room for them (`has_room`).
        """
        prompt, ids = self._following(text)
        sampling = self._sampling
        uniforms = self._stream.random(sampling.max_response_tokens, dtype=np.float32)
        (said,) = self._engine.respond([0], [ids], [Draw(uniforms, sampling.temperature, sampling.min_p)])
        if self._turns:
            self._turns[-1] = replace(self._turns[-1], observation=text, observation_ids=tuple(ids))
        else:
            self._prompt, self._prompt_ids = prompt, tuple(ids)
        return self._heard(said)

    def _following(self, text: str) -> tuple[tuple[Message, ...], list[int]]:
        """The prompt that a message opens, or none where it is not the first; and the ids to append."""
        if self._turns:
            return (), self._chat.observation_ids(text, finished=self._finished)
        return self._opening(text)

    def _opening(self, text: str) -> tuple[tuple[Message, ...], list[int]]:
        instructions = (Message("system", self._system),) if self._system else ()
        prompt = (*instructions, Message("user", text))
        return prompt, self._chat.prompt_ids(prompt)

    def _heard(self, said: SampledResponse) -> Answer:
        text = self._chat.response_text(said.ids)
        closing = self._chat.observation_ids("", finished=said.finished, last=True)
        self._turns.append(
            Turn(
                text,
                response_ids=said.ids,
                behaviour_logprobs=said.logprobs,
                observation_ids=tuple(closing),
            )
        )
        self._finished = said.finished
        return Answer(text, said.finished)
