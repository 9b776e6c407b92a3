"""A run with everything but weights: its roles, modules and optimizers can be counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric

from lightning_mtrl.assembly import Learner, backbone_on, build_context
from lightning_mtrl.config import RunConfig
from lightning_mtrl.models.load import blank_model
from lightning_mtrl.models.tiny import TINY_FOLDER, tiny_model_of
from lightning_mtrl.models.weights import base_bytes, largest_layer_bytes
from lightning_mtrl.parsing import build_algorithm, build_environment
from lightning_mtrl.rollouts.tokens import ChatTokenizer


class _StayingFabric(Fabric):
    """Sets modules up where they are."""

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        return super().setup(*args, **{**kwargs, "move_to_device": False})


@dataclass
class BlankRun(Learner):
    """What a run would hold, on the device "meta".

    Attributes:
        config: the run's configuration.
        context: with the backbone.
        algorithm: set up on the context.
        base: bytes of the base's weights.
        largest_layer: bytes of the largest layer of a base in 4 bits, while it is multiplied; 0 for others.
    """

    base: int
    largest_layer: int


def blank_run(config: RunConfig) -> BlankRun:
    """Build a run from its configuration and that of its model.

    Raises:
        UserError: if a part of the configuration cannot work.
    """
    algorithm, environment = build_algorithm(config), build_environment(config)
    wanted = config.model
    tiny = tiny_model_of(environment) if wanted.name == "tiny" else "sales"
    model = blank_model(
        wanted.name,
        dtype=wanted.dtype,
        gguf_file=wanted.gguf_file,
        trust_remote_code=wanted.trust_remote_code,
        tiny=tiny,
    )
    four_bits = wanted.quantization == "nf4"
    base, layer = base_bytes(model, four_bits), largest_layer_bytes(model) if four_bits else 0
    precision: Any = config.fabric.precision
    fabric = _StayingFabric(accelerator="cpu", devices=1, precision=precision)
    with torch.device("meta"):
        backbone = backbone_on(model, wanted, tiny)
        context = build_context(config, fabric, backbone, _any_chat())
        algorithm.setup(context)
    return BlankRun(config, context, algorithm, base, layer)


def _any_chat() -> ChatTokenizer:
    """The embedded tokenizer in place of the model's own: for memory, one id is like another."""
    from transformers import PreTrainedTokenizerFast

    return ChatTokenizer(PreTrainedTokenizerFast.from_pretrained(TINY_FOLDER))
