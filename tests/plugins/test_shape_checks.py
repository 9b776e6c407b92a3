from __future__ import annotations

from typing import Self

import pytest
import torch
from jaxtyping import Bool, Float, TypeCheckError, jaxtyped
from shape_checks import shapes
from torch import Tensor

from lightning_mtrl.batch import TokenBatch


@jaxtyped(typechecker=shapes)
def masked(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], scale: float = 1.0
) -> Float[Tensor, " B"]:
    return (values * mask * scale).sum(-1 if scale else 0)


class Chain:
    @jaxtyped(typechecker=shapes)
    def add(self, values: Float[Tensor, " T"] | None) -> Self:
        return self


def test_a_mask_that_would_broadcast_is_refused() -> None:
    masked(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeCheckError, match="mask"):
        masked(torch.ones(2, 3), torch.ones(1, 3, dtype=torch.bool))


def test_a_wrong_dtype_is_refused() -> None:
    with pytest.raises(TypeCheckError, match="mask"):
        masked(torch.ones(2, 3), torch.ones(2, 3))


def test_a_result_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(TypeCheckError, match="return value"):
        masked(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), scale=0)


def test_a_shape_inside_a_union_is_checked_and_self_is_no_obstacle() -> None:
    chain = Chain()
    assert chain.add(None) is chain
    with pytest.raises(TypeCheckError, match="values"):
        chain.add(torch.ones(2, 3))


def test_the_package_runs_under_the_checks() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    batch = TokenBatch(ids, mask, ids, ids, mask, torch.zeros(2, 3))
    assert len(batch.to("cpu")) == 2
    with pytest.raises(TypeCheckError, match="response_mask"):
        TokenBatch(ids, mask, ids, ids, mask[:, :1], torch.zeros(2, 3))
