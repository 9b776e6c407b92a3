"""Responses from a server: the whole conversation's ids go there, ids and log-probabilities come back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import partial

from lightning_mtrl.llm.completions import CompletionClient, TokenReply
from lightning_mtrl.llm.failures import LLMFailure
from lightning_mtrl.rollouts.decoding import Draw, SampledResponse
from lightning_mtrl.rollouts.environment_calls import Failure, PendingCalls
from lightning_mtrl.rollouts.sampling import SamplingConfig

_LOOK_SECONDS = 0.02  # how often somebody looks whether an environment has answered meanwhile


class ServedEngine:
    """Holds conversations and lets a server respond in any of them, as `ConversationEngine` does here.

    Every request has the whole conversation; a server that caches prefixes reads only what is new. Nothing
    that a server says is believed unseen: a reply whose tokens cannot have been sampled as asked is a failure
    of its conversation.

    Args:
        client: of the server.
        model: name of the adapter that responds.
        vocabulary: ids are below this.
        context_length: tokens that a conversation may hold, responses included.
        end_ids: ids that end a response.
        sampling: how tokens are drawn.
    """

    def __init__(
        self,
        client: CompletionClient,
        model: str,
        *,
        vocabulary: int,
        context_length: int,
        end_ids: Collection[int],
        sampling: SamplingConfig,
    ) -> None:
        self._client, self._model, self._vocabulary = client, model, vocabulary
        self._context_length, self._end_ids, self._sampling = context_length, frozenset(end_ids), sampling
        self._held: dict[int, list[int]] = {}
        self._calls: PendingCalls[int] = PendingCalls()
        self._responding: set[int] = set()

    @property
    def responding(self) -> set[int]:
        """Rows in which a response was begun and is not finished."""
        return self._responding

    def length(self, row: int) -> int:
        """Tokens that the row's conversation holds."""
        return len(self._held.get(row, ()))

    def release(self, row: int) -> None:
        """End the row's conversation; the next one in this row starts empty."""
        self._held.pop(row, None)

    def begin(self, row: int, new_ids: Sequence[int], draw: Draw) -> None:
        """Append ids to a conversation and ask for a response.

        Args:
            row: not responding.
            new_ids: what was said since the row's last response; not empty.
            draw: equal ones with equal conversations ask with equal seeds.

        Raises:
            ValueError: if the row is responding, nothing was said, or the conversation could outgrow the
                context.
        """
        held, limit = self.length(row), self._sampling.max_response_tokens
        if row in self._responding or not new_ids or held + len(new_ids) + limit > self._context_length:
            raise ValueError(
                f"row {row} holds {held} tokens and gets {len(new_ids)} (at least one, while it is not "
                f"responding); a response of {limit} must then fit {self._context_length}"
            )
        ids = self._held.setdefault(row, [])
        ids.extend(new_ids)
        self._responding.add(row)
        self._calls.start(row, partial(self._respond, tuple(ids), draw), SampledResponse)

    def advance(
        self, others: Callable[[], int] = lambda: 0
    ) -> dict[int, SampledResponse | Failure[SampledResponse]]:
        """Wait until some responses are there, or others could be begun.

        Args:
            others: how many rows could be begun by now.

        Returns:
            The responses that are there, by row, and a `Failure` where the server gave none.
        """
        while self._responding and not self._calls.ready() and not others():
            self._calls.wait(_LOOK_SECONDS)
        found: dict[int, SampledResponse | Failure[SampledResponse]] = dict(self._calls.take())
        self._responding -= found.keys()
        for row, said in found.items():
            if isinstance(said, SampledResponse):
                self._held[row].extend(said.ids)
        return found

    def cancel(self) -> None:
        """Give up the responses that are not there yet."""
        self._calls.cancel()
        self._responding.clear()

    async def _respond(self, ids: tuple[int, ...], draw: Draw) -> SampledResponse:
        sampling = self._sampling
        reply = await self._client.complete(
            self._model,
            ids,
            max_tokens=sampling.max_response_tokens,
            end_ids=sorted(self._end_ids),
            seed=seed_of(draw),
            draw={
                "temperature": draw.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": draw.min_p,
            },
        )
        if wrong := self._complaint(reply):
            raise LLMFailure(wrong)
        return SampledResponse(reply.ids, reply.logprobs, reply.ids[-1] in self._end_ids)

    def _complaint(self, reply: TokenReply) -> str | None:
        """What cannot be of a reply; None where all can."""
        ends = [place for place, token in enumerate(reply.ids) if token in self._end_ids]
        limit, number = self._sampling.max_response_tokens, len(reply.ids)
        if reply.model != self._model:
            return "another model answered than was asked"
        if not all(0 <= token < self._vocabulary for token in reply.ids):
            return "token ids outside the vocabulary"
        if number > limit or (ends and ends[0] < number - 1):
            return "a response that goes on after its end"
        return None if ends or number == limit else "a response that stops before its end"


def seed_of(draw: Draw) -> int:
    """A seed in [0, 2^31) that depends on all random numbers of a draw."""
    return int.from_bytes(hashlib.sha256(draw.uniforms.tobytes()).digest()[:4]) >> 1
