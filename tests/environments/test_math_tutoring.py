from __future__ import annotations

import builtins
from typing import Any

import pytest
from request_conversations import check_course, check_pivotal_turns, hold, shares_of

from lightning_mtrl.environments import MathTutoring
from lightning_mtrl.environments.math_tutoring import BlankedProblem, Sum, is_answer, stated_answer
from lightning_mtrl.environments.request_dialogue import DECLINES, Move, Patience
from lightning_mtrl.environments.word_problems import BLANK, word_problem
from lightning_mtrl.errors import UserError

PENS = Sum("pens", 4, "books", 5, withheld_first=False)


class FourPensAndSomeBooks(MathTutoring):
    def draw(self, rng: Any) -> Sum:
        return PENS


def test_conversations_follow_the_course_that_every_task_has() -> None:
    check_course(MathTutoring())


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("How many books?", Move("ask", "books")),
        ("And with the 4 pens, how many of the books do you have?", Move("ask", "books")),
        ("Could you tell me the number of books, please?", Move("ask", "books")),
        ("How many pens?", Move("ask", "pens")),
        ("How many cups are there?", Move("ask", "cups")),
        ("How old are you?", Move("ask", "other")),
        ("The answer is 9.", Move("deliver")),
        ("4 + 5 = 9", Move("deliver")),
        ("You have 4 pens and 5 books, so the total is 9.", Move("deliver")),
        ("The answer is 9. Does that help?", Move("deliver")),
        ("I see.", Move("chat")),
        ("You have 4 pens.", Move("chat")),
        ("", Move("chat")),
    ],
)
def test_free_text_is_read_by_rules(text: str, move: Move) -> None:
    assert PENS.read(text) == move


def test_the_request_names_one_number_and_the_thing_whose_number_is_missing() -> None:
    assert PENS.opening == "4 pens and some books. How many in all?"
    assert Sum("pens", 4, "books", 5, True).opening == "Some books and 4 pens. How many in all?"


def test_the_number_is_told_when_asked_for_and_only_then() -> None:
    patience = Patience(questions=3, before=(0,), after=(3,))
    said = hold(FourPensAndSomeBooks(patience=patience), ["I see.", "How many cups?", "How many books?"])
    observations = [step.observation for step in said]
    assert "5" not in "".join(observations[:2])
    assert observations[1] == "I have no cups."
    assert observations[2] == "5 books."


def test_a_user_of_the_tiny_size_answers_one_question() -> None:
    patience = Patience(before=(0,), after=(3,))
    said = hold(FourPensAndSomeBooks(patience=patience), ["How many pens?", "How many books?"])
    assert said[0].observation == "4 pens, as I said."
    assert said[1].observation == DECLINES


@pytest.mark.parametrize(
    ("responses", "outcome", "pivotal_turn"),
    [
        (["I see.", "How many books?", "I see.", "The answer is 9."], 1.0, 2),
        (["I see.", "How many pens?", "I see.", "The answer is 4."], 0.0, 2),
        (["How many cups?", "I see.", "I see.", "The answer is 6."], 0.0, 1),
        (["I see.", "How many pens?", "I see.", "The answer is 9."], 1.0, 4),  # a lucky guess
        (["I see.", "How many books?", "I see.", "The answer is 8."], 0.0, 4),  # a slip
        (["I see.", "I see.", "I see.", "The answer is 4."], 0.0, 2),  # the invitation was not used
        (["The answer is 4."], 0.0, 1),  # too early
        (["How many books?", "The answer is 9."], 1.0, 1),
        (["I see.", None, "I see.", None], 0.0, 2),
    ],
)
def test_the_pivotal_turn_of_conversations_made_by_hand(
    responses: list[str | None], outcome: float, pivotal_turn: int
) -> None:
    # The user invites a question before the second response and demands the answer before the third.
    last = hold(FourPensAndSomeBooks(patience=Patience(before=(1,), after=(1,))), responses)[-1]
    assert last.terminated
    assert (last.info["outcome"], last.info["pivotal_turn"]) == (outcome, pivotal_turn)


def test_greed_is_worth_an_eighth() -> None:
    """The missing number is one of eight, and the agent that asks knows it in its second turn."""
    optimum = MathTutoring().optimum(0.9)
    assert (optimum.success_rate, optimum.mean_return) == (1.0, 0.9)
    assert (optimum.greedy_success_rate, optimum.greedy_return) == (0.125, 0.125)


def test_the_pivotal_turn_changes_the_chance_of_success_most() -> None:
    check_pivotal_turns(MathTutoring(), luck=1 / 8)


def test_simulated_agents_reach_the_exact_values() -> None:
    shares_of(MathTutoring())


def test_answers_are_found_in_free_text() -> None:
    assert stated_answer("So the total is 1,234.5 dollars.") == 1234.5
    assert stated_answer("12 + 3 = 15. The answer is 15.") == 15
    assert stated_answer(r"\boxed{42}") == 42
    assert not is_answer("Is the number of books 5?")


def test_word_problems_are_the_same_for_the_same_seed_and_hide_their_numbers() -> None:
    pytest.importorskip("reasoning_gym")
    for seed in range(12):
        problem = word_problem(seed)
        word_problem.cache_clear()
        assert word_problem(seed) == problem
        assert problem.text.count(BLANK) == len(problem.blanks)
        assert 1 <= len(problem.blanks) <= 2
        for blank, number in problem.blanks.items():
            assert str(number) in problem.sentence(blank).replace(",", "").split() or str(
                number
            ) in problem.sentence(blank)
            words = " ".join(problem.surroundings[blank])
            assert problem.blank_asked_for(f"How many {words}?") == blank


def test_a_blank_of_a_word_problem_is_told_when_its_surroundings_are_asked_for() -> None:
    pytest.importorskip("reasoning_gym")
    environment = MathTutoring("natural")
    environment.case = case = BlankedProblem(word_problem(0))
    blank = case.withheld[0]
    near = " ".join(case.problem.surroundings[blank])
    assert str(case.problem.blanks[blank]) in case.tell(case.read(f"Sure! How many {near}?").slot)
    assert case.read("What number is missing in the problem?").slot in case.withheld
    assert case.read("What is your favourite colour?") == Move("ask", "other")
    assert case.score(f"First we add. The answer is {case.problem.answer:g}.") == 1.0
    assert case.score("The answer is -1.") == 0.0


def test_the_natural_size_plays_with_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    environment = MathTutoring("natural")
    first = environment.reset(3)
    assert first.system
    assert BLANK in first.text
    asked = [f"How many {' '.join(near)}?" for near in environment.case.problem.surroundings.values()]
    steps = [environment.step(text) for text in asked]
    assert all("left that out" in step.observation for step in steps)
    last = environment.step(f"The answer is {environment.case.problem.answer:g}.")
    assert last.info["outcome"] == 1.0
    assert last.info["pivotal_turn"] == len(asked)


def test_without_reasoning_gym_the_natural_size_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    word_problem.cache_clear()
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("reasoning_gym"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"lightning_mtrl\[math\]"):
        MathTutoring("natural").reset(0)
    MathTutoring().reset(0)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="size"):
        MathTutoring("huge")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="question"):
        Patience(questions=0)
