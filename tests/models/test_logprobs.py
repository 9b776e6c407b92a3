"""Log-probabilities in chunks are those of a plain log-softmax, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from lightning_mtrl.errors import UserError
from lightning_mtrl.models import logprobs as module
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.logprobs import LogitHead, head_width, token_logprobs

VOCABULARY, WIDTH, TOKENS = 50, 16, 33


@pytest.fixture(params=[7, TOKENS, 10_000], ids=["many chunks", "one full chunk", "one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens in a chunk; 33 tokens leave a shorter last one of 5 where it is 7."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param * VOCABULARY)
    return int(request.param)


def _problem(bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    return head, torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (TOKENS,))


def _gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (3.0, 1.0), (0.0, 0.25), (2.0, 4.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_equal_a_plain_softmax_with_gradients_of_hidden_states_and_head(
    chunk: int, softcap: float, scale: float, bias: bool
) -> None:
    head, hidden, targets = _problem(bias)
    weight = torch.linspace(-1, 1, TOKENS)
    found, entropy = token_logprobs(LogitHead(head, softcap, scale), hidden, targets)
    logits = head(hidden) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    plain = Categorical(logits=logits)
    wanted = plain.log_prob(targets)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.allclose(entropy, plain.entropy(), atol=1e-5)
    inputs = (hidden, *head.parameters())
    ours = _gradients((weight * found).sum() + entropy.sum(), *inputs)
    theirs = _gradients((weight * wanted).sum() + plain.entropy().sum(), *inputs)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_a_frozen_head_lets_gradients_through_to_hidden_states(chunk: int) -> None:
    head, hidden, targets = _problem()
    head.requires_grad_(False)
    token_logprobs(LogitHead(head), hidden, targets)[0].sum().backward()
    one_hot = torch.nn.functional.one_hot(targets, VOCABULARY).float()
    with torch.no_grad():
        wanted = (one_hot - head(hidden).softmax(-1)) @ head.weight
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, wanted, atol=1e-5)


def test_without_gradients_nothing_is_kept_for_a_backward_pass(chunk: int) -> None:
    head, hidden, targets = _problem()
    with torch.no_grad():
        found, entropy = token_logprobs(LogitHead(head), hidden, targets)
    assert not found.requires_grad
    assert not entropy.requires_grad


def test_no_chunk_holds_more_logits_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, targets = _problem()
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * VOCABULARY)
    sizes: list[int] = []
    head.register_forward_hook(lambda _, given, out: sizes.append(out.numel()))
    token_logprobs(LogitHead(head), hidden, targets)[0].sum().backward()
    assert max(sizes) <= 7 * VOCABULARY
    # Once forward, and once more in the backward pass, so no chunk's logits are kept between.
    assert sum(sizes) == 2 * TOKENS * VOCABULARY


def test_a_vocabulary_larger_than_a_chunk_is_done_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, targets = _problem()
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 10)
    found, _ = token_logprobs(LogitHead(head), hidden, targets)
    wanted = Categorical(logits=head(hidden)).log_prob(targets)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_no_tokens_give_no_numbers_and_a_backward_pass_still_works() -> None:
    head, hidden, _ = _problem()
    found, entropy = token_logprobs(LogitHead(head), hidden[:0], torch.zeros(0, dtype=torch.long))
    assert found.shape == entropy.shape == (0,)
    assert found.dtype == torch.float32
    (found.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_numbers_are_fp32_and_finite_for_a_half_precision_head_with_extreme_logits() -> None:
    head, hidden, targets = _problem()
    found, entropy = token_logprobs(LogitHead(head.bfloat16()), 300 * hidden.bfloat16(), targets)
    assert found.dtype == entropy.dtype == torch.float32
    assert torch.isfinite(found).all()
    assert torch.isfinite(entropy).all()
    assert (found <= 0).all()
    assert (entropy >= 0).all()


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def test_a_head_is_read_with_what_its_model_does_to_logits() -> None:
    torch.manual_seed(0)
    capped = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0))
    scaled = Cohere2ForCausalLM(Cohere2Config(**SIZES, head_dim=8, logit_scale=0.125))
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    for model in (capped.eval(), scaled.eval()):
        LogitHead.check(model)
        head = LogitHead.of(model)
        assert head_width(head) == VOCABULARY
        with torch.no_grad():
            hidden = model.base_model(input_ids=ids).last_hidden_state[0]
            assert torch.allclose(head.logits(hidden), model(input_ids=ids).logits[0], atol=1e-5)
    assert (LogitHead.of(capped).softcap, LogitHead.of(capped).scale) == (2.0, 1.0)
    assert (LogitHead.of(scaled).softcap, LogitHead.of(scaled).scale) == (0.0, 0.125)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused() -> None:
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0, initializer_range=0.5)).train()
    with pytest.raises(UserError, match=r"GraniteForCausalLM.*model\.name"):
        Backbone(model)
    assert model.training


def test_an_ordinary_model_passes_in_training_mode_and_keeps_its_random_numbers() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=1, n_head=2)).train()
    state = torch.random.get_rng_state()
    LogitHead.check(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
