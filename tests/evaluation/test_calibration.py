"""What is said of a critic: order, calibration, and the bound of the gate."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import mannwhitneyu

from lightning_mtrl.evaluation.calibration import ranking_auc

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
