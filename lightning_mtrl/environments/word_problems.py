"""Word problems of reasoning-gym in which some numbers are blanks."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_mtrl.errors import UserError

BLANK = "___"
MOST_WORDS = 60  # longer problems cost a small model its context
TRIES = 100

# Whole numbers that stand alone: no prices, shares, decimals or parts of larger numbers.
_WHOLE = re.compile(r"(?<=\s)(\d{1,4})(?=\s)")
_SENTENCE = re.compile(r"[^.?!]+[.?!]+")
_WORD = re.compile(r"[a-z]+")
_INSTRUCTION = " Give the result as your final answer. Do not include units."
_EMPTY_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are at but by can could did do does each for from give had has have he her him his how i "
        "if in is it its many me much number of on or please she so some tell than that the their them then "
        "there they this to total was what when which who will with would you your",
    )
)
_BLANK_WORDS = frozenset(("missing", "blank", "left"))


@dataclass(frozen=True)
class WordProblem:
    """A problem with blanks.

    Attributes:
        text: the problem; each withheld number is `BLANK`.
        answer: the right number.
        blanks: name of each blank ("blank 1", ...) and its number, in the text's order.
        sentences: the sentence of each blank, with its number and without other ones' numbers.
        surroundings: words near each blank, by which a question is recognised.
    """

    text: str
    answer: float
    blanks: Mapping[str, int]
    sentences: Mapping[str, str]
    surroundings: Mapping[str, frozenset[str]]

    def sentence(self, blank: str) -> str:
        """What the user says when asked for a blank."""
        return self.sentences[blank]

    def blank_asked_for(self, text: str) -> str | None:
        """The blank that a question asks for: the one with most of its surroundings in the question.

        A question for what is missing, without more, means the first blank; None is for other questions.
        """
        words = frozenset(_stems(text))
        shared = {blank: len(words & near) for blank, near in self.surroundings.items()}
        best = max(shared, key=lambda blank: shared[blank])
        if shared[best]:
            return best
        return best if words & _BLANK_WORDS else None


@lru_cache(maxsize=1024)
def word_problem(seed: int) -> WordProblem:
    """A problem of reasoning-gym's `gsm_symbolic` with one or two blanks; equal seeds, equal problems.

    Raises:
        UserError: if reasoning-gym is not installed.
    """
    rng = random.Random(seed)
    for _ in range(TRIES):
        item = _generated(rng.randrange(2**31))
        text = str(item["question"]).removesuffix(_INSTRUCTION)
        numbers = [match for match in _WHOLE.finditer(text) if int(match[1]) > 1]
        if numbers and len(text.split()) <= MOST_WORDS:
            chosen = sorted(
                rng.sample(numbers, rng.randint(1, min(2, len(numbers)))), key=lambda m: m.start()
            )
            return _blanked(text, chosen, float(str(item["answer"]).replace(",", "")))
    raise ValueError(f"no word problem of at most {MOST_WORDS} words with a whole number in {TRIES} tries")


def _generated(seed: int) -> Mapping[str, Any]:
    try:
        from reasoning_gym.arithmetic import GSMSymbolicDataset, GSMSymbolicDatasetConfig
    except ImportError as error:
        raise UserError(
            "environment.init_args.size is 'natural', and the problems of MathTutoring then come from "
            "reasoning-gym, which is not installed. Run pip install 'lightning_mtrl[math]', or pass "
            "--environment.init_args.size tiny."
        ) from error
    made: Mapping[str, Any] = GSMSymbolicDataset(GSMSymbolicDatasetConfig(size=1, seed=seed))[0]
    return made


def _blanked(text: str, chosen: list[re.Match[str]], answer: float) -> WordProblem:
    blanks = {f"blank {place}": int(match[1]) for place, match in enumerate(chosen, start=1)}
    sentences, surroundings = {}, {}
    for (blank, number), match in zip(blanks.items(), chosen, strict=True):
        others = [other for other in chosen if other is not match]
        # Blanks keep their length meanwhile, so that places in the text stay what they are.
        hidden = _with_blanks(text, others, keep_length=True)
        begin, end = _sentence_around(hidden, match.start())
        sentences[blank] = re.sub(r"_+", BLANK, hidden[begin:end].strip())
        before, after = text[begin : match.start()].split(), text[match.end() : end].split()
        surroundings[blank] = frozenset(_stems(" ".join(before[-6:] + after[:6])))
        assert str(number) in sentences[blank]
    own = {blank: _only_here(blank, surroundings) for blank in blanks}
    return WordProblem(_with_blanks(text, chosen), answer, blanks, sentences, own)


def _only_here(blank: str, surroundings: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Surroundings that tell a blank from others; all of them when none does."""
    others = frozenset().union(*(near for other, near in surroundings.items() if other != blank))
    return surroundings[blank] - others or surroundings[blank]


def _with_blanks(text: str, matches: list[re.Match[str]], keep_length: bool = False) -> str:
    for match in sorted(matches, key=lambda m: -m.start()):
        blank = "_" * len(match[1]) if keep_length else BLANK
        text = text[: match.start()] + blank + text[match.end() :]
    return text


def _sentence_around(text: str, place: int) -> tuple[int, int]:
    for match in _SENTENCE.finditer(text):
        if match.start() <= place < match.end():
            return match.start(), match.end()
    return 0, len(text)


def _stems(text: str) -> list[str]:
    """Words that say something, without the ending of a plural."""
    words = [word for word in _WORD.findall(text.lower()) if word not in _EMPTY_WORDS]
    return [word[:-1] if word.endswith("s") and len(word) > 3 else word for word in words]
