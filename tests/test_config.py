from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass

import pytest

from lightning_mtrl import config
from lightning_mtrl.config import (
    DataConfig,
    FabricConfig,
    LoopConfig,
    ModelConfig,
    RunConfig,
    ValidationConfig,
)
from lightning_mtrl.errors import UserError

NAN = float("nan")
REFUSED = ("bf16-true", "16-true", "16-mixed", "64-true", "bf16", "transformer-engine", "16-wide")

MISTAKES: list[tuple[Callable[..., object], str, dict[str, object]]] = [
    (FabricConfig, "fabric.devices", {"devices": 0}),
    (FabricConfig, "fabric.devices", {"devices": "both"}),
    (FabricConfig, "fabric.num_nodes", {"num_nodes": 0}),
    (FabricConfig, "fabric.threads", {"threads": 0}),
    *[(FabricConfig, "fabric.precision", {"precision": name}) for name in REFUSED],
    (ModelConfig, "model.name", {"name": " "}),
    (ModelConfig, "model.lora_rank", {"lora_rank": 0}),
    (ModelConfig, "model.lora_alpha", {"lora_alpha": -1.0}),
    (ModelConfig, "model.lora_dropout", {"lora_dropout": 1.0}),
    (ModelConfig, "model.context_length", {"context_length": 0}),
    (ModelConfig, "model.quantization", {"quantization": "nf4", "fine_tuning": "full"}),
    (DataConfig, "data.batch_size", {"batch_size": 0}),
    (DataConfig, "data.conversations", {"conversations": 0}),
    (DataConfig, "data.conversations", {"conversations": 10, "group_size": 4}),
    (DataConfig, "data.group_size", {"group_size": 0}),
    (DataConfig, "data.max_turns", {"max_turns": 0}),
    (DataConfig, "data.temperature", {"temperature": 0.0}),
    (DataConfig, "data.temperature", {"temperature": NAN}),
    (DataConfig, "data.top_p", {"top_p": 0.0}),
    (DataConfig, "data.top_k", {"top_k": -1}),
    (DataConfig, "data.validation_share", {"validation_share": 1.0}),
    (DataConfig, "data.validation_share", {"validation_share": NAN}),
    (DataConfig, "data.earlier_share", {"earlier_share": 1.0}),
    (DataConfig, "data.explore_share", {"explore_share": 1.5}),
    (DataConfig, "data.persona_share", {"persona_share": 0.5}),
    (LoopConfig, "loop.iterations", {"iterations": 0}),
    (LoopConfig, "loop.checkpoint_keep", {"checkpoint_keep": 0}),
    (LoopConfig, "loop.max_skipped_steps", {"max_skipped_steps": 0}),
    (ValidationConfig, "validation.conversations", {"conversations": 0}),
    (ValidationConfig, "validation.seed", {"seed": -1}),
    (ValidationConfig, "validation.temperature", {"temperature": float("inf")}),
    (RunConfig, "seed", {"seed": -1}),
]


@pytest.mark.parametrize(("part", "key", "arguments"), MISTAKES)
def test_a_value_that_cannot_work_is_told_with_its_key_its_value_and_an_example(
    part: Callable[..., object], key: str, arguments: dict[str, object]
) -> None:
    with pytest.raises(UserError) as caught:
        part(**arguments)
    message = str(caught.value)
    assert message.startswith(f"{key} is ")
    assert str(next(iter(arguments.values()))) in message
    assert f"--{key} " in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("precision", REFUSED)
def test_a_precision_that_is_refused_comes_with_what_to_use_instead(precision: str) -> None:
    with pytest.raises(UserError, match=r"32-true or bf16-mixed .*half precision, set model.dtype bfloat16"):
        FabricConfig(precision=precision)


def test_the_defaults_are_allowed() -> None:
    assert RunConfig() == RunConfig()


def test_every_key_is_described() -> None:
    parts = [part for part in vars(config).values() if is_dataclass(part)]
    assert len(parts) >= 7
    for part in parts:
        described = part.__doc__ or ""
        missing = [field.name for field in fields(part) if f"\n        {field.name}: " not in described]
        assert not missing, f"{part.__name__} does not describe {missing}"
