"""Conversations as token ids that are only ever appended to.

Glue (what the chat template writes around contents) is tokenized with control tokens parsed. Contents are
tokenized so that a typed control token stays ordinary text. The pieces are joined as ids, so masks come
from construction, and what the policy sampled is never decoded and tokenized again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.encoding_plan import EncodingPlan, Piece
from lightning_mtrl.rollouts.template import ChatTemplate, Glue
from lightning_mtrl.rollouts.text_ids import TextIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTokenizer:
    """A tokenizer and its chat template.

    A response ends with the control token that the template writes after an assistant's content (white
    space between the two is left out). A template that writes nothing there gets the tokenizer's eos token.
    A line break that follows the end belongs to the glue: the policy never samples it.

    Spaces at the end of a piece of glue go with the content behind them, as tokenizers join them to words.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        system_prompt: put before conversations that have no system message of their own. Without it a
            template's own default stays in force.

    Attributes:
        tokenizer: as given.
        pad_id: id for padding; any id serves, since attention masks tell padding from tokens.
        end_ids: ids that end a response: the template's end-of-turn token and the eos token.
        end_id: the one that the template writes.
        header_ids: glue from after the end-of-turn token to where the next user message's content begins.

    Raises:
        UserError: if there is no chat template, one that rewrites what it wrote before, or one that does
            not end a response with one control token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, system_prompt: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self._template = ChatTemplate(tokenizer)
        self._prompts: dict[tuple[str, ...], Glue] = {}
        self._objects = list(range(len(tokenizer)))
        self._texts = TextIds(tokenizer, self._template.markers())
        ending, self._user_lead = _with_lead(self._template.ending)
        self.end_id: int
        self.header_ids: list[int]
        self.end_id, self.header_ids = self._cut_end(self._texts.glue(ending.lstrip()))
        self._opening_ids = self._texts.glue(self._template.opening)
        self._closing_ids = self._texts.glue(self._template.closing)
        eos: int | None = tokenizer.eos_token_id
        self.end_ids = frozenset({self.end_id} if eos is None else {self.end_id, eos})
        self.pad_id: int = self.end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a rendered prompt, up to where the response begins.

        No start token is added to what the template writes.

        Raises:
            ValueError: for no messages at all.
            UserError: if the template refuses the roles, in this order.
        """
        return self._found(self._prompt_pieces(messages))

    def observation_ids(self, text: str, *, finished: bool = True, last: bool = False) -> list[int]:
        """Ids to append after a response; the policy never samples them, so they are never trained on.

        Args:
            text: the observation. An empty last one adds nothing: the conversation ends with the response.
            finished: False for a response that hit its length limit; an end-of-turn token is put in front,
                as glue, so that what follows stands where the template puts it.
            last: nothing is sampled afterwards, so there is no header that opens a response.
        """
        return self._found(self._observation_pieces(text, finished, last))

    def response_ids(self, text: str | None) -> list[int]:
        """Ids of a logged response, its end-of-turn token included; None or "" is abstention, a bare end."""
        return self._found(self._response_pieces(text))

    def response_text(self, ids: Sequence[int]) -> str | None:
        """Text of a sampled response without its end and outer white space; None if nothing is left.

        Other control tokens stay visible: an environment should see that the policy wrote them.
        """
        kept = list(ids[:-1] if ids and ids[-1] in self.end_ids else ids)
        text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text).strip() or None

    def encode(self, conversation: Conversation) -> Conversation:
        """Give a logged conversation its ids; ids that it already has stay as they are.

        An assistant's message that opens the conversation is context, not a response (`opening_as_prompt`).

        Raises:
            UserError: if there is no response, or the template refuses the prompt's roles.
        """
        return next(self.encode_all([conversation]))

    def encode_all(self, conversations: Sequence[Conversation]) -> Iterator[Conversation]:
        """`encode` for many; all their contents are tokenized together, in as many threads as allowed.

        Raises:
            UserError: as `encode`, for the first one that it cannot encode.
        """
        return self.encode_turns([opening_as_prompt(conversation) for conversation in conversations])

    def encode_turns(self, conversations: Sequence[Conversation]) -> Iterator[Conversation]:
        """`encode_all` with every turn as it is, also one that opens a conversation.

        Raises:
            UserError: as `encode`, and for a conversation without a message before its first response.
        """
        plans = [self._plan(conversation) for conversation in conversations]
        contents = {piece for plan in plans for piece in plan.contents()}
        known = self._texts.contents(sorted(contents))
        # One object for each id: an object for each token would take four times the memory.
        shared = self._objects.__getitem__

        def ids(pieces: Sequence[Piece]) -> tuple[int, ...]:
            found = (known[piece] if isinstance(piece, str) else piece for piece in pieces)
            return tuple(map(shared, chain.from_iterable(found)))

        return (plan.encoded(ids) for plan in plans)

    def _plan(self, conversation: Conversation) -> EncodingPlan:
        if conversation.has_tokens and all(turn.observation_ids for turn in conversation.turns[:-1]):
            return EncodingPlan(conversation, [], [])
        if not conversation.turns:
            raise UserError(
                f"conversation {conversation.id!r} has no response to a user; at least one was expected. "
                f"Leave it out."
            )
        known = conversation.prompt_ids
        if not conversation.prompt and not known and self.system_prompt is None:
            raise UserError(
                f"conversation {conversation.id!r} has no message before its first response; at least one "
                f"was expected. Give it a 'system' message."
            )
        last = len(conversation.turns) - 1
        turns = [self._turn_pieces(turn, index == last) for index, turn in enumerate(conversation.turns)]
        return EncodingPlan(
            conversation, [list(known)] if known else self._prompt_pieces(conversation.prompt), turns
        )

    def _turn_pieces(self, turn: Turn, last: bool) -> tuple[list[Piece], list[Piece]]:
        """The response, and what follows it."""
        if not turn.response_ids:
            return self._response_pieces(turn.response), self._observation_pieces(
                turn.observation, True, last
            )
        response: list[Piece] = [list(turn.response_ids)]
        if turn.observation_ids:
            return response, [list(turn.observation_ids)]
        finished = turn.response_ids[-1] in self.end_ids
        return response, self._observation_pieces(turn.observation, finished, last)

    def _prompt_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        if self.system_prompt is not None and (not messages or messages[0].role != "system"):
            messages = [Message("system", self.system_prompt), *messages]
        if not messages:
            raise ValueError("a prompt needs at least one message")
        roles = tuple(message.role for message in messages)
        if roles not in self._prompts:
            self._prompts[roles] = self._template.prompt(roles)
        glue = self._prompts[roles]
        text, lead = _with_lead(glue.texts[0])
        pieces: list[Piece] = [self._texts.first(text)]
        for index, message in enumerate(messages, start=1):
            pieces.append(lead + glue.content(index - 1, message.content))
            # What opens the response stays whole, as it does after an observation.
            text, lead = (glue.texts[-1], "") if index == len(messages) else _with_lead(glue.texts[index])
            pieces.append(self._texts.glue(text))
        return pieces

    def _observation_pieces(self, text: str, finished: bool, last: bool) -> list[Piece]:
        closed = [] if finished else [self.end_id, *self.header_ids]
        if last and not text:
            return [closed]
        content = self._user_lead + self._template.middle.content(2, text)
        return [closed or self.header_ids, content, self._closing_ids if last else self._opening_ids]

    def _response_pieces(self, text: str | None) -> list[Piece]:
        content = self._template.middle.content(1, text or "")
        return [self._template.lead + content if content else "", [self.end_id]]

    def _found(self, pieces: Sequence[Piece]) -> list[int]:
        found = (self._texts.content(piece) if isinstance(piece, str) else piece for piece in pieces)
        return list(chain.from_iterable(found))

    def _cut_end(self, ids: list[int]) -> tuple[int, list[int]]:
        """The end-of-turn token, and the glue behind it."""
        template, eos = self._template, self.tokenizer.eos_token
        written = template.finish.lstrip()
        if not written and eos is not None:
            # Some templates leave a conversation's very last end out; then it shows where a message follows.
            found = template.ending.lstrip().startswith(eos)
            return self.tokenizer.eos_token_id, ids[1:] if found else self._texts.glue(
                _with_lead(template.ending)[0]
            )
        marker = self._texts.added.get(ids[0], "") if ids else ""
        if not marker or not written.startswith(marker):
            raise UserError(
                f"the chat template of {template.name} writes {template.finish!r} after an assistant's "
                f"message, but a response must end with one control token, such as {eos or '<|im_end|>'!r}. "
                f"Add the marker to the tokenizer as a special token, or use another chat_template."
            )
        return ids[0], ids[1:]


def opening_as_prompt(conversation: Conversation) -> Conversation:
    """Move an opening of the assistant, and the answer to it, into the prompt.

    A response to nothing is not a decision that training could improve, but what follows refers to it. A
    conversation with a user's message before its first response, or with sampled ids, stays as it is.
    """
    spoken = any(message.role == "user" for message in conversation.prompt)
    if spoken or not conversation.turns or conversation.has_tokens:
        return conversation
    first, *rest = conversation.turns
    opening = [Message("assistant", first.response or "")]
    if first.observation or rest:
        opening.append(Message("user", first.observation))
    return replace(conversation, prompt=(*conversation.prompt, *opening), turns=tuple(rest))


def _with_lead(glue: str) -> tuple[str, str]:
    """Glue without the spaces at its end, and those spaces."""
    text = glue.rstrip(" ")
    return text, glue[len(text) :]
