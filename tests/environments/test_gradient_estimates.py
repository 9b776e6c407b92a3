"""Policy gradients estimated with our objectives, against the exact gradient of the tabular dialogue.

The policy is a table of logits over next words, one row for each beginning of a response in each state, so
that responses have two to four tokens (the end-of-turn token included) and credit has to find its token.

Each estimate is an average over 400,000 rows of a fixed seed, so a test always says the same. Over twenty
seeds the cosines lay between 0.9971 and 0.9998 for conversations and above 0.9989 for single turns. Their
shortfall from 1 is half the squared ratio of noise to signal; the worst of 160 would have to be three and a
half times as far from 1 to fail by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.environments.tabular_dialogue import MAX_RESPONSE_WORDS, TabularDialogue

TOKENS = MAX_RESPONSE_WORDS + 1
GROUP = 4


class WordPolicy:
    """Next-word logits; `edges[h, x, a]` are the places in them of the tokens of a response, -1 for none."""

    def __init__(self, dialogue: TabularDialogue, seed: int) -> None:
        nodes: dict[tuple, int] = {}
        places: dict[tuple, int] = {}
        owner: list[int] = []
        self.dialogue = dialogue
        self.edges = torch.full((*dialogue.success.shape, TOKENS), -1)
        for (turn, x), known in dialogue.responses.items():
            for a, response in enumerate(known):
                tokens = [*response.split(), "<end>"]
                for i, token in enumerate(tokens):
                    beginning = (turn, x, *tokens[:i])
                    node = nodes.setdefault(beginning, len(nodes))
                    if (*beginning, token) not in places:
                        places[*beginning, token] = len(owner)
                        owner.append(node)
                    self.edges[turn, x, a, i] = places[*beginning, token]
        self.owner, self.num_nodes = torch.tensor(owner), len(nodes)
        generator = torch.Generator().manual_seed(seed)
        logits = 0.5 * torch.randn(len(owner), generator=generator, dtype=torch.float64)
        self.logits = logits.requires_grad_()

    def token_logprobs(self) -> Tensor:
        """Log-probability of each place in the table, given the beginning that it continues."""
        mass = torch.zeros(self.num_nodes, dtype=torch.float64).index_add(0, self.owner, self.logits.exp())
        return self.logits - mass.log()[self.owner]

    def response_probabilities(self) -> Tensor:
        """Chance of each known response in each state: [H, X, A]."""
        return objectives.masked_sum(self.token_logprobs()[self.edges], self.edges >= 0, dim=-1).exp()

    def token_values(self, q: Tensor) -> Tensor:
        """Expected Q before each token is chosen, exact: the mean over responses that begin alike."""
        chances = self.response_probabilities().detach()
        kept = self.edges >= 0
        nodes, flat = self.owner[self.edges][kept], torch.zeros(self.num_nodes, dtype=torch.float64)
        total = flat.index_add(0, nodes, (chances * q)[..., None].expand(kept.shape)[kept])
        mass = flat.index_add(0, nodes, chances[..., None].expand(kept.shape)[kept])
        return (total / mass)[self.owner]


@dataclass(frozen=True)
class Sample:
    """Rows of tokens. `edges` is -1 at observations and padding; `rewards` stand on last tokens."""

    edges: Tensor
    rewards: Tensor


def _place_of(edges: Tensor) -> Tensor:
    return (edges >= 0) & (torch.nn.functional.pad(edges, (0, 1), value=-1)[..., 1:] < 0)


def _conversations(policy: WordPolicy, number: int, generator: torch.Generator) -> Sample:
    """Whole conversations, in groups that begin in the same situation; observations stand between turns."""
    dialogue, chances = policy.dialogue, policy.response_probabilities().detach()
    success, going_on = dialogue.success, dialogue.transitions
    first = torch.multinomial(dialogue.initial, number // GROUP, replacement=True, generator=generator)
    place, alive = first.repeat_interleave(GROUP), torch.ones(number, dtype=torch.bool)
    edges, rewards = [], []
    for turn in range(dialogue.max_turns):
        action = torch.multinomial(chances[turn, place], 1, generator=generator)[:, 0]
        tokens = torch.where(alive[:, None], policy.edges[turn, place, action], -1)
        follow = going_on[turn, place, action]
        won = success[turn, place, action][:, None]
        ends = torch.cat([follow, won, 1 - won - follow.sum(1, keepdim=True)], 1).clamp(min=0)
        then = torch.multinomial(ends, 1, generator=generator)[:, 0]
        situations = follow.size(1)
        observation = torch.full((number, 1), -1)
        edges.append(torch.cat([tokens, observation], 1))
        rewards.append(_place_of(edges[-1]) * (alive & (then == situations))[:, None])
        alive = alive & (then < situations)
        place = torch.where(alive, then, 0)
    return Sample(torch.cat(edges, 1), torch.cat(rewards, 1).double())


def _states(policy: WordPolicy, q: Tensor, number: int, generator: torch.Generator) -> Sample:
    """Groups of responses in visited states, with the exact Q as the reward of each: a step of IMPROVE."""
    chances = policy.response_probabilities().detach()
    visits = policy.dialogue.visitation(chances)
    drawn = torch.multinomial(visits.flatten(), number // GROUP, replacement=True, generator=generator)
    turn, place = (x.repeat_interleave(GROUP) for x in (drawn // visits.size(1), drawn % visits.size(1)))
    action = torch.multinomial(chances[turn, place], 1, generator=generator)[:, 0]
    edges = policy.edges[turn, place, action]
    return Sample(edges, _place_of(edges) * q[turn, place, action][:, None])


Estimator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _reinforce(logprobs: Tensor, rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return objectives.reinforce_loss(logprobs, objectives.returns_to_go(rewards, mask), mask)


def _rloo(logprobs: Tensor, rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    advantages = objectives.rloo_advantages(objectives.masked_sum(rewards, mask, dim=1), GROUP)
    return objectives.reinforce_loss(logprobs, advantages[:, None].expand(mask.shape), mask)


def _grpo_without_std(logprobs: Tensor, rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    scores = objectives.masked_sum(rewards, mask, dim=1)
    advantages = objectives.grpo_advantages(scores, GROUP, divide_by_std=False)[:, None].expand(mask.shape)
    return objectives.clipped_policy_loss(logprobs, logprobs.detach(), advantages, mask)


def _ppo_at_ratio_one(logprobs: Tensor, rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    advantages, _ = objectives.gae(rewards, values, mask, gamma=1.0, gae_lambda=0.9)
    return objectives.clipped_policy_loss(logprobs, logprobs.detach(), advantages, mask)


def _ppo_without_the_future(logprobs: Tensor, rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    advantages, _ = objectives.gae(rewards, values, mask, 1.0, 0.9, turn_gamma=0.0)
    return objectives.clipped_policy_loss(logprobs, logprobs.detach(), advantages, mask)


ESTIMATORS = (_reinforce, _rloo, _grpo_without_std, _ppo_at_ratio_one)


def _cosine(estimator: Estimator, problem: str, seed: int, rows: int, steps: int) -> float:
    """Cosine between the exact gradient and the average of the estimates of `steps` batches."""
    policy = WordPolicy(TabularDialogue(seed=0), seed)
    policy.dialogue.expected_return(policy.response_probabilities(), 1.0).backward()
    exact = policy.logits.grad
    policy.logits.grad = None
    q = policy.dialogue.q_values(policy.response_probabilities().detach(), 1.0)
    values, generator = policy.token_values(q), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        whole = problem == "conversations"
        drawn = _conversations(policy, rows, generator) if whole else _states(policy, q, rows, generator)
        mask = drawn.edges >= 0
        logprobs = policy.token_logprobs()[drawn.edges]
        losses = estimator(logprobs, drawn.rewards, values[drawn.edges], mask)
        (objectives.token_weights(mask, dtype=torch.float64) * losses).sum().backward()
    assert exact is not None
    assert policy.logits.grad is not None
    return torch.cosine_similarity(exact, -policy.logits.grad, dim=0).item()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_average_over_conversations_points_along_the_exact_gradient(estimator: Estimator) -> None:
    assert _cosine(estimator, "conversations", seed=0, rows=40_000, steps=10) >= 0.99


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_single_turn_steps_against_exact_q_point_along_the_exact_gradient(estimator: Estimator) -> None:
    """The claim behind Iterative PPO: one turn at a time, rewarded by Q, is the multi-turn gradient."""
    assert _cosine(estimator, "states", seed=0, rows=40_000, steps=10) >= 0.99


def test_an_estimate_that_forgets_the_later_turns_is_told_apart() -> None:
    assert _cosine(_ppo_without_the_future, "conversations", seed=0, rows=40_000, steps=2) < 0.9
