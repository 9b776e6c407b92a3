from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.model_card import name_base, write_card
from lightning_mtrl.models.saving import save_merged, save_role

PROMPT = torch.tensor([[1, 5, 9, 2, 7]])


def base(tied: bool = True) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    torch.manual_seed(1)
    return LlamaForCausalLM(config).eval()


def trained(model: PreTrainedModel, fine_tuning: str = "lora") -> Backbone:
    """A backbone whose policy and critic both moved away from the base, and from each other."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    backbone = Backbone(model, fine_tuning, lora)
    for role in ("policy", "critic"):
        backbone.add_role(role)
        for parameter in backbone.parameters_of(role):
            parameter.data += 0.2 * torch.randn_like(parameter)
    return backbone


def greedy(model: torch.nn.Module) -> list[int]:
    assert isinstance(model, (PreTrainedModel, PeftModel))
    generated = model.generate(
        input_ids=PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return generated[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_adapter_speaks_like_the_policy_in_peft(tmp_path: Path, tied: bool) -> None:
    backbone = trained(base(tied))
    save_role(backbone, "policy", tmp_path)
    loaded = PeftModel.from_pretrained(base(tied), str(tmp_path))
    expected = greedy(backbone.causal("policy"))
    assert greedy(loaded) == expected
    assert greedy(base(tied)) != expected, (
        "the policy must differ from the base for this test to mean anything"
    )
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}


def test_the_card_of_a_moved_adapter_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base(True).save_pretrained(tmp_path / "package")
    backbone = trained(AutoModelForCausalLM.from_pretrained(tmp_path / "package"))
    made, moved = tmp_path / "made", tmp_path / "moved"
    made.mkdir()
    save_role(backbone, "policy", made)
    assert not (made / "README.md").exists(), "an unfilled card of peft"
    name_base(made, made, tmp_path / "package")
    write_card(made, "A policy", {"base model": "small"})
    expected = greedy(backbone.causal("policy"))
    for gone in ("package", "made"):
        (tmp_path / gone).rename(moved if gone == "made" else tmp_path / "elsewhere")
    code = (moved / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(moved)
    names: dict[str, Any] = {}
    exec(code.replace("tokenizer = ", "tokenizer = None and "), names)
    assert greedy(names["model"]) == expected


def test_the_name_of_a_local_base_holds_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/small").mkdir(parents=True)
    for given, named in (("models/small", str(tmp_path / "models/small")), ("owner/name", "owner/name")):
        Path("adapter_config.json").write_text(json.dumps({"base_model_name_or_path": given}))
        name_base(tmp_path, tmp_path, None)
        assert json.loads(Path("adapter_config.json").read_text())["base_model_name_or_path"] == named


@pytest.mark.parametrize("tied", [True, False])
def test_a_merged_policy_needs_no_peft_and_speaks_the_same(tmp_path: Path, tied: bool) -> None:
    backbone = trained(base(tied))
    save_merged(backbone, "policy", tmp_path)
    assert greedy(AutoModelForCausalLM.from_pretrained(tmp_path)) == greedy(backbone.causal("policy"))


def test_after_full_fine_tuning_the_model_itself_is_written(tmp_path: Path) -> None:
    backbone = trained(base(), "full")
    save_role(backbone, "policy", tmp_path)
    assert greedy(AutoModelForCausalLM.from_pretrained(tmp_path)) == greedy(backbone.causal("policy"))


def test_saving_leaves_the_policy_as_it_was(tmp_path: Path) -> None:
    backbone = trained(base())
    before = backbone.causal("policy")(PROMPT).logits
    for name, save in (("adapter", save_role), ("merged", save_merged)):
        (tmp_path / name).mkdir()
        save(backbone, "policy", tmp_path / name)
    assert torch.equal(backbone.causal("policy")(PROMPT).logits, before)


@pytest.mark.parametrize(
    ("reordered", "tolerance"),
    [
        # Only the order of the sums differs; the error of 4 bits is thousands of times larger.
        pytest.param(False, 1e-3, id="as quantized"),
        # Some CPUs compute in bfloat16 then, on logits of about 7; weights in the wrong order are off by 10.
        pytest.param(True, 0.3, id="reordered for the CPU"),
    ],
)
def test_a_four_bit_base_is_merged_into_the_weights_that_it_stands_for(
    tmp_path: Path, reordered: bool, tolerance: float
) -> None:
    base().save_pretrained(tmp_path / "base")
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=settings, dtype=torch.float32
    )
    quantized = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(quantized) == 14
    for module in quantized:
        module.support_avx512bf16_for_cpu &= reordered
    backbone = trained(model)
    policy = backbone.causal("policy").eval()
    with torch.no_grad():
        expected = policy(PROMPT).logits
    (tmp_path / "merged").mkdir()
    save_merged(backbone, "policy", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    torch.testing.assert_close(merged(PROMPT).logits, expected, rtol=0, atol=tolerance)
