"""Each loss of a Q-critic means what it says, and its best constant is the best one."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_mtrl.modules.q_losses import Q_LOSSES, HLGauss, QLoss, q_loss

TARGETS = torch.tensor([0.0, 0.25, 1.0, 1.0])


def test_cross_entropy_and_squared_error_of_hand_made_numbers() -> None:
    raw = torch.tensor([[0.0], [math.log(3.0)]])
    # -log 1/2; and of 3/4 against 1: -log 3/4
    assert q_loss("bce").loss(raw, torch.tensor([0.3, 1.0])).tolist() == pytest.approx([0.693147, 0.287682])
    assert q_loss("bce").values(raw).tolist() == pytest.approx([0.5, 0.75])
    assert q_loss("mse").loss(torch.tensor([[2.0]]), torch.tensor([-1.0])).tolist() == [9.0]
    assert q_loss("mse").values(torch.tensor([[2.0]])).tolist() == [2.0]


def test_cross_entropy_has_a_minimum_for_a_target_beyond_its_range() -> None:
    """The largest value is right there, log(1 + exp(-x)) its loss; without a bound it would fall forever."""
    raw = torch.tensor([[0.0], [8.0], [800.0]])
    found = q_loss("bce").loss(raw, torch.full((3,), 1.4))
    assert found.tolist() == pytest.approx([math.log(2), 0.000335406, 0.0], abs=1e-6)
    below = q_loss("bce").loss(-raw, torch.full((3,), -0.4))
    assert below.tolist() == pytest.approx(found.tolist(), abs=1e-6)


def test_a_flat_hl_gauss_head_predicts_the_middle_at_the_cost_of_all_bins() -> None:
    loss = HLGauss(low=-1.0, high=3.0, bins=8)
    raw = torch.zeros(3, 8)
    assert loss.outputs == 8
    assert loss.values(raw).tolist() == pytest.approx([1.0] * 3)
    assert loss.loss(raw, torch.tensor([-1.0, 0.3, 3.0])).tolist() == pytest.approx([math.log(8)] * 3)


@pytest.mark.parametrize(("target", "tolerance"), [(0.5, 1e-4), (0.3, 1e-3), (0.0, 0.015), (1.0, 0.015)])
def test_the_best_hl_gauss_prediction_of_one_return_is_that_return(target: float, tolerance: float) -> None:
    loss = q_loss("hl_gauss")
    best = loss.constant(torch.tensor([target]))
    assert loss.values(best[None]).item() == pytest.approx(target, abs=tolerance)


@pytest.mark.parametrize("name", sorted(Q_LOSSES))
def test_no_other_constant_is_better(name: str) -> None:
    loss: QLoss = q_loss(name)
    best = loss.constant(TARGETS)
    assert best.shape == (loss.outputs,)
    cost = loss.loss(best.expand(4, -1), TARGETS).mean()
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 0.1, 1.0):
        other = best + scale * torch.randn(best.shape, generator=generator)
        assert loss.loss(other.expand(4, -1), TARGETS).mean() > cost


@pytest.mark.parametrize("name", sorted(Q_LOSSES))
def test_the_best_constant_means_the_mean_return(name: str) -> None:
    loss = q_loss(name)
    assert loss.values(loss.constant(TARGETS)[None]).item() == pytest.approx(0.5625, abs=0.01)


@pytest.mark.parametrize("name", sorted(Q_LOSSES))
def test_constants_of_equal_returns_are_finite(name: str) -> None:
    loss = q_loss(name)
    for value in (0.0, 1.0):
        best = loss.constant(torch.full((3,), value))
        assert torch.isfinite(loss.loss(best.expand(3, -1), torch.full((3,), value))).all()


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'huber'.*'bce', 'hl_gauss', 'mse'"):
        q_loss("huber")
