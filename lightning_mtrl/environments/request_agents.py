"""Scripted agents of all skills for the tasks with a withheld fact, in size "tiny".

They see what the user's messages say (`RequestDialogue.cue`, what was told) and speak the short phrases that
the embedded model learns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from lightning_mtrl.environments.document_texts import KINDS, LETTERS, TONES
from lightning_mtrl.environments.document_writing import ShortLetter
from lightning_mtrl.environments.math_tutoring import ITEMS, NUMBERS, Sum
from lightning_mtrl.environments.medical_recommendation import FAMILIES, QUESTIONS, Complaint
from lightning_mtrl.environments.request_dialogue import AGENT_SMALL_TALK, Case, RequestDialogue

LETTER_QUESTIONS = {
    "kind": "What is it about?",
    "tone": "Which tone do you want?",
    "font": "Which font should I use?",
    "length": "How long should it be?",
}


@dataclass(frozen=True)
class Habits:
    """How a scripted agent chooses.

    Attributes:
        asks_invited: chance that it asks when the user invites a question; otherwise it makes small talk.
        asks: chance that it asks in a turn that calls for nothing, while nothing was asked yet.
        right_question: chance that a question is about what the request leaves out.
        early: chance that it delivers in a turn that calls for nothing.
        informed: chance that a delivery uses what was told.
        guesses: chance that a delivery without the fact is a guess; otherwise it stays vague.
    """

    asks_invited: float = 0.96
    asks: float = 0.03
    right_question: float = 0.34
    early: float = 0.02
    informed: float = 1.0
    guesses: float = 0.1


# It asks when invited, but about anything; what it hears it uses.
MEDIOCRE = Habits()
PLANNER = Habits(asks=1.0, right_question=1.0, asks_invited=1.0, early=0.0)


def random_habits(rng: random.Random) -> Habits:
    """An agent of any skill: the population on which the tiny model's base is trained."""
    return Habits(
        asks_invited=rng.uniform(0.6, 1.0),
        asks=rng.choice((0.0, 0.1, 0.5)),
        right_question=rng.choice((0.25, 0.6, 1.0)),
        early=rng.choice((0.0, 0.1)),
        informed=rng.choice((1.0, 0.7)),
        guesses=rng.random(),
    )


class ScriptedAgent:
    """Acts by its habits; one that asks right (`PLANNER`) delivers as soon as it knows enough."""

    def __init__(self, habits: Habits, rng: random.Random) -> None:
        self.habits, self.rng = habits, rng

    def respond(self, dialogue: RequestDialogue) -> str:
        """The next response."""
        habits, rng, case = self.habits, self.rng, dialogue.case
        knows = bool(dialogue.told)
        if dialogue.cue == "delivery" or (knows and habits.asks == 1.0):
            return self._deliver(case, knows)
        if dialogue.cue == "question":
            return question(case, habits, rng) if rng.random() < habits.asks_invited else small_talk(rng)
        drawn = rng.random()
        if drawn < habits.early:
            return self._deliver(case, knows)
        if drawn < habits.early + habits.asks and dialogue.questions_left:
            return question(case, habits, rng)
        return small_talk(rng)

    def _deliver(self, case: Case, knows: bool) -> str:
        if knows and self.rng.random() < self.habits.informed:
            return right_delivery(case)
        return guess(case, self.rng) if self.rng.random() < self.habits.guesses else vague_delivery(case)


def small_talk(rng: random.Random) -> str:
    """A response that moves nothing."""
    return rng.choice(AGENT_SMALL_TALK)


def question(case: Case, habits: Habits, rng: random.Random) -> str:
    """A question about what is missing, or about something else."""
    asked = phrasings(case)
    missing = case.withheld[0]
    if rng.random() < habits.right_question:
        return asked[missing]
    return rng.choice([text for slot, text in asked.items() if slot != missing])


def phrasings(case: Case) -> dict[str, str]:
    """Every question that a scripted agent asks in this task, by what it is about."""
    if isinstance(case, Sum):
        return {item: f"How many {item}?" for item in ITEMS}
    return QUESTIONS if isinstance(case, Complaint) else LETTER_QUESTIONS


def right_delivery(case: Case) -> str:
    """What an agent says that knows all."""
    if isinstance(case, Sum):
        return f"The answer is {case.answer}."
    if isinstance(case, Complaint):
        return f"It is {case.illness}."
    assert isinstance(case, ShortLetter)
    return case.wanted


def guess(case: Case, rng: random.Random) -> str:
    """A delivery that fits all that the request tells."""
    if isinstance(case, Sum):
        return f"The answer is {case.number + rng.choice(NUMBERS)}."
    if isinstance(case, Complaint):
        return f"It is {rng.choice(tuple(FAMILIES[case.organ][1].values()))}."
    assert isinstance(case, ShortLetter)
    kind = case.kind if case.withheld_slot == "tone" else rng.choice(tuple(KINDS))
    tone = case.tone if case.withheld_slot == "kind" else rng.choice(tuple(TONES))
    return LETTERS[kind, tone].format(name=case.name)


def vague_delivery(case: Case) -> str:
    """A delivery that uses nothing but the request."""
    if isinstance(case, Sum):
        return f"The answer is {case.number}."
    if isinstance(case, Complaint):
        return f"It is a {case.organ} problem."
    assert isinstance(case, ShortLetter)
    return f"Hello {case.name}, good luck"


def play(
    dialogue: RequestDialogue, habits: Habits, seed: int
) -> tuple[list[tuple[str, str]], dict[str, object]]:
    """One conversation of a scripted agent, as (role, text) messages, and the last transition's info."""
    agent = ScriptedAgent(habits, random.Random(seed + 1_000_003))
    messages = [("user", dialogue.reset(seed).text)]
    while True:
        response = agent.respond(dialogue)
        transition = dialogue.step(response)
        messages += [("assistant", response), ("user", transition.observation)]
        if transition.terminated:
            return messages, dict(transition.info)
