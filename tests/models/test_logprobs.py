"""Log-probabilities in chunks are those of a plain log-softmax, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode
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
from lightning_mtrl.models import chunked_head
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.logprobs import (
    LogitHead,
    head_width,
    token_logprobs,
    token_logprobs_and_entropies,
)

VOCABULARY, WIDTH, TOKENS = 50, 16, 33


def _limit(patch: pytest.MonkeyPatch, elements: int) -> None:
    """Let chunks of every kind hold so many logits."""
    patch.setattr(chunked_head, "FROZEN_ELEMENTS", elements)
    patch.setattr(chunked_head, "TRAINED_ELEMENTS", elements)


@pytest.fixture(params=[7, TOKENS, 10_000], ids=["many chunks", "one full chunk", "one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens in a chunk; 33 tokens leave a shorter last one of 5 where it is 7."""
    _limit(monkeypatch, request.param * VOCABULARY)
    return int(request.param)


class WrappedHead(nn.Module):
    """More than a matrix, as a head with an adapter is, so that it is called as a module."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.linear = linear.weight, linear.bias, linear

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.linear(hidden)
        return found


class Kept:
    """Elements of all tensors that were kept for a backward pass."""

    elements = 0

    def __call__(self, value: Tensor) -> Tensor:
        self.elements += value.numel()
        return value


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return found


def _problem(bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    return head, torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (TOKENS,))


SQUASHES = [(0.0, 1.0), (3.0, 1.0), (0.0, 0.25), (2.0, 4.0)]
KINDS = ["frozen", "trained", "wrapped"]


def _plain(head: nn.Module, softcap: float, scale: float, hidden: Tensor) -> Categorical:
    logits = head(hidden) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return Categorical(logits=logits)


def _kind(kind: str, linear: nn.Linear) -> nn.Module:
    linear.requires_grad_(kind != "frozen")
    return WrappedHead(linear) if kind == "wrapped" else linear


@pytest.mark.parametrize(("softcap", "scale"), SQUASHES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_a_plain_softmax_with_all_gradients(
    chunk: int, kind: str, bias: bool, softcap: float, scale: float
) -> None:
    linear, hidden, targets = _problem(bias)
    head = _kind(kind, linear)
    weight = torch.linspace(-1, 1, TOKENS)
    plain = _plain(head, softcap, scale, hidden)
    inputs = (hidden, *(p for p in linear.parameters() if p.requires_grad))
    read = LogitHead(head, softcap, scale)
    found, entropy = token_logprobs_and_entropies(read, hidden, targets)
    alone = token_logprobs(read, hidden, targets)
    wanted = plain.log_prob(targets)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.allclose(alone, wanted, atol=1e-5)
    assert torch.allclose(entropy, plain.entropy(), atol=1e-5)
    pairs = [
        ((weight * found).sum() + (weight**2 * entropy).sum(), wanted * weight + weight**2 * plain.entropy()),
        ((weight * alone).sum(), wanted * weight),
    ]
    for ours, theirs in pairs:
        expected = torch.autograd.grad(theirs.sum(), inputs, retain_graph=True)
        for a, b in zip(torch.autograd.grad(ours, inputs), expected, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_pass_gives_the_same_gradients(chunk: int, kind: str) -> None:
    linear, hidden, targets = _problem(bias=True)
    found, entropy = token_logprobs_and_entropies(LogitHead(_kind(kind, linear), 3.0), hidden, targets)
    inputs = (hidden, *(p for p in linear.parameters() if p.requires_grad))
    first, second = (
        torch.autograd.grad((found + entropy).sum(), inputs, retain_graph=True) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("softcap", "scale"), SQUASHES)
@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_gradients_are_those_of_finite_differences_in_double_precision(
    kind: str, softcap: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    _limit(monkeypatch, 2 * 9)
    hidden, targets = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randint(9, (5,))
    weight, bias = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    if kind == "trained":
        weight.requires_grad_()
        bias.requires_grad_()
    squash, entropy = chunked_head.Squash(softcap, scale), chunked_head.Entropy(wanted=True, trained=True)

    def scored(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_head.head_logprobs(*inputs, targets, squash, entropy)

    assert torch.autograd.gradcheck(scored, (hidden, weight, bias))


@pytest.mark.parametrize("kind", KINDS)
def test_entropies_can_be_had_without_gradients(chunk: int, kind: str) -> None:
    linear, hidden, targets = _problem()
    read = LogitHead(_kind(kind, linear))
    found, entropy = token_logprobs_and_entropies(read, hidden, targets, entropy_trained=False)
    assert found.requires_grad
    assert not entropy.requires_grad
    assert torch.allclose(entropy, _plain(linear, 0.0, 1.0, hidden).entropy(), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_nothing_is_kept_for_a_backward_pass(chunk: int, kind: str) -> None:
    linear, hidden, targets = _problem()
    kept = Kept()
    with torch.no_grad(), saved_tensors_hooks(kept, lambda kept: kept):
        found, entropy = token_logprobs_and_entropies(LogitHead(_kind(kind, linear)), hidden, targets)
    assert not found.requires_grad
    assert not entropy.requires_grad
    assert kept.elements == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_holds_more_logits_than_a_chunk_however_many_tokens(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch, 7 * VOCABULARY)
    torch.manual_seed(0)
    linear = nn.Linear(4, VOCABULARY, bias=False)
    head = LogitHead(_kind(kind, linear))
    for tokens in (50, 5000):
        hidden, targets = torch.randn(tokens, 4, requires_grad=True), torch.randint(VOCABULARY, (tokens,))
        kept = Kept()
        with Sizes() as sizes, saved_tensors_hooks(kept, lambda kept: kept):
            found, entropy = token_logprobs_and_entropies(head, hidden, targets)
            (found.sum() + entropy.sum()).backward()
        assert 0 < sizes.largest <= max(7 * VOCABULARY, hidden.numel())
        # Hidden states, targets and a few numbers a token, and the head; never a token's logits.
        assert 0 < kept.elements <= 10 * hidden.numel() + linear.weight.numel()


def test_a_vocabulary_larger_than_a_chunk_is_done_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, targets = _problem()
    _limit(monkeypatch, 10)
    wanted = Categorical(logits=head(hidden)).log_prob(targets)
    assert torch.allclose(token_logprobs(LogitHead(head), hidden, targets), wanted, atol=1e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_autocast_computes_products_in_its_precision_and_sums_in_fp32(trained: bool) -> None:
    linear, hidden, targets = _problem()
    linear.requires_grad_(trained)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_logprobs(LogitHead(linear), hidden, targets)
    found.sum().backward()
    wanted = Categorical(logits=linear(hidden)).log_prob(targets)
    assert found.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32
    assert torch.allclose(found, wanted, atol=0.05)
    assert not torch.allclose(found, wanted, atol=1e-6)


def test_no_tokens_give_no_numbers_and_a_backward_pass_still_works() -> None:
    head, hidden, _ = _problem()
    nothing = torch.zeros(0, dtype=torch.long)
    found, entropy = token_logprobs_and_entropies(LogitHead(head), hidden[:0], nothing)
    assert found.shape == entropy.shape == (0,)
    assert found.dtype == torch.float32
    (found.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_fp32_and_finite_for_a_half_precision_head_with_extreme_logits(kind: str) -> None:
    linear, hidden, targets = _problem()
    head = LogitHead(_kind(kind, linear.bfloat16()))
    given = (300 * hidden.detach()).bfloat16().requires_grad_()
    found, entropy = token_logprobs_and_entropies(head, given, targets)
    (found.sum() + entropy.sum()).backward()
    assert found.dtype == entropy.dtype == torch.float32
    assert torch.isfinite(found).all()
    assert torch.isfinite(entropy).all()
    assert (found <= 0).all()
    assert (entropy >= 0).all()
    assert given.grad is not None
    assert given.grad.dtype == torch.bfloat16
    assert torch.isfinite(given.grad).all()


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
