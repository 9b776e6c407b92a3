"""Document writing: a letter whose kind or tone is not said; the outcome is BLEU against the wanted one."""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from lightning_mtrl.environments.document_texts import (
    CLOSINGS,
    DETAILS,
    KINDS,
    LETTERS,
    MESSAGES,
    NAMES,
    TONES,
)
from lightning_mtrl.environments.request_dialogue import SOLVED, Case, Move, Prospects, RequestDialogue

_SALUTATION = re.compile(
    r"\b(?:dear|hi|hello|hey|o)\s+(?:" + "|".join(NAMES) + r")\b.*", re.IGNORECASE | re.DOTALL
)
_SLOT_WORDS = {
    "kind": r"about|kind|sort|type|purpose|topic|subject|occasion|reason|message|say|content",
    "tone": r"tone|style|formal|formality|mood|manner|voice|closing|end|sign|signed|close|signature",
    "detail": r"when|where|date|day|time|place|location|details?",
    "name": r"who|whom|name|recipient|addressed",
}
_SLOT = re.compile("|".join(rf"(?P<{slot}>\b(?:{words})\b)" for slot, words in _SLOT_WORDS.items()))


def _spaced(text: str) -> str:
    """Words and punctuation marks in lower case with spaces between them: what BLEU counts."""
    return " ".join(re.findall(r"\w+|[^\w\s]", text.lower()))


@lru_cache(maxsize=65536)
def bleu(delivered: str, wanted: str, longest: int = 4) -> float:
    """BLEU in [0, 1] (torchmetrics), from single words up to runs of `longest` words, without smoothing."""
    from torchmetrics.functional.text import bleu_score

    words = _spaced(delivered)
    return float(bleu_score([words], [[_spaced(wanted)]], n_gram=longest)) if words else 0.0


def document_of(text: str) -> str | None:
    """The letter in a message: from its salutation on."""
    found = _SALUTATION.search(text)
    return found[0].strip() if found else None


class _Writing(Case):
    """What both sizes have in common: letters begin with a salutation, and are compared by BLEU."""

    longest_run: ClassVar[int] = 4

    @property
    @abstractmethod
    def wanted(self) -> str:
        """The letter that the user has in mind."""

    def read(self, text: str) -> Move:
        """A salutation begins a letter; a question is about the first thing that it mentions."""
        if document_of(text):
            return Move("deliver")
        if "?" not in text:
            return Move("chat")
        found = _SLOT.search(text.lower())
        return Move("ask", str(found.lastgroup) if found else "other")

    def score(self, text: str) -> float:
        """BLEU against the wanted letter; of a message without salutation as it is."""
        return bleu(document_of(text) or text.strip(), self.wanted, self.longest_run)


@dataclass(frozen=True)
class ShortLetter(_Writing):
    """A one-line letter of a kind and a tone, of which the request tells one."""

    longest_run = 3  # of about eight words
    name: str
    kind: str
    tone: str
    withheld_slot: str

    @property
    def opening(self) -> str:
        """The request."""
        told = KINDS[self.kind] if self.withheld_slot == "tone" else TONES[self.tone]
        return f"Please write {told} to {self.name}."

    @property
    def withheld(self) -> tuple[str, ...]:
        """Kind or tone."""
        return (self.withheld_slot,)

    @property
    def wanted(self) -> str:
        """The letter that the user has in mind."""
        return LETTERS[self.kind, self.tone].format(name=self.name)

    def tell(self, slot: str) -> str:
        """Kind or tone; anything else is left to the writer."""
        if slot == "kind":
            return f"It is {KINDS[self.kind]}."
        if slot == "tone":
            return f"Make it {self.tone}."
        return f"To {self.name}." if slot == "name" else "That does not matter."

    def prospects(self, told: frozenset[str]) -> Prospects:
        """Certain when both are known, else the best of the letters that are possible."""
        if self.withheld_slot in told:
            return Prospects(1.0, 1.0)
        letters = _possible(self.kind if self.withheld_slot == "tone" else None, self.tone)
        outcomes = [[bleu(letter, wanted, self.longest_run) for wanted in letters] for letter in letters]
        best = max(outcomes, key=sum)
        return Prospects(sum(o > SOLVED for o in best) / len(best), sum(best) / len(best))

    def facts(self) -> dict[str, Any]:
        """Kind, tone, what was withheld, and the wanted letter."""
        return {
            "kind": self.kind, "tone": self.tone, "withheld": [self.withheld_slot], "wanted": self.wanted,
        }  # fmt: skip


def _possible(kind: str | None, tone: str) -> tuple[str, ...]:
    """Letters of one kind, or (without a kind) of one tone; the name makes no difference."""
    wanted = [LETTERS[kind, t] for t in TONES] if kind else [LETTERS[k, tone] for k in KINDS]
    return tuple(letter.format(name=NAMES[0]) for letter in wanted)


@dataclass(frozen=True)
class LongLetter(_Writing):
    """Three parts: message, detail and closing; the user says the words of each part when asked for it."""

    name: str
    kind: str
    tone: str
    detail: str
    withheld_slots: tuple[str, ...]

    @property
    def opening(self) -> str:
        """The request, with the words of the parts that are not withheld."""
        stated = [f"Use these words: {self._part(s)}" for s in self._slots if s not in self.withheld_slots]
        return " ".join([f"Please write a letter to {self.name}.", *stated])

    @property
    def withheld(self) -> tuple[str, ...]:
        """Two of the three parts, the message among them."""
        return self.withheld_slots

    @property
    def wanted(self) -> str:
        """The letter that the user has in mind."""
        return self._letter(frozenset(self._slots))

    def tell(self, slot: str) -> str:
        """The words of a part."""
        if slot in self._slots:
            return f"Use these words: {self._part(slot)}"
        return f"It is for {self.name}." if slot == "name" else "That does not matter."

    def prospects(self, told: frozenset[str]) -> Prospects:
        """The letter of all parts that are known."""
        known = frozenset(slot for slot in self._slots if slot in told or slot not in self.withheld_slots)
        outcome = bleu(self._letter(known), self.wanted)
        return Prospects(float(outcome > SOLVED), outcome)

    def facts(self) -> dict[str, Any]:
        """What was withheld, and the wanted letter."""
        return {"withheld": list(self.withheld_slots), "wanted": self.wanted}

    _slots = ("kind", "detail", "tone")

    def _part(self, slot: str) -> str:
        return {"kind": MESSAGES[self.kind], "detail": self.detail, "tone": CLOSINGS[self.tone]}[slot]

    def _letter(self, parts: frozenset[str]) -> str:
        return " ".join([f"Dear {self.name},", *(self._part(slot) for slot in self._slots if slot in parts)])


class DocumentWriting(RequestDialogue):
    """A letter without its kind or its tone; the outcome is BLEU against the letter that the user wants.

    In size "tiny" a kind and a tone make a letter of one line, which shares at most its salutation with
    another one; BLEU then counts runs of up to three words. In size "natural" the user gives the words of
    the message, of a detail and of the closing when asked, and withholds two of them, the message among
    them; BLEU counts runs of up to four words. See `RequestDialogue` for the course of a conversation and
    for the pivotal turn.
    """

    demand = "Please write it now."
    instructions = (
        "You write letters. The user leaves parts out: the message (what it is about), the detail (when "
        "and where), or the tone (how it closes). Ask for one part at a time, in one short question, such "
        "as: What is it about? When and where? Which tone do you want? When you know the parts, write only "
        "the letter. Begin with Dear and the name, and use the user's words: message, detail, closing."
    )

    def draw(self, rng: random.Random) -> Case:
        """A letter, and what is withheld of it."""
        name, kind, tone = rng.choice(NAMES), rng.choice(tuple(KINDS)), rng.choice(tuple(TONES))
        if self.size == "tiny":
            return ShortLetter(name, kind, tone, rng.choice(("kind", "tone")))
        withheld = ("kind", rng.choice(("detail", "tone")))
        return LongLetter(name, kind, tone, rng.choice(DETAILS), withheld)

    def situations(self) -> Sequence[tuple[Case, float]]:
        """Kinds, tones and details, each as likely; the name makes no difference."""
        pairs = [(kind, tone) for kind in KINDS for tone in TONES]
        cases: list[Case]
        if self.size == "tiny":
            cases = [ShortLetter(NAMES[0], *pair, slot) for pair in pairs for slot in ("kind", "tone")]
        else:
            cases = [
                LongLetter(NAMES[0], kind, tone, detail, ("kind", other))
                for kind, tone in pairs
                for detail in DETAILS
                for other in ("detail", "tone")
            ]
        return [(case, 1 / len(cases)) for case in cases]
