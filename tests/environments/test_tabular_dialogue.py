"""The tabular dialogue, and what it is the ground truth for: returns, improvement steps, error bounds."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_mtrl.environments.protocol import Environment, Transition
from lightning_mtrl.environments.tabular_dialogue import MAX_RESPONSES, TabularDialogue
from lightning_mtrl.objectives import discounted_returns, exact_kl

dialogues = st.builds(
    TabularDialogue, st.integers(0, 999), st.integers(1, 4), st.integers(1, 3), st.integers(2, 5)
)
seeds = st.integers(0, 2**30)


def _random_policy(dialogue: TabularDialogue, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(dialogue.success.shape, generator=generator, dtype=torch.float64)).softmax(-1)


def _improved(policy: Tensor, q: Tensor, beta: float) -> Tensor:
    """pi' ~ pi exp(Q / beta), the maximiser of E[Q] - beta KL(pi' || pi) in every state."""
    return (policy.log() + q / beta).softmax(-1)


def test_it_is_an_environment_and_equal_seeds_give_equal_conversations() -> None:
    dialogue = TabularDialogue(seed=3)
    assert isinstance(dialogue, Environment)
    again = copy.deepcopy(TabularDialogue(seed=3))
    assert dialogue.responses == again.responses
    assert TabularDialogue(seed=4).responses != dialogue.responses
    for seed in range(50):
        assert dialogue.reset(seed) == again.reset(seed)
        response = dialogue.responses[0, int(dialogue.reset(seed).info["situation"])][seed % 4]
        assert dialogue.step(response) == again.step(response)


def test_responses_are_different_and_short_and_the_message_tells_the_state() -> None:
    dialogue = TabularDialogue(seed=1, max_turns=3, situations=6, responses=5)
    assert len(dialogue.responses) == 18
    for known in dialogue.responses.values():
        assert len(set(known)) == 5
        assert all(1 <= len(response.split()) <= 3 for response in known)
    texts = {dialogue.reset(seed).text for seed in range(200)}
    assert texts == {f"turn 1 {name}" for name in dialogue.situations}


def test_unknown_text_and_abstention_end_the_conversation_without_success() -> None:
    dialogue = TabularDialogue()
    for response in (
        None,
        "",
        "hello",
        " " + dialogue.responses[0, 0][0],
        dialogue.responses[0, 0][0].upper(),
    ):
        dialogue.reset(0)
        assert dialogue.step(response) == Transition("", 0.0, terminated=True, info={"outcome": 0.0})


def test_a_dialogue_that_cannot_be_is_refused() -> None:
    for wrong in ({"max_turns": 0}, {"situations": 7}, {"responses": 1}, {"responses": MAX_RESPONSES + 1}):
        with pytest.raises(ValueError, match="need max_turns >= 1"):
            TabularDialogue(**wrong)


@given(dialogues)
def test_chances_are_chances(dialogue: TabularDialogue) -> None:
    success, going_on = dialogue.success, dialogue.transitions
    assert dialogue.initial.sum().item() == pytest.approx(1)
    assert ((success >= 0) & (success < 1)).all()
    assert (going_on >= 0).all()
    assert (success + going_on.sum(-1) <= 1 + 1e-12).all()
    assert (going_on[-1] == 0).all()


@given(st.integers(0, 99), st.floats(0, 1))
def test_optimal_values_are_the_best_of_all_deterministic_policies(seed: int, gamma: float) -> None:
    dialogue = TabularDialogue(seed, max_turns=2, situations=2, responses=3)
    choices = torch.eye(3, dtype=torch.float64)
    values = [
        dialogue.state_values(torch.stack(rows).view(2, 2, 3), gamma) for rows in product(choices, repeat=4)
    ]
    best = torch.stack(values).amax(0)
    assert torch.allclose(dialogue.optimal_values(gamma), best, atol=1e-12)
    assert torch.allclose(dialogue.state_values(dialogue.optimal_policy(gamma), gamma), best, atol=1e-12)
    optimum = dialogue.optimum(gamma)
    assert optimum.mean_return == pytest.approx((dialogue.initial * best[0]).sum().item())
    assert optimum.greedy_return <= optimum.mean_return + 1e-12


def test_greedy_is_clearly_worse_than_planning() -> None:
    for seed in range(10):
        optimum = TabularDialogue(seed).optimum(gamma=0.95)
        assert optimum.success_rate - optimum.greedy_success_rate > 0.1


@given(dialogues, seeds)
def test_one_turn_left_means_that_q_is_the_chance_of_success(dialogue: TabularDialogue, seed: int) -> None:
    q = dialogue.q_values(_random_policy(dialogue, seed), gamma=0.9)
    assert torch.equal(q[-1], dialogue.success[-1])
    assert torch.equal(dialogue.q_values(_random_policy(dialogue, seed), gamma=0.0), dialogue.success)


@given(dialogues, seeds)
def test_the_bad_response_has_value_zero(dialogue: TabularDialogue, seed: int) -> None:
    policy = _random_policy(dialogue, seed)
    assert torch.allclose(dialogue.expected_return(0 * policy, 1.0), torch.zeros(1).double())
    last = dialogue.state_values(0.25 * policy, 0.9)[-1]
    assert torch.allclose(last, 0.25 * dialogue.state_values(policy, 0.9)[-1])


@given(dialogues, seeds)
def test_success_adds_up_over_the_states_that_are_visited(dialogue: TabularDialogue, seed: int) -> None:
    policy = _random_policy(dialogue, seed)
    visits = dialogue.visitation(policy)
    assert visits[0].sum().item() == pytest.approx(1)
    total = (visits[..., None] * policy * dialogue.success).sum()
    assert total.item() == pytest.approx(dialogue.expected_return(policy, 1.0).item())


@given(dialogues, seeds, st.floats(0, 1))
def test_the_policy_gradient_is_that_of_automatic_differentiation(
    dialogue: TabularDialogue, seed: int, gamma: float
) -> None:
    logits = _random_policy(dialogue, seed).log().requires_grad_()
    dialogue.expected_return(logits.softmax(-1), gamma).backward()
    assert torch.allclose(dialogue.policy_gradient(logits.detach(), gamma), logits.grad, atol=1e-12)


def _play(dialogue: TabularDialogue, conversations: int, policy: Tensor) -> dict[str, list[list]]:
    """Rewards of each conversation, and the (turn, situation, response) of each of its turns."""
    rng, weights, played = random.Random(0), policy.tolist(), defaultdict(list)
    for seed in range(conversations):
        info, rewards, pairs = dialogue.reset(seed).info, [], []
        while True:
            turn, place = info["turn"], info["situation"]
            known = dialogue.responses[turn, place]
            action = rng.choices(range(len(known)), weights[turn][place])[0]
            transition = dialogue.step(known[action])
            pairs.append((turn, place, action))
            rewards.append(transition.reward)
            if transition.terminated:
                break
            info = transition.info
        played["rewards"].append(rewards)
        played["pairs"].append(pairs)
    return played


def test_monte_carlo_q_of_played_conversations_is_exact_q_up_to_three_hundredths() -> None:
    """Largest error over the 18 pairs of state and response below 0.03.

    Every pair is met at least 4,500 times and a return in [0, 1] has a standard deviation of at most 0.5,
    so an error of 0.03 is at least four standard errors: a chance of 6e-5 for a pair and 0.1% for all of
    them, over seeds. The seeds here are fixed, so the test always says the same.
    """
    dialogue, gamma = TabularDialogue(seed=0, situations=2, responses=3), 0.95
    policy = dialogue.uniform_policy()
    played = _play(dialogue, 140_000, policy)
    width = max(map(len, played["rewards"]))
    lengths = torch.tensor([len(r) for r in played["rewards"]])
    mask = torch.arange(width) < lengths[:, None]
    rewards = torch.tensor([r + [0.0] * (width - len(r)) for r in played["rewards"]], dtype=torch.float64)
    returns = discounted_returns(rewards, mask, gamma)[mask]
    turn, place, action = torch.tensor([pair for pairs in played["pairs"] for pair in pairs]).T
    total, count = (torch.zeros_like(policy) for _ in range(2))
    total.index_put_((turn, place, action), returns, accumulate=True)
    count.index_put_((turn, place, action), torch.ones_like(returns), accumulate=True)
    assert count.min() >= 4_500
    assert (total / count - dialogue.q_values(policy, gamma)).abs().max() < 0.03


@pytest.mark.parametrize("gamma", [0.9, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_soft_improvement_never_loses_and_reaches_the_optimum_in_eight_steps(seed: int, gamma: float) -> None:
    dialogue = TabularDialogue(seed)
    policy = dialogue.uniform_policy()
    values = dialogue.state_values(policy, gamma)
    for _ in range(8):
        policy = _improved(policy, dialogue.q_values(policy, gamma), beta=0.02)
        better = dialogue.state_values(policy, gamma)
        assert (better >= values - 1e-12).all()
        values = better
    reached = dialogue.expected_return(policy, gamma)
    assert reached.item() >= 0.99 * dialogue.optimum(gamma).mean_return


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_with_a_falling_penalty_it_reaches_the_optimum_in_every_state(seed: int, gamma: float) -> None:
    """With a constant penalty the log-policy is the sum of all Q so far, the early and worse ones too."""
    dialogue = TabularDialogue(seed, max_turns=4, responses=5)
    policy = dialogue.uniform_policy()
    for step in range(8):
        values = dialogue.state_values(policy, gamma)
        policy = _improved(policy, dialogue.q_values(policy, gamma), beta=0.1 / 2**step)
        assert (dialogue.state_values(policy, gamma) >= values - 1e-12).all()
    reached = dialogue.state_values(policy, gamma)
    assert (reached >= 0.99 * dialogue.optimal_values(gamma)).all()


@given(dialogues, seeds, st.floats(0.02, 5), st.floats(0, 1))
def test_one_soft_step_from_any_policy_loses_in_no_state(
    dialogue: TabularDialogue, seed: int, beta: float, gamma: float
) -> None:
    policy = _random_policy(dialogue, seed)
    improved = _improved(policy, dialogue.q_values(policy, gamma), beta)
    gain = dialogue.state_values(improved, gamma) - dialogue.state_values(policy, gamma)
    assert gain.min() >= -1e-12


@given(dialogues, seeds, st.floats(0, 1))
def test_the_gain_is_the_old_advantage_where_the_new_policy_goes(
    dialogue: TabularDialogue, seed: int, gamma: float
) -> None:
    """The performance difference lemma, behind Theorem 1."""
    old, new = _random_policy(dialogue, seed), _random_policy(dialogue, seed + 1)
    q = dialogue.q_values(old, gamma)
    advantage = (new * (q - (old * q).sum(-1, keepdim=True))).sum(-1)
    discount = gamma ** torch.arange(dialogue.max_turns, dtype=torch.float64)
    expected = (discount[:, None] * dialogue.visitation(new) * advantage).sum()
    gain = dialogue.expected_return(new, gamma) - dialogue.expected_return(old, gamma)
    assert gain.item() == pytest.approx(expected.item(), abs=1e-12)


@settings(max_examples=200)
@given(dialogues, seeds, st.floats(0.02, 2), st.floats(0, 0.5), st.booleans())
def test_a_step_on_a_wrong_q_gains_what_the_error_bound_promises(
    dialogue: TabularDialogue, seed: int, beta: float, eps_q: float, optimal: bool
) -> None:
    """Theorem 2: E_{pi'}[A^pi] >= beta KL - delta - 2 eps_Q in every state.

    `delta` is how far the step falls short of what the old policy itself scores; 0 for the best step.
    """
    policy, generator = _random_policy(dialogue, seed), torch.Generator().manual_seed(seed)
    q = dialogue.q_values(policy, 0.95)
    noise = 2 * torch.rand(q.shape, generator=generator, dtype=torch.float64) - 1
    wrong = q + eps_q * noise
    step = _improved(policy, wrong, beta) if optimal else _random_policy(dialogue, seed + 1)
    kl = exact_kl(step.log(), policy.log())
    objective = (step * wrong).sum(-1) - beta * kl
    delta = ((policy * wrong).sum(-1) - objective).clamp(min=0)
    if optimal:
        assert delta.max() < 1e-9
    gain = (step * q).sum(-1) - (policy * q).sum(-1)
    assert (gain >= beta * kl - delta - 2 * eps_q - 1e-9).all()
