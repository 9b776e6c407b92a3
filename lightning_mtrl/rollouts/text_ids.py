"""Ids of pieces of text: of a template's glue with its control tokens, and of contents without any."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE_MARK = "\u2581"  # SentencePiece writes it for a space, also for the one that it puts before a text.


class TextIds:
    """Tokenizes pieces that are joined as ids.

    Args:
        tokenizer: of the model.
        glue: of a conversation, as text; the added tokens in it are control tokens, whatever they are called.

    Attributes:
        added: text of each added token, by id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, glue: str) -> None:
        self.tokenizer = tokenizer
        self.added = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
        self._glue: dict[str, list[int]] = {}
        self._first: dict[str, list[int]] = {}
        self._joins_a_space = self._tokens("a")[0].startswith(SPACE_MARK)
        self._controls = set(tokenizer.all_special_ids) | (set(self._ids(glue, parse=True)) & set(self.added))
        self._typed_control = _inside(self.added[i] for i in self._controls & set(self.added))

    def glue(self, text: str) -> list[int]:
        """Ids of glue that stands after other text."""
        if text not in self._glue:
            self._glue[text] = self._behind_text(text, parse=True)
        return self._glue[text]

    def first(self, text: str) -> list[int]:
        """Ids of glue that nothing stands before."""
        if text not in self._first:
            self._first[text] = self._ids(text, parse=True)
        return self._first[text]

    def content(self, text: str) -> list[int]:
        """Ids of what a person or a model wrote: never a control token, whatever was typed."""
        ids = self._behind_text(text, parse=False)
        if self._controls.isdisjoint(ids):
            return ids
        return [i for part in self._typed_control.split(text) for i in self._behind_text(part, parse=False)]

    def contents(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Ids of each content, as `content` gives them."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or self._joins_a_space or len(texts) < 2:
            return {text: self.content(text) for text in texts}
        # Without the places of tokens in the text, which transformers always asks for, it takes half as long.
        kept, backend.encode_special_tokens = backend.encode_special_tokens, True
        backend.no_padding()
        backend.no_truncation()
        try:
            found = backend.encode_batch_fast(texts, add_special_tokens=False)
        finally:
            backend.encode_special_tokens = kept
        return {text: self._plain(text, one.ids) for text, one in zip(texts, found, strict=True)}

    def _plain(self, text: str, ids: list[int]) -> list[int]:
        return ids if self._controls.isdisjoint(ids) else self.content(text)

    def _behind_text(self, text: str, parse: bool) -> list[int]:
        if not text or not self._joins_a_space:
            return self._ids(text, parse)
        # The space that the tokenizer puts before a text goes to a line break, which is taken off again.
        return self._ids(f"\n{text}", parse)[len(self._ids("\n", parse)) :]

    def _ids(self, text: str, parse: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not parse)
        return ids

    def _tokens(self, text: str) -> list[str]:
        found = self.tokenizer.convert_ids_to_tokens(self._ids(text, parse=False))
        return [str(token) for token in found] or [""]


def _inside(markers: Iterable[str]) -> re.Pattern[str]:
    """Matches the empty place after the first character of each marker."""
    places = [f"(?<={re.escape(m[0])})(?={re.escape(m[1:])})" for m in sorted(markers) if len(m) > 1]
    return re.compile("|".join(places) or r"(?!)")
