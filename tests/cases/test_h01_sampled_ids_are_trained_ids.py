"""H01: the ids that were sampled are the ids that are trained on; text is never encoded again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mtrl.batch import collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.engine import sample_groups
from lightning_mtrl.rollouts.sampling import SamplingConfig
from lightning_mtrl.rollouts.tokens import ChatTokenizer

WORDS = ["<pad>", "<eot>", "<user>", "<bot>", "h", "e", "l", "o", "he", "ll", "llo", "hello", "x", "y"]
PAD, END, USER, BOT = range(4)
UNIFORM = -2.639057
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def _tokenizer() -> PreTrainedTokenizerFast:
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    model = models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(WORDS[:4])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eot>", chat_template=TEMPLATE
    )


class TwoTurns:
    def reset(self, seed: int) -> Observation:
        self.turn = 0
        return Observation("hello")

    def step(self, response: str | None) -> Transition:
        self.turn += 1
        return Transition("xy", reward=float(self.turn == 2), terminated=self.turn == 2)


def _model(uniform: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=14,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    if uniform:
        torch.nn.init.zeros_(model.lm_head.weight)
    return model


def _collect(model: LlamaForCausalLM, conversations: int = 200, **sampling: Any) -> list[Conversation]:
    collector = Collector(
        TwoTurns(),
        ChatTokenizer(_tokenizer()),
        sampling=SamplingConfig(**{"max_response_tokens": 6, **sampling}),
        rows=64,
        context_length=64,
        max_turns=2,
        show_progress=False,
    )
    return collector.collect(model, conversations=conversations, seed=0, policy="uniform").conversations


def _non_canonical(responses: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many non-empty responses encode to other ids, and how many there are."""
    tokenizer = _tokenizer()
    bodies = [[i for i in ids if i != END] for ids in responses]
    filled = [ids for ids in bodies if ids]
    return sum(tokenizer.encode(tokenizer.decode(ids)) != ids for ids in filled), len(filled)


def test_the_tokenizer_of_the_case_is_the_one_described() -> None:
    tokenizer = _tokenizer()
    assert tokenizer.encode("hello") == [11]
    assert tokenizer.decode([8, 10]) == "hello"


def test_responses_that_encode_differently_are_trained_as_they_were_sampled() -> None:
    conversations = _collect(_model(uniform=True))
    assert len(conversations) == 200
    batch = collate(conversations, PAD, (USER,))
    places = [(row, turn) for row in range(200) for turn in (1, 2)]
    responses = [batch.input_ids[row][batch.turn_index[row] == turn].tolist() for row, turn in places]
    odd, filled = _non_canonical(responses)
    # A uniform sampler gives about a fifth; 0.1 and 0.3 are five standard deviations away.
    assert 0.1 < odd / filled < 0.3
    assert responses == [list(turn.response_ids) for c in conversations for turn in c.turns]


def test_every_trainable_token_has_the_exact_uniform_logprob() -> None:
    batch = collate(_collect(_model(uniform=True)), PAD, (USER,))
    kept = batch.behaviour_logprobs[batch.response_mask]
    assert len(kept) > 1000
    assert kept.tolist() == pytest.approx([UNIFORM] * len(kept), abs=1e-5)
    assert not batch.behaviour_logprobs[~batch.response_mask].any()
    assert batch.response_mask.shape == batch.input_ids.shape == batch.behaviour_logprobs.shape


def test_ids_and_logprobs_have_equal_lengths_and_the_end_token_is_among_them() -> None:
    turns = [turn for c in _collect(_model(uniform=True)) for turn in c.turns]
    assert len(turns) == 400
    for turn in turns:
        assert len(turn.response_ids) == len(turn.behaviour_logprobs)
        assert END not in turn.response_ids[:-1]
        assert turn.response_ids[-1] == END or len(turn.response_ids) == 6
    assert any(turn.response_ids == (END,) and turn.response is None for turn in turns)
    cut = [turn for turn in turns if turn.response_ids[-1] != END]
    assert cut
    assert all(turn.observation_ids[0] == END for turn in cut)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 6}, {"temperature": 1.5, "min_p": 0.1}]
)
def test_whatever_was_drawn_the_kept_logprobs_are_plain_ones_of_the_kept_ids(
    sampling: dict[str, float],
) -> None:
    model = _model(uniform=False)
    conversations = _collect(model, 40, **sampling)
    batch = collate(conversations, PAD, (USER,))
    assert _non_canonical([turn.response_ids for c in conversations for turn in c.turns])[0] > 0
    for row in range(40):
        ids = batch.input_ids[row][batch.attention_mask[row]]
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for column in batch.response_mask[row].nonzero().flatten().tolist():
            plain = float(logprobs[column - 1, ids[column]])
            assert float(batch.behaviour_logprobs[row, column]) == pytest.approx(plain, abs=1e-4)


def test_a_written_conversation_comes_back_with_the_ids_that_were_sampled() -> None:
    for conversation in _collect(_model(uniform=True), 50):
        again = Conversation.from_json(conversation.to_json())
        assert again.token_ids() == conversation.token_ids()
        assert [t.behaviour_logprobs for t in again.turns] == [
            t.behaviour_logprobs for t in conversation.turns
        ]


def test_samples_of_one_state_are_kept_as_they_were_sampled() -> None:
    prompts = [[USER, 11, END, BOT], [USER, 12, 13, END, BOT]]
    sampling = SamplingConfig(max_response_tokens=6)
    groups = sample_groups(
        _model(uniform=True), prompts, 100, sampling=sampling, end_ids=(END,), pad_id=PAD, seed=0
    )
    responses = [response for group in groups for response in group]
    odd, filled = _non_canonical([response.ids for response in responses])
    assert 0.05 < odd / filled < 0.35
    kept = [logprob for response in responses for logprob in response.logprobs]
    assert kept == pytest.approx([-math.log(14)] * len(kept), abs=1e-5)
