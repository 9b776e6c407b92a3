"""Rows of batches, wherever they and their index lie."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import pytest
import torch
from small_models import conversations_batch, some_talks
from torch import Tensor

from lightning_mtrl.batch import ConversationBatch, TurnFeatures

Batch = TypeVar("Batch", ConversationBatch, TurnFeatures)


class OnAccelerator(Tensor):
    """Numbers that lie elsewhere: as an index they take rows of what lies there, not of the CPU's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], cls) and not isinstance(args[0], cls):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(Tensor) if func is Tensor.cpu else found


def _there(batch: Batch) -> Batch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(
        batch, **{n: v.as_subclass(OnAccelerator) for n, v in values.items() if torch.is_tensor(v)}
    )


def _features(batch: ConversationBatch) -> TurnFeatures:
    features = torch.arange(batch.turn_mask.numel() * 2.0).view(*batch.turn_mask.shape, 2)
    return TurnFeatures(features, batch.turn_mask, batch.turn_rewards, batch.turn_weights, batch.ids)


@pytest.mark.parametrize("kind", ["conversations", "features"])
def test_rows_on_an_accelerator_keep_what_is_no_tensor(kind: str) -> None:
    whole = conversations_batch(some_talks(5))
    batch = whole if kind == "conversations" else _features(whole)
    index = torch.tensor([3, 0, 4])
    with pytest.raises(RuntimeError, match="same device"):
        torch.arange(5)[index.as_subclass(OnAccelerator)]
    wanted, found = batch.rows(index), _there(batch).rows(index.as_subclass(OnAccelerator))
    assert found.ids == wanted.ids == ("c-3", "c-0", "c-4")
    assert torch.equal(found.turn_rewards, wanted.turn_rewards)
