"""Outcomes of conversations by a language model.

The measures are those of CollabLLM's and ITPO's tasks (arXiv:2502.00640, arXiv:2603.23550): accuracy, BLEU of
the document that is found in the conversation, and a diagnosis score from 0 to 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from lightning_mtrl.conversation import Message
from lightning_mtrl.environments.document_writing import bleu
from lightning_mtrl.environments.scenarios import Scenario
from lightning_mtrl.llm.client import ChatClient
from lightning_mtrl.llm.server import Server
from lightning_mtrl.llm.transcripts import judged

Talk = Sequence[Message]


@runtime_checkable
class OutcomeJudge(Protocol):
    """Says how well a finished conversation went."""

    async def score(self, scenario: Scenario, talk: Talk) -> float:
        """The outcome, in [0, 1].

        Args:
            scenario: the user, with the reference.
            talk: all messages, the request first.

        Raises:
            LLMFailure: if no outcome could be had; the conversation then has none, and no zero.
        """
        ...


class AccuracyJudge:
    """1 where the answer that the agent gave last means the same as the reference, else 0.

    Args:
        server: the model that judges.
    """

    def __init__(self, server: Server) -> None:
        self.client = ChatClient(server)

    async def score(self, scenario: Scenario, talk: Talk) -> float:
        """See `OutcomeJudge`."""
        found = await self.client.chat_json(
            _asked(
                "You check answers. Find the last answer that the assistant gives in a conversation and "
                "compare it with the right one. Another wording or way of writing a number makes no "
                "difference; a missing answer, several different ones, or another value is wrong. Reply with "
                'JSON only: {"answer": "what the assistant answered, or nothing", "correct": true or false}.',
                scenario,
                talk,
            ),
            _object(answer={"type": ["string", "number", "null"]}, correct={"type": "boolean"}),
        )
        return float(found["correct"])


class DocumentJudge:
    """BLEU of the document that the agent wrote against the one that the user wanted.

    Args:
        server: the model that finds the document in the conversation; null takes the agent's last message as
            it is, which asks no model.
    """

    def __init__(self, server: Server | None = None) -> None:
        self.client = None if server is None else ChatClient(server)

    async def score(self, scenario: Scenario, talk: Talk) -> float:
        """See `OutcomeJudge`."""
        return bleu(await self._document(talk), scenario.reference)

    async def _document(self, talk: Talk) -> str:
        said = [message.content for message in talk if message.role == "assistant"]
        if self.client is None:
            return said[-1] if said else ""
        found = await self.client.chat_json(
            _asked(
                "You find documents in conversations. Copy the newest complete version of the text that the "
                "assistant wrote for the user, word by word, without greetings to the user, explanations and "
                'questions. Reply with JSON only: {"document": "the text, or nothing if there is none"}.',
                None,
                talk,
            ),
            _object(document={"type": "string"}),
        )
        return str(found["document"])


class DiagnosisJudge:
    """How near the agent's diagnosis comes to the right one: a score from 0 to 10, over 10.

    Args:
        server: the model that judges.
    """

    def __init__(self, server: Server) -> None:
        self.client = ChatClient(server)

    async def score(self, scenario: Scenario, talk: Talk) -> float:
        """See `OutcomeJudge`."""
        found = await self.client.chat_json(
            _asked(
                "You grade diagnoses. Compare the assistant's final diagnosis and advice in a conversation "
                "with the right one: 10 for the same illness, 5 for one of the same kind or organ, 0 for "
                'none or a wrong one, and numbers between them. Reply with JSON only: {"diagnosis": "what '
                'the assistant says, or nothing", "score": a number from 0 to 10}.',
                scenario,
                talk,
            ),
            _object(
                diagnosis={"type": ["string", "null"]}, score={"type": "number", "minimum": 0, "maximum": 10}
            ),
        )
        return float(found["score"]) / 10


def _asked(task: str, scenario: Scenario | None, talk: Talk) -> list[dict[str, str]]:
    given = None if scenario is None else f"The right answer: {scenario.reference}"
    return judged(task, given, [{"role": message.role, "content": message.content} for message in talk])


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}
