"""What is said of a critic: order, calibration, and the bound of the gate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu, ttest_1samp

from lightning_mtrl.evaluation.calibration import (
    calibration_curve,
    calibration_error,
    lower_bound,
    ranking_auc,
)

SCORES = torch.tensor([20.0, 30.0, 30.0, 40.0, 50.0])
POSITIVE = torch.tensor([False, True, False, True, True])


@pytest.mark.parametrize(
    ("factor", "shift"), [(1.0, 0.0), (0.01, 0.0), (1e-6, 0.5), (1e4, -1e5), (1.0, -90.0)]
)
def test_the_auc_does_not_depend_on_the_scale_of_scores(factor: float, shift: float) -> None:
    # 5.5 of 6 pairs stand in order; one is tied.
    assert ranking_auc(SCORES.double() * factor + shift, POSITIVE) == pytest.approx(5.5 / 6)


def test_the_auc_is_mann_and_whitneys() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (100 * torch.rand(200, generator=generator)).round()
    positive = torch.rand(200, generator=generator) < scores / 100
    statistic = mannwhitneyu(scores[positive].numpy(), scores[~positive].numpy()).statistic
    pairs = int(positive.sum()) * int((~positive).sum())
    assert ranking_auc(scores, positive) == pytest.approx(statistic / pairs, abs=1e-12)


def test_one_kind_alone_has_no_auc() -> None:
    assert math.isnan(ranking_auc(SCORES, torch.ones(5, dtype=torch.bool)))
    assert math.isnan(ranking_auc(SCORES, torch.zeros(5, dtype=torch.bool)))


def test_a_constant_that_is_the_mean_is_calibrated_in_any_order() -> None:
    predicted, observed = torch.full((100,), 0.5), torch.tensor([0.0] * 50 + [1.0] * 50)
    curve = calibration_curve(predicted, observed)
    assert [(b.predicted, b.observed, b.count) for b in curve] == [(0.5, 0.5, 100)]
    assert calibration_error(curve) == 0.0


def test_bins_have_equal_counts_and_keep_equal_predictions_together() -> None:
    # By hand, four bins of eight: three equal ones of ranks 2 to 4 have the mean rank 3, of the second bin.
    predicted = torch.tensor([0.6, 0.2, 0.1, 0.2, 0.9, 0.2, 0.7, 0.8])
    observed = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    curve = calibration_curve(predicted, observed, bins=4)
    assert [b.count for b in curve] == [1, 3, 2, 2]
    assert [b.predicted for b in curve] == pytest.approx([0.1, 0.2, 0.65, 0.85])
    assert [b.observed for b in curve] == pytest.approx([0.0, 2 / 3, 0.5, 1.0])
    # (1 * 0.1 + 3 * 0.4667 + 2 * 0.15 + 2 * 0.15) / 8
    assert calibration_error(curve) == pytest.approx(0.2625)
    distinct = calibration_curve(
        torch.rand(100, generator=torch.Generator().manual_seed(0)), torch.zeros(100)
    )
    assert [b.count for b in distinct] == [10] * 10
    order = torch.tensor([5, 3, 7, 1, 0, 6, 2, 4])
    again = calibration_curve(predicted[order], observed[order], bins=4)
    assert [b.observed for b in again] == pytest.approx([b.observed for b in curve])


def test_the_bound_of_a_gain_is_where_a_one_sided_t_test_refuses_it() -> None:
    gains = torch.tensor([0.3, -0.1, 0.45, 0.2, 0.25], dtype=torch.float64)
    mean, low = lower_bound(gains, list("abcde"))
    assert mean == pytest.approx(0.22)
    assert ttest_1samp(gains.numpy(), low, alternative="greater").pvalue == pytest.approx(0.05)
    assert lower_bound(gains, ["a"] * 5)[1] == -math.inf
    assert lower_bound(gains[:1], ["a"])[1] == -math.inf


def test_a_critic_without_a_gain_passes_as_seldom_as_the_bound_says() -> None:
    """2,000 fits with 8 held-out customers of 6 conversations, half of whose variance the customer has.

    5% of bounds above 0 have a standard error of 0.49%; 7% is four of them away, by chance 3 in 10^5 (the
    seed is fixed). With conversations taken for independent 20% pass.
    """
    rng = np.random.default_rng(0)
    names = [f"k{place // 6}" for place in range(48)]
    passed = alone = 0
    for _ in range(2000):
        gains = torch.from_numpy(np.repeat(rng.normal(size=8), 6) + rng.normal(size=48))
        passed += lower_bound(gains, names)[1] > 0
        alone += lower_bound(gains, [str(place) for place in range(48)])[1] > 0
    assert 60 <= passed <= 140
    assert alone > 300
