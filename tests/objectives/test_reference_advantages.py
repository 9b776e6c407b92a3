"""Returns and advantages against the numbers of published implementations, to 1e-6 in float64."""

from __future__ import annotations

import pytest
import torch
from reference_vectors import CASES, Reference, assert_equal, padded
from torch import Tensor

from lightning_mtrl import objectives

every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_masked_statistics(case: str) -> None:
    reference = Reference("masked_whiten", case)
    values, mask, expected = reference.values("values"), reference.mask("mask"), reference.expected
    assert_equal(objectives.masked_mean(values, mask), expected["mean"])
    assert_equal(objectives.masked_var(values, mask), expected["var_unbiased"])
    assert_equal(objectives.masked_var(values, mask, unbiased=False), expected["var_biased"])
    whitened = objectives.masked_whiten(values, mask)
    assert_equal(whitened, expected["whitened"], mask)
    assert_equal(whitened, expected["whitened_no_eps_mean"], mask)
    assert_equal(objectives.masked_whiten(values, mask, center=False), expected["whitened_keep_mean"], mask)


@every_case
@pytest.mark.parametrize("variant", ["g1", "g0.9", "g0.5", "g0"])
def test_discounted_returns(case: str, variant: str) -> None:
    reference = Reference("mc_discounted_returns", case)
    rewards, mask = padded(reference.inputs["reward_after_turn"])
    wanted, _ = padded(reference.expected[variant]["G"])
    got = objectives.discounted_returns(rewards, mask, reference.params["variants"][variant]["gamma"])
    assert_equal(got, wanted, mask)


@every_case
@pytest.mark.parametrize("rewards", ["turn_end_rewards", "dense_rewards"])
@pytest.mark.parametrize("variant", ["g1_l1", "g1_l0.95", "g0.99_l0.95", "g0.9_l0"])
def test_gae_over_several_responses(case: str, rewards: str, variant: str) -> None:
    reference, mask = Reference("gae_multiturn", case), Reference("gae_multiturn", case).mask()
    settings, expected = (
        reference.params["variants"][variant],
        reference.expected[f"{rewards}__{variant}"],
    )
    advantages, returns = objectives.gae(
        reference.values(rewards), reference.values("values"), mask, settings["gamma"], settings["lam"]
    )
    assert_equal(advantages, expected["advantages_raw"], mask)
    assert_equal(returns, expected["returns"], mask)
    assert_equal(objectives.masked_whiten(advantages, mask), expected["advantages_whitened"], mask)


@every_case
@pytest.mark.parametrize("variant", ["g1_l0.95", "g0.97_l0.9"])
def test_gae_of_one_response_with_one_more_position(case: str, variant: str) -> None:
    """That source counts the position after the last token as part of the response, except in whitening."""
    reference = Reference("gae_single_turn_trl", case)
    rewards, expected = reference.values("rewards"), reference.expected[variant]
    settings, last = reference.params["variants"][variant], reference.index("last_token_index")[:, None]
    place = torch.arange(rewards.size(1))
    advantages, returns = objectives.gae(
        rewards, reference.values("values"), place <= last + 1, settings["gamma"], settings["lam"]
    )
    assert_equal(advantages, expected["advantages_raw"])
    assert_equal(returns, expected["returns"])
    assert_equal(objectives.masked_whiten(advantages, place <= last), expected["advantages_whitened"])


@every_case
def test_rloo_outcomes(case: str) -> None:
    reference = Reference("rloo_outcome", case)
    got = objectives.rloo_advantages(reference.values("score"), reference.index())
    expected, mask = reference.expected, reference.mask()
    for name in ("row_advantage", "row_advantage_vectorized", "row_advantage_trl"):
        assert_equal(got, expected[name])
    assert_equal(got[:, None] * mask, expected["advantages"])
    # The one more step of a source, over the whole batch and with an epsilon of its own.
    normalised = (got - got.mean()) / (got.std() + 1e-4)
    assert_equal(normalised, expected["row_advantage_trl_normalized"])


@every_case
def test_grpo_outcomes(case: str) -> None:
    reference = Reference("grpo_outcome", case)
    scores, group = reference.values("score"), reference.index()
    expected, mask = reference.expected, reference.mask()
    scaled = objectives.grpo_advantages(scores, group)
    assert_equal(scaled, expected["row_advantage_std"])
    assert_equal(scaled[:, None] * mask, expected["advantages_std"])
    plain = objectives.grpo_advantages(scores, group, divide_by_std=False)
    assert_equal(plain, expected["row_advantage_no_std"])
    assert_equal(plain[:, None] * mask, expected["advantages_no_std"])
    assert_equal(plain, expected["row_advantage_trl_none"])
    wider = objectives.grpo_advantages(scores, group, epsilon=1e-4)
    assert_equal(wider, expected["row_advantage_trl_group"])
    # Division by the batch's standard deviation is no option of ours; it composes.
    assert_equal(plain / (scores.std() + 1e-4), expected["row_advantage_trl_batch"])


@every_case
def test_reinforce_plus_plus(case: str) -> None:
    reference, mask = Reference("reinforce_plus_plus", case), Reference("reinforce_plus_plus", case).mask()
    for variant, settings in reference.params["variants"].items():
        expected = reference.expected[variant]
        returns = objectives.returns_to_go(reference.values("token_rewards"), mask, settings["gamma"])
        assert_equal(returns, expected["returns"])
        assert_equal(objectives.masked_whiten(returns, mask), expected["advantages"])
    if "baseline_advantages" in reference.expected:
        scores = objectives.grpo_advantages(reference.values("score"), reference.index(), divide_by_std=False)
        spread = scores[:, None].expand(mask.shape)
        assert_equal(objectives.masked_whiten(spread, mask), reference.expected["baseline_advantages"])


def _check_released_rloo(
    reference: Reference, variant: str, parts: list[tuple[float, Tensor, Tensor]]
) -> None:
    """`parts` are (coefficient, rewards, mask of the rewards), each centred apart and then added."""
    mask, size = reference.mask(), reference.params["n_samples"]
    centred = sum(c * objectives.rloo_centred_rewards(rewards, places, size) for c, rewards, places in parts)
    assert isinstance(centred, Tensor)
    returns = objectives.returns_to_go(centred, mask)
    expected = reference.expected[variant]
    assert_equal(centred, expected["rloo_reward"])
    assert_equal(returns, expected["returns"], mask)
    assert_equal(objectives.masked_whiten(returns, mask), expected["advantages"], mask)


def _ends(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Last token of each response, and last sampled token of each row."""
    index = objectives.turn_index_of(mask)
    places = torch.arange(mask.size(1))
    ends = mask & (torch.nn.functional.pad(index, (0, 1))[:, 1:] != index)
    last = (ends * places).max(1, keepdim=True).values
    return ends, ends & (places == last)


def _penalty(reference: Reference) -> Tensor:
    """The row's penalty, spread over its responses by their share of the tokens."""
    mask = reference.mask()
    index = objectives.turn_index_of(mask)
    tokens = torch.stack([(index == k).sum(1) for k in range(1, int(index.max()) + 1)], 1)
    share = tokens / mask.sum(1, keepdim=True)
    return objectives.place_turn_rewards(reference.values("token_penalty")[:, None] * share, index)


@every_case
@pytest.mark.parametrize("variant", ["plain", "penalty"])
def test_released_rloo_of_outcomes(case: str, variant: str) -> None:
    reference = Reference("rloo_adv_outcome", case)
    settings, (_, last) = reference.params["variants"][variant], _ends(reference.mask())
    scores = reference.values("total_score_no_penalty")
    if settings["token_penalty"]:
        scores = scores + reference.values("token_penalty")
    _check_released_rloo(reference, variant, [(settings["gt_coef"], scores[:, None] * last, last)])


@every_case
@pytest.mark.parametrize("variant", ["plain", "penalty"])
def test_released_rloo_of_turn_sums(case: str, variant: str) -> None:
    reference = Reference("rloo_adv_itpo", case)
    settings, (ends, _) = reference.params["variants"][variant], _ends(reference.mask())
    turn_rewards, _ = padded(reference.expected[variant]["turn_reward"])
    placed = objectives.place_turn_rewards(turn_rewards, objectives.turn_index_of(reference.mask()))
    parts = [(settings["dpo_coef"], placed, ends)]
    if settings["token_penalty"]:
        parts.append((settings["dpo_coef"], _penalty(reference), ends))
    _check_released_rloo(reference, variant, parts)


@every_case
@pytest.mark.parametrize("variant", ["plain", "penalty"])
def test_released_rloo_of_shares_of_the_outcome(case: str, variant: str) -> None:
    reference = Reference("rloo_adv_normitpo", case)
    settings, (ends, _) = reference.params["variants"][variant], _ends(reference.mask())
    shares, _ = padded(reference.expected[variant]["turn_weight"])
    turn_rewards = reference.values("outcome")[:, None] * shares
    placed = objectives.place_turn_rewards(turn_rewards, objectives.turn_index_of(reference.mask()))
    if settings["token_penalty"]:
        placed = placed + _penalty(reference)
    _check_released_rloo(reference, variant, [(settings["dpo_coef"], placed, ends)])


@every_case
@pytest.mark.parametrize("variant", ["plain", "penalty", "with_outcome"])
def test_released_rloo_of_token_rewards(case: str, variant: str) -> None:
    reference = Reference("rloo_adv_prime_token", case)
    settings, mask = reference.params["variants"][variant], reference.mask()
    ends, last = _ends(mask)
    scores = reference.values("total_score_no_penalty")
    parts = [(settings["dpo_coef"], reference.values("rm_scores"), mask)]
    if settings["token_penalty"]:
        parts.append((settings["dpo_coef"], _penalty(reference), ends))
        scores = scores + reference.values("token_penalty")
    if settings["gt_coef"]:
        parts.append((settings["gt_coef"], scores[:, None] * last, last))
    _check_released_rloo(reference, variant, parts)
