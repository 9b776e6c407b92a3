"""Fresh responses of the policy in logged next states, and what a critic says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl.algorithms.critic_inputs import CriticInputs
from lightning_mtrl.algorithms.passes import rows_in_pass
from lightning_mtrl.algorithms.state_samples import sample_responses
from lightning_mtrl.batch import TurnFeatures
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.objectives import expectiles
from lightning_mtrl.rollouts.groups import Glue, GroupBatch, group_batch

STATES_IN_PASS = 64  # next states whose responses are read together, at most


@dataclass(frozen=True)
class _Next:
    """Next states that are scored together.

    Attributes:
        places: conversation (its place) and turn before each state, from 0.
        read: their responses, as the critic reads them.
    """

    places: list[tuple[int, int]]
    read: GroupBatch | TurnFeatures


class NextResponses:
    """Fresh responses of pi_k in every state after a logged response that a conversation went on from.

    They are sampled once. A critic with a trunk of its own reads their tokens at every refresh; for one on
    the frozen base the hidden states are computed once.

    Args:
        inputs: of the critic.
        conversations: with ids, without personas.
        samples: responses in each state.
    """

    def __init__(self, inputs: CriticInputs, conversations: Sequence[Conversation], samples: int) -> None:
        self.inputs, self.critic, self.conversations = inputs, inputs.critic, conversations
        context = inputs.context
        # States of similar length stand together, so that a pass over some of them has little padding.
        states = sorted(_next_states(conversations), key=lambda state: len(state[1]))
        prefixes = [ids for _, ids in states]
        responses = sample_responses(context, prefixes, samples, context.seed) if prefixes else []
        chat = context.chat
        glue = Glue(chat.pad_id, chat.end_id, tuple(chat.header_ids))
        lengths = [len(i) + sum(len(r.ids) for r in of) for i, of in zip(prefixes, responses, strict=True)]
        parts = list(_cut(lengths))
        batches = [group_batch(prefixes[a:b], responses[a:b], glue) for a, b in parts]
        self._kept = [
            _Next([place for place, _ in states[a:b]], read)
            for (a, b), read in zip(parts, self._read(batches), strict=True)
        ]

    def values(self, expectile: float) -> list[Float[Tensor, " K"]]:
        """Value of the state after each turn, 0 where there was none; on the CPU, by conversation.

        Args:
            expectile: of the critic's Q over the responses; 0.5 is their mean.
        """
        self.critic.eval()
        device = self.inputs.context.fabric.device
        scored = self.inputs.over(
            self._kept, lambda mine: [self.critic.values(kept.read.to(device)).cpu() for kept in mine]
        )
        found = [torch.zeros(len(c.turns)) for c in self.conversations]
        for kept, q in zip(self._kept, scored, strict=True):
            for (place, turn), value in zip(kept.places, expectiles(q, expectile).tolist(), strict=True):
                found[place][turn] = value
        return found

    def _read(self, batches: list[GroupBatch]) -> Sequence[GroupBatch | TurnFeatures]:
        if self.critic.owns_role:
            return batches
        return [_as_features(read) for read in self.inputs.read_base(batches, lambda batch: batch)]


def _next_states(conversations: Sequence[Conversation]) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """The ids before every response but the first, with its conversation's place and the turn before it."""
    for place, conversation in enumerate(conversations):
        ids = conversation.prompt_ids
        for turn, said in enumerate(conversation.turns[:-1]):
            ids = (*ids, *said.response_ids, *said.observation_ids)
            yield (place, turn), ids


def _cut(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Parts of a sequence that are read together, by the lengths of their rows."""
    start = 0
    while start < len(lengths):
        stop = start + 1
        while stop < len(lengths) and stop - start < rows_in_pass(
            max(lengths[start : stop + 1]), STATES_IN_PASS
        ):
            stop += 1
        yield start, stop
        start = stop


def _as_features(read: Float[Tensor, "S n H"]) -> TurnFeatures:
    """Hidden states as a batch that a critic's head reads; nothing else of it counts."""
    nothing = read.new_zeros(read.shape[:2])
    return TurnFeatures(read, nothing.bool(), nothing, nothing, ())
