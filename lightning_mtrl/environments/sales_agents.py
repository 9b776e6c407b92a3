"""Scripted agents of all skills for Suggested Response. They read text, as a model does, and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from lightning_mtrl.environments.protocol import Environment
from lightning_mtrl.environments.sales_dynamics import FITTING_TIER
from lightning_mtrl.environments.sales_language import (
    NEEDS,
    REPLIES,
    TIERS,
    Act,
    classify,
    phrase,
    read_reply,
)


@dataclass(frozen=True)
class Habits:
    """How a scripted agent chooses.

    Attributes:
        ask_need, ask_budget, chat, abstain: chances of these acts in any turn; the rest are offers.
        informed: chance that an offer uses all that is known; otherwise it is a blind offer.
        plans: ask exactly for what is not known yet, and offer once it is; overrides the chances.
    """

    ask_need: float = 0.08
    ask_budget: float = 0.2
    chat: float = 0.12
    abstain: float = 0.02
    informed: float = 1.0
    plans: bool = False


# It uses what it happens to hear, but offers too early and asks by chance alone.
MEDIOCRE = Habits()
PLANNER = Habits(informed=1.0, plans=True)


def random_habits(rng: random.Random) -> Habits:
    """An agent of any skill: the population on which the tiny model's base is trained."""
    asks = rng.uniform(0.1, 0.6)
    share = rng.uniform(0.3, 0.7)
    return Habits(
        ask_need=asks * share,
        ask_budget=asks * (1 - share),
        chat=rng.uniform(0.0, 0.3),
        abstain=rng.choice((0.0, 0.05)),
        informed=rng.random(),
        plans=rng.random() < 0.4,
    )


@dataclass
class ScriptedAgent:
    """Keeps what the customer has said, and acts by its habits."""

    habits: Habits
    rng: random.Random
    need: str | None = None
    budget: str | None = None
    excluded: set[str] = field(default_factory=set)

    def hear(self, observation: str, sent: Act | None) -> None:
        """Learn from a message; `sent` is what the shop's last message did."""
        self._notice_stated(observation)
        reaction, size = read_reply(observation)
        if sent is None or sent.kind != "offer":
            return
        if reaction == "wrong_need" and sent.need:
            self.excluded.add(sent.need)
        elif reaction == "wrong_tier":
            self.need, self.budget = sent.need, size
        elif reaction == "hesitated":
            self.need = sent.need
            self.budget = next(
                (size for size, tier in FITTING_TIER.items() if tier == sent.tier), self.budget
            )

    def respond(self) -> str | None:
        """The next suggestion; None to abstain."""
        act = self._plan() if self.habits.plans else self._habit()
        return None if act is None else phrase(act, self.rng)

    def _plan(self) -> Act:
        if self.need is None:
            return Act("ask_need")
        return (
            self._offer(informed=self.rng.random() < self.habits.informed)
            if self.budget
            else Act("ask_budget")
        )

    def _habit(self) -> Act | None:
        habits = self.habits
        kinds = ["ask_need", "ask_budget", "chat", "abstain"]
        chances = [habits.ask_need, habits.ask_budget, habits.chat, habits.abstain]
        kind = self.rng.choices([*kinds, "offer"], [*chances, max(0.0, 1 - sum(chances))])[0]
        if kind == "abstain":
            return None
        return Act(kind) if kind != "offer" else self._offer(informed=self.rng.random() < habits.informed)

    def _offer(self, informed: bool) -> Act:
        if not informed:
            return Act("offer", self.rng.choice(NEEDS), self.rng.choice(TIERS))
        possible = [need for need in NEEDS if need not in self.excluded] or list(NEEDS)
        tier = FITTING_TIER[self.budget] if self.budget else self.rng.choice(TIERS)
        return Act("offer", self.need or self.rng.choice(possible), tier)

    def _notice_stated(self, text: str) -> None:
        for need in NEEDS:
            if any(
                option.format(need=need) in text
                for option in REPLIES["stated_need"] + REPLIES["restated_need"]
            ):
                self.need = need
        for size in FITTING_TIER:
            options = REPLIES[f"stated_budget_{size}"] + REPLIES[f"restated_budget_{size}"]
            if any(option in text for option in options):
                self.budget = size


def play(environment: Environment, habits: Habits, seed: int) -> tuple[list[tuple[str, str]], float]:
    """One conversation of a scripted agent, as (role, text) messages, and its outcome.

    An abstention is an assistant message with empty text.
    """
    rng = random.Random(seed + 1_000_003)
    agent = ScriptedAgent(habits, rng)
    start = environment.reset(seed)
    agent.hear(start.text, None)
    messages = [("user", start.text)]
    outcome, ended = 0.0, False
    while not ended:
        response = agent.respond()
        transition = environment.step(response)
        messages += [("assistant", response or ""), ("user", transition.observation)]
        agent.hear(transition.observation, classify(str(transition.info["sent"])))
        outcome += transition.reward
        ended = transition.terminated
    return messages, outcome
