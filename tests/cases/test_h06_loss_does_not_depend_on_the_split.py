"""H06, the objectives' part: one loss for every way to cut the rows of a step into micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_mtrl import objectives

LENGTHS, LOSSES = (1, 9, 2, 4), (2.0, 0.5, 1.0, 0.25)
SPLITS = ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1, 2, 3]], [[0], [1], [2], [3]])
MEANS = {"token": 0.59375, "conversation": 0.9375, "response": 0.9375}


def _rows() -> tuple[Tensor, Tensor]:
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    return torch.tensor(LOSSES).double()[:, None].expand(4, 9), mask


@pytest.mark.parametrize("mean_over", MEANS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_split_gives_the_number_worked_out_by_hand(split: list[list[int]], mean_over: Any) -> None:
    losses, mask = _rows()
    weights = objectives.token_weights(mask, mean_over, dtype=torch.float64)
    parts = [(weights[rows] * losses[rows]).sum() for rows in split]
    assert sum(parts).item() == pytest.approx(MEANS[mean_over], abs=1e-12)


def _gradient(parts: list[Tensor], weights: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Accumulated gradient of a policy with one parameter a place, through the clipped loss and the KL."""
    parameter = data["logprobs"].clone().requires_grad_()
    for rows in parts:
        # Each micro-batch is cut to its own longest row, as a collator would do it.
        width = int(data["mask"][rows].any(0).nonzero().max()) + 1 if data["mask"][rows].any() else 1
        logprobs, behaviour, advantages, mask = (
            (parameter if name == "logprobs" else data[name])[rows][:, :width]
            for name in ("logprobs", "behaviour", "advantages", "mask")
        )
        losses = objectives.clipped_policy_loss(logprobs, behaviour, advantages, mask)
        losses = losses + 0.1 * objectives.kl_penalty(logprobs, behaviour, "k3", mask=mask)
        (weights[rows][:, :width] * losses).sum().backward()
    assert parameter.grad is not None
    return parameter.grad


@given(
    st.integers(0, 2**30),
    st.sampled_from(["token", "response", "conversation"]),
    st.integers(1, 6),
)
def test_gradients_do_not_depend_on_split_order_or_padding(seed: int, mean_over: Any, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, behaviour, advantages = torch.randn(3, 6, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 9, generator=generator) < 0.5
    data = {"logprobs": logprobs, "behaviour": behaviour, "advantages": advantages, "mask": mask}
    weights = objectives.token_weights(mask, mean_over, dtype=torch.float64)
    whole = _gradient([torch.arange(6)], weights, data)
    order = torch.randperm(6, generator=generator)
    assert torch.allclose(_gradient(list(order.split(size)), weights, data), whole, atol=1e-12)


@given(st.integers(0, 2**30), st.sampled_from(["token", "response", "conversation"]))
def test_a_row_without_a_token_changes_no_weight(seed: int, mean_over: Any) -> None:
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)) < 0.5
    longer = torch.cat([mask, torch.zeros(2, 6, dtype=torch.bool)])
    assert torch.equal(
        objectives.token_weights(longer, mean_over)[:4], objectives.token_weights(mask, mean_over)
    )
