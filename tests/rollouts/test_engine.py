from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_mtrl.models import onednn
from lightning_mtrl.rollouts.decoding import SampledResponse
from lightning_mtrl.rollouts.engine import ConversationEngine, Draw, sample_groups
from lightning_mtrl.rollouts.forwards import TransformersForward
from lightning_mtrl.rollouts.lean import LeanDecoder
from lightning_mtrl.rollouts.memory import PackedMemory, RecomputedMemory
from lightning_mtrl.rollouts.packing import Memories, _fastest_forward
from lightning_mtrl.rollouts.sampling import SamplingConfig

SPECIAL: dict[str, Any] = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROTARY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = (2, 3, 4, 5)


def _model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    grouped = {**SPECIAL, **ROTARY, "num_key_value_heads": 2, "initializer_range": 0.3}
    builders = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**grouped)),
        "biased": lambda: _with_biases(Qwen2ForCausalLM(Qwen2Config(**grouped))),
        "queries normalised": lambda: Qwen3ForCausalLM(Qwen3Config(**grouped, head_dim=8)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(**SPECIAL, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)
        ),
        "wide window": lambda: MistralForCausalLM(MistralConfig(**grouped, sliding_window=400)),
        "short window": lambda: MistralForCausalLM(MistralConfig(**grouped, sliding_window=6)),
        "alibi": lambda: BloomForCausalLM(
            BloomConfig(**SPECIAL, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
        ),
        "recurrent": lambda: MambaForCausalLM(MambaConfig(**SPECIAL, hidden_size=16, num_hidden_layers=1)),
        "local": lambda: GPTNeoForCausalLM(
            GPTNeoConfig(
                **SPECIAL,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                window_size=6,
                initializer_range=0.3,
            )
        ),
    }
    return builders[name]().eval()


def _with_biases(model: PreTrainedModel) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


LEAN = ("llama", "wide window", "biased")
PACKED = (*LEAN, "gpt2", "queries normalised")
RECOMPUTED = ("short window", "alibi", "recurrent", "local")


def _engine(model: PreTrainedModel, rows: int = 8, **settings: Any) -> ConversationEngine:
    ends: Collection[int] = settings.pop("end_ids", ENDS)
    sampling = SamplingConfig(**{"max_response_tokens": 9, **settings})
    return ConversationEngine(model, rows=rows, context_length=200, end_ids=ends, sampling=sampling, pad_id=0)


def _numbers(*key: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(key).random(9)


def _respond(
    engine: ConversationEngine,
    rows: Sequence[int],
    new: Sequence[Sequence[int]],
    numbers: Sequence[Any],
    temperatures: Sequence[float] | None = None,
    min_ps: Sequence[float] | None = None,
) -> list[SampledResponse]:
    usual = engine._sampling
    heats = temperatures or [usual.temperature] * len(numbers)
    cuts = min_ps or [usual.min_p] * len(numbers)
    return engine.respond(rows, new, [Draw(*each) for each in zip(numbers, heats, cuts, strict=True)])


def _ids(length: int, *key: int) -> list[int]:
    return [int(i) for i in np.random.default_rng([1000, *key]).integers(6, 40, size=length)]


def _generated(model: PreTrainedModel, ids: list[int], new: int = 9, ends: Sequence[int] = ENDS) -> list[int]:
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=list(ends),
        pad_token_id=0,
    )
    return [int(i) for i in out[0, len(ids) :]]


def _recomputed(model: PreTrainedModel, ids: list[int], start: int) -> list[float]:
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))]


@pytest.mark.parametrize("name", PACKED)
def test_plain_causal_models_keep_packed_rows(name: str) -> None:
    assert isinstance(Memories(_model(name), 200, 0).of(2), PackedMemory)


@pytest.mark.parametrize("name", PACKED)
def test_llama_and_its_kin_take_the_lean_forward_and_others_their_own(name: str) -> None:
    model = _model(name)
    assert LeanDecoder.supports(model) == (name in LEAN)
    assert isinstance(_fastest_forward(model, 200), LeanDecoder if name in LEAN else TransformersForward)


def test_a_model_that_changes_what_its_layers_compute_keeps_its_own_forward() -> None:
    model: Any = _model("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: 2 * output)
    assert isinstance(_fastest_forward(model, 200), TransformersForward)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_other_models_are_recomputed_and_it_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = _model(name)
    with caplog.at_level(logging.WARNING, logger="lightning_mtrl"):
        kinds = [type(Memories(model, 200, 0).of(2)) for _ in range(3)]
    assert kinds == [RecomputedMemory] * 3
    said = [r for r in caplog.records if "cannot keep packed keys" in r.getMessage()]
    assert len(said) == 1


@pytest.fixture(params=["ordinary", "packed"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with linear maps in oneDNN's layout, for which these models are too small by themselves."""
    if request.param == "packed":
        monkeypatch.setattr(onednn, "WORTH_ITS_CALL", 0)


@pytest.mark.parametrize("name", LEAN)
def test_the_lean_forward_has_the_tokens_of_generate_in_either_layout(name: str, layout: None) -> None:
    model, engine = _model(name), _engine(_model(name), temperature=0.0)
    held: list[list[int]] = [[] for _ in range(8)]
    for turn in range(3):
        new = [_ids(2 + (5 * row + turn) % 11, row, turn) for row in range(8)]
        responses = _respond(engine, range(8), new, [_numbers(0)] * 8)
        for row, response in enumerate(responses):
            held[row] += new[row]
            assert list(response.ids) == _generated(model, held[row])
            held[row] += response.ids


@pytest.mark.parametrize("name", PACKED + RECOMPUTED)
def test_greedy_tokens_are_those_of_generate_over_turns_and_after_a_row_was_reused(name: str) -> None:
    model = _model(name)
    engine = _engine(model, temperature=0.0)
    held: dict[int, list[int]] = {}
    for turn in range(4):
        rows = [row for row in (3, 0, 5, 1, 2) if not (turn == 2 and row == 1)]
        if turn == 2:
            engine.release(5)
            engine.release(0)
            del held[5], held[0]
        new = [_ids(3 + 5 * (row not in held) + (row * 3 + turn) % 4, row, turn) for row in rows]
        responses = _respond(engine, rows, new, [_numbers(row) for row in rows])
        for row, ids, response in zip(rows, new, responses, strict=True):
            before = held.get(row, []) + ids
            assert list(response.ids) == _generated(model, before)
            assert response.finished == (response.ids[-1] in ENDS)
            held[row] = before + list(response.ids)
            assert engine.length(row) == len(held[row])


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("cut", [{"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}])
def test_logprobs_are_those_of_a_plain_forward(name: str, cut: dict[str, float]) -> None:
    model = _model(name)
    engine = _engine(model, rows=12, **cut)
    held: list[list[int]] = [[] for _ in range(12)]
    for turn in range(3):
        new = [_ids(2 + (5 * row + turn) % 11, row, turn) for row in range(12)]
        responses = _respond(engine, range(12), new, [_numbers(row, turn) for row in range(12)])
        for row, response in enumerate(responses):
            start = len(held[row]) + len(new[row])
            held[row] += new[row] + list(response.ids)
            assert response.logprobs == pytest.approx(_recomputed(model, held[row], start), abs=1e-4)


def test_a_conversation_is_the_same_alone_and_among_others() -> None:
    model = _model("llama")
    alone = _engine(model, rows=1)
    crowd = _engine(model, rows=40)
    for turn in range(4):
        mine = _ids(4 + turn, 7, turn)
        by_itself = _respond(alone, [0], [mine], [_numbers(7, turn)])[0]
        rows = [row for row in range(39, -1, -1) if row == 17 or (row + turn) % 3]
        new = [mine if row == 17 else _ids(1 + row % 9, row, turn) for row in rows]
        numbers = [_numbers(7 if row == 17 else 100 + row, turn) for row in rows]
        response = _respond(crowd, rows, new, numbers)[rows.index(17)]
        assert response.ids == by_itself.ids
        assert response.logprobs == pytest.approx(by_itself.logprobs, abs=1e-5)
        for row in rows[::7]:
            if row != 17:
                crowd.release(row)


def test_rows_grow_past_their_first_slots() -> None:
    model = _model("llama")
    engine = _engine(model, rows=3, temperature=0.0, end_ids=())
    held: list[int] = []
    for turn in range(8):
        new = _ids(12, turn)
        response = _respond(engine, [2], [new], [_numbers(0)])[0]
        assert list(response.ids) == _generated(model, held + new, ends=[])
        assert not response.finished
        held += new + list(response.ids)
    assert engine.length(2) == len(held) == 8 * 21


@pytest.mark.parametrize("name", ["queries normalised", "gpt2"])
def test_what_new_conversations_begin_with_is_read_once(name: str) -> None:
    model = _model(name)
    engine = _engine(model, rows=6, temperature=0.0)
    held = {row: _ids(4, row) for row in (0, 1)}
    for row, response in zip(
        (0, 1), _respond(engine, [0, 1], list(held.values()), [_numbers(0)] * 2), strict=True
    ):
        held[row] += response.ids
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(args[0].numel())
    )
    system = _ids(40, 99)
    new = {
        1: _ids(3, 7),
        2: system,
        3: [*system, 9],
        4: [*system, *_ids(5, 8)],
        5: [*system[:30], *_ids(9, 1)],
    }
    responses = _respond(engine, list(new), list(new.values()), [_numbers(0)] * 5)
    hook.remove()
    # The common part once; the row that goes on, its unread token included; what is left of four new rows.
    assert seen[:3] == [30, 1 + 3, 4 * 15]
    for (row, ids), response in zip(new.items(), responses, strict=True):
        before = held.get(row, []) + ids
        assert list(response.ids) == _generated(model, before)
        assert response.logprobs == pytest.approx(
            _recomputed(model, [*before, *response.ids], len(before)), abs=1e-4
        )


def test_equal_new_conversations_get_the_same_answer() -> None:
    model, ids = _model("llama"), _ids(30, 3)
    responses = _respond(_engine(model, temperature=0.0), range(8), [ids] * 8, [_numbers(0)] * 8)
    assert {r.ids for r in responses} == {tuple(_generated(model, ids))}


def test_each_row_has_its_own_temperature() -> None:
    model = _model("llama")
    ids, rows = _ids(6, 1), [0, 1, 2]
    mixed = _respond(_engine(model), rows, [ids] * 3, [_numbers(5)] * 3, temperatures=[0.0, 1.0, 3.0])
    for heat, response in zip((0.0, 1.0, 3.0), mixed, strict=True):
        assert response == _close(
            _respond(_engine(model, temperature=heat), [0], [ids], [_numbers(5)])[0], response
        )
    assert len({r.ids for r in mixed}) == 3


def test_each_row_has_its_own_min_p() -> None:
    model, ids = _model("llama"), _ids(6, 1)
    numbers = [_numbers(5)] * 2
    strict, free = _respond(_engine(model, temperature=2.0), [0, 1], [ids] * 2, numbers, min_ps=[0.999, 0.0])
    assert list(strict.ids) == _generated(model, ids)
    assert free.ids == _respond(_engine(model, temperature=2.0), [0], [ids], numbers[:1])[0].ids != strict.ids


def _close(response: SampledResponse, other: SampledResponse) -> SampledResponse:
    assert response.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    return replace(response, logprobs=other.logprobs, drawn_logprobs=other.drawn_logprobs)


@pytest.mark.parametrize("name", ["llama", "gpt2", "alibi"])
def test_samples_of_a_prompt_do_not_depend_on_the_batch(name: str) -> None:
    model = _model(name)
    prompts = [_ids(n, n) for n in (9, 3, 14, 3, 70)]
    settings: dict[str, Any] = {
        "sampling": SamplingConfig(max_response_tokens=9),
        "end_ids": ENDS,
        "pad_id": 0,
    }
    wide = sample_groups(model, prompts, 5, seed=3, **settings)
    assert [len(group) for group in wide] == [5] * 5
    assert all(len({r.ids for r in group}) > 1 for group in wide)
    for rows in (1, 3, 7, 11):
        narrow = sample_groups(model, prompts, 5, seed=3, rows=rows, **settings)
        assert [[r.ids for r in group] for group in narrow] == [[r.ids for r in group] for group in wide]
    assert sample_groups(model, prompts, 5, seed=4, **settings)[0] != wide[0]
    for prompt, group in zip(prompts, wide, strict=True):
        for r in group:
            ids = prompt + list(r.ids)
            assert r.logprobs == pytest.approx(_recomputed(model, ids, len(prompt)), abs=1e-4)


def test_dropout_is_off_while_sampling_and_every_part_keeps_its_mode() -> None:
    model = GPT2LMHeadModel(GPT2Config(**SPECIAL, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.9))
    model.eval()
    calm = _respond(_engine(model), [0], [_ids(5)], [_numbers(1)])
    model.train()
    model.lm_head.eval()
    assert _respond(_engine(model), [0], [_ids(5)], [_numbers(1)]) == calm
    assert model.transformer.training
    assert not model.lm_head.training


def test_logits_that_are_not_finite_stop_the_sampling() -> None:
    model = _model("llama")
    engine = _engine(model)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        _respond(engine, [0], [_ids(5)], [_numbers(1)])


def test_misuse_is_refused() -> None:
    model = _model("llama")
    with pytest.raises(ValueError, match="responding already"):
        _respond(_engine(model), [1, 1], [[7], [8]], [_numbers(1)] * 2)
    with pytest.raises(ValueError, match="must then fit 200"):
        _respond(_engine(model), [1], [_ids(192)], [_numbers(1)])
    with pytest.raises(ValueError, match="at least one"):
        _respond(_engine(model), [1], [[]], [_numbers(1)])
    with pytest.raises(ValueError, match="as many uniform"):
        _respond(_engine(model), [1], [[7]], [_numbers(1)[:3]])


@pytest.mark.parametrize("name", ["llama", "gpt2", "alibi"])
def test_rows_join_while_others_are_in_the_middle_of_a_response(name: str) -> None:
    model = _model(name)
    engine = _engine(model, temperature=0.0, end_ids=(), max_response_tokens=12)
    said = {row: _ids(5 + row, row) for row in range(4)}
    late, found = {row: _ids(20 + row, row) for row in (4, 5)}, {}
    for row, ids in said.items():
        engine.begin(row, ids, Draw(np.zeros(12), 0.0, 0.0))
    waited = iter([0, 0, 1, *[0] * 99])
    assert engine.advance(lambda: next(waited)) == {}
    assert engine.responding == set(said)
    for row, ids in late.items():
        engine.begin(row, ids, Draw(np.zeros(12), 0.0, 0.0))
    while engine.responding:
        found |= engine.advance()
    # The early ones had sampled three tokens when the others came, so they are finished first.
    assert list(found) == [0, 1, 2, 3, 4, 5]
    for row, ids in (said | late).items():
        assert list(found[row].ids) == _generated(model, ids, new=12, ends=[])
        assert engine.length(row) == len(ids) + 12


@pytest.mark.parametrize("cut", [{"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 3}])
def test_the_distribution_that_was_drawn_from_is_kept_too(cut: dict[str, float]) -> None:
    model, ids = _model("llama"), _ids(6, 1)
    for seed in range(5):
        response = _respond(_engine(model, **cut), [0], [ids], [_numbers(seed)])[0]
        held = [*ids, *response.ids]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([held])).logits[0, len(ids) - 1 : -1].double()
        for scores, token, logprob in zip(logits, response.ids, response.drawn_logprobs, strict=True):
            assert logprob == pytest.approx(_log_share(scores, token, **cut), abs=1e-4)


def _log_share(
    scores: torch.Tensor, token: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> float:
    """By hand: the token's share among those that were kept."""
    ordered = (scores / temperature).softmax(-1).sort(descending=True)
    kept: list[tuple[int, float]] = []
    for index, share in zip(ordered.indices.tolist(), ordered.values.tolist(), strict=True):
        if sum(p for _, p in kept) >= top_p or len(kept) == (top_k or len(scores)):
            break
        kept.append((index, share))
    return float(np.log(dict(kept)[token] / sum(p for _, p in kept)))


@pytest.mark.real_lm
def test_a_real_model_says_greedily_what_generate_says(smollm2_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    engine = _engine(model, temperature=0.0, end_ids=(end,))
    held: list[list[int]] = [[], [], []]
    asked = (["Hi!", "What is a printer good for?", "Name a colour."], ["Why?", "And a camera?", "Another."])
    for questions in asked:
        new = [
            tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
            for text in questions
        ]
        for row, response in enumerate(_respond(engine, range(3), new, [_numbers(0)] * 3)):
            held[row] += new[row]
            assert list(response.ids) == _generated(model, held[row], ends=[end])
            held[row] += response.ids
