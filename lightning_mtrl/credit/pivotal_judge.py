"""A judge that knows: all weight on the turn that the environment itself names as pivotal."""

from __future__ import annotations

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError


class PivotalJudge:
    """For `LLMJudge`: what a language model would have to find out is read from the conversation's metadata.

    It stands for a judge that is always right, where none can be asked, and bounds what a judge can bring.
    """

    def judge(self, conversation: Conversation) -> list[float]:
        """1 for the pivotal turn, 0 for the others.

        Raises:
            UserError: if the environment names no pivotal turn.
        """
        pivotal = conversation.metadata.get("pivotal_turn")
        if pivotal is None:
            raise UserError(
                f"conversation {conversation.id!r} has no 'pivotal_turn' in its metadata, but PivotalJudge "
                f"reads it. Use an environment that gives it in the info of the last transition "
                f"(MathTutoring, DocumentWriting, MedicalRecommendation), or another judge."
            )
        return [float(number == pivotal) for number in range(1, len(conversation.turns) + 1)]
