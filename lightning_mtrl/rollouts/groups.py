"""Several responses of one state in one row: they share the prefix, in sampling and in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
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
    """States with n responses each: a row is the prefix, then one response after the other, then padding.

    Every response looks at the prefix and at itself, never at its neighbours, and its positions go on from
    the prefix, so each is scored exactly as if it stood alone behind the prefix.

    Attributes:
        row_lengths: columns of each row that are not padding.
        turn_start: index of the first token of each response.
        turn_end: index of the last token of each response.
        turn_read: index of the last token of the header after each response.
    """

    row_lengths: Int[Tensor, " S"]
    turn_start: Int[Tensor, "S n"]
    turn_end: Int[Tensor, "S n"]
    turn_read: Int[Tensor, "S n"]

    def by_response(self, values: Tensor) -> Tensor:
        """[S, T] -> [S * n, L]: the sampled tokens of each response from column 0 on, then 0 (False)."""
        columns, inside = self._columns()
        taken = values.gather(1, columns.flatten(1)).view(columns.shape)
        return torch.where(inside, taken, torch.zeros_like(taken)).flatten(0, 1)

    def by_row(self, values: Float[Tensor, "N L"]) -> Float[Tensor, "S T"]:
        """The inverse of `by_response`, with 0 on everything that was not sampled."""
        columns, inside = self._columns()
        kept = torch.where(inside, values.view(columns.shape), 0.0)
        full = torch.zeros(self.input_ids.shape, dtype=values.dtype, device=values.device)
        return full.scatter_add(1, columns.flatten(1), kept.flatten(1))

    def _columns(self) -> tuple[Int[Tensor, "S n L"], Bool[Tensor, "S n L"]]:
        """Where each response's tokens stand, and which of these places are inside it."""
        lengths = self.turn_end - self.turn_start + 1
        steps = torch.arange(int(lengths.max()), device=lengths.device)
        inside = steps < lengths[..., None]
        return torch.where(inside, self.turn_start[..., None] + steps, 0), inside


def group_batch(
    prefixes: Sequence[Sequence[int]], responses: Sequence[Sequence[SampledResponse]], glue: Glue
) -> GroupBatch:
    """Pack each prefix with its responses.

    Args:
        prefixes: token ids of each state.
        responses: the same number of responses for each state, each of at least one token.
        glue: what follows a response; its header is appended, never trained on.

    Raises:
        ValueError: if the states have different numbers of responses.
    """
    number = len(responses[0])
    if any(len(group) != number for group in responses):
        raise ValueError("every state of a GroupBatch needs the same number of responses")
    rows = [_packed(prefix, group, glue) for prefix, group in zip(prefixes, responses, strict=True)]
    width = max(len(row.ids) for row in rows)
    owner = _filled([row.owner for row in rows], width, -1)
    ids = _filled([row.ids for row in rows], width, glue.pad_id)
    return GroupBatch(
        input_ids=ids,
        attention_mask=_visible(owner),
        position_ids=_filled([row.positions for row in rows], width, 0),
        predecessor=_filled([row.predecessor for row in rows], width, 0),
        response_mask=_filled([row.sampled for row in rows], width, 0).bool(),
        behaviour_logprobs=_filled([row.logprobs for row in rows], width, 0.0),
        row_lengths=torch.tensor([len(row.ids) for row in rows]),
        turn_start=torch.tensor([row.starts for row in rows]),
        turn_end=torch.tensor([row.ends for row in rows]),
        turn_read=torch.tensor([row.reads for row in rows]),
    )


@dataclass
class _Row:
    """One state: per-token lists, and places of its responses; `owner` is 0 for the prefix, else a number."""

    ids: list[int]
    owner: list[int]
    positions: list[int]
    predecessor: list[int]
    sampled: list[int]
    logprobs: list[float]
    starts: list[int]
    ends: list[int]
    reads: list[int]


def _packed(prefix: Sequence[int], group: Sequence[SampledResponse], glue: Glue) -> _Row:
    size = len(prefix)
    before = [max(0, place - 1) for place in range(size)]
    row = _Row([*prefix], [0] * size, [*range(size)], before, [0] * size, [0.0] * size, [], [], [])
    for number, response in enumerate(group, start=1):
        start, drawn = len(row.ids), len(response.ids)
        block = [*response.ids, *([] if response.finished else [glue.end_id]), *glue.header_ids]
        rest = len(block) - drawn
        row.ids += block
        row.owner += [number] * len(block)
        row.positions += range(size, size + len(block))
        row.predecessor += [size - 1, *range(start, start + len(block) - 1)]
        row.sampled += [1] * drawn + [0] * rest
        row.logprobs += [*response.logprobs, *([0.0] * rest)]
        row.starts.append(start)
        row.ends.append(start + drawn - 1)
        row.reads.append(start + len(block) - 1)
    return row


def _visible(owner: Int[Tensor, "S T"]) -> Bool[Tensor, "S T T"]:
    """Causal, within the prefix or the own response; padding (owner -1) sees itself alone."""
    columns = torch.arange(owner.size(1))
    causal = columns[None, :] <= columns[:, None]
    looked_at, looking = owner[:, None, :], owner[:, :, None]
    same = (looked_at == 0) & (looking >= 0) | (looked_at == looking) & (looking >= 0)
    return same & causal | torch.eye(owner.size(1), dtype=torch.bool)


def _filled(rows: Sequence[Sequence[float]], width: int, value: float) -> Tensor:
    dtype = torch.float32 if isinstance(value, float) else torch.int64
    return torch.tensor([[*row, *([value] * (width - len(row)))] for row in rows], dtype=dtype)
