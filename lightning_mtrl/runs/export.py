"""A policy in the forms that other programs load: a peft folder, or a whole model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from safetensors.torch import save_file

from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.runs.atomic import replacing_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def save_adapter(backbone: Backbone, role: str, folder: Path) -> None:
    """Write a role as a folder that `peft.PeftModel.from_pretrained` and vLLM load; never half of one.

    With full fine-tuning the folder holds the whole model instead.
    """
    with replacing_folder(folder) as target:
        if backbone.full:
            backbone.causal(role).save_pretrained(target)
            return
        assert isinstance(backbone.base, PeftModel)
        config = copy.deepcopy(backbone.base.peft_config[role])
        config.inference_mode = True
        config.save_pretrained(str(target))
        weights = {name: w.contiguous() for name, w in backbone.state_of(role).items()}
        save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})


def save_merged(backbone: Backbone, role: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a role merged into its base, as `AutoModelForCausalLM.from_pretrained` loads it.

    A 4-bit base is written in 32 bits: its weights are dequantized first, so nothing is rounded twice.
    """
    model = backbone.causal(role)
    if backbone.full:
        merged = model
    else:
        assert isinstance(backbone.base, PeftModel)
        duplicate: PeftModel = copy.deepcopy(backbone.base)
        duplicate.set_adapter(role)
        if getattr(model, "is_quantized", False):
            duplicate.get_base_model().dequantize()
        with torch.no_grad():
            merged = duplicate.merge_and_unload(adapter_names=[role])
    with replacing_folder(folder) as target:
        merged.save_pretrained(target)
        tokenizer.save_pretrained(target)
