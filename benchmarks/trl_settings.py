"""What TRL's trainers are given in every comparison: the model, LoRA as ours, and nothing that costs time."""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

ENDLESS = 1_000_000  # steps
# What "all-linear" means for ours.
_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def loaded(a: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype))
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def lora() -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules=_MODULES, task_type="CAUSAL_LM")


def settings(a: argparse.Namespace, learning_rate: float) -> dict[str, Any]:
    """No logging, no saving, no gradient checkpointing."""
    return {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": a.micro_batch,
        "gradient_accumulation_steps": a.conversations // a.micro_batch, "learning_rate": learning_rate,
        "report_to": "none", "save_strategy": "no", "logging_strategy": "no",
        "use_cpu": not torch.cuda.is_available(), "bf16": False, "disable_tqdm": True,
        "gradient_checkpointing": False, "seed": 0,
    }  # fmt: skip
