"""Several responses of one state in one row: they share the prefix, in sampling and in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_mtrl.batch import TokenBatch
from lightning_mtrl.rollouts.engine import SampledResponse


@dataclass(frozen=True)
class Glue:
    """The tokens that follow a response.

    Attributes:
        pad_id: written on padding.
        end_id: closes a response that hit its length limit.
        header_ids: from after the end-of-turn token to where the next message begins.
    """

    pad_id: int
    end_id: int
    header_ids: tuple[int, ...]


@dataclass(frozen=True)
class GroupBatch(TokenBatch):
    """States with n responses each: a row is [prefix | response 1 | ... | response n].

    Every response looks at the prefix and at itself, never at its neighbours, and its positions go on from
    the prefix, so each is scored exactly as if it stood alone behind the prefix. All responses have
    the same number of columns, which makes `by_response` a reshape.

    Attributes:
        prefix_width: columns of the prefix part.
        turn_end: index of the last token of each response.
        turn_read: index of the last token of the header after each response.
    """

    prefix_width: int
    turn_end: Int[Tensor, "S n"]
    turn_read: Int[Tensor, "S n"]

    def by_response(self, values: Tensor) -> Tensor:
        """[S, T, ...] -> [S * n, L, ...]: one row a response."""
        states, number = self.turn_end.shape
        return values[:, self.prefix_width :].reshape(states * number, -1, *values.shape[2:])

    def by_row(self, values: Float[Tensor, "N L"]) -> Float[Tensor, "S T"]:
        """The inverse of `by_response`, with 0 on the prefix."""
        states = self.turn_end.size(0)
        return torch.nn.functional.pad(values.reshape(states, -1), (self.prefix_width, 0))


def group_batch(
    prefixes: Sequence[Sequence[int]], responses: Sequence[Sequence[SampledResponse]], glue: Glue
) -> GroupBatch:
    """Pack each prefix with its responses.

    Args:
        prefixes: token ids of each state.
        responses: the same number of responses for each state.
        glue: what follows a response; its header is appended, never trained on.

    Raises:
        ValueError: if the states have different numbers of responses.
    """
    number = len(responses[0])
    if any(len(group) != number for group in responses):
        raise ValueError("every state of a GroupBatch needs the same number of responses")
    blocks = [[_block(response, glue) for response in group] for group in responses]
    length = max(len(ids) for group in blocks for ids in group)
    width = max(len(prefix) for prefix in prefixes)
    ids = torch.full((len(prefixes), width + number * length), glue.pad_id)
    logprobs = torch.zeros(ids.shape)
    sampled = torch.zeros(len(prefixes), number, dtype=torch.long)
    written = torch.zeros(len(prefixes), number, dtype=torch.long)
    for row, (prefix, group) in enumerate(zip(prefixes, responses, strict=True)):
        ids[row, : len(prefix)] = torch.tensor(prefix)
        for column, response in enumerate(group):
            start, block = width + column * length, blocks[row][column]
            ids[row, start : start + len(block)] = torch.tensor(block)
            logprobs[row, start : start + len(response.ids)] = torch.tensor(response.logprobs)
            sampled[row, column], written[row, column] = len(response.ids), len(block)
    return _laid_out(ids, logprobs, torch.tensor([len(p) for p in prefixes]), sampled, written, width, length)


def _block(response: SampledResponse, glue: Glue) -> list[int]:
    closing = [] if response.finished else [glue.end_id]
    return [*response.ids, *closing, *glue.header_ids]


def _laid_out(
    ids: Tensor, logprobs: Tensor, prefix: Tensor, sampled: Tensor, written: Tensor, width: int, length: int
) -> GroupBatch:
    """Masks and positions from lengths: `prefix` [S], `sampled` and `written` [S, n]."""
    states, number = sampled.shape
    inside = torch.arange(length).expand(states, number, length)
    in_prefix = torch.arange(width) < prefix[:, None]
    real = torch.cat([in_prefix, (inside < written[..., None]).flatten(1)], 1)
    trained = torch.cat([torch.zeros_like(in_prefix), (inside < sampled[..., None]).flatten(1)], 1)
    after = (prefix[:, None, None] + inside).flatten(1)
    starts = width + torch.arange(number) * length
    columns = torch.arange(ids.size(1)).expand_as(ids)
    first = (columns >= width) & ((columns - width) % length == 0)
    predecessor = torch.where(first, (prefix - 1)[:, None], (columns - 1).clamp(min=0))
    return GroupBatch(
        input_ids=ids,
        attention_mask=_visible(real, width, length),
        position_ids=torch.cat([torch.arange(width).expand(states, width), after], 1).clamp(min=0),
        predecessor=predecessor,
        response_mask=trained,
        behaviour_logprobs=logprobs,
        prefix_width=width,
        turn_end=starts + (sampled - 1).clamp(min=0),
        turn_read=starts + written - 1,
    )


def _visible(real: Tensor, width: int, length: int) -> Tensor:
    """[S, T, T]: causal, within the prefix or the own response, real tokens only; padding sees itself."""
    total = real.size(1)
    columns = torch.arange(total)
    owner = torch.where(columns < width, 0, (columns - width) // length + 1)
    allowed = (columns[None, :] <= columns[:, None]) & (
        (owner[None, :] == 0) | (owner[None, :] == owner[:, None])
    )
    return (allowed & real[:, None, :]) | torch.eye(total, dtype=torch.bool)
