"""H05, the rollout side: how rows are put together and padded has no influence on the kept log-probs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_mtrl.rollouts import packing
from lightning_mtrl.rollouts.decoding import SampledResponse
from lightning_mtrl.rollouts.engine import ConversationEngine, Draw, sample_groups
from lightning_mtrl.rollouts.memory import RecomputedMemory
from lightning_mtrl.rollouts.sampling import SamplingConfig

LENGTHS = (5, 9, 31)
END = 1
SAMPLING = SamplingConfig(max_response_tokens=7)


def _model(positions: str) -> PreTrainedModel:
    torch.manual_seed(0)
    ids: dict[str, Any] = {"vocab_size": 14, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": END}
    if positions == "learned":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
        return GPT2LMHeadModel(GPT2Config(**ids, **shape)).eval()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**ids, **shape, initializer_range=0.2)).eval()


def _prompt(length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(length).integers(2, 14, size=length)]


def _engine(model: PreTrainedModel, pad_id: int = 0, rows: int = 8) -> ConversationEngine:
    return ConversationEngine(
        model, rows=rows, context_length=128, end_ids=(END,), sampling=SAMPLING, pad_id=pad_id
    )


def _respond(engine: ConversationEngine, parts: dict[int, list[int]]) -> dict[int, SampledResponse]:
    """Feed each row its ids; row r draws with stream r."""
    rows = list(parts)
    numbers = (np.random.default_rng([7, row]).random(7) for row in rows)
    draws = [Draw(each, SAMPLING.temperature, SAMPLING.min_p) for each in numbers]
    return dict(zip(rows, engine.respond(rows, list(parts.values()), draws), strict=True))


def _plain(model: PreTrainedModel, prompt: list[int], ids: tuple[int, ...]) -> list[float]:
    whole = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logprobs = model(input_ids=whole).logits[0].log_softmax(-1)
    return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(ids)]


ARRANGEMENTS: dict[str, list[dict[int, int]]] = {
    "alone": [{0: 5}, {1: 9}, {2: 31}],
    "together": [{0: 5, 1: 9, 2: 31}],
    "long first": [{2: 31, 1: 9, 0: 5}],
    "in pairs": [{0: 5, 2: 31}, {1: 9}],
    "beside a longer one": [{7: 90, 0: 5, 1: 9, 2: 31}],
    "in a crowd": [{0: 5, 3: 1, 4: 2, 1: 9, 5: 60, 2: 31, 6: 3}],
}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("pad_id", [0, 13])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_kept_logprobs_are_equal_in_all_arrangements(
    positions: str, pad_id: int, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(positions)
    if recomputed:  # It pads at the right, the packed rows are padded at the left.
        monkeypatch.setattr(packing, "_reason_against_packing", lambda *_: "the test wants it")
        assert isinstance(packing.Memories(model, 128, 0).of(1), RecomputedMemory)
    for batches in ARRANGEMENTS.values():
        engine = _engine(model, pad_id)
        for batch in batches:
            answers = _respond(engine, {row: _prompt(length) for row, length in batch.items()})
            for row, length in batch.items():
                response = answers[row]
                assert response.logprobs == pytest.approx(
                    _plain(model, _prompt(length), response.ids), abs=1e-5
                )


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_new_rows_and_rows_that_go_on_share_a_step(positions: str) -> None:
    model = _model(positions)
    engine = _engine(model)
    held: dict[int, list[int]] = {}
    plan = [{0: 5, 1: 31}, {0: 9, 2: 31, 1: 1}, {3: 5, 2: 2, 0: 31, 4: 9}, {1: 9, 4: 5}]
    for batch in plan:
        parts = {row: _prompt(length) for row, length in batch.items()}
        answers = _respond(engine, parts)
        for row, ids in parts.items():
            before = held.get(row, []) + ids
            assert answers[row].logprobs == pytest.approx(_plain(model, before, answers[row].ids), abs=1e-5)
            held[row] = before + list(answers[row].ids)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_reused_row_knows_nothing_of_the_conversation_before(positions: str) -> None:
    model = _model(positions)
    fresh, used = _engine(model), _engine(model)
    _respond(used, {0: _prompt(60), 1: _prompt(31)})
    used.release(0)
    assert used.length(0) == 0
    expected, found = (_respond(engine, {0: _prompt(9)})[0] for engine in (fresh, used))
    assert found.ids == expected.ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-6)


@pytest.mark.parametrize("pad_id", [0, 13])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_groups_of_samples_of_short_and_long_states_agree_with_a_plain_forward(
    positions: str, pad_id: int
) -> None:
    model = _model(positions)
    prompts = [_prompt(length) for length in (*LENGTHS, 70)]
    groups = sample_groups(model, prompts, 4, sampling=SAMPLING, end_ids=(END,), pad_id=pad_id, seed=0)
    for prompt, group in zip(prompts, groups, strict=True):
        for response in group:
            assert response.logprobs == pytest.approx(_plain(model, prompt, response.ids), abs=1e-5)
