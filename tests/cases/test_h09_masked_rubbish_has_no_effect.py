"""H09, the objectives' part: what stands outside the mask reaches no loss, no statistic and no gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_mtrl import objectives

NAN, INF = math.nan, math.inf
Losses = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _step(losses: Losses, rows: list[list[tuple[float, float, float, bool]]]) -> tuple[float, Tensor]:
    """Loss (mean over tokens) and gradient of rows of (log-prob, behaviour, advantage, mask)."""
    table = torch.tensor(rows, dtype=torch.float64)
    logprobs = table[..., 0].clone().requires_grad_()
    mask = table[..., 3] != 0
    weights = objectives.token_weights(mask, dtype=torch.float64)
    loss = (weights * losses(logprobs, table[..., 1], table[..., 2], mask)).sum()
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad


def _clipped(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return objectives.clipped_policy_loss(logprobs, behaviour, advantages, mask, clip_range=0.2)


def _product(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = objectives.turn_product_ratio(logprobs, behaviour, objectives.turn_index_of(mask))
    return objectives.clipped_surrogate(ratio, advantages, mask)


def _sequence(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = objectives.sequence_geometric_ratio(logprobs, behaviour, mask)
    carried = objectives.with_token_gradient(ratio, logprobs, mask)
    return objectives.clipped_surrogate(carried, advantages, mask, dual_clip=3.0)


def _reinforce(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return objectives.reinforce_loss(logprobs, advantages, mask)


def _penalty(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return objectives.kl_penalty(logprobs, behaviour, "k3", mask=mask)


def _value(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    return objectives.value_loss(values, old_values, returns, mask=mask)


ALL_LOSSES = (_clipped, _product, _sequence, _reinforce, _penalty, _value)
FIRST = [(-1.0, -1.05, 1.0, True), (NAN, INF, NAN, False)]
MASKED = [(NAN, -INF, NAN, False), (INF, NAN, INF, False)]


def test_the_loss_and_gradient_worked_out_by_hand() -> None:
    for rows in ([FIRST], [FIRST, MASKED]):
        loss, gradient = _step(_clipped, rows)
        assert loss == pytest.approx(-1.051271, abs=1e-6)
        assert gradient[0, 0].item() == pytest.approx(-1.051271, abs=1e-6)
        assert gradient[0, 1].item() == 0
        assert gradient[1:].abs().sum().item() == 0


@pytest.mark.parametrize("losses", ALL_LOSSES)
def test_a_batch_without_a_token_has_loss_zero_and_gradients_of_zero(losses: Losses) -> None:
    loss, gradient = _step(losses, [MASKED, MASKED])
    assert loss == 0
    assert gradient.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("losses", ALL_LOSSES)
def test_nan_at_a_sampled_token_shows_in_the_loss(losses: Losses) -> None:
    loss, _ = _step(losses, [[(NAN, -1.0, 1.0, True), (-1.0, -1.0, 1.0, True)]])
    assert math.isnan(loss)


@given(st.integers(0, 2**30), st.sampled_from([NAN, INF, -INF, 1e300]), st.sampled_from(ALL_LOSSES))
def test_rubbish_changes_no_loss_and_no_gradient(seed: int, rubbish: float, losses: Losses) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(3, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 6, generator=generator) < 0.5
    results = []
    for outside in (0.0, rubbish):
        rows = torch.stack([*torch.where(mask, numbers, outside), mask.double()], -1).tolist()
        results.append(_step(losses, rows))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@given(st.integers(0, 2**30), st.sampled_from([NAN, INF, -INF]))
def test_rubbish_changes_no_advantage(seed: int, rubbish: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 6, generator=generator) < 0.5
    results = []
    for outside in (0.0, rubbish):
        dirty = [torch.where(mask, x, outside) for x in (rewards, values)]
        advantages, returns = objectives.gae(*dirty, mask, 0.9, 0.8)
        whitened = objectives.masked_whiten(torch.where(mask, advantages, outside), mask)
        results.append(torch.stack([advantages, returns, whitened]))
    assert torch.equal(*results)
