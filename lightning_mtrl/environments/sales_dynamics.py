"""Chances of the Suggested Response shop, in one place.

The simulator draws from them, and the exact values enumerate them, so the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mtrl.environments.sales_language import NEEDS, TIERS, Act

FITTING_TIER = {"small": "basic", "large": "premium"}


@dataclass(frozen=True)
class SalesDynamics:
    """All probabilities of `SuggestedResponse`.

    Attributes:
        accepted, edited, influenced, left: how often the business sends a sensible suggestion as it is,
            edits it, writes its own words for the same act, or leaves the conversation. Otherwise it
            rejects the suggestion outright and does what it likes.
        nonsense_accepted: how often the business sends a suggestion that nobody can read.
        buys_fitting: chance of a sale when product and version fit.
        buys_wrong_tier: the same when only the product fits.
        states_need: chance that a customer who is asked says what they need.
        states_budget: chance that they name their budget once they have said what they need.
        states_budget_early: the same when they have not yet said what they need.
        opens_with_need, opens_with_budget: chance that the first message names the need, and, if so,
            the budget too.
        urgent, impatient: shares of customers. Urgency shows in the first message; patience never shows.
        hazards: chance that a customer leaves after each reaction, for patient and impatient ones.
        urgency_factor: hazards of urgent customers are this many times larger (0.9 at most).
    """

    accepted: float = 0.80
    edited: float = 0.08
    influenced: float = 0.06
    left: float = 0.01
    nonsense_accepted: float = 0.2
    buys_fitting: float = 0.94
    buys_wrong_tier: float = 0.02
    states_need: float = 0.95
    states_budget: float = 0.98
    states_budget_early: float = 0.4
    opens_with_need: float = 0.15
    opens_with_budget: float = 0.3
    urgent: float = 0.3
    impatient: float = 0.4
    urgency_factor: float = 1.5
    hazards: tuple[tuple[str, float, float], ...] = (
        ("stated", 0.02, 0.06),
        ("evaded", 0.05, 0.15),
        ("restated", 0.08, 0.20),
        ("chatted", 0.08, 0.20),
        ("puzzled", 0.20, 0.45),
        ("hesitated", 0.10, 0.25),
        ("wrong_tier", 0.80, 0.95),
        ("wrong_need", 0.45, 0.80),
    )

    def treatments(self, act: Act) -> list[tuple[str, float]]:
        """How the business treats a suggestion: (disposition, chance); "left" when it goes away."""
        if act.kind == "nonsense":
            accepted = self.nonsense_accepted
            return [("accepted", accepted), ("rejected", 1 - accepted - self.left), ("left", self.left)]
        kept = [("accepted", self.accepted), ("edited", self.edited), ("influenced", self.influenced)]
        rejected = 1 - self.accepted - self.edited - self.influenced - self.left
        return [*kept, ("rejected", rejected), ("left", self.left)]

    def own_acts(self) -> list[tuple[Act, float]]:
        """What the business does without the agent: chat, ask, or offer anything at all."""
        blind = 0.3 / (len(NEEDS) * len(TIERS))
        offers = [(Act("offer", need, tier), blind) for need in NEEDS for tier in TIERS]
        return [(Act("chat"), 0.5), (Act("ask_need"), 0.2), *offers]

    def reactions(
        self, act: Act, fits_need: bool, fits_tier: bool, stated: tuple[bool, bool]
    ) -> list[tuple[str, float]]:
        """The customer's reaction to an act: (reaction, chance).

        Args:
            act: what the message that was sent does.
            fits_need: an offer names the product that the customer needs.
            fits_tier: an offer names the version for the customer's budget.
            stated: whether the customer has told need and budget.
        """
        if act.kind == "offer":
            if not fits_need:
                return [("wrong_need", 1.0)]
            buys, otherwise = (
                (self.buys_fitting, "hesitated") if fits_tier else (self.buys_wrong_tier, "wrong_tier")
            )
            return [("bought", buys), (otherwise, 1 - buys)]
        if act.kind == "ask_need":
            told = "restated_need" if stated[0] else "stated_need"
            return [(told, self.states_need), ("evaded", 1 - self.states_need)]
        if act.kind == "ask_budget":
            told = "restated_budget" if stated[1] else "stated_budget"
            chance = self.states_budget if stated[0] or stated[1] else self.states_budget_early
            return [(told, chance), ("evaded", 1 - chance)]
        return [("chatted" if act.kind == "chat" else "puzzled", 1.0)]

    def hazard(self, reaction: str, impatient: bool, urgent: bool) -> float:
        """Chance that the customer leaves after a reaction."""
        family = reaction.removesuffix("_need").removesuffix("_budget")
        rates = {name: (patient, short) for name, patient, short in self.hazards}
        patient, short = rates[reaction] if reaction in rates else rates[family]
        rate = short if impatient else patient
        return min(0.9, rate * self.urgency_factor) if urgent else rate
