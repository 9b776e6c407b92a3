"""Lean layers are those of peft and transformers: the same outputs, the same gradients."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lightning_mtrl.models import lean_layers, onednn
from lightning_mtrl.models.lean_layers import (
    GatedMLP,
    LoRALinear,
    RMSNorm,
    rms_norm,
    use_lean_layers,
)
from lightning_mtrl.models.lora_linear import AdaptedMap, lora_linear
from lightning_mtrl.models.onednn import OneDNNLinear

ROWS, INPUTS, OUTPUTS, RANK = 6, 10, 7, 3


def _adapted(biased: bool = True, **settings: Any) -> PeftModel:
    """One adapted layer that is not the base any more."""
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=5, target_modules=["0"], init_lora_weights=False, **settings)
    return cast(PeftModel, get_peft_model(nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=biased)), config))


def _layer(model: nn.Module) -> lora.Linear:
    return next(module for module in model.modules() if isinstance(module, lora.Linear))


def _found(model: PeftModel) -> list[Tensor]:
    """Outputs, and gradients to inputs and adapter."""
    torch.manual_seed(1)
    x = torch.randn(2, ROWS // 2, INPUTS, requires_grad=True)
    output = model(x)
    (output * torch.randn_like(output)).sum().backward()
    trained = [p.grad for p in model.parameters() if p.requires_grad]
    assert x.grad is not None
    assert len(trained) == 2
    return [output, x.grad, *cast(list[Tensor], trained)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smallest", [0, 2**18], ids=["onednn", "blas"])
def test_outputs_and_gradients_are_those_of_peft(
    bias: bool, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "WORTH_ITS_CALL", smallest)
    wanted = _found(_adapted(bias))
    model = _adapted(bias)
    use_lean_layers(model)
    assert type(_layer(model)) is LoRALinear
    for found, expected in zip(_found(model), wanted, strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    shapes = ((ROWS, INPUTS), (RANK, INPUTS), (OUTPUTS, RANK))
    x, down, up = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    weight, bias = torch.randn(OUTPUTS, INPUTS).double(), torch.randn(OUTPUTS).double()

    def found(*some: Tensor) -> Tensor:
        return lora_linear(some[0], AdaptedMap(weight, bias, *some[1:], 0.7))

    assert torch.autograd.gradcheck(found, (x, down, up))


ELSEWHERE = {
    "dropout": {"lora_dropout": 0.5},
    "a trained bias": {"bias": "all"},
    "weight decomposition": {"use_dora": True},
}


@pytest.mark.parametrize("settings", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_the_operation_does_not_compute_is_left_to_peft(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _adapted(**settings).train()
    use_lean_layers(model)
    monkeypatch.setattr(lean_layers, "lora_linear", None)
    model(torch.randn(ROWS, INPUTS))


def test_dropout_that_is_off_does_not_stand_in_the_way() -> None:
    model = _adapted(lora_dropout=0.5).eval()
    use_lean_layers(model)
    x = torch.randn(ROWS, INPUTS)
    found = model(x)
    assert "_LoRALinear" in type(found.grad_fn.next_functions[0][0]).__name__
    _layer(model).__class__ = lora.Linear
    torch.testing.assert_close(found, model(x))


@pytest.mark.parametrize("how", ["disabled", "merged", "autocast"])
def test_an_adapter_that_is_off_or_merged_and_other_precisions_are_left_to_peft(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _adapted(), torch.randn(ROWS, INPUTS)
    use_lean_layers(model)
    monkeypatch.setattr(lean_layers, "lora_linear", None)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        if how == "merged":
            model.merge_adapter()
        if how == "disabled":
            with model.disable_adapter():
                model(x)
        else:
            model(x)


def test_a_layer_without_the_active_adapter_is_its_base() -> None:
    model, x = _adapted(), torch.randn(ROWS, INPUTS)
    use_lean_layers(model)
    layer = _layer(model)
    layer._active_adapter = ["another"]
    torch.testing.assert_close(model(x), layer.get_base_layer()(x), rtol=0, atol=0)


KIN: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


def _kin(name: str) -> nn.Module:
    torch.manual_seed(0)
    make_config, make_model = KIN[name]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: nn.Module = make_model(make_config(vocab_size=20, num_hidden_layers=2, **sizes))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def _adapted_kin(name: str) -> nn.Module:
    config = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(_kin(name), config)


def _learned(model: nn.Module) -> dict[str, Tensor]:
    """Logits, and gradients of everything that is trained."""
    logits = model(input_ids=torch.arange(18).reshape(2, 9) % 20).logits
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return {"logits": logits, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapted"])
@pytest.mark.parametrize("smallest", [0, 2**18], ids=["onednn", "blas"])
@pytest.mark.parametrize("name", KIN)
def test_models_compute_and_learn_what_they_do_in_transformers(
    name: str, smallest: int, adapted: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = _adapted_kin if adapted else _kin
    wanted = _learned(make(name))
    monkeypatch.setattr(onednn, "WORTH_ITS_CALL", smallest)
    model = make(name)
    use_lean_layers(model)
    if checkpointing:
        cast(Any, model).gradient_checkpointing_enable({"use_reentrant": False})
        cast(Any, model).enable_input_require_grads()
        model.train()
    assert sum(isinstance(module, RMSNorm) for module in model.modules()) == 5
    assert sum(isinstance(module, GatedMLP) for module in model.modules()) == 2
    found = _learned(model)
    assert found.keys() == wanted.keys()
    assert len(found) >= 22
    apart = {part: float((found[part] - wanted[part]).norm() / wanted[part].norm()) for part in wanted}
    assert max(apart.values()) < 1e-5, apart


def test_a_gated_block_keeps_half_of_what_autograd_would() -> None:
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() if tensor.size(-1) == 48 and tensor.size(0) == 18 else 0)
        return tensor

    model = _adapted_kin("llama")
    use_lean_layers(model)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(18).reshape(2, 9) % 20)
    layers, tokens, hidden = 2, 18, 48
    assert sum(kept) == 2 * layers * tokens * hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_in_another_precision_rounds_as_in_transformers(dtype: torch.dtype) -> None:
    plain, lean = (_kin("llama").to(dtype).eval() for _ in range(2))
    use_lean_layers(lean)
    x = torch.randn(4, 7, 32, dtype=dtype)
    norms = [cast(Any, model).model.norm(x) for model in (plain, lean)]
    exact = 0.0 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(norms[1], norms[0], rtol=exact, atol=exact)


def test_a_norm_has_the_gradients_of_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 5).double(), torch.randn(5).double()
    x.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda *some: rms_norm(*some, 1e-3), (x, weight))


def test_a_trained_layer_by_onednn_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "WORTH_ITS_CALL", 0)
    x = torch.randn(2, 5, INPUTS)

    def learned(lean: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer, inputs = nn.Linear(INPUTS, OUTPUTS), x.clone().requires_grad_()
        if lean:
            use_lean_layers(layer)
            assert isinstance(layer, OneDNNLinear)
        found = layer(inputs)
        (found**2).sum().backward()
        return [found, *(cast(Tensor, part.grad) for part in (inputs, layer.weight, layer.bias))]

    for found, wanted in zip(learned(True), learned(False), strict=True):
        torch.testing.assert_close(found, wanted)
