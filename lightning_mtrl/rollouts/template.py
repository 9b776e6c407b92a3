"""A chat template as text: the glue around contents, cut out once, and checked to be append-only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_mtrl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Python and Jinja strip a vertical tab as white space, and no template writes one.
PADDING = "\v"
MIDDLE = ("user", "assistant", "user", "assistant", "user")
# Conversations with the roles that not every template takes.
FURTHER = (("system", *MIDDLE), ("user", "assistant", "tool", "assistant", "user"))


@dataclass(frozen=True)
class Glue:
    """What a template writes around the contents of messages with given roles.

    Attributes:
        texts: before the first content, between contents, and after the last one.
        keeps_left: whether white space at the start of each content survives.
        keeps_right: whether white space at the end of each content survives.
    """

    texts: tuple[str, ...]
    keeps_left: tuple[bool, ...]
    keeps_right: tuple[bool, ...]

    def content(self, index: int, text: str) -> str:
        """A content as the template would write it."""
        text = text if self.keeps_left[index] else text.lstrip()
        return text if self.keeps_right[index] else text.rstrip()


class ChatTemplate:
    """The pieces from which every conversation is built, as text.

    Args:
        tokenizer: a transformers tokenizer with a chat template.

    Attributes:
        middle: glue of a conversation of five messages, the user's first.
        ending: from a response's content to the next user message's content.
        finish: after a response's content where nothing follows; the beginning of `ending`.
        opening: from a user's content to where the response begins.
        closing: after a user's content where nothing follows.
        lead: white space that the template writes before a finished response but not when it asks for one;
            it begins the response.

    Raises:
        UserError: if there is no chat template, or one that rewrites what it wrote before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.name = repr(tokenizer.name_or_path or type(tokenizer).__name__)
        if not tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {self.name} has no chat template, but conversations need one. Use an "
                f"instruction-tuned model, or set chat_template in its tokenizer_config.json."
            )
        self.middle = self.cut(MIDDLE, generation=False)
        self.ending, self.closing = self.middle.texts[2], self.middle.texts[5]
        self.finish = self._check_append_only()
        self.opening, self.lead, self._asked = self._cut_opening()

    def markers(self) -> str:
        """Glue around messages of every role that the template takes, as one text."""
        found = list(self.middle.texts)
        for roles in FURTHER:
            # What a template asks of a tool's message, beside a content, shows in errors of several kinds.
            with suppress(UserError, TypeError, ValueError):
                found += self.cut(roles, generation=False).texts
        return "".join(found)

    def prompt(self, roles: tuple[str, ...]) -> Glue:
        """Glue of a prompt; its last text asks for a response."""
        glue = self.cut(roles, generation=True)
        return Glue((*glue.texts[:-1], glue.texts[-1] + self._asked), glue.keeps_left, glue.keeps_right)

    def cut(self, roles: Sequence[str], generation: bool) -> Glue:
        """Render messages with marked contents and cut the text around the marks.

        Raises:
            UserError: if the template refuses these roles, or does not write each content once and in order.
        """
        marks = [f"content-{index}-" for index in range(len(roles))]
        pieces, rest = [], self._rendered(roles, marks, generation)
        for index, mark in enumerate(marks):
            if rest.count(mark) != 1:
                raise UserError(
                    f"the chat template of {self.name} must write each message once and in order, but does "
                    f"not with message {index + 1} of {', '.join(roles)}. Use another chat_template."
                )
            piece, rest = rest.split(mark)
            pieces.append(piece)
        pieces.append(rest)
        return Glue(
            tuple(piece.removeprefix(PADDING).removesuffix(PADDING) for piece in pieces),
            tuple(piece.endswith(PADDING) for piece in pieces[:-1]),
            tuple(piece.startswith(PADDING) for piece in pieces[1:]),
        )

    def _rendered(self, roles: Sequence[str], marks: Sequence[str], generation: bool) -> str:
        from jinja2 import TemplateError

        messages = [
            {"role": role, "content": f"{PADDING}{mark}{PADDING}"}
            for role, mark in zip(roles, marks, strict=True)
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation
            )
        except TemplateError as error:
            raise UserError(
                f"the chat template of {self.name} refuses messages from {', '.join(roles)}: {error}. Change "
                f"the prompt's roles, or use another chat_template."
            ) from error
        return str(text)

    def _check_append_only(self) -> str:
        texts = self.middle.texts
        found = [(texts[1], texts[3]), (texts[2], texts[4])]
        finish = ""
        for number in range(1, len(MIDDLE)):
            *before, last = self.cut(MIDDLE[:number], generation=False).texts
            found += [*zip(before, texts, strict=False), (last, texts[number][: len(last)])]
            finish = last if number == 2 else finish
        for early, late in found:
            if early != late:
                raise UserError(
                    f"the chat template of {self.name} is not append-only: where a shorter conversation has "
                    f"{early!r}, a longer one has {late!r}, so the policy would learn from a text that "
                    f"it never read. Use a chat_template that writes a message the same wherever it stands."
                )
        return finish

    def _cut_opening(self) -> tuple[str, str, str]:
        asked, written = self.cut(MIDDLE, generation=True).texts[-1], self.middle.texts[1]
        rest = written[len(asked) :]
        if written.startswith(asked) and not rest.strip():
            return asked, rest, ""
        if written.startswith(asked) and asked == self.closing:
            # The template knows no generation prompt, so ours is the header that it writes.
            return written, "", rest
        raise UserError(
            f"the chat template of {self.name} is not append-only: it asks for a response with {asked!r}, "
            f"but writes {written!r} before a response in the past. Use a chat_template that writes the same "
            f"in both places."
        )
