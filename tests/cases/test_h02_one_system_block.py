"""One system block and one start token in every row, whatever template and tokenizer add by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_mtrl.batch import collate
from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.rollouts.tokens import ChatTokenizer

WORDS = ["<pad>", "<s>", "<sys>", "<user>", "<bot>", "<eot>", *"abcdefghijklmnopqrstuvwxyz", " "]
TEMPLATE = (
    "{{ '<s>' }}{% if messages[0].role != 'system' %}{{ '<sys>be kind<eot>' }}{% endif %}"
    "{% for m in messages %}"
    "{{ {'system': '<sys>', 'user': '<user>', 'assistant': '<bot>'}[m.role] + m.content + '<eot>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter; its post-processor adds a start token of its own."""
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, []))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(WORDS[:6])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<eot>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.encode("a") == [1, 6]
    return tokenizer


def _played(chat: ChatTokenizer, said: list[str], heard: list[str], finished: bool = True) -> Conversation:
    """A conversation as a collector holds it: ids are appended turn by turn."""
    prompt = (Message("user", heard[0]),)
    turns = []
    for number, (response, observation) in enumerate(zip(said, heard[1:], strict=True), start=1):
        ids = chat.response_ids(response)
        after = chat.observation_ids(observation, finished=finished, last=number == len(said))
        turns.append(
            Turn(
                response,
                observation,
                response_ids=tuple(ids if finished else ids[:-1]),
                observation_ids=tuple(after),
            )
        )
    return Conversation(said[0], prompt, tuple(turns), 1.0, prompt_ids=tuple(chat.prompt_ids(prompt)))


def _rendered(tokenizer: PreTrainedTokenizerBase, said: list[str], heard: list[str]) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": heard[0]}]
    for response, observation in zip(said, heard[1:], strict=True):
        messages.append({"role": "assistant", "content": response})
        messages += [{"role": "user", "content": observation}] if observation else []
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


TALKS = [
    (["ja", "nein", "gern"], ["hallo", "was", "wie", ""]),
    (["a b", "c", "d"], ["x", "y", "z", ""]),
]


@pytest.mark.parametrize("finished", [True, False])
def test_every_row_has_one_start_one_system_block_and_each_role_marker_once_a_message(finished: bool) -> None:
    chat = ChatTokenizer(_tokenizer())
    rows = [_played(chat, said, heard, finished) for said, heard in TALKS]
    batch = collate(rows, chat.pad_id)
    for ids, attention, (said, heard) in zip(batch.input_ids, batch.attention_mask, TALKS, strict=True):
        row = ids[attention].tolist()
        counts = {word: row.count(index) for index, word in enumerate(WORDS[:6])}
        # Without a last observation, the header stands behind the end that closes an unfinished response.
        trailing = 0 if finished else 1
        assert (counts["<s>"], counts["<sys>"], counts["<bot>"]) == (1, 1, 3)
        assert counts["<user>"] == 3 + trailing
        text = chat.tokenizer.decode(row)
        assert text == _rendered(chat.tokenizer, said, heard) + "<user>" * trailing


def test_a_last_observation_is_rendered_once_too() -> None:
    chat = ChatTokenizer(_tokenizer())
    said, heard = ["ja", "nein"], ["hallo", "was", "ende"]
    row = _played(chat, said, heard).token_ids()
    assert chat.tokenizer.decode(row) == _rendered(chat.tokenizer, said, heard)
    assert row.count(WORDS.index("<user>")) == 3


def test_a_system_message_of_the_environment_replaces_the_default() -> None:
    chat = ChatTokenizer(_tokenizer())
    ids = chat.prompt_ids([Message("system", "be"), Message("user", "x")])
    assert chat.tokenizer.decode(ids) == "<s><sys>be<eot><user>x<eot><bot>"


def test_a_logged_conversation_gets_the_same_ids_as_a_played_one() -> None:
    chat = ChatTokenizer(_tokenizer())
    said, heard = TALKS[0]
    played = _played(chat, said, heard)
    logged = Conversation.from_json({k: v for k, v in played.to_json().items() if k != "tokens"})
    assert chat.encode(logged).token_ids() == played.token_ids()


@pytest.mark.real_lm
def test_a_public_instruct_model_with_a_default_system_text(smollm2_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    chat = ChatTokenizer(tokenizer)
    rows = [_played(chat, said, heard) for said, heard in TALKS]
    batch = collate(rows, chat.pad_id)
    for ids, attention, (said, heard) in zip(batch.input_ids, batch.attention_mask, TALKS, strict=True):
        text = str(tokenizer.decode(ids[attention]))
        # A conversation that ended with a response lacks the line break, which nobody reads.
        assert f"{text}\n" == _rendered(tokenizer, said, heard)
        assert text.count("You are a helpful AI assistant named SmolLM") == 1
        assert text.count("<|im_start|>user\n") == 3
