"""How the implicit process reward model learns from outcomes: from each one, or from pairs of a group."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.errors import UserError


class PRMLoss(Protocol):
    """The loss of trajectory scores against outcomes.

    Attributes:
        whole_step: True where the loss compares conversations with each other, so that all of an optimizer
            step must stand in one batch.
    """

    whole_step: bool

    def __call__(self, scores: Float[Tensor, " B"], batch: ConversationBatch) -> Float[Tensor, ""]:
        """Loss in nats; it carries the gradient to the scores."""
        ...


class CrossEntropy:
    """Binary cross-entropy of sigmoid(score) and an outcome in [0, 1], which may lie between the two.

    A mean over conversations, weighted by `conversation_weights`. It is computed from the score itself, so
    a large one is no infinity.

    Source: "Free Process Rewards without Process Labels" (arXiv:2412.01981); ITPO (arXiv:2603.23550).
    """

    whole_step = False

    def __call__(self, scores: Float[Tensor, " B"], batch: ConversationBatch) -> Float[Tensor, ""]:
        """The loss.

        Raises:
            UserError: for an outcome outside [0, 1], or an unknown one.
        """
        wrong = ~((batch.outcome >= 0) & (batch.outcome <= 1))
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            raise UserError(
                f"conversation {batch.ids[place]!r} has outcome {batch.outcome[place].item():g}, but the "
                f"cross-entropy of the implicit PRM needs outcomes from 0 to 1. Scale the environment's "
                f"outcomes, or use the loss 'pairwise', which takes any."
            )
        losses = objectives.bce_loss(scores, batch.outcome.to(scores.dtype))
        return (batch.conversation_weights * losses).sum()


class Pairwise:
    """-log sigmoid(difference of scores) over pairs of a group with unequal outcomes, of any range.

    A mean over the pairs of the batch.

    Source: iStar (arXiv:2509.19199).
    """

    whole_step = True

    def __call__(self, scores: Float[Tensor, " B"], batch: ConversationBatch) -> Float[Tensor, ""]:
        """The loss; 0 where no pair of a group is unequal."""
        return objectives.pairwise_loss(scores, batch.outcome.to(scores.dtype), batch.group)


PRM_LOSSES: dict[str, type[CrossEntropy] | type[Pairwise]] = {"ce": CrossEntropy, "pairwise": Pairwise}


def prm_loss(name: str) -> PRMLoss:
    """The loss of that name.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in PRM_LOSSES:
        raise ValueError(f"unknown PRM loss {name!r}; there are {sorted(PRM_LOSSES)}")
    return PRM_LOSSES[name]()
