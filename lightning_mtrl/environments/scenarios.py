"""What a user wants who is played by a language model: the request that is said, and the goal behind it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from lightning_mtrl.environments.document_writing import DocumentWriting
from lightning_mtrl.environments.math_tutoring import MathTutoring
from lightning_mtrl.environments.medical_recommendation import MedicalRecommendation
from lightning_mtrl.environments.request_dialogue import RequestDialogue
from lightning_mtrl.errors import UserError


@dataclass(frozen=True)
class Scenario:
    """One user.

    Attributes:
        request: the user's first message, which leaves something out.
        goal: what the user wants and knows, for the model that plays the user; the agent never sees it.
        reference: the right answer, text or diagnosis, for the judge.
        instructions: the agent's system message, or None.
    """

    request: str
    goal: str
    reference: str
    instructions: str | None = None


@runtime_checkable
class Scenarios(Protocol):
    """Where users come from.

    One that keeps users apart to validate on has `held_out() -> Scenarios`, which is the same with those.
    """

    def draw(self, seed: int) -> Scenario:
        """A user; equal seeds give equal ones."""
        ...


class TaskScenarios:
    """The users of an embedded task, whose facts are told to the model that plays them.

    Args:
        task: which one.
    """

    def __init__(self, task: Literal["math_tutoring", "document_writing", "medical_recommendation"]) -> None:
        kinds: dict[str, type[RequestDialogue]] = {
            "math_tutoring": MathTutoring,
            "document_writing": DocumentWriting,
            "medical_recommendation": MedicalRecommendation,
        }
        if task not in kinds:
            raise ValueError(f"task must be one of {', '.join(kinds)}, got {task!r}")
        self._task = kinds[task](size="natural")

    def draw(self, seed: int) -> Scenario:
        """A case of the task in size "natural"."""
        case = self._task.draw(random.Random(seed))
        facts = case.facts()
        told = " ".join(case.tell(slot) for slot in case.withheld)
        reference = next(str(facts[key]) for key in ("wanted", "answer", "illness") if key in facts)
        goal = f"What you left out of your request, and tell only when you are asked for it: {told}"
        return Scenario(case.opening, goal, reference, self._task.instructions)


class FileScenarios:
    """Users out of a file of JSON lines with "request", "goal", "reference" and maybe "instructions".

    A copy is the same object, since nothing in it changes.

    Args:
        path: of the file.
        held_out_share: share of the users that only validation draws, in [0, 1), at least one; 0 lets it draw
            from all, as learning does.
    """

    def __init__(self, path: str, held_out_share: float = 0.1) -> None:
        if not 0 <= held_out_share < 1:
            raise UserError(f"held_out_share is {held_out_share}, but a share in [0, 1) was expected.")
        users = _users(path)
        if held_out_share and len(users) < 2:
            raise UserError(
                f"scenarios: {path} has one user, and held_out_share is {held_out_share}, but one to learn "
                f"from and one to validate on were expected. Add more lines, or set held_out_share to 0."
            )
        number = min(max(round(held_out_share * len(users)), 1), len(users) - 1) if held_out_share else 0
        apart = set(random.Random(0).sample(range(len(users)), number))
        self._users = [user for place, user in enumerate(users) if place not in apart]
        self._kept = [users[place] for place in sorted(apart)] or self._users

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def draw(self, seed: int) -> Scenario:
        """One user, each as likely."""
        return random.Random(seed).choice(self._users)

    def held_out(self) -> Self:
        """The users that nothing is learnt from."""
        made = copy.copy(self)
        made._users = self._kept
        return made


def _users(path: str) -> list[Scenario]:
    file = Path(path)
    if not file.is_file():
        raise UserError(f"scenarios: {path} is not a file, but JSON lines were expected there.")
    # A text may hold other characters that end a line, which JSON need not escape.
    numbered = enumerate(file.read_text(encoding="utf-8").split("\n"), start=1)
    users = [_scenario(path, place, line) for place, line in numbered if line.strip()]
    if not users:
        raise UserError(f"scenarios: {path} is empty, but at least one line was expected.")
    return users


def _scenario(path: str, place: int, line: str) -> Scenario:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"scenarios: {path}, line {place} is not JSON ({error}).") from error
    needed = ("request", "goal", "reference")
    if not isinstance(found, Mapping) or not all(isinstance(found.get(name), str) for name in needed):
        raise UserError(
            f"scenarios: {path}, line {place}: an object with the texts {', '.join(needed)} was expected."
        )
    request, goal, reference = (str(found[name]) for name in needed)
    instructions = found.get("instructions")
    return Scenario(request, goal, reference, None if instructions is None else str(instructions))
