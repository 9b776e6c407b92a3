from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mtrl.objectives import adaptive_kl_coef, exact_kl, importance_weights, kl_penalty
from lightning_mtrl.objectives.kl import Estimator

seeds = st.integers(0, 2**30)


def _two_distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits[0].log_softmax(0), logits[1].log_softmax(0)


def _gradient_of_kl(logits: torch.Tensor, other: torch.Tensor, direction: str) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    ours = leaf.log_softmax(0)
    (exact_kl(ours, other) if direction == "reverse" else exact_kl(other, ours)).backward()
    assert leaf.grad is not None
    return leaf.grad


def _expected_gradient(
    logits: torch.Tensor, other: torch.Tensor, estimator: str, direction: str
) -> torch.Tensor:
    """Gradient of the estimate in expectation over samples of the direction's own distribution."""
    leaf = logits.clone().requires_grad_()
    ours = leaf.log_softmax(0)
    samples = ours.detach().exp() if direction == "reverse" else other.exp()
    (samples * kl_penalty(ours, other, estimator, direction)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@given(seeds)
def test_k1_and_k3_are_unbiased_in_both_directions(seed: int) -> None:
    ours, other = _two_distributions(seed)
    for estimator in ("k1", "k3", "k1+", "k3+"):
        reverse = (ours.exp() * kl_penalty(ours, other, estimator)).sum()
        assert reverse.item() == pytest.approx(exact_kl(ours, other).item(), abs=1e-12)
    for estimator in ("k1", "k3"):
        forward = (other.exp() * kl_penalty(ours, other, estimator, "forward")).sum()
        assert forward.item() == pytest.approx(exact_kl(other, ours).item(), abs=1e-12)


@given(seeds)
def test_samples_of_another_policy_serve_with_their_weights(seed: int) -> None:
    ours, other = _two_distributions(seed)
    weighted = importance_weights(other, ours) * kl_penalty(ours, other, "k3", "forward")
    assert (ours.exp() * weighted).sum().item() == pytest.approx(exact_kl(other, ours).item(), abs=1e-12)


@given(seeds)
def test_which_estimators_have_the_right_gradient(seed: int) -> None:
    ours, other = _two_distributions(seed)
    reverse, forward = (_gradient_of_kl(ours, other, d) for d in ("reverse", "forward"))
    for estimator in ("k2", "k1+", "k3+"):
        assert torch.allclose(_expected_gradient(ours, other, estimator, "reverse"), reverse, atol=1e-12)
    for estimator in ("k1", "k3"):
        assert torch.allclose(_expected_gradient(ours, other, estimator, "forward"), forward, atol=1e-12)
    assert _expected_gradient(ours, other, "k1", "reverse").abs().max() < 1e-12
    assert torch.allclose(_expected_gradient(ours, other, "k3", "reverse"), forward, atol=1e-12)


@given(st.floats(-30, 30))
def test_k2_k3_and_abs_are_never_negative(log_ratio: float) -> None:
    ours, other = torch.tensor([log_ratio], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for estimator in ("abs", "k2", "k3", "k3+"):
        for direction in ("reverse", "forward") if not estimator.endswith("+") else ("reverse",):
            assert kl_penalty(ours, other, estimator, direction).item() >= -1e-15


def test_what_stands_outside_the_mask_has_no_effect() -> None:
    for estimator in get_args(Estimator):
        logprobs = torch.tensor([[-1.0, math.nan, -math.inf]], requires_grad=True)
        reference = torch.tensor([[-1.5, math.inf, math.nan]])
        kl = kl_penalty(logprobs, reference, estimator, mask=torch.tensor([[True, False, False]]))
        kl.sum().backward()
        assert kl[0, 0] > 0
        assert kl[0, 1:].tolist() == [0, 0]
        assert logprobs.grad is not None
        assert logprobs.grad[0, 1:].tolist() == [0, 0]
        assert kl_penalty(torch.tensor([math.nan]), torch.zeros(1), estimator).isnan().all()


def test_impossible_tokens_count_nothing_and_missing_ones_everything() -> None:
    half = torch.tensor([0.5, 0.5, 0.0]).log().requires_grad_()
    certain = torch.tensor([1.0, 0.0, 0.0]).log()
    assert exact_kl(certain, half).item() == pytest.approx(math.log(2))
    assert exact_kl(half, certain).item() == math.inf
    exact_kl(certain, half).backward()
    assert half.grad is not None
    assert half.grad.tolist() == [-1, 0, 0]
    assert exact_kl(torch.full((3,), math.nan), half).isnan()


def test_a_far_token_gives_a_finite_penalty() -> None:
    far = kl_penalty(torch.tensor([-1000.0]), torch.tensor([0.0]), "k3")
    assert far.isfinite().all()
    assert importance_weights(torch.tensor([0.0]), torch.tensor([-1000.0])).isfinite().all()


def test_unknown_names_are_refused() -> None:
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match=r"'k4'.*'k1', 'abs', 'k2', 'k3'"):
        kl_penalty(zero, zero, "k4")
    with pytest.raises(ValueError, match=r"'sideways'.*'reverse' or 'forward'"):
        kl_penalty(zero, zero, "k1", "sideways")
    with pytest.raises(ValueError, match=r"'k3\+' is for the reverse direction; use 'k3'"):
        kl_penalty(zero, zero, "k3+", "forward")


def test_the_coefficient_follows_the_measured_divergence() -> None:
    assert adaptive_kl_coef(0.5, kl=1.0, kl_target=1.0) == 0.5
    assert adaptive_kl_coef(0.5, kl=1.1, kl_target=1.0) == pytest.approx(0.505)
    assert adaptive_kl_coef(0.5, kl=50.0, kl_target=1.0) == pytest.approx(0.51)
    assert adaptive_kl_coef(0.5, kl=0.0, kl_target=1.0) == pytest.approx(0.49)
    assert adaptive_kl_coef(0.5, kl=9.0, kl_target=1.0, gain=64 / 100) == pytest.approx(0.564)
    with pytest.raises(ValueError, match=r"kl_target is 0"):
        adaptive_kl_coef(0.5, kl=1.0, kl_target=0.0)
