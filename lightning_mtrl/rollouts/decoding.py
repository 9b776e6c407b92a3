"""The loop that turns logits into responses, one token a row and step; rows come and go while it runs.

Shape letters: R rows, T tokens of a response (at most), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_mtrl.rollouts.memory import Memory
from lightning_mtrl.rollouts.sampling import SamplingConfig, sample_tokens


@dataclass(frozen=True)
class SampledResponse:
    """What the policy said.

    Attributes:
        ids: the sampled tokens, end-of-turn token included when it was sampled; never empty.
        logprobs: log-probability in nats of each under the plain distribution of the model
            (temperature 1, nothing cut off).
        finished: True when the last id ends the turn, False when the length limit did.
        drawn_logprobs: log-probability of each under the distribution that it was drawn from.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    drawn_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Draw:
    """Everything that decides the draws of one response.

    Attributes:
        uniforms: one number in [0, 1) for each token that it may have.
        temperature: see `SamplingConfig`.
        min_p: see `SamplingConfig`.
    """

    uniforms: NDArray[np.floating[Any]]
    temperature: float
    min_p: float


@dataclass
class _Speaking:
    """A response that is being sampled in a row, whose memory held `start` tokens before it."""

    row: int
    draw: Draw
    start: int = 0
    is_over: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drawn_logprobs: list[float] = field(default_factory=list)

    @property
    def read(self) -> int:
        """Tokens of the row that the memory holds once this response is over: all but its last."""
        return self.start + len(self.tokens) - 1

    def hear(self, token: int, logprob: float, drawn_logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.drawn_logprobs.append(drawn_logprob)

    def response(self, finished: bool) -> SampledResponse:
        if not all(map(math.isfinite, self.logprobs)):
            raise FloatingPointError(
                "the model's logits are not finite; look at its weights and at the last update"
            )
        return SampledResponse(tuple(self.tokens), tuple(self.logprobs), finished, tuple(self.drawn_logprobs))


class Decoding:
    """Responses in the making. It goes on until so many are finished that it pays to let others in.

    A finished row stays in the steps until then (its tokens are thrown away), because moving rows costs more
    than a few of its tokens. The last token of a response stays unread.

    Args:
        memory: what the model has read of each row.
        sampling: what holds for all rows; `Draw` has the rest.
        end_ids: ids that end a response.

    Attributes:
        rows: those whose response is not finished.
    """

    def __init__(self, memory: Memory, sampling: SamplingConfig, end_ids: frozenset[int]) -> None:
        self._memory, self._sampling, self._end_ids = memory, sampling, end_ids
        self._limit = sampling.max_response_tokens
        self._going: list[_Speaking] = []
        self._coming: dict[int, tuple[_Speaking, list[int]]] = {}
        self._logits: Tensor | None = None
        self.rows: set[int] = set()

    def begin(self, row: int, new_ids: Sequence[int], draw: Draw) -> None:
        """Let a response follow after these ids; there must be one at least.

        Raises:
            ValueError: if the row is responding already, or there are too few random numbers.
        """
        if row in self.rows:
            raise ValueError(f"row {row} is responding already")
        if len(draw.uniforms) < self._limit:
            raise ValueError(f"a response of up to {self._limit} tokens needs as many uniform numbers")
        self._coming[row] = (_Speaking(row, draw), list(new_ids))
        self.rows.add(row)

    def begin_at(self, logits: Float[Tensor, "R V"], draws: Sequence[Draw]) -> None:
        """Let a response follow in each of the rows 0, 1, ..., whose next logits are known already."""
        held = self._memory.length
        self._going = [_Speaking(row, draw, held(row)) for row, draw in enumerate(draws)]
        self._logits, self.rows = logits, set(range(len(draws)))

    def advance(self, others: Callable[[], int] = lambda: 0) -> dict[int, SampledResponse]:
        """Sample on for a while.

        Args:
            others: how many rows could join by now; with enough of them it stops, to let them in.

        Returns:
            The responses that are finished now, by row; perhaps none.
        """
        logits = self._next_logits()
        draws = _Draws.of(self._sampling, self._going, logits.device)
        rows = [said.row for said in self._going]
        enough = math.ceil((1 - self._memory.compact_below) * len(rows)) or 1
        while True:
            tokens = self._hear(draws.take(logits))
            over = [said for said in self._going if said.is_over]
            if len(over) == len(rows) or len(over) + others() >= enough:
                break
            for said in over:
                # It does not move on: its thrown-away tokens stand where its last token will be read.
                self._memory.rewind(said.row, said.read)
            logits = self._memory.step(rows, tokens)
        for said in over:
            self._memory.rewind(said.row, said.read)
        self._going = [said for said in self._going if not said.is_over]
        self.rows = {said.row for said in self._going}
        return {said.row: said.response(said.tokens[-1] in self._end_ids) for said in over}

    def _hear(self, drawn: tuple[Tensor, Tensor, Tensor]) -> Int[Tensor, " R"]:
        tokens, *logprobs = drawn
        # One transfer for all three, the float32 by their bits: not every device has a type that holds both.
        sent = torch.stack([tokens.int(), *(each.view(torch.int32) for each in logprobs)]).cpu()
        values = (sent[0].tolist(), *sent[1:].view(torch.float32).tolist())
        for said, token, logprob, drawn_logprob in zip(self._going, *values, strict=True):
            if not said.is_over:
                said.hear(token, logprob, drawn_logprob)
                said.is_over = token in self._end_ids or len(said.tokens) == self._limit
        return tokens

    def _next_logits(self) -> Tensor:
        """Read what is unread in every row: the last token of those that go on, and what came in."""
        if self._logits is not None:
            logits, self._logits = self._logits, None
            return logits
        coming, self._coming = self._coming, {}
        speaking = {said.row: said for said in (*self._going, *(said for said, _ in coming.values()))}
        holding = [row for row in coming if self._memory.length(row)]
        fresh = [row for row in coming if not self._memory.length(row)]
        going, *new = self._memory.arrange([said.row for said in self._going], holding, fresh)
        parts = []
        if going:
            last = torch.tensor([speaking[row].tokens[-1] for row in going], device=self._memory.device)
            parts.append(self._memory.step(going, last))
        entering = [row for part in new for row in part]
        if entering:
            parts.append(self._memory.extend(entering, [coming[row][1] for row in entering]))
        for row in entering:
            speaking[row].start = self._memory.length(row)
        self._going = [speaking[row] for row in (*going, *entering)]
        return torch.cat(parts)


@dataclass
class _Draws:
    """The draws of some rows, in their order."""

    sampling: SamplingConfig
    uniforms: Float[Tensor, "R T"]
    temperature: float | Float[Tensor, " R"]
    min_p: float | Float[Tensor, " R"]
    step: Int[Tensor, "R 1"]

    @classmethod
    def of(cls, sampling: SamplingConfig, going: Sequence[_Speaking], device: torch.device) -> _Draws:
        numbers = np.stack([said.draw.uniforms[: sampling.max_response_tokens] for said in going])
        return cls(
            sampling,
            torch.from_numpy(numbers.astype(np.float32)).to(device),
            _one_or_each([said.draw.temperature for said in going], device),
            _one_or_each([said.draw.min_p for said in going], device),
            torch.tensor([[len(said.tokens)] for said in going], device=device),
        )

    def take(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next token of each row, and its plain and its drawn log-probability."""
        # A row that is over stays for a while, and has no number of its own any more.
        place = self.step.clamp(max=self.uniforms.size(1) - 1)
        uniforms = self.uniforms.gather(1, place).squeeze(1)
        self.step = self.step + 1
        cut = (self.sampling.top_k, self.sampling.top_p, self.min_p)
        return sample_tokens(logits, uniforms, self.temperature, *cut)


def _one_or_each(values: list[float], device: torch.device) -> float | Tensor:
    """The number that all rows share, which is faster, or one a row."""
    return values[0] if len(set(values)) == 1 else torch.tensor(values, device=device)
