"""A dialogue so small that every response can be listed, and every value computed exactly.

The ground truth for anything that estimates: Monte Carlo returns, Q-critics, policy gradients, and the
improvement theorems of Iterative PPO (arXiv:2511.21638, section 3). The environment itself speaks text like
any other; the exact values are methods beside that, on float64 tensors of the shapes below.

Shape letters: H turns, X situations, A responses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl.environments.protocol import Observation, Optimum, Transition

WORDS = ("ba", "do", "ki", "lu", "me", "so")
SITUATIONS = ("amber", "blue", "coral", "denim", "ebony", "fawn")
MAX_RESPONSE_WORDS = 3
MAX_RESPONSES = 20

_State = tuple[int, int]


class TabularDialogue:
    """A few situations, a few known responses in each, and a chance of success with every response.

    A turn's state is the turn's number and the situation, which the last message names. A known response
    succeeds with some chance (reward 1, the end); else the other party leaves with some chance (the end);
    else the next situation is drawn. After the last turn the other party leaves. Chances of success rise
    with the turns, and early successes are paid for with departures, so the response that succeeds most in
    its own turn is often not the best.

    Any other text, and an abstention, is the one bad response: the conversation ends without success, so
    its value is 0 in every state.

    It is not a task to train a real model on; `SuggestedResponse` is.

    Args:
        seed: draws the chances and the responses; equal seeds give equal dialogues.
        max_turns: turns after which the other party leaves.
        situations: number of situations, 1 to 6.
        responses: known responses in each state, 2 to 20; each is one to three words.
    """

    def __init__(self, seed: int = 0, max_turns: int = 3, situations: int = 3, responses: int = 4) -> None:
        if max_turns < 1 or not 1 <= situations <= len(SITUATIONS) or not 2 <= responses <= MAX_RESPONSES:
            raise ValueError(
                f"need max_turns >= 1, 1 to {len(SITUATIONS)} situations and 2 to {MAX_RESPONSES} responses, "
                f"got {max_turns}, {situations} and {responses}"
            )
        rng = random.Random(seed)
        self.max_turns = max_turns
        self.situations = SITUATIONS[:situations]
        states = [(turn, place) for turn in range(max_turns) for place in range(situations)]
        self.responses = {state: _draw_responses(rng, responses) for state in states}
        self._initial = _shares(rng, situations)
        chances = {s: _chances(rng, _readiness(rng, s[0], max_turns), responses) for s in states}
        self._success = {state: [success for success, _ in of] for state, of in chances.items()}
        self._stay = {state: [stay for _, stay in of] for state, of in chances.items()}
        self._next = {s: [_shares(rng, situations) for _ in range(responses)] for s in states}

    def reset(self, seed: int) -> Observation:
        """Draw the first situation."""
        self._rng = random.Random(seed)
        self._turn, self._place = 0, _draw(self._rng, self._initial)
        return Observation(self._message(), info=self._state_info())

    def step(self, response: str | None) -> Transition:
        """Succeed, leave, or go on to another situation."""
        state = (self._turn, self._place)
        if response not in self.responses[state]:
            return Transition("", terminated=True, info={"outcome": 0.0})
        action = self.responses[state].index(response)
        luck = self._rng.random()
        if luck < self._success[state][action]:
            return Transition("", reward=1.0, terminated=True, info={"outcome": 1.0})
        goes_on = luck < self._success[state][action] + self._stay[state][action]
        self._turn += 1
        if not goes_on or self._turn == self.max_turns:
            return Transition("", terminated=True, info={"outcome": 0.0})
        self._place = _draw(self._rng, self._next[state][action])
        return Transition(self._message(), info=self._state_info())

    def optimum(self, gamma: float) -> Optimum:
        """Exact values of the best and of the greedy agent, by dynamic programming."""
        best, greedy = self.optimal_policy(gamma), self.greedy_policy()
        return Optimum(
            success_rate=self.expected_return(best, 1.0).item(),
            mean_return=self.expected_return(best, gamma).item(),
            greedy_success_rate=self.expected_return(greedy, 1.0).item(),
            greedy_return=self.expected_return(greedy, gamma).item(),
        )

    @property
    def initial(self) -> Float[Tensor, " X"]:
        """Chance of each first situation."""
        return torch.tensor(self._initial, dtype=torch.float64)

    @property
    def success(self) -> Float[Tensor, "H X A"]:
        """Chance that a response succeeds: the expected reward of its turn."""
        return self._table(self._success)

    @property
    def transitions(self) -> Float[Tensor, "H X A X"]:
        """Chance to go on to each next situation; what is missing to 1 is the end of the conversation."""
        going_on = self._table(self._stay)[..., None] * self._table(self._next)
        going_on[-1] = 0
        return going_on

    def uniform_policy(self) -> Float[Tensor, "H X A"]:
        """Every known response with the same chance."""
        return torch.full_like(self.success, 1 / self.success.size(-1))

    def q_values(self, policy: Float[Tensor, "H X A"], gamma: float) -> Float[Tensor, "H X A"]:
        """Q^pi: expected discounted return of a response now and of the policy after it.

        Differentiable in the policy.

        Args:
            policy: chance of each known response in each state. A row may sum to less than 1: the rest is
                the bad response, whose value is 0.
            gamma: discount for each turn, in [0, 1].
        """
        return self._backward(gamma, lambda turn, q: (policy[turn] * q).sum(-1))

    def state_values(self, policy: Float[Tensor, "H X A"], gamma: float) -> Float[Tensor, "H X"]:
        """V^pi: expected discounted return of the policy from each state on."""
        return (policy * self.q_values(policy, gamma)).sum(-1)

    def expected_return(self, policy: Float[Tensor, "H X A"], gamma: float) -> Float[Tensor, ""]:
        """Expected discounted return of a whole conversation; with gamma 1 the success rate."""
        return (self.initial * self.state_values(policy, gamma)[0]).sum()

    def optimal_q_values(self, gamma: float) -> Float[Tensor, "H X A"]:
        """Q*: the same for the policy that is best in every state."""
        return self._backward(gamma, lambda turn, q: q.amax(-1))

    def optimal_values(self, gamma: float) -> Float[Tensor, "H X"]:
        """V*: the largest expected discounted return from each state on."""
        return self.optimal_q_values(gamma).amax(-1)

    def optimal_policy(self, gamma: float) -> Float[Tensor, "H X A"]:
        """The best response of each state, with chance 1."""
        return _choose_best(self.optimal_q_values(gamma))

    def greedy_policy(self) -> Float[Tensor, "H X A"]:
        """In each state the response that succeeds most in that very turn, with chance 1."""
        return _choose_best(self.success)

    def visitation(self, policy: Float[Tensor, "H X A"]) -> Float[Tensor, "H X"]:
        """Chance that a conversation of the policy comes to each state."""
        visits, transitions = [self.initial], self.transitions
        for turn in range(self.max_turns - 1):
            visits.append(torch.einsum("x,xa,xay->y", visits[-1], policy[turn], transitions[turn]))
        return torch.stack(visits)

    def policy_gradient(self, logits: Float[Tensor, "H X A"], gamma: float) -> Float[Tensor, "H X A"]:
        """Gradient of `expected_return` with respect to the logits of a softmax over known responses.

        gamma^h d^pi(s) pi(a|s) (Q^pi(s, a) - V^pi(s)) in the state s of turn h.

        Source: Sutton et al. 2000, policy gradient theorem.
        """
        policy = logits.softmax(-1)
        q = self.q_values(policy, gamma)
        advantages = q - (policy * q).sum(-1, keepdim=True)
        discount = gamma ** torch.arange(self.max_turns, dtype=torch.float64)
        return (discount[:, None] * self.visitation(policy))[..., None] * policy * advantages

    def _backward(self, gamma: float, value_of: Callable[[int, Tensor], Tensor]) -> Float[Tensor, "H X A"]:
        success, transitions = self.success, self.transitions
        following = torch.zeros_like(self.initial)
        turns: list[Tensor] = []
        for turn in reversed(range(self.max_turns)):
            turns.append(success[turn] + gamma * transitions[turn] @ following)
            following = value_of(turn, turns[-1])
        return torch.stack(turns[::-1])

    def _table(self, of_state: dict[_State, Any]) -> Tensor:
        rows = [[of_state[turn, x] for x in range(len(self.situations))] for turn in range(self.max_turns)]
        return torch.tensor(rows, dtype=torch.float64)

    def _message(self) -> str:
        return f"turn {self._turn + 1} {self.situations[self._place]}"

    def _state_info(self) -> dict[str, int]:
        return {"turn": self._turn, "situation": self._place}


def _choose_best(q: Float[Tensor, "H X A"]) -> Float[Tensor, "H X A"]:
    return torch.nn.functional.one_hot(q.argmax(-1), q.size(-1)).double()


def _draw_responses(rng: random.Random, number: int) -> list[str]:
    """Different sequences of words; some begin alike, so that the first word does not decide."""
    drawn: dict[str, None] = {}
    while len(drawn) < number:
        length = rng.randint(1, MAX_RESPONSE_WORDS)
        drawn[" ".join(rng.choice(WORDS) for _ in range(length))] = None
    return list(drawn)


def _chances(rng: random.Random, readiness: float, number: int) -> list[tuple[float, float]]:
    """Chance of success, and of going on, of each response of a state.

    Each response presses for success with a different force, and has a skill of its own. Pressing costs:
    without success it drives the other party away.
    """
    forces = [(i + rng.uniform(0.2, 0.8)) / number for i in range(number)]
    rng.shuffle(forces)
    successes = [force * rng.uniform(0.8, 1.0) * readiness for force in forces]
    return [(p, (1 - p) * (1 - 0.9 * force)) for p, force in zip(successes, forces, strict=True)]


def _readiness(rng: random.Random, turn: int, max_turns: int) -> float:
    """The highest chance of success in a state: a few tenths in the first turn, up to 0.95 in the last."""
    return rng.uniform(0.6, 1.0) * (0.95 if max_turns == 1 else 0.25 + 0.7 * turn / (max_turns - 1))


def _shares(rng: random.Random, number: int) -> list[float]:
    """Chances that sum to 1, none of them tiny."""
    weights = [rng.uniform(0.2, 1.0) for _ in range(number)]
    return [weight / sum(weights) for weight in weights]


def _draw(rng: random.Random, shares: Sequence[float]) -> int:
    return rng.choices(range(len(shares)), shares)[0]
