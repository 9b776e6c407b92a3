"""What a Q-critic reads of conversations; where nothing below its head is trained, computed only once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.passes import rows_in_pass
from lightning_mtrl.batch import ConversationBatch, TokenBatch, TurnFeatures, collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.workload import Extent, Kept, Pass, Work

SCORING_BATCH = 128  # conversations in a pass without gradients, at most

T = TypeVar("T")
R = TypeVar("R")

Readable = ConversationBatch | TurnFeatures
Weights = Callable[[Readable], Float[Tensor, "B K"]]


class CriticInputs:
    """The inputs of one critic for the conversations of one iteration.

    A critic with a trunk of its own reads tokens. A critic on the frozen base reads hidden states, which
    are kept for as long as this object lives: fitting, measuring and probing pass over the same
    conversations, and a pass of the base is most of their work.

    Args:
        critic: whose inputs these are.
        context: rollouts, devices and precision.
    """

    def __init__(self, critic: QCritic, context: Context) -> None:
        self.critic, self.context = critic, context
        # By identity, with the conversation, so that no other one can take its place while this lives.
        self._kept: dict[int, tuple[Conversation, Float[Tensor, "K H"]]] = {}

    def batches(self, conversations: Sequence[Conversation]) -> Iterator[tuple[list[int], Readable]]:
        """Conversations of similar length together, with their places in the sequence given."""
        for places in _by_length(conversations):
            chosen = [conversations[place] for place in places]
            yield places, self._collated(chosen) if self.critic.owns_role else self.features(chosen)

    def epochs(self) -> Iterator[Iterable[Readable]]:
        """The training batches of one epoch after another."""
        loader = self.context.datamodule.train_dataloader()
        if self.critic.owns_role:
            while True:
                yield (batch.to(self.context.fabric.device) for batch in loader)
        conversations = self.context.datamodule.train_conversations
        self._keep(conversations)
        kept = [self.features([conversations[place] for place in places]) for places in loader.sampler]
        rng = random.Random(self.context.seed)
        while True:
            yield rng.sample(kept, len(kept))

    def check(self, conversations: Sequence[Conversation], weights: Weights) -> None:
        """Refuse what the critic cannot be fitted to or measured on, before anything is computed.

        Args:
            conversations: to fit on, or held out.
            weights: gives the weight of each turn of a batch.

        Raises:
            UserError: for a return that the critic's loss is not for; it names the conversation. And if no
                turn weighs anything.
        """
        counted = 0
        for start in range(0, len(conversations), SCORING_BATCH):
            batch = self._collated(conversations[start : start + SCORING_BATCH])
            batch = replace(batch, turn_weights=weights(batch))
            self.critic.check_returns(batch)
            counted += int((batch.turn_weights > 0).sum())
        if not counted:
            raise UserError(
                f"the Q-critic has nothing to go by in {len(conversations)} conversations that it is fitted "
                f"to or measured on: every response comes before the turn that was drawn to be explored "
                f"(data.explore_share), so that its return is not the policy's, or has weight 0. Collect "
                f"more conversations (data.conversations), or lower data.explore_share."
            )

    def over(self, items: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
        """Share the critic's work on the items out among the processes; returns all results in order."""
        context, role = self.context, self.critic.role
        with context.reading(role) if self.critic.owns_role else context.fabric.autocast():
            return context.processes.over(items, work)

    def features(self, conversations: Sequence[Conversation]) -> TurnFeatures:
        """What the frozen base computes at the critic's reading places; rows in the order given."""
        self._keep(conversations)
        batch = self._collated(conversations)
        rows = [self._kept[id(c)][1] for c in conversations]
        features = pad_sequence(rows, batch_first=True)
        return TurnFeatures(features, batch.turn_mask, batch.turn_rewards, batch.turn_weights, batch.ids)

    def read_base(
        self, passes: Sequence[T], batch_of: Callable[[T], TokenBatch]
    ) -> list[Float[Tensor, "B K H"]]:
        """What the frozen base computes at the critic's reading places, one pass after another.

        The processes share the passes out among them, and all get all results, on the CPU.

        Args:
            passes: what is read, the same on all processes.
            batch_of: makes a batch of a pass, on this process's device or not.
        """

        def read(mine: Sequence[T]) -> list[Tensor]:
            batches = (batch_of(one).to(self.context.fabric.device) for one in mine)
            return [self.critic.read_base(batch).cpu() for batch in batches]

        with torch.no_grad(), self.context.reading("base"):
            return self.context.processes.over(passes, read)

    def _keep(self, conversations: Sequence[Conversation]) -> None:
        missing = [c for c in conversations if id(c) not in self._kept]
        if not missing:
            return
        passes = [[missing[place] for place in places] for places in _by_length(missing)]
        found = self.read_base(passes, self._collated)
        for chosen, read in zip(passes, found, strict=True):
            for conversation, row in zip(chosen, read.to(self.context.fabric.device), strict=True):
                self._kept[id(conversation)] = (conversation, row[: len(conversation.turns)])

    def _collated(self, conversations: Sequence[Conversation]) -> ConversationBatch:
        chat = self.context.chat
        batch = collate(conversations, chat.pad_id, chat.header_ids)
        return batch.to(self.context.fabric.device)


def predict(inputs: CriticInputs, conversations: Sequence[Conversation]) -> list[Float[Tensor, " K"]]:
    """Q of every turn of each conversation, on the CPU, in the order given."""
    found: dict[int, Tensor] = {}
    batches = list(inputs.batches(conversations))
    scored = inputs.over(batches, lambda mine: [inputs.critic.values(batch).cpu() for _, batch in mine])
    for (places, batch), values in zip(batches, scored, strict=True):
        for row, place in enumerate(places):
            found[place] = values[row][batch.turn_mask[row].cpu()]
    return [found[place] for place in range(len(conversations))]


def critic_passes(critic: QCritic, extent: Extent, rows: int, rows_key: str) -> list[Work]:
    """The largest passes that fit, measure and probe a critic, and its best state, for a plan of memory.

    Args:
        critic: whose passes.
        extent: how large conversations get.
        rows: conversations in one training pass.
        rows_key: the setting that says so.
    """
    measured = min(extent.conversations, rows_in_pass(extent.tokens, SCORING_BATCH))
    key = "model.context_length"
    scoring = Pass("evaluate", "critic", critic.role, measured, extent.tokens, layer=critic.layer, key=key)
    best = Kept("evaluate", "critic")
    if not critic.owns_role:
        return [scoring, best]
    trained = min(rows, extent.conversations)
    return [replace(scoring, rows=trained, trains=True, key=rows_key), scoring, best]


def _by_length(conversations: Sequence[Conversation]) -> list[list[int]]:
    order = sorted(range(len(conversations)), key=lambda place: len(conversations[place].token_ids()))
    parts, start = [], 0
    for end, place in enumerate(order):
        longest = len(conversations[place].token_ids())
        if end - start >= rows_in_pass(longest, SCORING_BATCH):
            parts.append(order[start:end])
            start = end
    return [*parts, order[start:]] if order else []
