"""Medical recommendation: a complaint without the finding that decides; the outcome grades the diagnosis."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mtrl.environments.request_dialogue import Case, Move, Patience, Prospects, RequestDialogue

SAME_FAMILY = 0.25  # outcome of a diagnosis of the right organ that is not the right one

# Organ -> the question that decides between its illnesses, and finding -> illness.
FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "stomach": (
        "eat",
        {"milk": "lactose", "bread": "celiac", "eggs": "salmonella", "chili": "gastritis", "nuts": "allergy"},
    ),
    "head": (
        "when",
        {
            "light": "migraine",
            "stress": "tension",
            "reading": "eyestrain",
            "bending": "sinusitis",
            "cold": "neuralgia",
        },
    ),
    "skin": (
        "touch",
        {"nickel": "dermatitis", "ivy": "rash", "soap": "eczema", "wool": "hives", "sun": "sunburn"},
    ),
    "chest": (
        "cough",
        {
            "dry": "bronchitis",
            "barking": "croup",
            "whistling": "asthma",
            "wet": "pneumonia",
            "bloody": "tuberculosis",
        },
    ),
}
ORGANS = tuple(FAMILIES)
QUESTIONS = {
    "eat": "What did you eat?",
    "when": "When does it hurt?",
    "touch": "What did you touch?",
    "cough": "How is your cough?",
}
COMPLAINTS = {
    "stomach": "My stomach hurts.",
    "head": "My head hurts.",
    "skin": "My skin hurts.",
    "chest": "My chest hurts.",
}
NATURAL_COMPLAINTS = {
    "stomach": "Hello, I have had trouble with my stomach since yesterday. What could it be?",
    "head": "Hello, my head has been aching on and off for some days. What could it be?",
    "skin": "Hello, my skin has been red and itchy since the weekend. What could it be?",
    "chest": "Hello, my chest feels tight and I am coughing. What could it be?",
}
FINDINGS = {
    "eat": "I had {}.",
    "when": "It starts with {}.",
    "touch": "There was {}.",
    "cough": "It sounds {}.",
}
NOTHING = {
    "eat": "Nothing special.",
    "when": "All the time.",
    "touch": "Nothing new.",
    "cough": "I do not cough.",
}
ORGAN_OF = {illness: organ for organ, (_, table) in FAMILIES.items() for illness in table.values()}

_ILLNESS = re.compile(r"\b(" + "|".join(ORGAN_OF) + r")\b")
_ORGAN = re.compile(r"\b(" + "|".join(ORGANS) + r")\b(?= (?:problem|trouble|disease|illness|infection)s?\b)")
_SLOT_WORDS = {
    "eat": r"eat|eaten|eating|ate|food|diet|meals?|drink|drank|dinner|lunch|breakfast",
    "when": r"when|triggers?|triggered|starts?|worse|brings?|makes|causes?",
    "touch": r"touch|touched|contact|wear|wearing|soaps?|exposed|handled?|metal|plants?|cosmetics?|creams?",
    "cough": r"cough|coughing|coughs|phlegm|mucus|breath|breathe|breathing|wheez\w*|sounds?",
}
_SLOT = re.compile("|".join(rf"(?P<{slot}>\b(?:{words})\b)" for slot, words in _SLOT_WORDS.items()))


@dataclass(frozen=True)
class Complaint(Case):
    """A patient whose illness shows in one finding."""

    organ: str
    finding: str
    natural: bool = False

    @property
    def opening(self) -> str:
        """The complaint, which tells the organ."""
        return (NATURAL_COMPLAINTS if self.natural else COMPLAINTS)[self.organ]

    @property
    def withheld(self) -> tuple[str, ...]:
        """What the organ's deciding question asks for."""
        return (FAMILIES[self.organ][0],)

    @property
    def illness(self) -> str:
        """The right diagnosis."""
        return FAMILIES[self.organ][1][self.finding]

    def read(self, text: str) -> Move:
        """A question is about the first thing it mentions; a diagnosis names an illness or an organ."""
        low = text.lower()
        if "?" in low:
            found = _SLOT.search(low)
            return Move("ask", str(found.lastgroup) if found else "other")
        return Move("deliver") if _ILLNESS.search(low) or _ORGAN.search(low) else Move("chat")

    def tell(self, slot: str) -> str:
        """The finding, or nothing of note."""
        if slot in self.withheld:
            return FINDINGS[slot].format(self.finding)
        return NOTHING.get(slot, "That does not matter.")

    def score(self, text: str) -> float:
        """1 for the illness, `SAME_FAMILY` for another of the organ or the organ alone, else 0.

        Of several diagnoses the first one counts.
        """
        low = text.lower()
        named = _ILLNESS.search(low)
        if named:
            return 1.0 if named[1] == self.illness else SAME_FAMILY * (ORGAN_OF[named[1]] == self.organ)
        vague = _ORGAN.search(low)
        return SAME_FAMILY * bool(vague and vague[1] == self.organ)

    def prospects(self, told: frozenset[str]) -> Prospects:
        """Certain with the finding; without it one of the organ's illnesses is a guess."""
        if told >= set(self.withheld):
            return Prospects(1.0, 1.0)
        chance = 1 / len(FAMILIES[self.organ][1])
        return Prospects(chance, chance + (1 - chance) * SAME_FAMILY)

    def facts(self) -> dict[str, Any]:
        """Organ, finding, illness, and the question that decides."""
        return {
            "organ": self.organ,
            "finding": self.finding,
            "illness": self.illness,
            "withheld": list(self.withheld),
        }


def _table() -> str:
    lines = [
        f"{organ}: ask {QUESTIONS[slot]} "
        + ", ".join(f"{finding}: {illness}" for finding, illness in table.items())
        for organ, (slot, table) in FAMILIES.items()
    ]
    return "\n".join(lines)


class MedicalRecommendation(RequestDialogue):
    """A patient names the organ that hurts; one finding, told when asked for, decides the illness.

    Which question brings it depends on the organ. The outcome is 1 for the right illness, 0.25 for the
    right organ, else 0. Size "natural" has longer complaints and instructions with the table of illnesses;
    free wording is understood by key words. See `RequestDialogue` for the course of a conversation and for
    the pivotal turn.
    """

    demand = "What do I have?"
    natural_patience = Patience(questions=3, before=(0,), after=(4,))  # 6 responses at most
    instructions = (
        "You are a doctor in a training game with made-up rules. The patient names what hurts. Ask one "
        "short question at a time, and when you know enough give the diagnosis in one short sentence, such "
        f"as: You have croup. The game's table of organ, question, and finding: illness is\n{_table()}"
    )

    def draw(self, rng: random.Random) -> Case:
        """An organ and a finding, each as likely."""
        organ = rng.choice(ORGANS)
        return Complaint(organ, rng.choice(tuple(FAMILIES[organ][1])), self.size == "natural")

    def situations(self) -> Sequence[tuple[Case, float]]:
        """All organs have equally many illnesses, so all cases are alike."""
        return [(Complaint("head", "light", self.size == "natural"), 1.0)]
