"""What each embedded model is trained on, and the probe that says when it is good."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lightning_mtrl.environments import request_agents, sales_agents
from lightning_mtrl.environments.document_texts import KINDS, TONES
from lightning_mtrl.environments.document_writing import DocumentWriting
from lightning_mtrl.environments.math_tutoring import NUMBERS, MathTutoring, Sum
from lightning_mtrl.environments.medical_recommendation import (
    FAMILIES,
    FINDINGS,
    Complaint,
    MedicalRecommendation,
)
from lightning_mtrl.environments.request_dialogue import INVITATION, PLEASED, Case, Patience
from lightning_mtrl.environments.sales_dynamics import FITTING_TIER, SalesDynamics
from lightning_mtrl.environments.sales_language import ACT_PHRASES, NEEDS, REPLIES, TIERS
from lightning_mtrl.environments.suggested_response import SuggestedResponse
from lightning_mtrl.models.tiny import ASSISTANT, END, USER

Messages = Sequence[tuple[str, str]]


def rendered(messages: Messages) -> str:
    """A conversation in the chat template's form."""
    return "".join(f"<|{role}|>{text}{END}" for role, text in messages)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Right-padded ids and a mask of the real tokens."""
    batch = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    )
    return batch["input_ids"], batch["attention_mask"].bool()


class Recipe(ABC):
    """How one embedded model is made.

    Attributes:
        model: its name in `TINY_MODELS`.
        vocabulary: tokens at most; enough for every word of its conversations.
        base_steps: optimizer steps of the base.
        pi_0_steps: optimizer steps of the adapter.
    """

    model: str
    vocabulary: int
    base_steps: int
    pi_0_steps: int

    @abstractmethod
    def any_agent(self, rng: random.Random, seed: int) -> str:
        """A conversation of an agent of any skill; its habits come from `rng`, its luck from `seed`."""

    @abstractmethod
    def mediocre_agent(self, seed: int) -> str:
        """A conversation of the agent that pi_0 imitates."""

    @abstractmethod
    def probe(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
        """Chances that show what the base knows."""


# A customer who was offered the wrong thing stays more often here than in the shop where the policy learns,
# so a conversation holds more offers and reactions. In the other shop the base had not found out within
# 2,900 steps that an offer must fit what was said; here it has after 2,000.
PATIENT_CUSTOMERS = SalesDynamics(
    buys_wrong_tier=0.08,
    states_budget=0.95,
    hazards=(
        ("stated", 0.02, 0.06),
        ("evaded", 0.05, 0.15),
        ("restated", 0.08, 0.20),
        ("chatted", 0.08, 0.20),
        ("puzzled", 0.20, 0.45),
        ("hesitated", 0.10, 0.25),
        ("wrong_tier", 0.20, 0.45),
        ("wrong_need", 0.30, 0.60),
    ),
)


class SalesRecipe(Recipe):
    """Suggested Response; the base learns with more patient customers than pi_0."""

    model, vocabulary, base_steps, pi_0_steps = "sales", 640, 3200, 80
    broad = SuggestedResponse(size="tiny", dynamics=PATIENT_CUSTOMERS)
    environment = SuggestedResponse(size="tiny")

    def any_agent(self, rng: random.Random, seed: int) -> str:
        """A shop assistant."""
        return rendered(sales_agents.play(self.broad, sales_agents.random_habits(rng), seed)[0])

    def mediocre_agent(self, seed: int) -> str:
        """One that offers too early."""
        return rendered(sales_agents.play(self.environment, sales_agents.MEDIOCRE, seed)[0])

    @torch.no_grad()
    def probe(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
        """Chance of a sale after fitting and other offers, in states where need and budget were told."""
        rng = random.Random(0)
        texts: dict[str, list[str]] = {"fitting": [], "wrong need": [], "wrong tier": []}
        for _ in range(64):
            need, size = rng.choice(NEEDS), rng.choice(("small", "large"))
            other = rng.choice([n for n in NEEDS if n != need])
            fit = FITTING_TIER[size]
            misfit = next(t for t in TIERS if t != fit)
            offers = {"fitting": (need, fit), "wrong need": (other, fit), "wrong tier": (need, misfit)}
            for kind, (n, t) in offers.items():
                lines = [
                    ("user", "Hello."),
                    ("assistant", rng.choice(ACT_PHRASES["ask_need"])),
                    ("user", rng.choice(REPLIES["stated_need"]).format(need=need)),
                    ("assistant", rng.choice(ACT_PHRASES["ask_budget"])),
                    ("user", rng.choice(REPLIES[f"stated_budget_{size}"])),
                    ("assistant", rng.choice(ACT_PHRASES["offer"]).format(need=n, tier=t)),
                ]
                texts[kind].append(rendered(lines) + USER)
        bought = [
            tokenizer(reply.split()[0].rstrip(","), add_special_tokens=False)["input_ids"][0]
            for reply in REPLIES["bought"]
        ]
        found = {}
        for kind, rows in texts.items():
            ids, attention = encode(tokenizer, rows)
            last = attention.sum(1) - 1
            logits = model(input_ids=ids, attention_mask=attention).logits
            chances = logits[torch.arange(len(rows)), last].softmax(-1)
            found[kind] = chances[:, bought].sum(1).mean().item()
        return found


class TasksRecipe(Recipe):
    """The three tasks with a withheld fact."""

    model, vocabulary, base_steps, pi_0_steps = "tasks", 1024, 2200, 120
    # Conversations of five turns at most, and not of up to eight as when they are played: small talk repeats.
    environments = tuple(
        task(patience=Patience(after=(1, 2)))
        for task in (MathTutoring, DocumentWriting, MedicalRecommendation)
    )
    shares = (0, 1, 0, 2)  # adding takes most practice

    def any_agent(self, rng: random.Random, seed: int) -> str:
        """An assistant."""
        return self._play(request_agents.random_habits(rng), seed)

    def mediocre_agent(self, seed: int) -> str:
        """One that asks about anything."""
        return self._play(request_agents.MEDIOCRE, seed)

    def _play(self, habits: request_agents.Habits, seed: int) -> str:
        environment = self.environments[self.shares[seed % len(self.shares)]]
        return rendered(request_agents.play(environment, habits, seed)[0])

    def probe(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
        """For each task the chance of three texts, with the fact told where that matters.

        "right": the right delivery. "told": the user's answer to the right question, over all facts that it
        can hold. "pleased": the user's thanks after the right delivery; "pleased wrongly": after a wrong one.
        """
        found: dict[str, float] = {}
        for environment in self.environments:
            rows: dict[str, list[tuple[str, str]]] = {
                "right": [],
                "told": [],
                "pleased": [],
                "pleased wrongly": [],
            }
            rng = random.Random(0)
            for _ in range(48):
                case = environment.draw(rng)
                asked = self._asked(case)
                demanded = [
                    *asked,
                    ("user", case.tell(case.withheld[0])),
                    ("assistant", "I see."),
                    ("user", environment.demand),
                ]
                right, wrong = request_agents.right_delivery(case), self._wrong(case, rng)
                rows["right"].append((rendered(demanded) + ASSISTANT, right + END))
                rows["told"] += [(rendered(asked) + USER, text + END) for text in self._tellings(case)]
                for kind, said in (("pleased", right), ("pleased wrongly", wrong)):
                    rows[kind].append((rendered([*demanded, ("assistant", said)]) + USER, PLEASED + END))
            name = type(environment).__name__
            for kind, pairs in rows.items():
                found[f"{name} {kind}"] = _chances(model, tokenizer, pairs).sum().item() / 48
        return found

    @staticmethod
    def _asked(case: Case) -> list[tuple[str, str]]:
        asked = request_agents.phrasings(case)[case.withheld[0]]
        return [("user", f"{case.opening} {INVITATION}"), ("assistant", asked)]

    @staticmethod
    def _wrong(case: Case, rng: random.Random) -> str:
        while (text := request_agents.guess(case, rng)) == request_agents.right_delivery(case):
            pass
        return text

    @staticmethod
    def _tellings(case: Case) -> list[str]:
        slot = case.withheld[0]
        if isinstance(case, Sum):
            return [f"{number} {slot}." for number in NUMBERS]
        if isinstance(case, Complaint):
            return [FINDINGS[slot].format(finding) for finding in FAMILIES[case.organ][1]]
        return (
            [f"It is {kind}." for kind in KINDS.values()]
            if slot == "kind"
            else [f"Make it {t}." for t in TONES]
        )


@torch.no_grad()
def _chances(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> Tensor:
    """Chance of each second text right after the first one."""
    ids, attention = encode(tokenizer, [before + after for before, after in pairs])
    begins = encode(tokenizer, [before for before, _ in pairs])[1].sum(1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
    picked = logits.gather(-1, ids[:, 1:, None])[..., 0]
    place = torch.arange(1, ids.shape[1])
    scored = attention[:, 1:] & (place >= begins[:, None])
    return (picked * scored).sum(1).exp()


RECIPES: dict[str, Recipe] = {recipe.model: recipe for recipe in (SalesRecipe(), TasksRecipe())}
