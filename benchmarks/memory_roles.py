"""An engine of `memory.py`: a training step and a scoring pass of some roles on one 4-bit base.

The roles take their turns as they do in an iteration: one adapter is active, and its activations are gone
before the next one's are made.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from lightning.fabric import Fabric

import measuring
from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.passes import of_similar_length
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.assembly import build_backbone
from lightning_mtrl.batch import collate
from lightning_mtrl.config import ModelConfig
from lightning_mtrl.modules.base import scored_logprobs
from lightning_mtrl.modules.implicit_prm import ImplicitPRM
from lightning_mtrl.modules.policy import Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.sampling import SamplingConfig
from training_ours import conversations, improvement

MAKERS: dict[str, Any] = {
    "policy": Policy,
    "critic": QCritic,
    "prm": ImplicitPRM,
    "value": lambda backbone: ValueHead(backbone, "value"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--roles", choices=["policy", "all"], required=True)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--scored", type=int, default=240)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def main() -> None:
    a = arguments()
    config = ModelConfig(
        name=a.model, quantization="nf4", dtype=a.dtype, gradient_checkpointing=a.gradient_checkpointing
    )
    backbone, chat = build_backbone(config)
    fabric = Fabric(accelerator="auto", devices=1)
    fabric.launch()
    data = RolloutDataModule(tokenizer=chat)
    context = Context(fabric, backbone, chat, data, SamplingConfig(), context_length=2 * a.tokens)
    roles = list(MAKERS) if a.roles == "all" else ["policy"]
    steppers = {role: Stepper(context, MAKERS[role](backbone), 1.0, None) for role in roles}
    if a.roles == "all":
        backbone.add_role("reference", like="policy", trainable=False)
    batch = collate(
        conversations(a.conversations, a.tokens, a.scored, tuple(chat.header_ids)),
        chat.pad_id,
        chat.header_ids,
    )
    mask, zeros = batch.response_mask, torch.zeros_like(batch.behaviour_logprobs)
    batches = {"policy": improvement(batch, zeros, mask.float(), zeros, zeros), "critic": batch, "prm": batch}
    batches["value"] = batches["policy"]
    measuring.report(engine="lightning_mtrl", roles=[*backbone.roles], threads=torch.get_num_threads())
    for _ in measuring.turns():
        measuring.give_back()
        start = time.perf_counter()
        for role, stepper in steppers.items():
            stepper.begin()
            stepper.step(batches[role], of_similar_length)
            stepper.module.module.eval()
            with torch.no_grad():
                stepper.module.module(batch.to(fabric.device))
        if "reference" in backbone.roles:
            with torch.no_grad():
                scored_logprobs(backbone, "reference", batch.to(fabric.device))
        measuring.report(seconds=time.perf_counter() - start, peak_mib=measuring.peak_mib())


if __name__ == "__main__":
    main()
