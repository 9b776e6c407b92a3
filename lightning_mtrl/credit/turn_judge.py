"""A language model that weighs turns, for the credit assigner `LLMJudge`."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.llm.client import ChatClient
from lightning_mtrl.llm.server import Server
from lightning_mtrl.llm.transcripts import judged

_TASK = (
    "You weigh the turns of a finished conversation between a user and an assistant. For each of the "
    "assistant's {number} numbered messages say how much it did for the result, as a number from 0 (nothing, "
    "or harm) to 10 (it decided the result). Judge a question by what the answer to it made possible. Reply "
    'with JSON only: {{"weights": [one number for each message, in order]}}.'
)


class TurnJudge:
    """Asks a model how much each response did for the outcome.

    Args:
        server: the model.

    Source: the baseline "LLM judge" of ITPO (arXiv:2603.23550), table 1; the prompt is ours.
    """

    def __init__(self, server: Server) -> None:
        self.client = ChatClient(server)

    async def judge(self, conversation: Conversation) -> list[float]:
        """One weight a turn.

        Raises:
            LLMFailure: if the model gives none after all attempts; the conversation is then left out.
        """
        number = len(conversation.turns)
        weight = {"type": "number", "minimum": 0, "maximum": 10}
        weights = {"type": "array", "items": weight, "minItems": number, "maxItems": number}
        found = await self.client.chat_json(
            judged(
                _TASK.format(number=number),
                f"The result of the conversation: {conversation.outcome}",
                list(_messages(conversation)),
            ),
            {"type": "object", "properties": {"weights": weights}, "required": ["weights"]},
        )
        return [float(weight) for weight in found["weights"]]


def _messages(conversation: Conversation) -> Iterator[dict[str, object]]:
    for message in conversation.prompt:
        if message.role == "user":
            yield {"role": "user", "content": message.content}
    for number, turn in enumerate(conversation.turns, start=1):
        yield {"role": "assistant", "number": number, "content": turn.response or ""}
        if turn.observation:
            yield {"role": "user", "content": turn.observation}
