"""Configurations of adapters, and what is wrong with them; adapters on a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from lightning_mtrl.errors import UserError
from lightning_mtrl.models.lean_layers import use_lean_layers


def every_linear_layer() -> LoraConfig:
    """Adapters of rank 16 on all linear layers but the output head."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def with_adapter(base: PreTrainedModel | PeftModel, name: str, config: LoraConfig) -> PeftModel:
    """Put a fresh adapter onto a model, in place.

    Raises:
        UserError: if the model lacks the layers that the adapter is for.
    """
    config = copy.deepcopy(config)
    try:
        if isinstance(base, PeftModel):
            base.add_adapter(name, config)
        else:
            base = get_peft_model(base, config, adapter_name=name)
    except ValueError as error:
        raise no_such_layers(base, config, error) from error
    use_lean_layers(base)
    kept = base.peft_config[name]
    assert isinstance(kept, LoraConfig)
    if isinstance(kept.target_modules, Iterable) and not isinstance(kept.target_modules, str):
        # peft makes a set of it, whose order differs between processes, and so would the saved file.
        kept.target_modules = sorted(kept.target_modules)
    return base


def no_such_layers(base: nn.Module, config: LoraConfig, error: ValueError) -> UserError:
    """What to tell about adapters for layers that the model does not have."""
    linear = (
        name.partition(".base_layer")[0] for name, m in base.named_modules() if isinstance(m, nn.Linear)
    )
    names = sorted({name.rpartition(".")[2] for name in linear if ".lora_" not in name})
    targets = config.target_modules
    shown = sorted(targets) if isinstance(targets, set) else targets
    return UserError(
        f"model.lora_targets is {shown!r}, but adapters cannot stand there: {error} "
        f"Layers that can have them: {', '.join(names)}."
    )


def adapter_config(adapter: str) -> LoraConfig:
    """Read the configuration in a peft folder, for training.

    Raises:
        UserError: if there is none.
    """
    try:
        config = LoraConfig.from_pretrained(adapter)
    except (ValueError, OSError) as error:
        raise UserError(
            f"model.adapter is {adapter!r}, but no peft adapter is there ({error}). A folder with "
            f"adapter_config.json "
            f"and adapter_model.safetensors was expected."
        ) from error
    config.inference_mode = False
    assert isinstance(config, LoraConfig)
    return config
