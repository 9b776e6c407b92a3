"""What is remembered of each row between forwards: packed keys and values, or the tokens themselves.

Both answer the same question, "which token follows?", with the same logits; the packed memory computes
no token twice. `lightning_mtrl.rollouts.packing` chooses.

Shape letters: R rows, Q new tokens of a row (at most), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_mtrl.rollouts.cache import PackedCache
from lightning_mtrl.rollouts.forwards import Forward

# Views of the cache end at a multiple of this: attention kernels of GPUs want aligned masks.
VIEW_BUCKET = 8
# A prefill is cut so that its activations and its mask stay within a few hundred MiB.
TOKENS_PER_FORWARD = 16384
MASK_CELLS_PER_FORWARD = 2**25
# Below this many tokens a forward of its own and the copies cost more than they save.
SHARED_PREFIX = 16


class Memory(Protocol):
    """Rows of tokens and what the model needs to go on with them.

    Rows are named by number. `arrange` says in which order the next calls take them.

    Attributes:
        compact_below: leave finished rows in the step until the share of rows that are still going
            falls to this; 1 takes them out at once.
        device: where tokens are expected.
    """

    compact_below: float
    device: torch.device

    def length(self, row: int) -> int:
        """Tokens that the row holds."""
        ...

    def arrange(self, *parts: Sequence[int]) -> list[list[int]]:
        """The same rows, part by part, in the order in which `extend` and `step` take and answer them.

        `step` takes the first part, or all rows; `extend` all rows, or those from the second part on.
        """
        ...

    def extend(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> Float[Tensor, "R V"]:
        """Append one or more tokens to each of some arranged rows; the logits of what follows."""
        ...

    def step(self, rows: Sequence[int], tokens: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Append one token to each of the arranged rows; the logits of what follows."""
        ...

    def rewind(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of a row; 0 hands it to a new conversation."""
        ...

    def repeat(self, rows: int, times: int) -> None:
        """Turn the first rows a, b, ... into a, a, ..., b, b, ..."""
        ...


class PackedMemory:
    """Keys and values of every row; the rows of a forward lie together at the front of the cache.

    It does not check that the model allows it; `packing` does.
    """

    compact_below = 0.75

    def __init__(self, model: nn.Module, forward: Forward, cache: PackedCache, pad_id: int) -> None:
        self._forward = forward
        self._pad_id = pad_id
        parameter = next(model.parameters())
        self.device = parameter.device
        self._dtype: torch.dtype = getattr(model, "dtype", parameter.dtype)
        self._cache = cache
        num_rows = cache.placement.num_rows
        self._lengths = np.zeros(num_rows, dtype=np.int64)  # by place, as are all rows of the cache
        self._place_of = list(range(num_rows))
        self._row_at = list(range(num_rows))

    def length(self, row: int) -> int:
        return int(self._lengths[self._place_of[row]])

    def rewind(self, row: int, length: int) -> None:
        self._lengths[self._place_of[row]] = length

    def arrange(self, *parts: Sequence[int]) -> list[list[int]]:
        """Bring the rows to the front, part behind part; only misplaced rows move."""
        rows: list[int] = []
        found = []
        for part in parts:
            rows += part
            self._bring_forward(rows)
            found.append(self._row_at[len(rows) - len(part) : len(rows)])
        return found

    def _bring_forward(self, rows: list[int]) -> None:
        wanted = set(rows)
        outside = [self._place_of[row] for row in rows if self._place_of[row] >= len(rows)]
        if not outside:
            return
        holes = [place for place in range(len(rows)) if self._row_at[place] not in wanted]
        kept = [pair for pair in zip(holes, outside, strict=True) if self._lengths[pair[0]]]
        lost = [pair for pair in zip(holes, outside, strict=True) if not self._lengths[pair[0]]]
        for pairs, exchange in ((kept, self._cache.swap), (lost, self._cache.move)):
            if pairs:
                to, source = (list(places) for places in zip(*pairs, strict=True))
                exchange(to, source, int(self._lengths[to + source].max()))
        self._lengths[holes + outside] = self._lengths[outside + holes]
        for hole, place in zip(holes, outside, strict=True):
            self._row_at[hole], self._row_at[place] = self._row_at[place], self._row_at[hole]
            self._place_of[self._row_at[hole]], self._place_of[self._row_at[place]] = hole, place

    def extend(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> Float[Tensor, "R V"]:
        counts = [len(ids) for ids in new_ids]
        holding = [self.length(row) > 0 for row in rows]
        totals = [self.length(row) + count for row, count in zip(rows, counts, strict=True)]
        self._cache.ensure(max(totals))
        place, holders = self._place_of[rows[0]], holding.count(True)
        new_ids = [*new_ids[:holders], *self._share_prefix(place + holders, new_ids[holders:])]
        counts = [len(ids) for ids in new_ids]
        parts = _parts(counts, totals, holding)
        return torch.cat([self._prefill(place + first, new_ids[first:last]) for first, last in parts])

    def _share_prefix(self, first: int, fresh: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Compute what all new rows (from place `first` on) begin with once; what is left to be read.

        Conversations of one environment usually begin with the same system message.
        """
        shared = _common_length([list(ids) for ids in fresh]) if len(fresh) > 1 else 0
        if shared < SHARED_PREFIX:
            return fresh
        self._prefill(first, [fresh[0][:shared]])
        self._cache.spread(first, first + len(fresh), shared)
        self._lengths[first : first + len(fresh)] = shared
        return [ids[shared:] for ids in fresh]

    def _prefill(self, first: int, new_ids: Sequence[Sequence[int]]) -> Tensor:
        """One ragged forward. Rows are padded at the left, so that the last column is the last token."""
        counts = np.array([len(ids) for ids in new_ids])
        width = int(counts.max())
        tokens = np.full((len(new_ids), width), self._pad_id)
        for row, ids in enumerate(new_ids):
            tokens[row, width - len(ids) :] = ids
        lengths = self._lengths[first : first + len(new_ids)]
        positions = lengths[:, None] + np.arange(width) - (width - counts)[:, None]
        real = np.arange(width) >= (width - counts)[:, None]
        slots = np.where(real, positions, self._cache.placement.num_slots)
        lengths += counts
        places = (np.where(real, positions, 0), slots)
        return self._read(first, self._on_device(tokens), places, self._on_device(real))

    def step(self, rows: Sequence[int], tokens: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        lengths = self._lengths[: len(rows)]
        positions = lengths[:, None].copy()
        lengths += 1
        self._cache.ensure(int(lengths.max()))
        return self._read(0, tokens[:, None], (positions, positions), None)

    def _read(self, first: int, tokens: Tensor, places: tuple[Any, Any], real: Tensor | None) -> Tensor:
        """Forward of rows from `first` on over new tokens, which their lengths count already."""
        used = int(self._lengths[first : first + len(tokens)].max())
        used = min(-(-used // VIEW_BUCKET) * VIEW_BUCKET, self._cache.placement.num_slots)
        positions = self._on_device(places[0])
        slots = positions if places[1] is places[0] else self._on_device(places[1])
        self._cache.placement.aim(first, slots, used)
        hidden = torch.arange(used, device=self.device) > positions[..., None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self.device)
        return self._forward(tokens, positions, real, mask.masked_fill_(hidden, -torch.inf), self._cache)

    def _on_device(self, values: Any) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def repeat(self, rows: int, times: int) -> None:
        self._cache.repeat(rows, times, int(self._lengths[:rows].max()))
        self._lengths[: rows * times] = self._lengths[:rows].repeat(times)


class RecomputedMemory:
    """The tokens of every row and nothing else; each answer costs a forward over whole rows.

    It asks nothing of the model but causality, which also makes padding at the right harmless.
    """

    compact_below = 1.0

    def __init__(self, model: nn.Module, num_rows: int, pad_id: int) -> None:
        self._model = model
        self._pad_id = pad_id
        self.device = next(model.parameters()).device
        self._ids: list[list[int]] = [[] for _ in range(num_rows)]

    def length(self, row: int) -> int:
        return len(self._ids[row])

    def rewind(self, row: int, length: int) -> None:
        del self._ids[row][length:]

    def arrange(self, *parts: Sequence[int]) -> list[list[int]]:
        return [list(part) for part in parts]

    def step(self, rows: Sequence[int], tokens: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        return self.extend(rows, tokens[:, None].tolist())

    def extend(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> Float[Tensor, "R V"]:
        for row, ids in zip(rows, new_ids, strict=True):
            self._ids[row] += ids
        whole = [self._ids[row] for row in rows]
        lengths = [len(ids) for ids in whole]
        parts = _parts(lengths, lengths, [True] * len(rows))
        return torch.cat([self._next_logits(whole[first:last]) for first, last in parts])

    def _next_logits(self, rows: list[list[int]]) -> Tensor:
        width = max(len(ids) for ids in rows)
        padded = [ids + [self._pad_id] * (width - len(ids)) for ids in rows]
        ends = torch.tensor([len(ids) - 1 for ids in rows], device=self.device)
        mask = (torch.arange(width, device=self.device) <= ends[:, None]).long()
        tokens = torch.tensor(padded, device=self.device)
        # Only columns in which some row ends meet the head: all logits of a large vocabulary would not fit.
        columns, column_of = ends.unique(return_inverse=True)
        output = self._model(input_ids=tokens, attention_mask=mask, use_cache=False, logits_to_keep=columns)
        logits: Tensor = output.logits[torch.arange(len(rows), device=self.device), column_of]
        return logits

    def repeat(self, rows: int, times: int) -> None:
        copies = [list(ids) for ids in self._ids[:rows] for _ in range(times)]
        self._ids[: rows * times] = copies


def _common_length(rows: Sequence[list[int]]) -> int:
    """How many tokens all rows begin with, leaving at least one of each row."""
    lowest, highest = min(rows), max(rows)  # what these two share, all in between share
    limit = min(len(ids) for ids in rows) - 1
    return next((i for i in range(limit) if lowest[i] != highest[i]), limit)


def _parts(
    counts: Sequence[int], totals: Sequence[int], holding: Sequence[bool]
) -> Iterator[tuple[int, int]]:
    """Cut rows into forwards: those that hold something apart from new ones, each within the size limits."""
    first, width, longest = 0, 0, 0
    for row in range(len(counts)):
        width, longest = max(width, counts[row]), max(longest, totals[row])
        tokens = (row + 1 - first) * width
        too_big = tokens > TOKENS_PER_FORWARD or tokens * longest > MASK_CELLS_PER_FORWARD
        if row > first and (too_big or holding[row] != holding[row - 1]):
            yield first, row
            first, width, longest = row, counts[row], totals[row]
    yield first, len(counts)
