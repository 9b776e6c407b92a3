from __future__ import annotations

import math
from typing import Any

import pytest
from request_conversations import check_course, check_pivotal_turns, hold, shares_of

from lightning_mtrl.environments import MedicalRecommendation
from lightning_mtrl.environments.medical_recommendation import FAMILIES, ORGAN_OF, Complaint
from lightning_mtrl.environments.request_dialogue import DECLINES, Move, Patience

MILK = Complaint("stomach", "milk")


class Milk(MedicalRecommendation):
    def draw(self, rng: Any) -> Complaint:
        return MILK


def test_conversations_follow_the_course_that_every_task_has() -> None:
    check_course(MedicalRecommendation())


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("What did you eat?", Move("ask", "eat")),
        ("I am sorry to hear that. Could you tell me about your diet in the last days?", Move("ask", "eat")),
        ("What triggers the pain?", Move("ask", "when")),
        ("Have you been in contact with any plants?", Move("ask", "touch")),
        ("How does your cough sound?", Move("ask", "cough")),
        ("How old are you?", Move("ask", "other")),
        ("It is lactose.", Move("deliver")),
        ("You have asthma, and should rest.", Move("deliver")),
        ("It is a stomach problem.", Move("deliver")),
        ("I am sorry about your stomach.", Move("chat")),
        ("Take your time.", Move("chat")),
        ("", Move("chat")),
    ],
)
def test_free_text_is_read_by_rules(text: str, move: Move) -> None:
    assert MILK.read(text) == move


def test_a_message_that_asks_for_everything_gets_the_first_thing() -> None:
    assert MILK.read("How is your cough, and what did you eat?").slot == "cough"


def test_the_finding_is_told_when_asked_for_and_only_then() -> None:
    patience = Patience(questions=3, before=(0,), after=(3,))
    said = hold(Milk(patience=patience), ["I see.", "What did you touch?", "What did you eat?"])
    assert "milk" not in said[0].observation + said[1].observation
    assert said[1].observation == "Nothing new."
    assert said[2].observation == "I had milk."
    assert hold(Milk(), ["How old are you?", "What did you eat?"], seed=1)[1].observation.startswith(DECLINES)


def test_the_diagnosis_is_graded() -> None:
    assert MILK.score("It is lactose.") == 1.0
    assert MILK.score("Celiac, I would say.") == 0.25
    assert MILK.score("It is a stomach problem.") == 0.25
    assert MILK.score("It is asthma.") == 0.0
    assert MILK.score("It is a skin problem.") == 0.0
    assert MILK.score("No idea.") == 0.0
    assert MILK.score("") == 0.0
    # Of several diagnoses the first one counts, so naming all is no way out.
    assert MILK.score("It is asthma, or lactose.") == 0.0


def test_illnesses_are_told_apart_by_their_findings() -> None:
    assert len(ORGAN_OF) == sum(len(table) for _, table in FAMILIES.values()) == 20
    assert len({slot for slot, _ in FAMILIES.values()}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("responses", "outcome", "pivotal_turn"),
    [
        (["I see.", "What did you eat?", "I see.", "It is lactose."], 1.0, 2),
        (["I see.", "What did you touch?", "I see.", "It is a stomach problem."], 0.25, 2),
        (["How is your cough?", "I see.", "I see.", "It is asthma."], 0.0, 1),
        (["I see.", "How is your cough?", "I see.", "It is lactose."], 1.0, 4),  # a lucky guess
        (["I see.", "What did you eat?", "I see.", "It is celiac."], 0.25, 4),  # a slip
        (["I see.", "I see.", "I see.", "It is celiac."], 0.25, 2),  # the invitation was not used
        (["It is celiac."], 0.25, 1),  # too early
    ],
)
def test_the_pivotal_turn_of_conversations_made_by_hand(
    responses: list[str | None], outcome: float, pivotal_turn: int
) -> None:
    last = hold(Milk(patience=Patience(before=(1,), after=(1,))), responses)[-1]
    assert last.terminated
    assert (last.info["outcome"], last.info["pivotal_turn"]) == (outcome, pivotal_turn)


def test_greed_gets_the_organ_and_one_illness_in_five() -> None:
    """By hand: 1/5 + 4/5 * 0.25."""
    optimum = MedicalRecommendation().optimum(0.9)
    assert (optimum.success_rate, optimum.mean_return) == (1.0, 0.9)
    assert optimum.greedy_success_rate == 0.2
    assert math.isclose(optimum.greedy_return, 0.4)


def test_the_pivotal_turn_changes_the_chance_of_success_most() -> None:
    check_pivotal_turns(MedicalRecommendation(), luck=1 / 5)


def test_simulated_agents_reach_the_exact_values() -> None:
    shares_of(MedicalRecommendation())


def test_the_natural_size_has_instructions_that_hold_what_it_takes() -> None:
    environment = MedicalRecommendation("natural")
    for seed in range(30):
        first = environment.reset(seed)
        case = environment.case
        assert isinstance(case, Complaint)
        assert case.organ in first.text
        assert first.system
        assert f"{case.finding}: {case.illness}" in first.system
        answer = environment.step("Thank you for telling me. What did you eat, or drink?")
        assert (case.finding in answer.observation) == (case.organ == "stomach")
