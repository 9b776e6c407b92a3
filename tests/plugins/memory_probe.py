"""Peak resident memory in MiB of a training step and a scoring pass, of one role or of all of them.

python memory_probe.py MODEL_FOLDER alone|all
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.assembly import build_backbone
from lightning_mtrl.batch import ConversationBatch, ImprovementBatch, collate
from lightning_mtrl.config import ModelConfig
from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.modules.base import scored_logprobs
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.objectives import token_weights
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.sampling import SamplingConfig

ROWS, TURNS, RESPONSE, OBSERVATION = 2, 3, 32, 32


def talks(header: tuple[int, ...]) -> list[Conversation]:
    """Conversations of 224 tokens; what they say has no influence on memory."""
    rng = random.Random(0)

    def said(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(100, 40_000) for _ in range(number))

    found = []
    for row in range(ROWS):
        turns = tuple(
            Turn(
                "said", "heard", reward=float(turn == TURNS - 1),
                response_ids=said(RESPONSE), behaviour_logprobs=(-5.0,) * RESPONSE,
                observation_ids=(*header, *said(OBSERVATION - len(header))),
            )
            for turn in range(TURNS)
        )  # fmt: skip
        found.append(Conversation(str(row), (Message("user", "x"),), turns, 1.0, prompt_ids=said(32)))
    return found


def improvement(batch: ConversationBatch) -> ImprovementBatch:
    mask, shared = batch.response_mask, {f.name for f in fields(ImprovementBatch)}
    return ImprovementBatch(
        **{f.name: getattr(batch, f.name) for f in fields(batch) if f.name in shared},
        reference_logprobs=batch.behaviour_logprobs,
        advantages=mask.float(),
        returns=mask.float(),
        values=torch.zeros(mask.shape),
        loss_weights=token_weights(mask),
    )


def give_back_what_loading_took() -> None:
    """The peak counts from here: of loading, only what stays resident."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main(folder: str, roles: str) -> None:
    backbone, chat = build_backbone(ModelConfig(name=folder, quantization="nf4"))
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    data = RolloutDataModule(tokenizer=chat)
    context = Context(fabric, backbone, chat, data, SamplingConfig(), context_length=512)
    policy = Policy(backbone, kl=KLTerm(0.1))
    modules: list[Any] = [policy]
    if roles == "all":
        backbone.add_role("reference", like="policy", trainable=False)
        modules = [QCritic(backbone), policy, ValueHead(backbone, "value")]
    steppers = [Stepper(context, module, 1.0, None) for module in modules]
    batch = collate(talks(tuple(chat.header_ids)), chat.pad_id, chat.header_ids)
    step = improvement(batch)
    give_back_what_loading_took()
    for stepper, module in zip(steppers, modules, strict=True):
        stepper.step(batch if isinstance(module, QCritic) else step)
        module.eval()
        with torch.no_grad():
            module(batch)
    if roles == "all":
        with torch.no_grad():
            scored_logprobs(backbone, "reference", batch)
    print(peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
