"""The current rollouts, and every module's view of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_mtrl.batch import ConversationBatch, collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.ranges import COUNT, PART
from lightning_mtrl.rollouts.log_tokens import LogEncoder
from lightning_mtrl.rollouts.logs import LoadedLogs, read_conversations
from lightning_mtrl.rollouts.split import held_out, owners
from lightning_mtrl.rollouts.tokens import ChatTokenizer
from lightning_mtrl.rollouts.usable import expect_enough, unusable

BATCHES_IN_POOL = 16


@dataclass(frozen=True)
class State:
    """A single-turn prompt: everything that the agent has seen before a response.

    Attributes:
        ids: all token ids before the response.
        conversation_id: the conversation it comes from.
        turn: number of the response that followed, from 1.
        owner: what it comes from, as a split keeps it together (`owners`): states of one owner are not
            independent of each other.
    """

    ids: tuple[int, ...]
    conversation_id: str
    turn: int
    owner: str


class RolloutDataModule(LightningDataModule):
    """Conversations of the current policy, split for fitting and for measuring.

    The split is by conversation, by group where several share an initial state, and by `metadata["customer"]`
    where that is known; never by turn, so no turn of a held-out conversation is ever trained on. It depends
    on the seed and these names alone.

    The views for training hold conversations that ended with an outcome. A truncated conversation has no
    Monte Carlo return, and one without an outcome has none either: both stay in `conversations`, and are
    counted in `dropped`.

    A persona, under which a conversation was led for coverage, is taken out of its prompt: all views are of
    the states in which the policy itself acts. Responses and their `behaviour_logprobs` stay those of the
    policy with the persona, so they are off-policy; `metadata["persona"]` still tells which these are.

    Args:
        conversations: the rollouts, if there are some already.
        logs: a file of logged conversations, or "hub:NAME" (`read_conversations`); read in `setup`.
        tokenizer: gives logged conversations their ids, and batches the glue after a last response.
        batch_size: conversations in a batch.
        validation_share: share of the conversations that is held out, in [0, 1).
        seed: of the split and of the order of batches.

    Attributes:
        conversations: all rollouts, with ids and without personas.
        usable_conversations: those of them that ended with an outcome: to fit on, or held out.
        train_conversations: those to fit on.
        validation_conversations: those held out.
        dropped: number of conversations in neither, by cause.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation] | None = None,
        *,
        logs: str | None = None,
        tokenizer: ChatTokenizer | None = None,
        batch_size: int = 32,
        validation_share: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("batch_size", batch_size, COUNT),
            ("validation_share", validation_share, PART),
        ):
            if not allowed.holds(value):
                raise UserError(f"{name} is {value}, but it must be {allowed.expected}.")
        self.logs, self.tokenizer = logs, tokenizer
        self.batch_size, self.validation_share, self.seed = batch_size, validation_share, seed
        self.conversations: list[Conversation] = []
        self.usable_conversations: list[Conversation] = []
        self.train_conversations: list[Conversation] = []
        self.validation_conversations: list[Conversation] = []
        self.dropped: dict[str, int] = {}
        if conversations is not None:
            self.set_rollouts(conversations)

    def setup(self, stage: str | None = None) -> None:
        """Read the logs; Lightning calls this before it asks for batches."""
        if self.logs is not None and not self.conversations:
            # Here already, so that records whose ids are another model's are counted.
            encoder = None if self.tokenizer is None else LogEncoder(self.tokenizer)
            loaded = read_conversations(self.logs, encoder=encoder)
            self._take(loaded.conversations, (), Counter(loaded.dropped), loaded)

    def set_rollouts(
        self,
        conversations: Sequence[Conversation],
        *,
        earlier: Sequence[Conversation] = (),
        seed: int | None = None,
        logs: LoadedLogs | None = None,
        failed: Mapping[str, int] | None = None,
    ) -> None:
        """Take new rollouts in place of the old ones.

        Args:
            conversations: of the current policy.
            earlier: of earlier policies, to fit on only; those of a held-out customer are left out.
            seed: of the split and of the order of batches from now on.
            logs: by which the conversations were read, to be named where they are too few.
            failed: how many there are besides that were dropped, by cause, to be named there too.

        Raises:
            UserError: if too few conversations have an outcome.
        """
        self.seed = self.seed if seed is None else seed
        self._take(conversations, earlier, Counter(failed), logs)

    def _take(
        self,
        conversations: Sequence[Conversation],
        earlier: Sequence[Conversation],
        failed: Counter[str],
        logs: LoadedLogs | None,
    ) -> None:
        self.conversations = [self._prepared(c) for c in conversations]
        causes = failed + Counter(filter(None, (unusable(c) for c in self.conversations)))
        self.dropped = dict(sorted(causes.items()))
        usable = [c for c in self.conversations if unusable(c) is None]
        self.usable_conversations = usable
        past = [self._prepared(c) for c in earlier if unusable(c) is None]
        names = owners([*usable, *past])
        own, share = set(names[: len(usable)]), self.validation_share
        expect_enough(self.conversations, own, share, logs, failed)
        outside = held_out(own, share, self.seed) if share else set()
        self.train_conversations = [
            c for c, name in zip([*usable, *past], names, strict=True) if name not in outside
        ]
        self.validation_conversations = [c for c, name in zip(usable, names, strict=False) if name in outside]
        self._order = LengthBuckets(self.train_conversations, self.batch_size, self.seed)

    def train_dataloader(self) -> DataLoader[ConversationBatch]:
        """Batches to fit on, in a new order each time they are gone through."""
        return self._loader(self.train_conversations, self._order)

    def val_dataloader(self) -> DataLoader[ConversationBatch] | list[Any]:
        """Held-out batches, always in the same order; an empty list where nothing is held out."""
        held_out = self.validation_conversations
        if not held_out:
            return []
        return self._loader(held_out, LengthBuckets(held_out, self.batch_size, None))

    def states(self, conversations: Sequence[Conversation]) -> list[State]:
        """The state before each response that is learned from, in order; nobody acts after the last one."""
        names = owners(conversations)
        named = zip(conversations, names, strict=True)
        return [state for c, name in named for state in _states(self._prepared(c), name)]

    def outcomes(self) -> dict[str, float]:
        """Outcome of each conversation by its id, where it is known."""
        return {c.id: c.outcome for c in self.conversations if c.outcome is not None}

    def _loader(
        self, conversations: list[Conversation], order: LengthBuckets
    ) -> DataLoader[ConversationBatch]:
        if self.tokenizer is None:
            raise UserError(
                "batches need the glue of a chat template, but no tokenizer was given. "
                "Pass tokenizer=ChatTokenizer(...) of the model that will read them."
            )
        # Each item is a whole batch, so torch's own batching is off.
        return DataLoader(_Batches(conversations, self.tokenizer), batch_size=None, sampler=order)

    def _prepared(self, conversation: Conversation) -> Conversation:
        """With ids, and with the prompt under which the policy itself would have acted."""
        plain = conversation.plain_prompt
        if conversation.has_tokens and plain == conversation.prompt:
            return conversation
        if self.tokenizer is None:
            what = "no token ids" if plain == conversation.prompt else "a persona in its prompt"
            raise UserError(
                f"conversation {conversation.id!r} has {what}, and no tokenizer was given. "
                f"Pass tokenizer=ChatTokenizer(...) of the model that will read it."
            )
        if plain != conversation.prompt:
            ids = tuple(self.tokenizer.prompt_ids(plain)) if conversation.prompt_ids else ()
            conversation = replace(conversation, prompt=plain, prompt_ids=ids)
        return self.tokenizer.encode(conversation)


class LengthBuckets(Sampler[list[int]]):
    """Batches of conversations of similar length, in an order that depends on seed and epoch only.

    Conversations are shuffled, sorted by length within pools of some batches, cut into batches, and the
    batches are shuffled. Every conversation comes once an epoch.

    Args:
        conversations: with ids.
        batch_size: conversations in a batch; the last batch may be smaller.
        seed: None for the order of lengths, without any shuffling.
    """

    def __init__(self, conversations: Sequence[Conversation], batch_size: int, seed: int | None) -> None:
        self.lengths = [len(c.token_ids()) for c in conversations]
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Go on with the order of this epoch, as a resumed `Trainer` does."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rng = random.Random(f"{self.seed}/{self.epoch}")
        self.epoch += 1
        places = list(range(len(self.lengths)))
        pool = len(places)
        if self.seed is not None:
            rng.shuffle(places)
            pool = self.batch_size * BATCHES_IN_POOL
        ordered: list[int] = []
        for start in range(0, len(places), max(pool, 1)):
            ordered += sorted(places[start : start + pool], key=self.lengths.__getitem__)
        batches = [ordered[i : i + self.batch_size] for i in range(0, len(ordered), self.batch_size)]
        if self.seed is not None:
            rng.shuffle(batches)
        return iter(batches)


class _Batches(Dataset[ConversationBatch]):
    """Conversations as batches: an item is a list of places."""

    def __init__(self, conversations: list[Conversation], chat: ChatTokenizer) -> None:
        self.conversations, self.chat = conversations, chat

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, places: list[int]) -> ConversationBatch:
        return collate(
            [self.conversations[place] for place in places], self.chat.pad_id, self.chat.header_ids
        )


def _states(conversation: Conversation, owner: str) -> Iterator[State]:
    ids = conversation.prompt_ids
    for number, turn in enumerate(conversation.turns, start=1):
        if turn.trained:
            yield State(ids, conversation.id, number, owner)
        ids = (*ids, *turn.response_ids, *turn.observation_ids)
