from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
from request_conversations import check_course, check_pivotal_turns, hold, shares_of

from lightning_mtrl.environments import DocumentWriting
from lightning_mtrl.environments.document_texts import KINDS, LETTERS, NAMES, TONES
from lightning_mtrl.environments.document_writing import LongLetter, ShortLetter, bleu
from lightning_mtrl.environments.request_dialogue import SOLVED, Move, Patience

FUNNY = ShortLetter("Tom", "reminder", "funny", "tone")
RIGHT = "Hey Tom, the library misses its old book"
VAGUE = "Hello Tom, good luck"


class Funny(DocumentWriting):
    def draw(self, rng: Any) -> ShortLetter:
        return FUNNY


def test_conversations_follow_the_course_that_every_task_has() -> None:
    check_course(DocumentWriting())


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("Which tone do you want?", Move("ask", "tone")),
        ("Should it be formal?", Move("ask", "tone")),
        ("Sure! What is the letter about?", Move("ask", "kind")),
        ("When and where is it?", Move("ask", "detail")),
        ("Which font should I use?", Move("ask", "other")),
        (RIGHT, Move("deliver")),
        ("Here you are:\n\nDear Tom,\n\nall the best.", Move("deliver")),
        ("Take your time.", Move("chat")),
        ("", Move("chat")),
    ],
)
def test_free_text_is_read_by_rules(text: str, move: Move) -> None:
    assert FUNNY.read(text) == move


def test_the_tone_is_told_when_asked_for_and_only_then() -> None:
    patience = Patience(questions=3, before=(0,), after=(3,))
    said = hold(Funny(patience=patience), ["I see.", "What is it about?", "Which tone do you want?"])
    assert "funny" not in FUNNY.opening + said[0].observation + said[1].observation
    assert said[1].observation == "It is a reminder."
    assert said[2].observation == "Make it funny."


def test_bleu_by_hand() -> None:
    """Of "hey tom , the cat sat down", 6 of 7 words, 4 of 6 pairs and 2 of 5 triples are in the reference.

    Both are equally long, so there is no penalty for brevity.
    """
    found = bleu("Hey Tom, the cat sat down", "Hey Tom, the dog sat down", 3)
    assert math.isclose(found, (6 / 7 * 4 / 6 * 2 / 5) ** (1 / 3), rel_tol=1e-6)
    assert bleu("", "a b c d") == 0.0


def test_letters_share_too_little_for_a_success_by_mistake() -> None:
    letters = [letter.format(name="Eva") for letter in LETTERS.values()]
    assert len(letters) == len(KINDS) * len(TONES)
    assert all(bleu(letter, letter, 3) == pytest.approx(1.0) for letter in letters)
    assert max(bleu(a, b, 3) for a, b in combinations(letters, 2)) < SOLVED - 0.1
    assert max(bleu(VAGUE.replace("Tom", "Eva"), letter, 3) for letter in letters) < 0.3


@pytest.mark.parametrize(
    ("responses", "pivotal_turn"),
    [
        (["I see.", "Which tone do you want?", "I see.", RIGHT], 2),
        (["I see.", "What is it about?", "I see.", VAGUE], 2),
        (["Which font should I use?", "I see.", "I see.", VAGUE], 1),
        (["I see.", "What is it about?", "I see.", RIGHT], 4),  # a lucky guess
        (["I see.", "Which tone do you want?", "I see.", VAGUE], 4),  # a slip
        (["I see.", "I see.", "I see.", VAGUE], 2),  # the invitation was not used
        ([VAGUE], 1),  # too early
    ],
)
def test_the_pivotal_turn_of_conversations_made_by_hand(responses: list[str], pivotal_turn: int) -> None:
    last = hold(Funny(patience=Patience(before=(1,), after=(1,))), responses)[-1]
    assert last.terminated
    assert (last.info["outcome"] > SOLVED) == (responses[-1] == RIGHT)
    assert last.info["pivotal_turn"] == pivotal_turn


def test_greed_writes_one_letter_in_four() -> None:
    optimum = DocumentWriting().optimum(1.0)
    assert math.isclose(optimum.success_rate, 1.0)
    assert math.isclose(optimum.greedy_success_rate, 0.25)
    assert 0.25 < optimum.greedy_return < 0.4


def test_the_pivotal_turn_changes_the_chance_of_success_most() -> None:
    check_pivotal_turns(DocumentWriting(), luck=1 / 4)


def test_simulated_agents_reach_the_exact_values() -> None:
    shares_of(DocumentWriting())


def test_the_natural_letter_grows_with_what_was_told() -> None:
    environment = DocumentWriting("natural")
    for seed in range(20):
        environment.reset(seed)
        case = environment.case
        assert isinstance(case, LongLetter)
        slots = case.withheld
        values = [case.prospects(frozenset(slots[:n])).mean for n in range(len(slots) + 1)]
        assert values == sorted(values)
        assert values[0] < SOLVED < values[-1] == pytest.approx(1.0)


def test_the_natural_user_gives_the_words_of_a_part_and_the_largest_part_is_pivotal() -> None:
    environment = DocumentWriting("natural", Patience(questions=3, before=(0,), after=(4,)))
    opening = environment.reset(0).text
    case = environment.case
    other = case.withheld[1]
    questions = {"kind": "What is the letter about?", "detail": "When and where?", "tone": "Which tone?"}
    parts = []
    for slot in (other, "kind"):
        words = environment.step(questions[slot]).observation.removeprefix("Use these words: ")
        assert words in case.wanted
        assert words not in opening
        parts.append(words)
    last = environment.step(f"Here it is.\n\n{case.wanted}")
    assert last.info["outcome"] == pytest.approx(1.0)
    assert last.info["pivotal_turn"] == 2
    assert all(name not in opening for name in NAMES if name != case.name)
