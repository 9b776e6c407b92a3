"""A language model that weighs turns, for the credit assigner `LLMJudge`."""

from __future__ import annotations

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.llm.client import ChatClient
from lightning_mtrl.llm.server import Server

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
            [
                {"role": "system", "content": _TASK.format(number=number)},
                {"role": "user", "content": _shown(conversation)},
            ],
            {"type": "object", "properties": {"weights": weights}, "required": ["weights"]},
        )
        return [float(weight) for weight in found["weights"]]


def _shown(conversation: Conversation) -> str:
    lines = [f"USER: {m.content}" for m in conversation.prompt if m.role == "user"]
    for number, turn in enumerate(conversation.turns, start=1):
        lines.append(f"ASSISTANT, message {number}: {turn.response or '(nothing)'}")
        if turn.observation:
            lines.append(f"USER: {turn.observation}")
    return "\n".join([*lines, f"RESULT: {conversation.outcome}"])
