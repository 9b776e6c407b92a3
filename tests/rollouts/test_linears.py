from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_mtrl.models.onednn import onednn_is_faster
from lightning_mtrl.rollouts.linears import FusedLinear, full_linear, fused

SIZES = {"packed": (600, 520), "ordinary": (24, 16)}


@pytest.fixture(params=SIZES)
def layers(request: pytest.FixtureRequest) -> list[nn.Linear]:
    torch.manual_seed(0)
    out, inputs = SIZES[request.param]
    return [nn.Linear(inputs, out, bias=False), nn.Linear(inputs, out // 2)]


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 33])
@torch.inference_mode()
def test_a_fused_map_gives_what_its_layers_give(layers: list[nn.Linear], rows: int) -> None:
    x = torch.randn(rows, layers[0].in_features)
    wanted = torch.cat([layer(x) for layer in layers], -1)
    other = torch.randn_like(wanted)
    made = fused(layers)
    _close(made(x), wanted)
    _close(made.silu(x), functional.silu(wanted))
    _close(made.times(x, other), wanted * other)
    _close(made.plus(x, other), wanted + other)


def test_only_large_maps_in_fp32_on_a_cpu_are_for_onednn() -> None:
    large = torch.zeros(*SIZES["packed"])
    assert onednn_is_faster(large)
    assert not onednn_is_faster(large.bfloat16())
    assert not onednn_is_faster(torch.zeros(*SIZES["ordinary"]))
    assert not onednn_is_faster(large.to("meta"))


def test_a_layer_with_an_unmerged_adapter_is_no_ordinary_one() -> None:
    from peft import LoraConfig, get_peft_model

    base = nn.Sequential(nn.Linear(4, 4))
    model = get_peft_model(base, LoraConfig(target_modules=["0"]))
    layer = model.base_model.model[0]
    assert full_linear(layer) is None
    layer._disable_adapters = True
    assert full_linear(layer) is layer.get_base_layer()
    assert full_linear(nn.Embedding(4, 4)) is None


def test_a_copy_is_made_of_the_weights_as_they_are() -> None:
    layer = nn.Linear(*reversed(SIZES["packed"]), bias=False)
    made = FusedLinear([layer.weight.detach()])
    x = torch.randn(2, layer.in_features)
    with torch.inference_mode():
        before = made(x)
        layer.weight.zero_()
        assert torch.equal(made(x), before)
