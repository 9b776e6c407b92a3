"""KL, policy and value losses against the numbers of published implementations, to 1e-6 in float64."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from reference_vectors import CASES, Reference, assert_equal
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.objectives.kl import Estimator

every_case = pytest.mark.parametrize("case", CASES)
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def _weighted(losses: Tensor, mask: Tensor, mean_over: Any) -> Tensor:
    return (objectives.token_weights(mask, mean_over, dtype=torch.float64) * losses).sum()


def _aggregate(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    """The sources' ways to one number; the sums, which depend on the batch's size, are no option of ours."""
    rows = mask.any(1).sum()
    total = objectives.masked_sum(losses, mask)
    return {
        "token-mean": lambda: _weighted(losses, mask, "token"),
        "token-sum": lambda: total,
        "seq-mean-token-sum": lambda: total / rows,
        "seq-mean-token-mean": lambda: _weighted(losses, mask, "conversation"),
        "seq-mean-token-sum-norm": lambda: total / rows / mask.size(1),
    }[mode]()


@every_case
def test_aggregation(case: str) -> None:
    reference = Reference("agg_loss", case)
    losses, mask, expected = reference.values("loss_matrix"), reference.mask("mask"), reference.expected
    for mode in MODES:
        assert_equal(_aggregate(losses, mask, mode), expected[mode])
    total, rows = objectives.masked_sum(losses, mask), mask.any(1).sum()
    row_means = objectives.masked_mean(losses, mask, dim=1)
    assert_equal(total / rows / 100, expected["seq-mean-token-sum-norm|loss_scale_factor=100"])
    assert_equal(total / 200 * 2, expected["token-mean|dp2_tokens200"])
    assert_equal(row_means.sum() / 32 * 2, expected["seq-mean-token-mean|dp2_batch32"])
    older = expected["older_revision"]
    assert_equal(_aggregate(losses, mask, "token-mean"), older["token-mean"])
    assert_equal(total / len(mask), older["seq-mean-token-sum"])
    assert_equal(total / mask.size(1), older["seq-mean-token-sum-norm"])
    if "seq-mean-token-mean" in older:
        assert_equal(row_means.mean(), older["seq-mean-token-mean"])


@every_case
@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_kl_estimators(case: str, estimator: Estimator) -> None:
    """The source limits k3 to 10 nats; we do not, since beyond it a token gets no gradient back."""
    reference, mask = Reference("kl_estimators", case), Reference("kl_estimators", case).mask()
    logprobs, expected = reference.leaf("logprob"), reference.expected[estimator]
    kl = objectives.kl_penalty(logprobs, reference.values("ref_logprob"), estimator)
    limited = kl.clamp(-10, 10) if estimator == "k3" else kl
    limited.sum().backward()
    assert_equal(limited.detach().clamp(max=10) if estimator == "k3+" else limited, expected["value"])
    assert_equal(logprobs.grad, expected["grad_logprob_of_sum"])
    if estimator == "k3":
        for mode in ("token-mean", "seq-mean-token-mean"):
            assert_equal(_aggregate(limited, mask, mode), expected[f"agg_{mode}"])


@every_case
def test_rewards_less_a_kl_penalty(case: str) -> None:
    reference = Reference("kl_estimators", case)
    kl = objectives.kl_penalty(reference.values("logprob"), reference.values("ref_logprob"), "k1")
    shaped = reference.values("token_rewards") - reference.params["kl_coef"] * kl
    assert_equal(shaped, reference.expected["shaped_reward"])


@every_case
@pytest.mark.parametrize("variant", ["c0.2", "c0.2_0.28_d5", "no_dual"])
def test_clipped_policy_loss(case: str, variant: str) -> None:
    reference, mask = Reference("policy_loss_ppo_clip", case), Reference("policy_loss_ppo_clip", case).mask()
    settings, expected = reference.params["variants"][variant], reference.expected[variant]
    low, high, dual = settings["clip_low"], settings["clip_high"], settings["dual_clip"]
    old, advantages = reference.values("old_logprob"), reference.values("advantages")
    for mode in MODES:
        logprobs = reference.leaf("logprob")
        losses = objectives.clipped_policy_loss(logprobs, old, advantages, mask, low, high, dual)
        loss = _aggregate(losses, mask, mode)
        loss.backward()
        assert_equal(losses, expected["token_loss"], mask)
        assert_equal(loss, expected[mode]["loss"])
        assert_equal(logprobs.grad, expected[mode]["grad_logprob"])
    logprobs = reference.values("logprob")
    ratio = objectives.token_ratio(logprobs, old, mask)
    clipped = objectives.is_clipped(ratio, advantages, low, high).double()
    assert_equal(objectives.masked_mean(clipped, mask), expected["clip_fraction"])
    dual_clipped = objectives.is_dual_clipped(ratio, advantages, dual).double()
    assert_equal(objectives.masked_mean(dual_clipped, mask), expected["clip_fraction_lower"])
    approximate = objectives.kl_penalty(old, logprobs, "k1")
    assert_equal(objectives.masked_mean(approximate, mask), expected["approx_kl"])
    if variant == "no_dual":
        plain = objectives.clipped_policy_loss(logprobs, old, advantages, mask, low, high)
        assert_equal(plain, expected["token_loss"], mask)


@every_case
@pytest.mark.parametrize("variant", ["c3e-4_4e-4", "c0.2", "c0.02_0.05"])
def test_sequence_ratio_with_token_gradient(case: str, variant: str) -> None:
    reference, mask = Reference("policy_loss_gspo", case), Reference("policy_loss_gspo", case).mask()
    settings, expected = reference.params["variants"][variant], reference.expected[variant]
    low, high = settings["clip_low"], settings["clip_high"]
    logprobs, old, advantages = (
        reference.leaf("logprob"),
        reference.values("old_logprob"),
        reference.values("advantages"),
    )
    ratio = objectives.sequence_geometric_ratio(logprobs, old, mask)
    carried = objectives.with_token_gradient(ratio, logprobs, mask)
    loss = _weighted(objectives.clipped_surrogate(carried, advantages, mask, low, high), mask, "conversation")
    loss.backward()
    rows = mask.any(1)
    assert_equal(loss, expected["loss"])
    assert_equal(logprobs.grad, expected["grad_logprob"])
    assert_equal(objectives.masked_mean(ratio, mask, dim=1)[rows], torch.tensor(expected["row_ratio"])[rows])
    clipped = objectives.is_clipped(ratio, advantages, low, high).double()
    assert_equal(objectives.masked_mean(clipped, mask), expected["clip_fraction"])
    approximate = objectives.kl_penalty(old, logprobs, "k1")
    assert_equal(objectives.masked_mean(approximate, mask), expected["approx_kl"])


@every_case
@pytest.mark.parametrize(
    "variant", ["grpo_token", "grpo_seq", "bnpo_token_kl", "dr_grpo_token", "dapo_token_kl_delta"]
)
def test_grpo_losses(case: str, variant: str) -> None:
    """The source's bound `delta` on a ratio is our dual clip: it matters for negative advantages only."""
    reference, mask = Reference("policy_loss_trl_grpo", case), Reference("policy_loss_trl_grpo", case).mask()
    settings, expected = reference.params["variants"][variant], reference.expected[variant]
    logprobs, old = reference.leaf("logprob"), reference.values("old_logprob")
    unit = {"token": objectives.token_ratio, "sequence": objectives.sequence_geometric_ratio}
    advantages = reference.values("row_advantage")[:, None].expand(mask.shape)
    losses = objectives.clipped_surrogate(
        unit[settings["level"]](logprobs, old, mask),
        advantages,
        mask,
        reference.params["epsilon_low"],
        reference.params["epsilon_high"],
        settings["delta"],
    )
    losses = losses + settings["beta"] * objectives.kl_penalty(
        logprobs, reference.values("ref_logprob"), "k3"
    )
    budget = len(mask) * reference.params["max_completion_length"]
    loss = {
        "grpo": objectives.masked_mean(losses, mask, dim=1).mean(),
        "bnpo": _weighted(losses, mask, "token"),
        "dapo": _weighted(losses, mask, "token"),
        "dr_grpo": objectives.masked_sum(losses, mask) / budget,
    }[settings["loss_type"]]
    loss.backward()
    assert_equal(loss, expected["loss"])
    assert_equal(logprobs.grad, expected["grad_logprob"])


@every_case
@pytest.mark.parametrize("variant", ["c0.2", "c0.5"])
def test_rloo_loss_of_whole_rows(case: str, variant: str) -> None:
    reference, mask = Reference("policy_loss_trl_rloo", case), Reference("policy_loss_trl_rloo", case).mask()
    settings, expected = reference.params["variants"][variant], reference.expected[variant]
    logprobs = reference.leaf("logprob")
    ratio = objectives.sequence_product_ratio(logprobs, reference.values("old_logprob"), mask)
    advantages = reference.values("row_advantage")[:, None].expand(mask.shape)
    losses = objectives.clipped_surrogate(
        ratio, advantages, mask, settings["epsilon_low"], settings["epsilon_high"]
    )
    # A row without tokens still counts there, as the action of ratio 1.
    empty = -reference.values("row_advantage")[~mask.any(1)].sum()
    loss = (objectives.masked_mean(losses, mask, dim=1).sum() + empty) / len(mask)
    loss.backward()
    assert_equal(loss, expected["loss"])
    assert_equal(logprobs.grad, expected["grad_logprob"])
    rows = mask.any(1)
    assert_equal(objectives.masked_mean(ratio, mask, dim=1)[rows], torch.tensor(expected["row_ratio"])[rows])


@every_case
def test_ppo_losses(case: str) -> None:
    reference, mask = (
        Reference("policy_loss_trl_ppo", case),
        Reference("policy_loss_trl_ppo", case).mask("mask"),
    )
    params, expected = reference.params, reference.expected
    logprobs, values = reference.leaf("logprob"), reference.leaf("values")
    old_values, returns = reference.values("old_values"), reference.values("returns")
    losses = objectives.clipped_policy_loss(
        logprobs, reference.values("old_logprob"), reference.values("advantages"), mask, params["cliprange"]
    )
    policy_loss = _weighted(losses, mask, "token")
    value_losses = objectives.value_loss(values, old_values, returns, params["cliprange_value"])
    value_loss = _weighted(value_losses, mask, "token")
    loss = policy_loss + params["vf_coef"] * value_loss
    loss.backward()
    assert_equal(policy_loss, expected["policy_loss"])
    assert_equal(value_loss, expected["value_loss"])
    assert_equal(loss, expected["loss"])
    assert_equal(logprobs.grad, expected["grad_logprob"])
    assert_equal(values.grad, expected["grad_value"])
    clipped = objectives.value_clipped(values, old_values, returns, params["cliprange_value"]).double()
    assert_equal(objectives.masked_mean(clipped, mask), expected["value_clip_fraction"])


@every_case
@pytest.mark.parametrize("variant", ["c0.2", "c0.5"])
def test_clipped_value_loss(case: str, variant: str) -> None:
    reference, mask = Reference("value_loss", case), Reference("value_loss", case).mask("mask")
    clip_range, expected = (
        reference.params["variants"][variant]["clip_value"],
        reference.expected[variant],
    )
    old_values, returns = reference.values("old_values"), reference.values("returns")
    for mode in reference.params["modes"]:
        values = reference.leaf("values")
        loss = _aggregate(objectives.value_loss(values, old_values, returns, clip_range, mask), mask, mode)
        loss.backward()
        assert_equal(loss, expected[mode]["loss"])
        assert_equal(values.grad, expected[mode]["grad_value"])
    clipped = objectives.value_clipped(reference.values("values"), old_values, returns, clip_range).double()
    assert_equal(objectives.masked_mean(clipped, mask), expected["clip_fraction"])
