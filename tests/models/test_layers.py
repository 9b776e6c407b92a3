"""Hidden states of a layer below the last."""

from __future__ import annotations

import pytest
import torch
from small_models import small_backbone
from torch import nn
from transformers import GPT2Config, GPT2Model

from lightning_mtrl.models.layers import hidden_states

IDS = torch.tensor([[1, 5, 9, 3, 7]])


def test_a_layer_holds_what_the_whole_model_computes_there() -> None:
    decoder = small_backbone().causal("base").base_model
    gpt2 = GPT2Model(GPT2Config(vocab_size=20, n_embd=32, n_layer=3, n_head=4, n_positions=32)).eval()
    for model in (decoder, gpt2):
        with torch.no_grad():
            whole = model(input_ids=IDS, output_hidden_states=True)
            layers = model.config.num_hidden_layers
            assert layers >= 2
            for layer in range(1, layers + 1):
                assert torch.equal(hidden_states(model, layer, input_ids=IDS), whole.hidden_states[layer])
            assert torch.equal(hidden_states(model, None, input_ids=IDS), whole.last_hidden_state)


def test_layers_above_are_not_computed_and_are_there_again_afterwards() -> None:
    decoder = small_backbone().causal("base").base_model
    layers, norm, calls = decoder.layers, decoder.norm, []
    handles = [layer.register_forward_hook(lambda *_, n=n: calls.append(n)) for n, layer in enumerate(layers)]
    hidden_states(decoder, 1, input_ids=IDS)
    for handle in handles:
        handle.remove()
    assert calls == [0]
    assert decoder.layers is layers
    assert decoder.norm is norm


def test_the_model_is_whole_again_after_a_failed_pass() -> None:
    decoder = small_backbone().causal("base").base_model
    layers = decoder.layers
    with pytest.raises(ValueError, match="specify exactly one"):
        hidden_states(decoder, 1, input_ids=None)
    assert decoder.layers is layers
    assert isinstance(layers, nn.ModuleList)


@pytest.mark.parametrize("layer", [0, 99])
def test_a_layer_that_is_not_there_is_named(layer: int) -> None:
    with pytest.raises(ValueError, match=f"layer must be from 1 to 2, got {layer}"):
        hidden_states(small_backbone().causal("base").base_model, layer, input_ids=IDS)
