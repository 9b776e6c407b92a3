"""A key-value cache of packed rows: each row is written at its own position, so there are no holes.

It is handed to a transformers model as its `cache`. The caller says before each forward where the new
tokens go (`Placement`) and passes a 4-D mask in which a query sees the slots up to its own position.

Shape letters: R rows, Q new tokens of a row (at most), S slots, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SLOT_BUCKET = 64


class Placement:
    """Where the keys and values of the next forward are written and read; shared by all layers.

    Attributes:
        num_rows: rows of the cache.
        num_slots: slots of a row. One more is allocated: padding is written there and never read.
        first: first row of the forward.
        last: row after the last one of the forward.
        used: number of slots that the forward reads.
        slots: [R, Q], the slot of each new token; `num_slots` for padding.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.first = 0
        self.last = 0
        self.used = 0
        self.slots: Tensor = torch.empty(0, 0, dtype=torch.long)
        self.rows: Tensor = torch.empty(0, 1, dtype=torch.long)

    def aim(self, first: int, slots: Int[Tensor, "R Q"], used: int) -> None:
        """Point the next forward at the rows from `first` on."""
        self.first, self.last, self.used = first, first + slots.size(0), used
        self.slots = slots
        self.rows = torch.arange(self.first, self.last, device=slots.device)[:, None]

    def flat_places(self, rows: Int[Tensor, " M"], slots: Int[Tensor, " M"], heads: int) -> Int[Tensor, " N"]:
        """For each token and head its place in a layer of so many heads, laid out flat."""
        first = (rows * heads * (self.num_slots + 1) + slots)[:, None]
        return (first + torch.arange(heads, device=rows.device) * (self.num_slots + 1)).view(-1)


class PackedLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, H, S + 1, D]: what a head reads lies together.

    It is not usable without the `Placement` that it shares with the other layers.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.placement = placement

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate once the first keys and values show their shapes and types."""
        self.keys = self._empty(key_states.size(1), key_states)
        self.values = self._empty(value_states.size(1), value_states)
        self.is_initialized = True

    def update(
        self,
        key_states: Float[Tensor, "R H Q D"],
        value_states: Float[Tensor, "R H Q E"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "R H S D"], Float[Tensor, "R H S E"]]:
        """Write the new keys and values and return views of all that the forward's rows hold."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.placement
        keys, values = self.storage
        # The slice between the two indices puts the heads behind them.
        keys[place.rows, :, place.slots] = key_states.transpose(1, 2)
        values[place.rows, :, place.slots] = value_states.transpose(1, 2)
        return self.held

    def write(self, places: Int[Tensor, " N"], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values, [M, H, D], at flat places, and return views as `update` does.

        Args:
            places: for each of the M tokens and H heads its place, from `flat_places`.
            keys: new keys.
            values: new values.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        for kept, new in zip(self.storage, (keys, values), strict=True):
            # A copy by one index is ten times as fast as an assignment by two.
            kept.view(-1, kept.size(-1)).index_copy_(0, places, new.reshape(-1, new.size(-1)))
        return self.held

    @property
    def held(self) -> tuple[Float[Tensor, "R H S D"], Float[Tensor, "R H S E"]]:
        """Views of all that the forward's rows hold."""
        keys, values = self.storage
        place = self.placement
        rows = slice(place.first, place.last)
        return keys[rows, :, : place.used], values[rows, :, : place.used]

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """The whole keys and values."""
        if self.keys is None or self.values is None:
            raise ValueError("the layer has not seen any keys yet")
        return self.keys, self.values

    def grow(self) -> None:
        """Take the placement's number of slots, keeping what was written."""
        self.keys, self.values = (self._regrown(old) for old in self.storage)

    def swap(self, one: Tensor, other: Tensor, used: int) -> None:
        """Exchange the first `used` slots of some rows with those of as many others."""
        here, there = torch.cat([one, other]), torch.cat([other, one])
        for kept in self.storage:
            kept[here, :, :used] = kept[there, :, :used]

    def move(self, to: Tensor, source: Tensor, used: int) -> None:
        """Copy the first `used` slots of some rows over those of as many others."""
        for kept in self.storage:
            kept[to, :, :used] = kept[source, :, :used]

    def repeat(self, rows: int, times: int, used: int) -> None:
        """Turn the first rows a, b, ... into a, a, ..., b, b, ..."""
        for kept in self.storage:
            kept[: rows * times, :, :used] = kept[:rows, :, :used].repeat_interleave(times, dim=0)

    def spread(self, row: int, last: int, used: int) -> None:
        """Copy the first `used` slots of a row to all rows after it and before `last`."""
        for kept in self.storage:
            kept[row + 1 : last, :, :used] = kept[row, :, :used]

    def get_seq_length(self) -> int:
        """Slots that the current forward reads; asked only by models that were given no positions."""
        return self.placement.used

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset for a mask that transformers would build itself."""
        return self.placement.used, 0

    def get_max_length(self) -> int:
        """No maximum: rows grow."""
        return -1

    def _empty(self, heads: int, like: Tensor) -> Tensor:
        # Zeros, not uninitialised memory: a masked slot takes part in the product, and NaN would survive.
        return like.new_zeros(self.placement.num_rows, heads, self.placement.num_slots + 1, like.size(-1))

    def _regrown(self, old: Tensor) -> Tensor:
        grown = self._empty(old.size(1), old)
        grown[:, :, : old.size(2) - 1] = old[:, :, :-1]
        return grown


class PackedCache(Cache):
    """The layers of `PackedLayer` and their common placement.

    Args:
        num_layers: layers of the model that keep keys and values.
        num_rows: rows.
        context_length: tokens that a row can hold at most; the cache starts small and grows towards it.
    """

    def __init__(self, num_layers: int, num_rows: int, context_length: int) -> None:
        self.context_length = context_length
        self.placement = Placement(num_rows, min(SLOT_BUCKET, context_length))
        self.packed = [PackedLayer(self.placement) for _ in range(num_layers)]
        super().__init__(layers=list(self.packed))

    def ensure(self, used: int) -> None:
        """Make room for rows of `used` tokens.

        Raises:
            ValueError: if that is more than the context holds.
        """
        if used > self.context_length:
            raise ValueError(f"a row of {used} tokens does not fit a context of {self.context_length}")
        if used <= self.placement.num_slots:
            return
        wanted = -(-(used + used // 4) // SLOT_BUCKET) * SLOT_BUCKET
        self.placement.num_slots = min(wanted, self.context_length)
        for layer in self._filled():
            layer.grow()

    def swap(self, one: Sequence[int], other: Sequence[int], used: int) -> None:
        """Exchange rows; only their first `used` slots hold anything."""
        for layer in self._filled():
            device = layer.storage[0].device
            layer.swap(torch.tensor(one, device=device), torch.tensor(other, device=device), used)

    def move(self, to: Sequence[int], source: Sequence[int], used: int) -> None:
        """Copy rows over others whose contents are no longer needed."""
        for layer in self._filled():
            device = layer.storage[0].device
            layer.move(torch.tensor(to, device=device), torch.tensor(source, device=device), used)

    def repeat(self, rows: int, times: int, used: int) -> None:
        """Turn the first rows a, b, ... into a, a, ..., b, b, ..."""
        for layer in self._filled():
            layer.repeat(rows, times, used)

    def spread(self, row: int, last: int, used: int) -> None:
        """Copy the first `used` slots of a row to all rows after it and before `last`."""
        for layer in self._filled():
            layer.spread(row, last, used)

    def _filled(self) -> list[PackedLayer]:
        return [layer for layer in self.packed if layer.is_initialized]
