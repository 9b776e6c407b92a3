"""The loop that turns logits into responses, one token a row and step.

Shape letters: R rows, T tokens of a response (at most), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
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
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


@dataclass
class Draws:
    """Everything that decides the draws of some rows, in their order.

    Attributes:
        sampling: what holds for all rows.
        uniforms: one number in [0, 1) for each token that a row may sample.
        temperature: one for all rows, or one a row.
        min_p: one for all rows, or one a row.
    """

    sampling: SamplingConfig
    uniforms: Float[Tensor, "R T"]
    temperature: float | Float[Tensor, " R"]
    min_p: float | Float[Tensor, " R"]

    @classmethod
    def of(cls, sampling: SamplingConfig, logits: Tensor, uniforms: Sequence[NDArray[Any]]) -> Draws:
        size = sampling.max_response_tokens
        if any(len(row) < size for row in uniforms):
            raise ValueError(f"a response of up to {size} tokens needs as many uniform numbers")
        numbers = np.stack([row[:size] for row in uniforms]).astype(np.float32)
        on_device = torch.from_numpy(numbers).to(logits.device)
        return cls(sampling, on_device, sampling.temperature, sampling.min_p)

    def override(self, temperatures: list[float] | None, min_ps: list[float] | None) -> None:
        """Use a value of its own for each row."""
        if temperatures is not None:
            self.temperature = self.uniforms.new_tensor(temperatures)
        if min_ps is not None:
            self.min_p = self.uniforms.new_tensor(min_ps)

    def take(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Draw one token a row: the tokens and their plain log-probabilities."""
        cut = (self.sampling.top_k, self.sampling.top_p, self.min_p)
        return sample_tokens(logits, self.uniforms[:, step], self.temperature, *cut)[:2]

    def keep(self, index: Tensor) -> None:
        """Go on with these rows only, in this order."""
        self.uniforms = self.uniforms[index]
        self.temperature = (
            self.temperature[index] if isinstance(self.temperature, Tensor) else self.temperature
        )
        self.min_p = self.min_p[index] if isinstance(self.min_p, Tensor) else self.min_p


def decode(
    memory: Memory, rows: list[int], logits: Tensor, draws: Draws, end_ids: frozenset[int]
) -> list[SampledResponse]:
    """Sample until every row has an end id or is at the length limit; the last token stays unread.

    A finished row may stay in the step for a while (its tokens are thrown away), because moving rows
    costs more than a few of its tokens.
    """
    start = {row: memory.length(row) for row in rows}
    said: dict[int, list[int]] = {row: [] for row in rows}
    kept: list[Tensor] = []
    columns: list[list[int]] = []
    going, stepping = set(rows), list(rows)
    limit = draws.uniforms.size(1)
    for step in range(limit):
        tokens, logprobs = draws.take(logits, step)
        kept.append(logprobs)
        columns.append(stepping)
        drawn = [(row, token) for row, token in zip(stepping, tokens.tolist(), strict=True) if row in going]
        for row, token in drawn:
            said[row].append(token)
        going -= {row for row, token in drawn if token in end_ids}
        if not going or step == limit - 1:
            break
        if len(going) <= memory.compact_below * len(stepping) and len(going) < len(stepping):
            stepping, tokens = _leave(memory, stepping, going, tokens, draws)
        logits = memory.step(stepping, tokens)
    for row in rows:
        memory.rewind(row, start[row] + len(said[row]) - 1)
    return _collected(rows, said, kept, columns, end_ids)


def _leave(
    memory: Memory, stepping: list[int], going: set[int], tokens: Tensor, draws: Draws
) -> tuple[list[int], Tensor]:
    """Take finished rows out of the step: the rows that go on, in their new order, and their tokens."""
    position = {row: index for index, row in enumerate(stepping)}
    rows = memory.arrange([row for row in stepping if row in going])
    index = torch.tensor([position[row] for row in rows], device=tokens.device)
    draws.keep(index)
    return rows, tokens[index]


def _collected(
    rows: list[int],
    said: dict[int, list[int]],
    kept: list[Tensor],
    columns: list[list[int]],
    end_ids: frozenset[int],
) -> list[SampledResponse]:
    flat = torch.cat(kept)
    if not bool(torch.isfinite(flat).all()):
        raise FloatingPointError(
            "the model's logits are not finite; look at its weights and at the last update"
        )
    logprobs: dict[int, list[float]] = {row: [] for row in rows}
    values = iter(flat.tolist())
    for column in columns:
        for row in column:
            logprobs[row].append(next(values))
    return [
        SampledResponse(tuple(said[row]), tuple(logprobs[row][: len(said[row])]), said[row][-1] in end_ids)
        for row in rows
    ]
