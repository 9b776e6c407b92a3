"""A merged adapter computes what it computes apart, in any precision and on any layer, or is not merged."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_mtrl.assembly import build_backbone
from lightning_mtrl.config import ModelConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.saving import save_merged

IDS = torch.arange(18).reshape(2, 9) % 20


def adapted(dtype: torch.dtype, size: float, targets: str | list[str] = "all-linear") -> Backbone:
    """A policy whose weights changed by numbers of about this size, on a base with tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    backbone = Backbone(model.to(dtype).eval(), lora=lora)
    backbone.add_role("policy")
    for name, weight in backbone.named_parameters_of("policy").items():
        if ".lora_B" in name:
            weight.data.normal_(0.0, size)
    return backbone


def logits(backbone: Backbone, role: str) -> Tensor:
    with torch.no_grad():
        found: Tensor = backbone.causal(role).eval()(input_ids=IDS).logits.float()
    return found


def sampled(backbone: Backbone) -> Tensor:
    with backbone.sampling("policy") as model, torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits.float()
    return found


@pytest.mark.parametrize("size", [1e-4, 1e-1])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_what_an_adapter_changes_is_the_same_while_it_samples(precision: str, size: float) -> None:
    backbone = adapted(torch.bfloat16 if precision == "bfloat16" else torch.float32, size)
    mixed = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "autocast" else nullcontext()
    with mixed:
        base, wanted, found = logits(backbone, "base"), logits(backbone, "policy"), sampled(backbone)
    change = (wanted - base).norm()
    if precision == "float32":
        assert change > 0
        # A sum of fp32 numbers is off by 1e-7 of them, however small the adapter.
        assert (found - wanted).norm() < 1e-6 * base.norm()
    else:
        assert torch.equal(found, wanted)


def test_full_fine_tuning_starts_from_all_of_an_adapter_or_not_at_all() -> None:
    """What a merged pi_0 computes is what peft's layers compute one after the other."""
    apart, _ = build_backbone(ModelConfig())
    merged, _ = build_backbone(ModelConfig(fine_tuning="full"))
    base, wanted, found = logits(apart, "base"), logits(apart, "policy"), logits(merged, "policy")
    assert (wanted - base).norm() > 0.01 * base.norm()
    assert (found - wanted).norm() < 1e-5 * base.norm()
    with pytest.raises(UserError, match=r"model\.dtype is 'bfloat16'.*--model\.dtype float32"):
        build_backbone(ModelConfig(fine_tuning="full", dtype="bfloat16"))


def test_a_merge_that_fails_halfway_leaves_nothing_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = adapted(torch.float32, 0.1)
    wanted = logits(backbone, "policy")
    last = backbone.adapted_layers("policy")[-1]
    monkeypatch.setattr(last, "get_delta_weight", _out_of_memory)
    with pytest.raises(MemoryError), backbone.sampling("policy"):
        pass
    assert not any(layer.disable_adapters for layer in backbone.adapted_layers("policy"))
    assert torch.equal(logits(backbone, "policy"), wanted)


def _out_of_memory(role: str) -> Tensor:
    raise MemoryError


def test_an_adapted_output_head_does_not_move_the_embedding_that_it_shares_weights_with(
    tmp_path: Path,
) -> None:
    backbone = adapted(torch.float32, 0.3, ["q_proj", "lm_head"])
    head: Any = backbone.causal("policy").get_output_embeddings()
    assert head in backbone.adapted_layers("policy")
    embedding: Any = backbone.causal("policy").get_input_embeddings().weight
    assert head.get_base_layer().weight is embedding
    before, wanted = embedding.clone(), logits(backbone, "policy")
    with backbone.sampling("policy"):
        assert torch.equal(embedding, before)
    torch.testing.assert_close(sampled(backbone), wanted)

    save_merged(backbone, "policy", tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(exported(input_ids=IDS).logits, wanted)


def test_a_merged_export_says_how_much_of_the_adapter_rounding_took(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "full").mkdir()
    # bfloat16 has 8 bits, so numbers near 0.2 stand 1/1024 apart; an adapter of 1e-4 hardly moves any.
    assert save_merged(adapted(torch.bfloat16, 1e-5), "policy", tmp_path / "half") > 0.5
    assert save_merged(adapted(torch.float32, 1e-2), "policy", tmp_path / "full") < 1e-3
