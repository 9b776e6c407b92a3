"""A judge that follows a rule, for tests of credit from a configuration."""

from __future__ import annotations

from lightning_mtrl.conversation import Conversation


class EarlyTurns:
    """Prefers early turns, and cannot weigh a conversation of one turn."""

    def judge(self, conversation: Conversation) -> list[float]:
        if len(conversation.turns) == 1:
            raise ValueError("there is nothing to compare")
        return [1.0 / (place + 1) for place in range(len(conversation.turns))]
