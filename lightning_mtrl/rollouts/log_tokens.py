"""Token ids for logged conversations, many at a time; each that cannot have them is told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.log_checks import Unreadable
from lightning_mtrl.rollouts.tokens import ChatTokenizer


class LogEncoder:
    """Encodes conversations for one model.

    Ids that a log brings stay as they are, if they are this model's.

    Args:
        chat: the model's tokenizer and chat template.
        context_length: tokens that a conversation may hold.
        response_tokens: room that must be left for another response in each state.
    """

    def __init__(self, chat: ChatTokenizer, context_length: int, response_tokens: int = 0) -> None:
        self.chat, self.context_length = chat, context_length
        # A critic reads at the end of the header behind a response, which may have to be closed first.
        self.room = response_tokens + len(chat.header_ids) + 1
        self._size = len(chat.tokenizer)

    def encode(self, conversations: Sequence[Conversation]) -> Iterator[Conversation | Unreadable]:
        """Each conversation with its ids, or why it has none, in order."""
        try:
            encoded: Sequence[Conversation | Unreadable] = list(self.chat.encode_all(conversations))
        except UserError:
            encoded = [self._alone(conversation) for conversation in conversations]
        for given, found in zip(conversations, encoded, strict=True):
            problem = None if isinstance(found, Unreadable) else self._problem(found, given.has_tokens)
            yield problem or found

    def _alone(self, conversation: Conversation) -> Conversation | Unreadable:
        try:
            return self.chat.encode(conversation)
        except UserError as error:
            return Unreadable("chat template", str(error))

    def _problem(self, conversation: Conversation, had_tokens: bool) -> Unreadable | None:
        turns = conversation.turns
        last = turns[-1]
        length = len(conversation.prompt_ids)
        length += sum(len(turn.response_ids) + len(turn.observation_ids) for turn in turns)
        before = length - len(last.response_ids) - len(last.observation_ids)
        needed = max(length + len(self.chat.header_ids), before + self.room)
        if needed > self.context_length:
            detail = f"it needs {needed} tokens; at most {self.context_length} (model.context_length) fit."
            return Unreadable("too long", detail)
        if had_tokens and not self._are_ours(conversation):
            detail = "its token ids are not this model's; without 'tokens' in the log it is tokenized anew."
            return Unreadable("other tokens", detail)
        return None

    def _are_ours(self, conversation: Conversation) -> bool:
        if not all(len(t.behaviour_logprobs) in (0, len(t.response_ids)) for t in conversation.turns):
            return False
        if not all(0 <= i < self._size for i in conversation.token_ids()):
            return False
        first = conversation.turns[0]
        # One response tells; to decode all of them would take as long as everything else.
        return self.chat.response_text(first.response_ids) == first.response
