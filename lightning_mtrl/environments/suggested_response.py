"""Suggested Response: an agent suggests replies to a business that talks with a customer.

The problem of section 2.1 of the Iterative PPO paper (arXiv:2511.21638), as a simulator without network.
Nothing here knows about models or tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar

from lightning_mtrl.conversation import describe_sent
from lightning_mtrl.environments.protocol import Observation, Optimum, Transition
from lightning_mtrl.environments.sales_dynamics import FITTING_TIER, SalesDynamics
from lightning_mtrl.environments.sales_language import (
    GREETINGS,
    INSTRUCTIONS,
    NEEDS,
    STYLE_ENDINGS,
    TIERS,
    Act,
    classify,
    phrase,
    reply_text,
)


@dataclass
class _Customer:
    need: str
    budget: str
    urgent: bool
    impatient: bool
    stated_need: bool = False
    stated_budget: bool = False


class SuggestedResponse:
    """A customer with a hidden need, budget and patience, and a business that treats suggestions its own way.

    Each response is a suggestion, or an abstention. The business sends it, edits it, writes its own words
    under its influence, rejects it, or goes away; then the customer reacts to what was *sent*. The state
    shows suggestion and sent message. The reward is 1 when the customer buys. The conversation ends when
    the customer buys, when the business has left, or when the customer has left (in the last turn they
    run out of time).

    Asking pays late: a customer whose need and budget are known buys the fitting product, a customer who
    is offered the wrong one often leaves, and a budget is rarely told before the need. `optimum` gives
    the exact values of the best and of the greedy agent.

    Args:
        max_turns: responses after which the customer has no more time.
        size: "natural" gives the agent a system message that explains the task; a chat model needs it, the
            tiny model was trained without ("tiny").
        dynamics: the probabilities; see `SalesDynamics`.
    """

    def __init__(
        self,
        max_turns: int = 8,
        size: Literal["tiny", "natural"] = "natural",
        dynamics: SalesDynamics | None = None,
    ) -> None:
        if size not in ("tiny", "natural"):
            raise ValueError(f"size must be 'tiny' or 'natural', got {size!r}")
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns
        self.size = size
        self.dynamics = dynamics or SalesDynamics()

    def reset(self, seed: int) -> Observation:
        """Draw a customer and a business; the first message may already name need and budget."""
        self._rng = random.Random(seed)
        rng, chances = self._rng, self.dynamics
        self._customer = customer = _Customer(
            need=rng.choice(NEEDS),
            budget=rng.choice(("small", "large")),
            urgent=rng.random() < chances.urgent,
            impatient=rng.random() < chances.impatient,
        )
        self._style = rng.choice(tuple(STYLE_ENDINGS))
        self._turn = 0
        text = rng.choice(GREETINGS["urgent" if customer.urgent else "calm"])
        if rng.random() < chances.opens_with_need:
            customer.stated_need = True
            text += " " + reply_text("stated_need", customer.need, customer.budget, rng)
            if rng.random() < chances.opens_with_budget:
                customer.stated_budget = True
                text += " " + reply_text("stated_budget", customer.need, customer.budget, rng)
        system = INSTRUCTIONS if self.size == "natural" else None
        return Observation(text, system, info=self._hidden())

    def step(self, response: str | None) -> Transition:
        """Let the business treat the suggestion and the customer react to what was sent."""
        self._turn += 1
        disposition, sent, act = self._business(response)
        if disposition == "left":
            return self._transition(response, "", "", disposition="rejected", terminated=True)
        customer, rng = self._customer, self._rng
        if act.kind == "offer" and act.tier is None:
            act = Act("offer", act.need, rng.choice(TIERS))
        fits_tier = act.tier == FITTING_TIER[customer.budget]
        options = self.dynamics.reactions(
            act, act.need == customer.need, fits_tier, (customer.stated_need, customer.stated_budget)
        )
        reaction = _draw(options, rng)
        self._remember(reaction)
        if reaction == "bought":
            reply = reply_text(reaction, customer.need, customer.budget, rng)
            return self._transition(response, sent, reply, disposition, terminated=True, reward=1.0)
        leaves = rng.random() < self.dynamics.hazard(reaction, customer.impatient, customer.urgent)
        if leaves or self._turn == self.max_turns:
            return self._transition(response, sent, "", disposition, terminated=True)
        reply = reply_text(reaction, customer.need, customer.budget, rng)
        return self._transition(response, sent, reply, disposition)

    def optimum(self, gamma: float) -> Optimum:
        """Exact values of the best and of the greedy agent, by dynamic programming over beliefs."""
        return _optimum(self.dynamics, self.max_turns, gamma)

    def _business(self, response: str | None) -> tuple[str, str, Act]:
        """Disposition, the message that was sent, and what that message does."""
        rng = self._rng
        act = Act("nonsense") if response is None else classify(response)
        disposition = _draw(self.dynamics.treatments(act), rng)
        if response is None and disposition != "left":
            disposition = "abstained"
        if response is None or disposition == "rejected":
            own = _draw(self.dynamics.own_acts(), rng)
            return disposition, phrase(own, rng) + STYLE_ENDINGS[self._style], own
        if disposition == "edited":
            return disposition, response + STYLE_ENDINGS[self._style], act
        if disposition == "influenced":
            worded = Act("offer", act.need, act.tier or rng.choice(TIERS)) if act.kind == "offer" else act
            return disposition, phrase(worded, rng) + STYLE_ENDINGS[self._style], worded
        return disposition, response, act

    def _remember(self, reaction: str) -> None:
        customer = self._customer
        customer.stated_need |= reaction in ("stated_need", "wrong_tier", "hesitated")
        customer.stated_budget |= reaction in ("stated_budget", "wrong_tier", "hesitated")

    def _transition(
        self,
        response: str | None,
        sent: str,
        reply: str,
        disposition: str,
        terminated: bool = False,
        reward: float = 0.0,
    ) -> Transition:
        info = {"sent": sent, "reply": reply, "disposition": disposition, **self._hidden()}
        return Transition(describe_sent(response, sent, reply), reward, terminated, info=info)

    def _hidden(self) -> dict[str, object]:
        c = self._customer
        return {"need": c.need, "budget": c.budget, "urgent": c.urgent, "impatient": c.impatient}


_T = TypeVar("_T")


def _draw(options: list[tuple[_T, float]], rng: random.Random) -> _T:
    return rng.choices([o for o, _ in options], [p for _, p in options])[0]


@lru_cache(maxsize=16)
def _optimum(dynamics: SalesDynamics, max_turns: int, gamma: float) -> Optimum:
    from lightning_mtrl.environments.sales_values import SalesValues

    return SalesValues(dynamics, max_turns, gamma).optimum()
