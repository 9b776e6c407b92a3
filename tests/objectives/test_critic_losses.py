from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from lightning_mtrl.objectives import (
    bce_loss,
    hl_gauss_targets,
    hl_gauss_values,
    mse_loss,
    value_clipped,
    value_loss,
)


def test_cross_entropy_and_squared_error_by_hand() -> None:
    assert bce_loss(torch.zeros(2), torch.tensor([0.0, 0.7])).tolist() == pytest.approx([math.log(2)] * 2)
    quarter = torch.tensor([0.25]).logit()
    wanted = -(0.5 * math.log(0.25) + 0.5 * math.log(0.75))
    assert bce_loss(quarter, torch.tensor([0.5])).item() == pytest.approx(wanted)
    assert mse_loss(torch.tensor([1.0, -2.0]), torch.tensor([4.0, 1.0])).tolist() == [9, 9]


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=6))
def test_the_mean_of_soft_targets_is_where_cross_entropy_has_no_slope(targets: list[float]) -> None:
    wanted = torch.tensor(targets, dtype=torch.float64)
    logit = wanted.mean().logit().requires_grad_()
    bce_loss(logit.expand(len(targets)), wanted).mean().backward()
    assert logit.grad is not None
    assert abs(logit.grad.item()) < 1e-12


def test_bins_hold_the_mass_of_a_gaussian_that_ends_at_the_range() -> None:
    got = hl_gauss_targets(torch.tensor([0.3], dtype=torch.float64), 0.0, 1.0, 4, sigma_in_bins=0.5)
    gaussian = norm(0.3, 0.125)
    inside = gaussian.cdf(1) - gaussian.cdf(0)
    wanted = [
        (gaussian.cdf(b) - gaussian.cdf(a)) / inside
        for a, b in ((0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1))
    ]
    assert got.tolist()[0] == pytest.approx(wanted)


@given(st.floats(-2, 3), st.integers(2, 101))
def test_a_target_is_a_distribution_with_the_right_mean(target: float, bins: int) -> None:
    distribution = hl_gauss_targets(torch.tensor([target], dtype=torch.float64), -2.0, 3.0, bins)
    assert distribution.shape == (1, bins)
    assert (distribution >= 0).all()
    assert distribution.sum().item() == pytest.approx(1)
    mean = hl_gauss_values(distribution.log(), -2.0, 3.0).item()
    assert abs(mean - target) < 0.75 * 5 / bins
    width = 5 / bins
    if -2 + 4 * width < target < 3 - 4 * width:
        assert abs(mean - target) < 0.01 * width


def test_a_target_beyond_the_range_counts_as_its_end() -> None:
    beyond, end = hl_gauss_targets(torch.tensor([1.5, 1.0]), 0.0, 1.0, 11)
    assert torch.equal(beyond, end)


def test_an_empty_range_and_a_single_bin_are_refused() -> None:
    for low, high, bins in ((1.0, 1.0, 5), (2.0, 1.0, 5), (0.0, 1.0, 1)):
        with pytest.raises(ValueError, match=f"got \\[{low}, {high}\\] and {bins}"):
            hl_gauss_targets(torch.zeros(1), low, high, bins)


def test_the_value_loss_takes_the_larger_of_two_errors() -> None:
    values, old = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.9])
    returns = torch.tensor([2.0, 0.0, 2.0])
    losses = value_loss(values, old, returns, clip_range=0.2)
    assert losses.tolist() == pytest.approx([1.8**2 / 2, 1 / 2, 1 / 2])
    assert value_clipped(values, old, returns, 0.2).tolist() == [True, False, False]
    assert value_loss(values, old, returns, clip_range=None).tolist() == pytest.approx([0.5, 0.5, 0.5])


def test_masked_rubbish_has_no_effect_on_values() -> None:
    values = torch.tensor([1.0, math.nan], requires_grad=True)
    rubbish = torch.tensor([0.0, math.inf])
    losses = value_loss(values, rubbish, rubbish, mask=torch.tensor([True, False]))
    losses.sum().backward()
    assert losses.tolist() == [0.5, 0]
    assert values.grad is not None
    assert values.grad.tolist() == [1, 0]
