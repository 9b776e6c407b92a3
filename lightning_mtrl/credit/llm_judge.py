"""The outcome in shares that a judge gives: usually a language model that reads the conversation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from lightning_mtrl import objectives
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit, CreditAssigner, share_outcome, turn_mask
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.environment_calls import Failure, ask


@runtime_checkable
class Judge(Protocol):
    """Weighs the turns of a finished conversation."""

    def judge(self, conversation: Conversation) -> list[float]:
        """How much each response did for the outcome: one number >= 0 a turn, of any scale.

        It may be a coroutine (`async def judge`); all conversations are then judged at once. An exception
        costs its conversation only.
        """
        ...


class LLMJudge(CreditAssigner):
    """Each turn gets a share of the outcome in proportion to the judge's weight for it.

    A conversation that the judge cannot weigh (it raises, or returns another number of weights, or one that
    is negative or not finite) is left out of the update and counted; it is no conversation without merit. A
    `UserError` of the judge ends the run, since no conversation would fare better.

    Source: the baseline "LLM judge" of ITPO (arXiv:2603.23550), table 1.

    Args:
        judge: by class_path and init_args.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def assign(self, batch: ConversationBatch, conversations: list[Conversation]) -> Credit:
        """The judge's shares at the ends of the responses."""
        present = turn_mask(batch)
        known = torch.zeros(len(conversations), dtype=torch.bool)
        given = torch.zeros(present.shape)
        # A judge may answer the same question twice in two ways, so each is asked by one process.
        for row, answer in enumerate(self.context.processes.over(conversations, self._answers)):
            if answer is not None:
                known[row] = True
                given[row, : len(answer)] = torch.tensor(answer, dtype=torch.float32)
        weights = objectives.proportional_weights(given, present)
        return share_outcome(weights, batch, {"judge_failures": float((~known).sum())}, known)

    def _answers(self, conversations: Sequence[Conversation]) -> list[list[float] | None]:
        """The judge's weights for the turns of each conversation; None where there are no usable ones."""
        answers = ask([partial(self.judge.judge, c) for c in conversations], list)
        for answer in answers:
            if isinstance(answer, Failure) and isinstance(answer.error, UserError):
                raise answer.error
        return [
            answer if isinstance(answer, list) and _usable(answer, len(conversation.turns)) else None
            for answer, conversation in zip(answers, conversations, strict=True)
        ]


def _usable(answer: list[float], turns: int) -> bool:
    numbers = [isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0 for weight in answer]
    return len(answer) == turns and all(numbers)
