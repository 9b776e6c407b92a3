"""Token ids for logged conversations, many at a time; each that cannot have them is told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.log_checks import Unreadable
from lightning_mtrl.rollouts.tokens import ChatTokenizer


class LogEncoder:
    """Encodes conversations for one model.

    Ids that a log brings stay as they are, if they are this model's, and every turn is one: where a prompt
    ends is said by whoever read the conversation.

    Args:
        chat: the model's tokenizer and chat template.
        context_length: tokens that a conversation may hold; None for any number.
        response_tokens: room that must be left for another response in each state.
    """

    def __init__(
        self, chat: ChatTokenizer, context_length: int | None = None, response_tokens: int = 0
    ) -> None:
        self.chat, self.context_length = chat, context_length
        # A critic reads at the end of the header behind a response, which may have to be closed first.
        self.room = response_tokens + len(chat.header_ids) + 1
        self._size = len(chat.tokenizer)

    def encode(self, conversations: Sequence[Conversation]) -> Iterator[Conversation | Unreadable]:
        """Each conversation with its ids, or why it has none, in order."""
        ours = [self._are_ours(conversation) for conversation in conversations]
        encoded = iter(self._encoded([c for c, own in zip(conversations, ours, strict=True) if own]))
        for own in ours:
            if not own:
                detail = (
                    "its token ids are not this model's; without 'tokens' in the log it is tokenized anew."
                )
                yield Unreadable("other tokens", detail)
                continue
            found = next(encoded)
            yield found if isinstance(found, Unreadable) else self._too_long(found) or found

    def _encoded(self, conversations: Sequence[Conversation]) -> Sequence[Conversation | Unreadable]:
        try:
            return list(self.chat.encode_turns(conversations))
        except UserError:
            return [self._alone(conversation) for conversation in conversations]

    def _alone(self, conversation: Conversation) -> Conversation | Unreadable:
        try:
            return next(self.chat.encode_turns([conversation]))
        except UserError as error:
            return Unreadable("chat template", str(error))

    def _too_long(self, conversation: Conversation) -> Unreadable | None:
        if self.context_length is None:
            return None
        turns = conversation.turns
        last = turns[-1]
        length = len(conversation.prompt_ids)
        length += sum(len(turn.response_ids) + len(turn.observation_ids) for turn in turns)
        before = length - len(last.response_ids) - len(last.observation_ids)
        needed = max(length + len(self.chat.header_ids), before + self.room)
        if needed <= self.context_length:
            return None
        detail = f"it needs {needed} tokens; at most {self.context_length} (model.context_length) fit."
        return Unreadable("too long", detail)

    def _are_ours(self, conversation: Conversation) -> bool:
        """Whether the ids that a conversation brings, all of its or some, are of this model."""
        ids = conversation.token_ids()
        if not ids:
            return True
        if max(ids) >= self._size or min(ids) < 0:
            return False
        known = next((turn for turn in conversation.turns if turn.response_ids), None)
        # One response tells; to decode all of them would take as long as everything else.
        return known is None or self.chat.response_text(known.response_ids) == known.response
