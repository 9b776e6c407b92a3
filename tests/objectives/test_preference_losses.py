"""Losses on pairs: where they meet the textbook, and where REFUEL's is zero."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_mtrl.objectives import discounted_turn_weights, multi_turn_dpo_loss, refuel_loss

seeds = st.integers(0, 2**30)
betas = st.floats(0.01, 5.0)


def log_ratios(seed: int, turns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    better, worse = torch.randn(2, 5, turns, generator=generator, dtype=torch.float64)
    return better, worse


def dpo(better: Tensor, worse: Tensor, beta: float) -> float:
    """The textbook, pair by pair and with the logarithm of a sigmoid written out."""
    pairs = zip(better.tolist(), worse.tolist(), strict=True)
    return sum(math.log1p(math.exp(-beta * (b - w))) for b, w in pairs) / len(better)


@given(seed=seeds, beta=betas, turns=st.integers(1, 4))
def test_without_weights_it_is_dpo_of_whole_conversations(seed: int, beta: float, turns: int) -> None:
    better, worse = log_ratios(seed, turns)
    loss = multi_turn_dpo_loss(better, worse, beta).item()
    assert loss == pytest.approx(dpo(better.sum(1), worse.sum(1), beta))
    ones = torch.ones_like(better)
    assert loss == pytest.approx(multi_turn_dpo_loss(better, worse, beta, ones, ones).item())


@given(seed=seeds, beta=betas, gamma=st.floats(0.01, 1.0))
def test_with_one_turn_it_is_dpo_whatever_the_discount(seed: int, beta: float, gamma: float) -> None:
    better, worse = log_ratios(seed, 1)
    weights = discounted_turn_weights(torch.ones(5, dtype=torch.int64), 1, gamma)
    loss = multi_turn_dpo_loss(better, worse, beta, weights, weights)
    assert loss.item() == pytest.approx(dpo(better[:, 0], worse[:, 0], beta))


@given(gamma=st.floats(0.01, 0.999), turns=st.integers(1, 8))
def test_weights_begin_at_one_and_fall_to_nothing_after_the_last_turn(gamma: float, turns: int) -> None:
    weights = discounted_turn_weights(torch.tensor([turns]), 10, gamma)[0]
    assert weights[0].item() == pytest.approx(1.0)
    assert (weights.diff() <= 1e-7).all()
    assert not weights[turns:].any()


def test_weights_by_hand() -> None:
    halves = discounted_turn_weights(torch.tensor([2, 3]), 3, 0.5)
    assert torch.allclose(halves, torch.tensor([[1.0, 1 / 3, 0.0], [1.0, 3 / 7, 1 / 7]]))
    assert torch.allclose(
        discounted_turn_weights(torch.tensor([4]), 4, 1.0), torch.tensor([[1, 0.75, 0.5, 0.25]])
    )
    first_only = discounted_turn_weights(torch.tensor([5]), 3, 1e-9)
    assert torch.allclose(first_only, torch.tensor([[1.0, 0.0, 0.0]]), atol=1e-6)
    with pytest.raises(ValueError, match=r"gamma must be in \(0, 1\], got 0"):
        discounted_turn_weights(torch.tensor([2]), 2, 0.0)


@given(seed=seeds, eta=st.floats(0.01, 100.0))
def test_refuel_is_zero_where_log_ratios_differ_by_eta_times_the_returns_and_nowhere_else(
    seed: int, eta: float
) -> None:
    returns = torch.randn(6, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    second = torch.randn(6, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    first = (second + eta * (returns[:, 0] - returns[:, 1])).requires_grad_()
    loss = refuel_loss(first, second, returns, eta)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-20)
    assert first.grad is not None
    assert first.grad.abs().max() < 1e-10
    assert refuel_loss(first + 0.3, second, returns, eta).item() == pytest.approx(0.09)
