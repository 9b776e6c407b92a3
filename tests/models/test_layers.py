"""Hidden states of a layer below the last."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from small_models import conversations_batch, move, small_backbone, some_talks
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, OPTConfig, OPTForCausalLM, PreTrainedModel

from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.layers import hidden_states
from lightning_mtrl.modules.policy import Policy
from lightning_mtrl.modules.q_critic import QCritic

SIZES = {"vocab_size": 14, "bos_token_id": 1, "eos_token_id": 1}
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


def _gpt2() -> PreTrainedModel:
    chances = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    return GPT2LMHeadModel(GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=2, n_positions=64, **chances))


def _opt() -> PreTrainedModel:
    chances = {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}
    sizes = {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
    return OPTForCausalLM(
        OPTConfig(**SIZES, **sizes, num_hidden_layers=2, num_attention_heads=2, **chances, pad_token_id=0)
    )


MODELS = {"gpt2": _gpt2, "opt": _opt}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_policy_computes_the_same_in_training_and_a_frozen_base_at_any_time(
    name: str, checkpointing: bool
) -> None:
    """Of models that drop units and layers by numbers, and by modules whose number alone is read."""
    torch.manual_seed(0)
    lora = LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM")
    backbone = Backbone(MODELS[name]().eval(), lora=lora, gradient_checkpointing=checkpointing)
    backbone.add_role("policy")
    move(backbone.parameters_of("policy"))
    policy, critic = Policy(backbone), QCritic(backbone, trunk="frozen")
    batch = conversations_batch(some_talks(4))
    with torch.no_grad():
        policy.eval()
        wanted, read = policy(batch)[0], critic.read_base(batch)
        policy.train()
        assert backbone.training
        assert torch.equal(policy(batch)[0], wanted)
        critic.train()
        assert torch.equal(critic.read_base(batch), read)


def test_sampling_leaves_every_part_in_the_mode_it_was_in() -> None:
    backbone = small_backbone(["policy", "critic"], dropout=0.5)
    policy = Policy(backbone)
    policy.train()
    modes = [module.training for module in policy.modules()]
    assert len(set(modes)) == 2
    with backbone.sampling("policy") as model:
        assert not any(module.training for module in model.modules())
    assert [module.training for module in policy.modules()] == modes
