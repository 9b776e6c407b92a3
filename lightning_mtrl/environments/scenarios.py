"""What a user wants who is played by a language model: the request that is said, and the goal behind it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

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
    """Where users come from."""

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

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        file = Path(path)
        if not file.is_file():
            raise UserError(f"scenarios: {path} is not a file, but JSON lines were expected there.")
        lines = file.read_text(encoding="utf-8").splitlines()
        numbered = enumerate(lines, start=1)
        self._scenarios = [_scenario(path, place, line) for place, line in numbered if line.strip()]
        if not self._scenarios:
            raise UserError(f"scenarios: {path} is empty, but at least one line was expected.")

    def draw(self, seed: int) -> Scenario:
        """One line, each as likely."""
        return random.Random(seed).choice(self._scenarios)


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
