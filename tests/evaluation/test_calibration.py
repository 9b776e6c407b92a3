"""What is said of a critic: order, calibration, and the bound of the gate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu, ttest_1samp

from lightning_mtrl.evaluation.calibration import lower_bound, ranking_auc

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
