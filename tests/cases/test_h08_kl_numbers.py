"""H08, the objectives' part: the KL divergence of two distributions that are small enough for a pencil."""

from __future__ import annotations

import torch

from lightning_mtrl import objectives

POLICY = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
REFERENCE = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
MASK = torch.tensor([[True, True, False]])


def _sampled() -> tuple[torch.Tensor, torch.Tensor]:
    """Each token once, then a place that does not count."""
    outside = torch.tensor([-7.0], dtype=torch.float64)
    return torch.cat([POLICY, outside])[None], torch.cat([REFERENCE, 3 * outside])[None]


def _close(got: torch.Tensor, expected: list[float]) -> None:
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64), atol=1e-6)


def test_the_exact_divergence_has_a_direction() -> None:
    _close(objectives.exact_kl(POLICY, REFERENCE), 0.510826)
    _close(objectives.exact_kl(REFERENCE, POLICY), 0.368064)


def test_the_log_ratio_takes_both_signs_and_its_masked_mean_is_the_divergence() -> None:
    values = objectives.kl_penalty(*_sampled(), "k1")
    _close(values[0, :2], [-0.587787, 1.609438])
    _close(objectives.masked_mean(values, MASK), 0.510826)


def test_the_estimator_that_is_never_negative_has_the_same_mean() -> None:
    values = objectives.kl_penalty(*_sampled(), "k3")
    _close(values[0, :2], [0.212213, 0.809438])
    _close(objectives.masked_mean(values, MASK), 0.510826)


def test_the_other_direction_needs_samples_of_the_reference() -> None:
    policy, reference = _sampled()
    for estimator in ("k1", "k3"):
        values = objectives.kl_penalty(policy, reference, estimator, "forward")[0, :2]
        _close((REFERENCE.exp() * values).sum(), 0.368064)
    weights = objectives.importance_weights(reference, policy)
    values = weights * objectives.kl_penalty(policy, reference, "k1", "forward")
    _close(objectives.masked_mean(values, MASK), 0.368064)
