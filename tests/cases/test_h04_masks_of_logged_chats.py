"""Logged chats get their mask from construction, from a template that has no generation markers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_mtrl.batch import ConversationBatch, collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.logs import read_conversations, write_conversations
from lightning_mtrl.rollouts.tokens import ChatTokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
A = [("user", "hi"), ("assistant", "Hello there"), ("user", "and?"), ("assistant", "Fine")]
B = [("assistant", "A"), ("user", "b"), ("assistant", "C")]
D = [("user", "anyone?"), ("user", "hello?")]
RENDERED_A = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n"
    "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\nFine<|im_end|>"
)
RENDERED_B = (
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nC<|im_end|>"
)


def _tokenizer() -> PreTrainedTokenizerFast:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("H", "e"), ("l", "l"), ("He", "ll"), ("Ġ", "t"), ("F", "i"), ("n", "e")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _openai(name: str, talk: list[tuple[str, str]]) -> dict[str, object]:
    return {"id": name, "messages": [{"role": r, "content": c} for r, c in talk], "outcome": 1.0}


def _sharegpt(name: str, talk: list[tuple[str, str]]) -> dict[str, object]:
    sides = {"user": "human", "assistant": "gpt"}
    return {"id": name, "conversations": [{"from": sides[r], "value": c} for r, c in talk], "outcome": 1.0}


def _file(folder: Path, form: str) -> Path:
    path = folder / "chats.jsonl"
    make = {"openai": _openai, "sharegpt": _sharegpt}[form]
    path.write_text("".join(json.dumps(make(n, t)) + "\n" for n, t in (("A", A), ("B", B), ("D", D))))
    return path


def _loaded(path: Path) -> tuple[ChatTokenizer, dict[str, Conversation]]:
    chat = ChatTokenizer(_tokenizer())
    return chat, {c.id: chat.encode(c) for c in read_conversations(path).conversations}


def _expected_mask(
    text: str, spans: list[str], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[bool]]:
    """Ids and mask of a rendered text, from the places of characters; nothing of the product."""
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    places = [(text.index(span), text.index(span) + len(span)) for span in spans]
    inside = [any(a <= start and end <= b for a, b in places) for start, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), inside


@pytest.mark.parametrize("form", ["openai", "sharegpt"])
def test_the_responses_and_their_ends_are_trained_and_nothing_else(tmp_path: Path, form: str) -> None:
    chat, conversations = _loaded(_file(tmp_path, form))
    batch = collate([conversations["A"]], chat.pad_id)
    ids, mask = _expected_mask(RENDERED_A, ["Hello there<|im_end|>", "Fine<|im_end|>"], _tokenizer())
    assert batch.input_ids[0].tolist() == ids
    assert batch.response_mask[0].tolist() == mask
    assert sum(mask) > 4


@pytest.mark.parametrize("form", ["openai", "sharegpt"])
def test_an_opening_of_the_assistant_is_context(tmp_path: Path, form: str) -> None:
    chat, conversations = _loaded(_file(tmp_path, form))
    batch = collate([conversations["B"]], chat.pad_id)
    assert chat.tokenizer.decode(batch.input_ids[0]) == RENDERED_B
    assert chat.tokenizer.decode(batch.input_ids[batch.response_mask]) == "C<|im_end|>"


def test_a_chat_without_a_response_is_dropped_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _file(tmp_path, "openai")
    with caplog.at_level(logging.WARNING):
        loaded = read_conversations(path)
    assert [c.id for c in loaded.conversations] == ["A", "B"]
    assert loaded.dropped == {"no response": 1}
    assert loaded.messages[0].startswith(f"{path}, line 3 (id 'D'): no response")
    assert "id 'D'" in caplog.text
    with pytest.raises(UserError, match=r"line 3 \(id 'D'\)"):
        read_conversations(path, strict=True)


def _batches(data: RolloutDataModule) -> list[ConversationBatch]:
    data.setup()
    return [*data.train_dataloader(), *data.val_dataloader()]


def test_no_batch_of_the_logs_has_an_empty_mask_or_a_nan(tmp_path: Path) -> None:
    data = RolloutDataModule(logs=str(_file(tmp_path, "openai")), tokenizer=ChatTokenizer(_tokenizer()))
    batches = _batches(data)
    assert sorted(name for batch in batches for name in batch.ids) == ["A", "B"]
    assert data.dropped == {"no response": 1}
    for batch in batches:
        assert batch.response_mask.any(1).all()
        assert torch.isfinite(batch.turn_rewards).all()
        assert torch.isfinite(batch.turn_weights).all()
        assert not batch.outcome.isnan().any()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_masks_are_the_same_after_the_chats_were_stored(tmp_path: Path, ending: str) -> None:
    chat, conversations = _loaded(_file(tmp_path, "openai"))
    write_conversations(tmp_path / f"stored.{ending}", conversations.values())
    stored = read_conversations(tmp_path / f"stored.{ending}").conversations
    before, after = collate(list(conversations.values()), chat.pad_id), collate(stored, chat.pad_id)
    assert torch.equal(before.input_ids, after.input_ids)
    assert torch.equal(before.response_mask, after.response_mask)
