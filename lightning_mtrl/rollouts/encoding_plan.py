"""What the token ids of a logged conversation are made of, so that many can be tokenized together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lightning_mtrl.conversation import Conversation

# Ids that are known, or a content whose ids are still to be found.
Piece = list[int] | str


@dataclass(frozen=True)
class EncodingPlan:
    """A conversation with the pieces that its ids are made of.

    Attributes:
        conversation: as logged.
        prompt: pieces of the prompt.
        turns: pieces of each response, and of what follows it; empty where all ids are known.
    """

    conversation: Conversation
    prompt: list[Piece]
    turns: list[tuple[list[Piece], list[Piece]]]

    def contents(self) -> Iterator[str]:
        """The texts whose ids are still to be found."""
        pieces = chain(self.prompt, *chain.from_iterable(self.turns))
        return (piece for piece in pieces if isinstance(piece, str))

    def encoded(self, ids: Callable[[Sequence[Piece]], tuple[int, ...]]) -> Conversation:
        """The conversation with its ids, which `ids` finds."""
        whole = self.conversation
        if not self.turns:
            return whole
        turns = tuple(
            replace(turn, response_ids=ids(response), observation_ids=ids(after))
            for turn, (response, after) in zip(whole.turns, self.turns, strict=True)
        )
        return replace(whole, prompt_ids=ids(self.prompt), turns=turns)
