"""The end of a turn is learned, also where the padding token is the end-of-turn token."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mtrl.batch import ConversationBatch, collate
from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.rollouts.tokens import ChatTokenizer

WORDS = ["<pad>", "<eot>", "<user>", "<bot>", "h", "e", "l", "o", "he", "ll", "llo", "hello", "x", "y"]
MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
EOT, USER, BOT, LETTER_O, HE, HELLO, X, Y = (1, 2, 3, 7, 8, 11, 12, 13)
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)


def _chat(pad: str) -> ChatTokenizer:
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, MERGES))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(WORDS[:4])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eot>", pad_token=pad)
    tokenizer.chat_template = TEMPLATE
    return ChatTokenizer(tokenizer)


def _batch(chat: ChatTokenizer) -> ConversationBatch:
    talks = [["x", "hello"], ["yy", "he", "x", "o"]]
    records = [
        {
            "id": str(number),
            "messages": [
                {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)
            ],
            "outcome": 1.0,
        }
        for number, talk in enumerate(talks)
    ]
    return collate([chat.encode(Conversation.from_json(r)) for r in records], chat.pad_id, chat.header_ids)


def test_trainable_tokens_are_the_responses_with_their_ends() -> None:
    batch = _batch(_chat("<eot>"))
    trained = [ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True)]
    assert trained == [[HELLO, EOT], [HE, EOT, LETTER_O, EOT]]
    assert int(batch.response_mask.sum()) == 6


def test_ends_inside_a_conversation_are_attended_and_padding_is_not() -> None:
    batch = _batch(_chat("<eot>"))
    first = [USER, X, EOT, BOT, HELLO, EOT, USER]
    second = [USER, Y, Y, EOT, BOT, HE, EOT, USER, X, EOT, BOT, LETTER_O, EOT, USER]
    padding = len(second) - len(first)
    assert batch.input_ids.tolist() == [first + [EOT] * padding, second]
    assert batch.attention_mask.tolist() == [[True] * len(first) + [False] * padding, [True] * len(second)]
    assert not batch.response_mask[0, len(first) :].any()


def test_the_padding_token_changes_nothing_but_the_padding() -> None:
    same, other = _batch(_chat("<eot>")), _batch(_chat("<pad>"))
    assert torch.equal(same.response_mask, other.response_mask)
    assert torch.equal(same.attention_mask, other.attention_mask)
    assert torch.equal(same.input_ids[same.attention_mask], other.input_ids[other.attention_mask])


def test_a_response_that_was_cut_off_teaches_no_end() -> None:
    chat = _chat("<eot>")
    prompt = (Message("user", "y"),)
    cut = Turn(
        "he", "x", response_ids=(HE,), observation_ids=tuple(chat.observation_ids("x", finished=False))
    )
    conversation = Conversation("cut", prompt, (cut,), 1.0, prompt_ids=tuple(chat.prompt_ids(prompt)))
    batch = collate([conversation], chat.pad_id, chat.header_ids)
    assert batch.input_ids[batch.response_mask].tolist() == [HE]
    assert batch.input_ids[0].tolist() == [USER, Y, EOT, BOT, HE, EOT, USER, X, EOT, BOT]


def _loss(model: LlamaForCausalLM, batch: ConversationBatch) -> Tensor:
    """Mean over rows and tokens of the negative log-likelihood, weighted by the outcome."""
    logits = model(batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), batch.input_ids[:, 1:], reduction="none")
    return (losses * batch.response_mask[:, 1:] * batch.outcome[:, None]).sum() / batch.response_mask.sum()


def test_the_end_is_likely_after_training() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=14, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=EOT, eos_token_id=EOT, bos_token_id=None,
    )  # fmt: skip
    model, batch = LlamaForCausalLM(config), _batch(_chat("<eot>"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        after_hello = model(torch.tensor([[USER, X, EOT, BOT, HELLO]])).logits[0, -1].softmax(-1)
    assert after_hello[EOT] > 0.9
