"""Math tutoring: a word problem with numbers left out; the outcome is whether the answer is right."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mtrl.environments.request_dialogue import Case, Move, Prospects, RequestDialogue
from lightning_mtrl.environments.word_problems import WordProblem, word_problem

ITEMS = ("pens", "books", "cups", "coins")
NUMBERS = tuple(range(2, 10))
NATURAL_SAMPLE = 64  # word problems over which the optimum of size "natural" is a mean

_NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
_STATED = re.compile(rf"(?:answer|total|result|sum|\bis|\bare|=|boxed\{{)[^\d?]{{0,25}}?({_NUMBER})", re.I)
_NAMED = re.compile(rf"\b(?:answer|boxed\{{)\W*(?:is|=|:)?\W*{_NUMBER}", re.I)
_COUNTED = re.compile(rf"how (?:many|much) (?:\w+ ){{0,3}}?({'|'.join(ITEMS)})\b")
_MENTIONED = re.compile(rf"\b({'|'.join(ITEMS)})\b")


def stated_answer(text: str) -> float | None:
    """The number that a message gives as its answer: the last one after "answer", "is", "=" or the like."""
    found = _STATED.findall(text)
    return _value(found[-1]) if found else None


def last_number(text: str) -> float | None:
    """The last number of a message."""
    found = re.findall(_NUMBER, text)
    return _value(found[-1]) if found else None


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def is_answer(text: str) -> bool:
    """Whether a message answers: it names an answer, or states a number and does not end in a question."""
    if _NAMED.search(text):
        return True
    return stated_answer(text) is not None and not text.rstrip().endswith("?")


def _right(text: str, answer: float) -> float:
    """1 when the number that was stated, or else the last one, is the answer."""
    given = stated_answer(text)
    given = last_number(text) if given is None else given
    return float(given is not None and abs(given - answer) < 1e-6)


@dataclass(frozen=True)
class Sum(Case):
    """Two kinds of things: how many of one is said, how many of the other is asked for."""

    item: str
    number: int
    withheld_item: str
    withheld_number: int
    withheld_first: bool

    @property
    def opening(self) -> str:
        """The request."""
        parts = [f"{self.number} {self.item}", f"some {self.withheld_item}"]
        first, second = reversed(parts) if self.withheld_first else parts
        return f"{first[0].upper()}{first[1:]} and {second}. How many in all?"

    @property
    def withheld(self) -> tuple[str, ...]:
        """The thing whose number is missing."""
        return (self.withheld_item,)

    @property
    def answer(self) -> int:
        """The sum."""
        return self.number + self.withheld_number

    def read(self, text: str) -> Move:
        """A question asks for the thing after "how many", or else for the first thing it names."""
        if is_answer(text):
            return Move("deliver")
        if "?" not in text:
            return Move("chat")
        low = text.lower()
        named = _COUNTED.search(low) or _MENTIONED.search(low)
        return Move("ask", named[1] if named else "other")

    def tell(self, slot: str) -> str:
        """A number, or that there is none."""
        if slot == self.withheld_item:
            return f"{self.withheld_number} {slot}."
        if slot == self.item:
            return f"{self.number} {slot}, as I said."
        return f"I have no {slot}." if slot in ITEMS else "That does not matter."

    def score(self, text: str) -> float:
        """1 for the sum."""
        return _right(text, self.answer)

    def prospects(self, told: frozenset[str]) -> Prospects:
        """Certain with the missing number, one of eight without."""
        chance = 1.0 if self.withheld_item in told else 1 / len(NUMBERS)
        return Prospects(chance, chance)

    def facts(self) -> dict[str, Any]:
        """The missing thing, its number, and the answer."""
        return {"withheld": [self.withheld_item], "answer": self.answer}


@dataclass(frozen=True)
class BlankedProblem(Case):
    """A word problem in which numbers are blanks."""

    problem: WordProblem

    @property
    def opening(self) -> str:
        """The request."""
        return f"Please help me with this problem. {self.problem.text}"

    @property
    def withheld(self) -> tuple[str, ...]:
        """Names of the blanks."""
        return tuple(self.problem.blanks)

    def read(self, text: str) -> Move:
        """A question asks for the blank whose surroundings it mentions most."""
        if is_answer(text):
            return Move("deliver")
        if "?" not in text:
            return Move("chat")
        return Move("ask", self.problem.blank_asked_for(text) or "other")

    def tell(self, slot: str) -> str:
        """The sentence with its number."""
        if slot in self.problem.blanks:
            return f"Oh, I left that out: {self.problem.sentence(slot)}"
        return "That does not matter. It is about the numbers in the problem."

    def score(self, text: str) -> float:
        """1 for the problem's answer."""
        return _right(text, self.problem.answer)

    def prospects(self, told: frozenset[str]) -> Prospects:
        """Certain with all numbers; a number that nobody knows is not guessed."""
        chance = float(told >= set(self.withheld))
        return Prospects(chance, chance)

    def facts(self) -> dict[str, Any]:
        """The blanks, their numbers, and the answer."""
        return {"withheld": dict(self.problem.blanks), "answer": self.problem.answer}


class MathTutoring(RequestDialogue):
    """A student's word problem lacks numbers; the outcome is 1 for the right answer, else 0.

    Size "tiny" adds two small numbers, one of which is told when the agent asks for the right thing. Size
    "natural" takes problems of reasoning-gym (`gsm_symbolic`; pip install 'lightning_mtrl[math]') and blanks
    one or two numbers. See `RequestDialogue` for the course of a conversation and for the pivotal turn.
    """

    demand = "What is the answer?"
    instructions = (
        "You are a tutor. A student shows you a word problem, but one or two of its numbers are missing and "
        "written as ___. Ask for one missing number at a time, in one short question, such as: How many "
        "apples does Tom have? When you know all numbers, solve it and finish with: The answer is NUMBER."
    )

    def draw(self, rng: random.Random) -> Case:
        """Two things and their numbers, or a word problem."""
        if self.size == "natural":
            return BlankedProblem(word_problem(rng.randrange(2**31)))
        item, withheld_item = rng.sample(ITEMS, 2)
        number, withheld_number = rng.choice(NUMBERS), rng.choice(NUMBERS)
        return Sum(item, number, withheld_item, withheld_number, rng.random() < 0.5)

    def situations(self) -> Sequence[tuple[Case, float]]:
        """All sums have the same prospects; so have word problems with equally many blanks."""
        if self.size == "natural":
            cases = [self.draw(random.Random(seed)) for seed in range(NATURAL_SAMPLE)]
            return [(case, 1 / NATURAL_SAMPLE) for case in cases]
        return [(Sum("pens", 2, "books", 2, False), 1.0)]
