"""Adapters on a 4-bit base get the gradients of its dequantised weights, also after it has sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from small_models import TEMPLATE, move, small_chat
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.load import load_model

IDS = torch.tensor([[2, 4, 5, 1, 3, 6, 7, 8, 9, 1]])
REAL, POSITIONS = torch.ones_like(IDS, dtype=torch.bool), torch.arange(10)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=14, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = small_chat().tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def _four_bit(folder: Path) -> Backbone:
    return _with_roles(load_model(str(folder), quantization="nf4").model)


def _dequantised(folder: Path) -> Backbone:
    """The same numbers as ordinary weights, so that plain autograd is the truth."""
    plain = load_model(str(folder)).model
    layers = dict(load_model(str(folder), quantization="nf4").model.named_modules())
    quantised = {name: layer for name, layer in layers.items() if isinstance(layer, Linear4bit)}
    assert len(quantised) == 14
    for name, layer in quantised.items():
        plain.get_submodule(name).weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return _with_roles(plain)


def _with_roles(model: LlamaForCausalLM) -> Backbone:
    torch.manual_seed(1)
    backbone = Backbone(model)
    for number, role in enumerate(("policy", "critic")):
        backbone.add_role(role)
        move(backbone.parameters_of(role), seed=number, by=0.05)
    return backbone


def _gradients(backbone: Backbone, role: str = "policy") -> tuple[Tensor, list[Tensor]]:
    hidden = backbone.hidden(role, IDS, REAL, POSITIONS)
    loss = (hidden * torch.linspace(-1, 1, 128)).sum()
    return hidden.detach(), list(torch.autograd.grad(loss, backbone.parameters_of(role)))


def _use_without_gradients(backbone: Backbone, how: str) -> None:
    if how == "sampled":
        with backbone.sampling("policy") as model, torch.inference_mode():
            model(input_ids=IDS)
    elif how == "scored":
        backbone.eval()
        with torch.no_grad():
            backbone.hidden("critic", IDS, REAL, POSITIONS)
    elif how == "saved":
        backbone.state_dict()


@pytest.mark.parametrize("how", ["fresh", "sampled", "scored", "saved"])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_the_dequantised_weights(folder: Path, how: str, training: bool) -> None:
    backbone = _four_bit(folder).eval()
    _use_without_gradients(backbone, how)
    found, gradients = _gradients(backbone.train(training))
    wanted, plain = _gradients(_dequantised(folder))
    assert torch.allclose(found, wanted, atol=1e-3)
    assert len(plain) == 28
    for gradient, truth in zip(gradients, plain, strict=True):
        assert torch.cosine_similarity(gradient.flatten(), truth.flatten(), dim=0) > 0.9999
        assert torch.allclose(gradient, truth, rtol=1e-2, atol=1e-2 * float(truth.abs().max()))


def test_scores_with_and_without_gradients_are_the_same(folder: Path) -> None:
    backbone = _four_bit(folder).eval()
    with torch.no_grad():
        before = backbone.hidden("policy", IDS, REAL, POSITIONS)
    after, _ = _gradients(backbone.train())
    with torch.no_grad():
        again = backbone.eval().hidden("policy", IDS, REAL, POSITIONS)
    assert torch.allclose(before, after, atol=1e-4)
    assert torch.equal(before, again)
