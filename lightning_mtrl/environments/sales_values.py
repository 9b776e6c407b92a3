"""Exact values of the Suggested Response shop, for agents that see only what the agent sees.

The hidden facts (need, budget, patience) stay independent given what was seen, and the four needs are
alike, so a belief is small: how many needs are still possible, whether the customer has told need and
budget, whether they are in a hurry, and the odds that they are impatient. Every reachable belief is
visited once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from lightning_mtrl.environments.protocol import Optimum
from lightning_mtrl.environments.sales_dynamics import SalesDynamics
from lightning_mtrl.environments.sales_language import NEEDS, TIERS, Act


class Belief(NamedTuple):
    """What an agent knows before a response.

    Attributes:
        turn: responses already given.
        candidates: number of needs that are still possible.
        stated_need: the customer has told the need (then `candidates` is 1).
        known_budget: the customer has told or shown the budget.
        urgent: the customer said that they are in a hurry.
        impatience: probability that the customer is impatient, rounded to 1e-9.
    """

    turn: int
    candidates: int
    stated_need: bool
    known_budget: bool
    urgent: bool
    impatience: float


class Move(NamedTuple):
    """An act as the agent sees it.

    Attributes:
        kind: "ask_need", "ask_budget", "chat", "abstain", "nonsense" or "offer".
        possible: an offer names a need that is still possible.
        tier: an offer's tier is known to fit ("fit"), known not to ("misfit"), or a guess ("guess").
    """

    kind: str
    possible: bool = True
    tier: str = "guess"


class Value(NamedTuple):
    """Probability of success from here on, and expected discounted return."""

    success: float
    value: float


Policy = Callable[[Belief], list[tuple[Move, float]]]


def moves(belief: Belief) -> list[Move]:
    """Every move that differs from another one in this belief."""
    tiers = ("fit", "misfit") if belief.known_budget else ("guess",)
    offers = [Move("offer", True, tier) for tier in tiers]
    excluded = [Move("offer", False, tier) for tier in tiers] if belief.candidates < len(NEEDS) else []
    return [Move("ask_need"), Move("ask_budget"), Move("chat"), Move("abstain"), *offers, *excluded]


class SalesValues:
    """Dynamic programming over beliefs.

    Args:
        dynamics: the probabilities.
        max_turns: responses after which the customer leaves.
        gamma: discount for each response, in (0, 1].
    """

    def __init__(self, dynamics: SalesDynamics, max_turns: int, gamma: float) -> None:
        self.dynamics, self.max_turns, self.gamma = dynamics, max_turns, gamma
        self._hazards = cache(
            lambda reaction, urgent: tuple(
                dynamics.hazard(reaction, impatient, urgent) for impatient in (True, False)
            )
        )
        self._branches: dict[tuple[object, ...], list[tuple[str, Belief | None, float]]] = {}

    def starts(self) -> list[tuple[Belief, float]]:
        """The beliefs after the first message, with their probabilities."""
        d = self.dynamics
        found = []
        for urgent, share in ((True, d.urgent), (False, 1 - d.urgent)):
            vague = Belief(0, len(NEEDS), False, False, urgent, d.impatient)
            told = vague._replace(candidates=1, stated_need=True)
            found.append((vague, share * (1 - d.opens_with_need)))
            found.append((told, share * d.opens_with_need * (1 - d.opens_with_budget)))
            found.append((told._replace(known_budget=True), share * d.opens_with_need * d.opens_with_budget))
        return found

    def outcomes(self, belief: Belief, move: Move) -> Iterator[tuple[float, float, Belief | None]]:
        """All that can follow a move: (probability, reward, next belief or None at the end)."""
        key = (belief.candidates, belief.stated_need, belief.known_budget, belief.urgent, move)
        if key not in self._branches:
            self._branches[key] = self._merge(belief._replace(turn=0, impatience=0.0), move)
        for reaction, after, chance in self._branches[key]:
            if after is None:
                yield chance, float(reaction == "bought"), None
                continue
            stays, impatience = self._stay(belief, reaction)
            yield chance * (1 - stays), 0.0, None
            if stays > 0:
                yield chance * stays, 0.0, Belief(belief.turn + 1, *after[1:5], impatience)

    def _merge(self, belief: Belief, move: Move) -> list[tuple[str, Belief | None, float]]:
        """(reaction, what is known after it, chance): independent of turn and patience, so made once."""
        found: dict[tuple[str, Belief | None], float] = {}
        for sent, chance in self._sent(belief, move):
            reactions = [("left", 1.0, None)] if sent is None else self._reactions(belief, sent)
            for reaction, share, after in reactions:
                key = (reaction, None if reaction == "bought" else after)
                found[key] = found.get(key, 0.0) + chance * share
        return [(reaction, after, chance) for (reaction, after), chance in found.items()]

    def evaluate(self, policy: Policy) -> Value:
        """Exact success rate and discounted return of a policy."""
        return self._expect(lambda belief, value: self._mix(policy(belief), belief, value))

    def optimum(self) -> Optimum:
        """Values of the best agent (maximal discounted return) and of the greedy one."""
        best = self._expect(
            lambda belief, value: max(
                (self._after(belief, m, value) for m in moves(belief)), key=lambda v: v.value
            )
        )
        greedy = self.evaluate(self.greedy_policy)
        return Optimum(best.success, best.value, greedy.success, greedy.value)

    def best_move(self, belief: Belief) -> Move:
        """The move with the largest expected discounted return."""
        cache: dict[Belief, Value] = {}

        def value(b: Belief) -> Value:
            if b not in cache:
                cache[b] = max((self._after(b, m, value) for m in moves(b)), key=lambda v: v.value)
            return cache[b]

        return max(moves(belief), key=lambda m: self._after(belief, m, value).value)

    def greedy_policy(self, belief: Belief) -> list[tuple[Move, float]]:
        """The move with the largest chance of success in this very turn."""
        now = {m: sum(p * reward for p, reward, _ in self.outcomes(belief, m)) for m in moves(belief)}
        return [(max(now, key=lambda m: now[m]), 1.0)]

    def _expect(self, step: Callable[[Belief, Callable[[Belief], Value]], Value]) -> Value:
        cache: dict[Belief, Value] = {}

        def value(belief: Belief) -> Value:
            if belief not in cache:
                cache[belief] = step(belief, value)
            return cache[belief]

        parts = [(value(belief), probability) for belief, probability in self.starts()]
        return Value(sum(v.success * p for v, p in parts), sum(v.value * p for v, p in parts))

    def _mix(
        self, choice: list[tuple[Move, float]], belief: Belief, value: Callable[[Belief], Value]
    ) -> Value:
        parts = [
            (self._after(belief, move, value), probability) for move, probability in choice if probability > 0
        ]
        return Value(sum(v.success * p for v, p in parts), sum(v.value * p for v, p in parts))

    def _after(self, belief: Belief, move: Move, value: Callable[[Belief], Value]) -> Value:
        success = total = 0.0
        for probability, reward, following in self.outcomes(belief, move):
            later = value(following) if following else Value(0.0, 0.0)
            success += probability * (reward + later.success)
            total += probability * (reward + self.gamma * later.value)
        return Value(success, total)

    def _sent(self, belief: Belief, move: Move) -> list[tuple[Move | None, float]]:
        """The move that reaches the customer; None when the business left."""
        act = Act("nonsense" if move.kind in ("abstain", "nonsense") else move.kind)
        treatments = dict(self.dynamics.treatments(act))
        left = treatments.pop("left")
        rejected = treatments.pop("rejected")
        kept = sum(treatments.values())
        if move.kind == "abstain":
            rejected, kept = rejected + kept, 0.0
        own = [(sent, chance * rejected) for sent, chance in self._own_moves(belief)]
        return [(None, left), (move, kept), *own]

    def _own_moves(self, belief: Belief) -> list[tuple[Move, float]]:
        found: list[tuple[Move, float]] = []
        for act, chance in self.dynamics.own_acts():
            if act.kind != "offer":
                found.append((Move(act.kind), chance))
        offers = 1 - sum(chance for _, chance in found)
        return found + [(move, offers * share) for move, share in blind_offers(belief)]

    def _reactions(self, belief: Belief, move: Move) -> Iterator[tuple[str, float, Belief | None]]:
        """(reaction, probability, what is known after it)."""
        act = Act(move.kind)
        stated = (belief.stated_need, belief.known_budget)
        for fits_need, fits_tier, chance in self._fits(belief, move):
            for reaction, share in self.dynamics.reactions(act, fits_need, fits_tier, stated):
                if chance * share > 0:
                    yield reaction, chance * share, _learn(belief, reaction, move)

    def _fits(self, belief: Belief, move: Move) -> list[tuple[bool, bool, float]]:
        if move.kind != "offer":
            return [(False, False, 1.0)]
        right = 1 / belief.candidates if move.possible else 0.0
        tier = {"fit": 1.0, "misfit": 0.0, "guess": 1 / len(TIERS)}[move.tier]
        return [(False, False, 1 - right), (True, True, right * tier), (True, False, right * (1 - tier))]

    def _stay(self, belief: Belief, reaction: str) -> tuple[float, float]:
        """Chance that the customer stays after a reaction, and the odds of impatience if they do."""
        if belief.turn + 1 == self.max_turns:
            return 0.0, 0.0
        impatient, patient = self._hazards(reaction, belief.urgent)
        impatient_stays = belief.impatience * (1 - impatient)
        stays = impatient_stays + (1 - belief.impatience) * (1 - patient)
        return stays, round(impatient_stays / stays, 9)


def blind_offers(belief: Belief) -> list[tuple[Move, float]]:
    """An offer of any product in any version, as the moves that it can be."""
    possible = belief.candidates / len(NEEDS)
    tiers = (("fit", 0.5), ("misfit", 0.5)) if belief.known_budget else (("guess", 1.0),)
    chances = ((True, possible), (False, 1 - possible))
    return [(Move("offer", p, tier), share * t) for p, share in chances for tier, t in tiers if share > 0]


def _learn(belief: Belief, reaction: str, move: Move) -> Belief:
    """What is known after a reaction."""
    if reaction == "stated_need":
        return belief._replace(candidates=1, stated_need=True)
    if reaction == "stated_budget":
        return belief._replace(known_budget=True)
    if reaction in ("wrong_tier", "hesitated"):
        return belief._replace(candidates=1, stated_need=True, known_budget=True)
    if reaction == "wrong_need" and move.possible:
        return belief._replace(candidates=max(1, belief.candidates - 1))
    return belief
