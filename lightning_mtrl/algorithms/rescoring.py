"""Rollouts of a server, scored by the trainer: its own log-probabilities replace the server's.

A server computes the same policy with other kernels, often in another precision, and may be set up to tell
the log-probabilities of a changed distribution. In the clipped ratio such differences would pass for
learning, so the server's are measured against the trainer's and then not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lightning_mtrl.algorithms.agreement import differences
from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.passes import of_similar_length, training_logprobs
from lightning_mtrl.batch import collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.rollouts.results import Rollouts


def with_own_logprobs(rollouts: Rollouts, context: Context) -> tuple[Rollouts, Mapping[str, float]]:
    """The rollouts with the trainer's log-probabilities, and how far the server's were from them.

    It costs a forward pass over all conversations, and every sampled token is compared.

    Args:
        rollouts: of the policy as it is now.
        context: its model; the adapter is not merged, as in a training step.

    Returns:
        The rollouts, and over all their sampled tokens: "server_difference_max" and
        "server_difference_mean" in nats, and "server_kl", the k3 estimate of KL(server, trainer) in nats a
        token.
    """
    batch = collate(rollouts.conversations, context.chat.pad_id, context.chat.header_ids)
    logprobs = training_logprobs("policy", batch, list(of_similar_length(batch)), context)
    measured = {
        name.replace("behaviour", "server"): value for name, value in differences(batch, logprobs).items()
    }
    rows = zip(rollouts.conversations, logprobs, batch.response_mask, strict=True)
    rescored = [_rescored(conversation, iter(row[mask].tolist())) for conversation, row, mask in rows]
    return replace(rollouts, conversations=rescored), measured


def _rescored(conversation: Conversation, logprobs: Iterator[float]) -> Conversation:
    """The conversation with these log-probabilities of its sampled tokens, in order."""
    turns = tuple(
        replace(turn, behaviour_logprobs=tuple(next(logprobs) for _ in turn.response_ids))
        for turn in conversation.turns
    )
    return replace(conversation, turns=turns)
