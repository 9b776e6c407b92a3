"""One base, many roles: what a role computes, what it owns, and what sampling leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_mtrl.errors import UserError
from lightning_mtrl.models.adapters import Backbone


def _llama(seed: int = 0, hidden_size: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config).eval()


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=32)).eval()


def _stir(backbone: Backbone, role: str, seed: int = 1) -> None:
    """Move a role away from the base."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in backbone.parameters_of(role):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


IDS = torch.arange(18).reshape(2, 9) % 20
REAL = torch.ones(2, 9, dtype=torch.bool)
POSITIONS = torch.arange(9).expand(2, 9)


def _logits(backbone: Backbone, role: str) -> torch.Tensor:
    with torch.no_grad():
        hidden = backbone.hidden(role, IDS, REAL, POSITIONS)
        return backbone.logit_head(role).logits(hidden.flatten(0, 1)).view(2, 9, -1)


@pytest.mark.parametrize("fine_tuning", ["lora", "full"])
@pytest.mark.parametrize("make", [_llama, _gpt2])
def test_a_fresh_role_is_the_base_and_roles_do_not_touch_each_other(make, fine_tuning: str) -> None:
    plain = make()
    with torch.no_grad():
        wanted = plain(input_ids=IDS).logits
    backbone = Backbone(make(), fine_tuning)
    for role in ("policy", "critic"):
        backbone.add_role(role)
    backbone.keep_base()
    _stir(backbone, "policy")
    assert torch.allclose(_logits(backbone, "critic"), wanted, atol=1e-5)
    assert torch.allclose(_logits(backbone, "base"), wanted, atol=1e-5)
    assert not torch.allclose(_logits(backbone, "policy"), wanted, atol=1e-2)
    backbone.copy_role("policy", "critic")
    assert torch.equal(_logits(backbone, "critic"), _logits(backbone, "policy"))


@pytest.mark.parametrize("fine_tuning", ["lora", "full"])
def test_gradients_reach_the_active_role_alone(fine_tuning: str) -> None:
    backbone = Backbone(_llama(), fine_tuning)
    backbone.add_role("policy")
    backbone.add_role("critic")
    backbone.add_role("reference", like="policy", trainable=False)
    backbone.hidden("critic", IDS, REAL, POSITIONS).square().sum().backward()
    assert any(p.grad is not None for p in backbone.parameters_of("critic"))
    assert all(p.grad is None for role in ("policy", "reference") for p in backbone.parameters_of(role))
    assert all(not p.requires_grad for p in backbone.parameters_of("reference"))


@pytest.mark.parametrize(
    ("fine_tuning", "use"),
    [
        *(("lora", use) for use in ("sampling", "causal", "logit_head")),
        *(("full", use) for use in ("sampling", "causal", "logit_head", "whole", "state_of")),
    ],
)
def test_a_role_that_is_not_there_is_told_with_those_that_are(fine_tuning: str, use: str) -> None:
    backbone = Backbone(_llama(), fine_tuning)
    backbone.add_role("policy")

    def enter() -> None:
        with getattr(backbone, use)("critic"):
            pass

    with pytest.raises(ValueError, match=r"unknown role 'critic'; there are \['policy'\]"):
        enter()


def test_a_policy_alone_has_the_weights_once_with_full_fine_tuning_too() -> None:
    number = sum(p.numel() for p in _llama().parameters())
    backbone = Backbone(_llama(), "full")
    backbone.add_role("policy")
    assert sum(p.numel() for p in backbone.parameters()) == number
    backbone.add_role("initial", like="policy", trainable=False)
    assert sum(p.numel() for p in backbone.parameters()) == 2 * number


@pytest.mark.parametrize("kept", [False, True])
def test_after_the_first_role_was_trained_the_base_is_there_only_if_it_was_kept(kept: bool) -> None:
    backbone = Backbone(_llama(), "full")
    backbone.add_role("policy")
    wanted = _logits(backbone, "base")
    if kept:
        backbone.keep_base()
    policy = torch.optim.SGD(backbone.parameters_of("policy"), lr=0.1)
    backbone.hidden("policy", IDS, REAL, POSITIONS).square().sum().backward()
    policy.step()
    if kept:
        backbone.add_role("critic")
        assert torch.equal(_logits(backbone, "base"), wanted)
        assert torch.equal(_logits(backbone, "critic"), wanted)
        return
    with pytest.raises(ValueError, match=r"trained as 'policy'.*keep_base"):
        backbone.add_role("critic")
    with pytest.raises(ValueError, match=r"trained as 'policy'.*keep_base"):
        _logits(backbone, "base")


def test_sampling_uses_the_merged_policy_and_leaves_no_trace() -> None:
    backbone = Backbone(_llama())
    backbone.add_role("policy")
    _stir(backbone, "policy")
    before = {name: w.clone() for name, w in backbone.state_dict().items()}
    wanted = _logits(backbone, "policy")
    for _ in range(3):
        with backbone.sampling("policy") as model, torch.no_grad():
            assert torch.allclose(model(input_ids=IDS).logits, wanted, atol=1e-4)
    after = backbone.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(_logits(backbone, "policy"), wanted)


def test_sampling_puts_weights_back_when_it_fails() -> None:
    backbone = Backbone(_llama())
    backbone.add_role("policy")
    _stir(backbone, "policy")
    wanted = _logits(backbone, "policy")
    with pytest.raises(RuntimeError), backbone.sampling("policy"):
        raise RuntimeError
    assert torch.equal(_logits(backbone, "policy"), wanted)


def test_a_square_mask_of_causal_order_is_the_ordinary_mask() -> None:
    for model in (_llama(), _gpt2()):
        backbone = Backbone(model)
        backbone.add_role("policy")
        causal = torch.ones(9, 9).tril().bool().expand(2, 9, 9)
        plain = backbone.hidden("policy", IDS, REAL, POSITIONS)
        assert torch.allclose(backbone.hidden("policy", IDS, causal, POSITIONS), plain, atol=1e-5)


def test_a_peft_folder_starts_a_role_and_another_bases_folder_is_refused(tmp_path: Path) -> None:
    source = Backbone(_llama(), lora=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    source.add_role("policy")
    _stir(source, "policy")
    assert isinstance(source.base, PeftModel)
    source.base.save_pretrained(tmp_path, selected_adapters=["policy"])
    adapter = str(tmp_path / "policy")
    backbone = Backbone(_llama())
    backbone.add_role("policy", adapter=adapter)
    assert torch.allclose(_logits(backbone, "policy"), _logits(source, "policy"), atol=1e-5)
    backbone.add_role("reference", like="policy", trainable=False)
    assert torch.equal(_logits(backbone, "reference"), _logits(backbone, "policy"))
    with pytest.raises(UserError, match="another base"):
        Backbone(_llama(hidden_size=64)).add_role("policy", adapter=adapter)
    with pytest.raises(UserError, match="no peft adapter"):
        Backbone(_llama()).add_role("policy", adapter=str(tmp_path / "nothing"))


def test_only_trainable_hides_the_other_roles_for_a_moment() -> None:
    backbone = Backbone(_llama())
    backbone.add_role("policy")
    backbone.add_role("critic")
    with backbone.only_trainable("critic"):
        assert not any(p.requires_grad for p in backbone.parameters_of("policy"))
    assert all(p.requires_grad for r in ("policy", "critic") for p in backbone.parameters_of(r))


SAVED_ORDER = """
import sys, torch
from lightning_mtrl.models.adapters import Backbone
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
backbone = Backbone(LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)))
backbone.add_role("critic")
backbone.add_role("reference", like="critic")
backbone.base.save_pretrained(sys.argv[1])
"""


def test_an_adapters_configuration_is_saved_in_one_order_by_every_process(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        command = [sys.executable, "-c", SAVED_ORDER, str(tmp_path / seed)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    for role in ("critic", "reference"):
        first, second = (tmp_path / seed / role / "adapter_config.json" for seed in ("0", "1"))
        assert first.read_bytes() == second.read_bytes()
