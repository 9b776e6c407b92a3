"""Targets and weights for logs of another policy: hand numbers, exact sums over a dialogue, identities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_mtrl.environments.tabular_dialogue import TabularDialogue
from lightning_mtrl.objectives import (
    clipped_ratios,
    discounted_returns,
    effective_sample_size,
    expected_sarsa_targets,
    expectile_loss,
    expectiles,
    lambda_returns,
    per_decision_returns,
    retrace_targets,
    self_normalised_weights,
    traced_returns,
    turn_log_ratios,
)

NAN = math.nan
REWARDS = torch.tensor([[1.0, 0.0, 2.0], [4.0, NAN, NAN]], dtype=torch.float64)
TURNS = torch.tensor([[True, True, True], [True, False, False]])
seeds = st.integers(0, 2**30)


def test_the_ratio_of_a_response_is_that_of_all_its_tokens() -> None:
    index = torch.tensor([[0, 1, 1, 0, 2, 0]])
    policy = torch.tensor([[NAN, -1.0, -2.0, NAN, -0.5, NAN]])
    behaviour = torch.tensor([[0.0, -2.0, -1.5, 0.0, -0.25, 0.0]])
    assert turn_log_ratios(policy, behaviour, index).tolist() == [[0.5, -0.25]]


def test_clipped_ratios_never_overflow() -> None:
    ratios = clipped_ratios(torch.tensor([math.log(0.5), math.log(3.0), 5000.0, -5000.0]), 2.0)
    assert ratios.tolist() == pytest.approx([0.5, 2.0, 2.0, 0.0])


def test_weights_and_effective_sample_size_by_hand() -> None:
    log_weights = torch.tensor([[0.0, math.log(3.0), NAN]], dtype=torch.float64) + 5000
    mask = torch.tensor([[True, True, False]])
    assert self_normalised_weights(log_weights, mask).tolist() == [pytest.approx([0.25, 0.75, 0.0])]
    assert effective_sample_size(log_weights, mask).item() == pytest.approx(16 / 10)
    with pytest.raises(ValueError, match="at least one"):
        effective_sample_size(log_weights, torch.zeros_like(mask))


@given(seeds, st.integers(1, 20), st.floats(-50, 50))
def test_the_effective_size_is_between_one_and_all_whatever_the_unit(seed: int, n: int, shift: float) -> None:
    weights = 3 * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    every = torch.ones(n, dtype=torch.bool)
    size = effective_sample_size(weights, every).item()
    assert 1 - 1e-9 <= size <= n + 1e-9
    assert effective_sample_size(weights + shift, every).item() == pytest.approx(size)
    assert effective_sample_size(torch.zeros_like(weights), every).item() == pytest.approx(n)


def test_per_decision_returns_by_hand_leave_the_first_response_alone() -> None:
    ratios = torch.tensor([[100.0, 2.0, 0.5], [7.0, NAN, NAN]], dtype=torch.float64)
    # 2; 0 + 0.5 * 0.5 * 2 = 0.5; 1 + 0.5 * 2 * 0.5 = 1.5
    assert per_decision_returns(REWARDS, ratios, TURNS, 0.5).tolist() == [[1.5, 0.5, 2], [4, 0, 0]]


def test_retrace_by_hand() -> None:
    values = torch.tensor([[9.0, 3.0, 5.0], [7.0, NAN, NAN]], dtype=torch.float64)
    after = torch.tensor([[4.0, 6.0, 0.0], [0.0, NAN, NAN]], dtype=torch.float64)
    ratios = torch.tensor([[1.0, 0.5, 8.0], [1.0, NAN, NAN]], dtype=torch.float64)
    targets = retrace_targets(REWARDS, values, after, ratios.log(), TURNS, 0.5, td_lambda=0.5, clip=1.0)
    # 2; 0.5 (6 + 0.5 * 1 * (2 - 5)) = 2.25; 1 + 0.5 (4 + 0.5 * 0.5 * (2.25 - 3)) = 2.90625
    assert targets.tolist() == [[2.90625, 2.25, 2], [4, 0, 0]]
    one_step = expected_sarsa_targets(REWARDS, after, TURNS, 0.5)
    assert one_step.tolist() == [[3.0, 3.0, 2.0], [4.0, 0.0, 0.0]]
    assert torch.equal(retrace_targets(REWARDS, values, after, ratios, TURNS, 0.5, td_lambda=0.0), one_step)


def _rows(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    return rewards, values, torch.arange(5) < torch.randint(1, 6, (3, 1), generator=generator)


@given(seeds, st.floats(0, 1), st.floats(0, 1))
def test_with_the_logged_next_response_as_the_policys_it_is_sarsa(
    seed: int, gamma: float, td_lambda: float
) -> None:
    rewards, values, mask = _rows(seed)
    following = torch.nn.functional.pad(torch.where(mask, values, 0.0), (0, 1))[:, 1:]
    traces = torch.full_like(rewards, td_lambda)
    traced = traced_returns(rewards, values, following, traces, mask, gamma)
    assert torch.allclose(traced, lambda_returns(rewards, values, mask, gamma, td_lambda), atol=1e-12)


@given(seeds, st.floats(0, 1))
def test_ratios_of_one_give_monte_carlo(seed: int, gamma: float) -> None:
    rewards, _, mask = _rows(seed)
    found = per_decision_returns(rewards, torch.ones_like(rewards), mask, gamma)
    assert torch.allclose(found, discounted_returns(rewards, mask, gamma), atol=1e-12)


def _policy(dialogue: TabularDialogue, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dialogue.success.shape, generator=generator, dtype=torch.float64).softmax(-1)


def _all_conversations(dialogue: TabularDialogue, behaviour: Tensor, place: int, action: int) -> list:
    """Every conversation of two turns after a first response, with its chance under the behaviour policy."""
    success, going = dialogue.success, dialogue.transitions
    p = success[0, place, action].item()
    stop = 1 - p - going[0, place, action].sum().item()
    found = [(p, [1.0], []), (stop, [0.0], [])]
    for x in range(success.size(1)):
        for a in range(success.size(2)):
            chance = (going[0, place, action, x] * behaviour[1, x, a]).item()
            q = success[1, x, a].item()
            found += [(chance * q, [0.0, 1.0], [(x, a)]), (chance * (1 - q), [0.0, 0.0], [(x, a)])]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_in_expectation_over_all_conversations_of_another_policy_targets_are_q_of_the_policy(
    seed: int,
) -> None:
    """Exact sums: Q^pi is the mean of every target here, and Monte Carlo's mean is Q of the behaviour."""
    dialogue, gamma = TabularDialogue(seed, max_turns=2, situations=2, responses=3), 0.9
    policy, behaviour = _policy(dialogue, seed), _policy(dialogue, seed + 100)
    q = dialogue.q_values(policy, gamma)
    v = (policy * q).sum(-1)
    for place in range(2):
        for action in range(3):
            means = torch.zeros(4, dtype=torch.float64)
            for chance, rewards, second in _all_conversations(dialogue, behaviour, place, action):
                r, mask = torch.tensor([rewards], dtype=torch.float64), torch.ones(1, len(rewards)).bool()
                values, after, logs = torch.zeros_like(r), torch.zeros_like(r), torch.zeros_like(r)
                values[0, 0] = q[0, place, action]
                for x, a in second:
                    values[0, 1], after[0, 0] = q[1, x, a], v[1, x]
                    logs[0, 1] = (policy[1, x, a] / behaviour[1, x, a]).log()
                found = (
                    expected_sarsa_targets(r, after, mask, gamma),
                    retrace_targets(r, values, after, logs, mask, gamma, td_lambda=0.7),
                    per_decision_returns(r, logs.exp(), mask, gamma),
                    discounted_returns(r, mask, gamma),
                )
                means += chance * torch.stack([targets[0, 0] for targets in found])
            exact = q[0, place, action].expand(3)
            assert torch.allclose(means[:3], exact, atol=1e-12)
            of_behaviour = dialogue.q_values(behaviour, gamma)[0, place, action]
            assert means[3].item() == pytest.approx(of_behaviour.item())


def test_expectile_loss_by_hand() -> None:
    losses = expectile_loss(torch.tensor([1.0, 1.0]), torch.tensor([3.0, -1.0]), 0.9)
    assert losses.tolist() == pytest.approx([0.9 * 4, 0.1 * 4])


def test_expectiles_of_two_numbers_are_the_weighted_mean() -> None:
    """At tau, tau (1 - e) = (1 - tau) e between samples 0 and 1, so e = tau."""
    samples = torch.tensor([[0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    for tau in (0.1, 0.5, 0.9):
        assert expectiles(samples, tau).tolist() == pytest.approx([tau, 2.0])


@given(seeds, st.integers(1, 9), st.floats(0.05, 0.95))
def test_no_other_number_has_less_expectile_loss(seed: int, n: int, tau: float) -> None:
    samples = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    best = expectiles(samples, tau)
    least = expectile_loss(best.expand(n), samples, tau).mean()
    for other in (best + 0.01, best - 0.01, samples.mean(), samples.max()):
        assert least <= expectile_loss(other.expand(n), samples, tau).mean() + 1e-12
    assert expectiles(samples, 0.5).item() == pytest.approx(samples.mean().item())
