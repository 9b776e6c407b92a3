"""Credit of turns and the implicit reward model against the published code's numbers, to 1e-6 in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_vectors import CASES, Reference, assert_equal, padded
from torch import Tensor

from lightning_mtrl import objectives

every_case = pytest.mark.parametrize("case", CASES)


def _assert_turns(got: Tensor, expected: list[list[float]], mask: Tensor) -> None:
    """A table of turns against ragged rows; nothing stands beyond the last turn."""
    wanted, present = padded(expected)
    assert torch.equal(objectives.turn_tokens(objectives.turn_index_of(mask)) > 0, present)
    assert_equal(got, wanted, present)
    assert not got[~present].any()


@every_case
def test_segmentation_into_turns(case: str) -> None:
    reference = Reference("turn_segmentation", case)
    mask, scores, expected = reference.mask(), reference.values("token_scores"), reference.expected
    index = objectives.turn_index_of(mask)
    _assert_turns(objectives.turn_sums(scores, index), expected["turn_sum"], mask)
    _assert_turns(objectives.turn_means(scores, index), expected["turn_mean"], mask)
    _assert_turns(objectives.turn_tokens(index), expected["turn_count"], mask)
    _assert_turns(objectives.token_fractions(index, torch.float64), expected["token_fraction"], mask)
    places = objectives.place_turn_rewards(torch.ones(index.shape, dtype=torch.float64), index)
    ends = [row.nonzero().flatten().tolist() for row in places]
    assert ends == expected["turn_end"]


@every_case
def test_token_fractions(case: str) -> None:
    reference = Reference("token_fractions", case)
    fractions = objectives.token_fractions(objectives.turn_index_of(reference.mask()), torch.float64)
    _assert_turns(fractions, reference.expected["token_fraction"], reference.mask())


@every_case
def test_turn_rewards_of_itpo(case: str) -> None:
    reference, mask = Reference("itpo_turn_rewards", case), Reference("itpo_turn_rewards", case).mask()
    index = objectives.turn_index_of(mask)
    got = objectives.turn_sums(reference.values("token_scores"), index)
    _assert_turns(got, reference.expected["turn_reward"], mask)
    _assert_turns(objectives.token_fractions(index).double(), reference.expected["token_fraction"], mask)


@every_case
@pytest.mark.parametrize(
    ("function", "evidence"),
    [
        ("normitpo_weights_paper", objectives.turn_sums),
        ("normitpo_weights_official", objectives.scaled_turn_means),
    ],
)
def test_weights_of_norm_itpo(case: str, function: str, evidence: Any) -> None:
    reference, mask = Reference(function, case), Reference(function, case).mask()
    index = objectives.turn_index_of(mask)
    present = objectives.turn_tokens(index) > 0
    found = evidence(reference.values("token_scores"), index)
    for variant, settings in reference.params["variants"].items():
        weights = objectives.norm_itpo_weights(found, present, settings["temperature"])
        _assert_turns(weights, reference.expected[variant]["turn_weight"], mask)


@every_case
def test_token_rewards_of_the_implicit_reward_model(case: str) -> None:
    """As released: the last attended position loses its reward, and batch_norm is our batch maximum."""
    reference, mask = Reference("prm_token_rewards", case), Reference("prm_token_rewards", case).mask()
    log_ratio = reference.values("logp_prm") - reference.values("logp_ref")
    last = reference.mask("response_attention_mask").sum(1) - 1
    outcome = reference.values("outcome")
    for variant, settings in reference.params["variants"].items():
        beta, expected = settings["beta"], reference.expected[variant]
        rewards = objectives.implicit_rewards(log_ratio, mask, beta)
        rewards = objectives.without_rewards_from(rewards, last)
        if settings["norm"] == "batch_norm":
            rewards = objectives.scaled_by_batch_max(rewards)
        assert_equal(rewards, expected["rm_scores"])
        assert_equal(rewards.sum(1).mean(), expected["mean_row_reward"])
        scores = objectives.trajectory_scores(log_ratio, mask, beta)
        assert_equal(objectives.bce_loss(scores, outcome).mean(), expected["ce_loss"])
        assert_equal(scores.mean() / beta, expected["mean_row_q"])
    assert_equal(objectives.implicit_rewards(log_ratio, mask, 1.0), reference.expected["q"])


@every_case
def test_cross_entropy_of_outcomes_and_its_gradient(case: str) -> None:
    reference, mask = Reference("prm_ce_loss", case), Reference("prm_ce_loss", case).mask()
    for variant, settings in reference.params["variants"].items():
        log_ratio, expected = reference.leaf("token_scores"), reference.expected[variant]
        scores = objectives.trajectory_scores(log_ratio, mask, settings["beta"])
        loss = objectives.bce_loss(scores, reference.values("outcome")).mean()
        loss.backward()
        assert_equal(loss, expected["loss"])
        assert_equal(scores.sigmoid(), expected["row_probability"])
        assert log_ratio.grad is not None
        assert_equal(log_ratio.grad, expected["grad_token_scores"])


@every_case
def test_accuracies_of_the_implicit_reward_model(case: str) -> None:
    reference, mask = Reference("prm_accuracy_metric", case), Reference("prm_accuracy_metric", case).mask()
    scores = objectives.trajectory_scores(reference.values("token_scores"), mask, 1.0)
    group = torch.arange(len(scores)) // reference.params["n_samples"]
    assert len(reference.inputs["outcomes"]) == 3
    for name, outcomes in reference.inputs["outcomes"].items():
        outcome, expected = torch.tensor(outcomes, dtype=torch.float64), reference.expected[name]
        assert_equal(objectives.pairwise_accuracy(scores, outcome, group), expected["pair_accuracy"])
        assert_equal(objectives.absolute_accuracy(scores, outcome), expected["abs_accuracy"])
