"""What a configuration takes, the classes that read it take too: a wrong number is told at the start."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from small_models import small_chat

from lightning_mtrl.config import DataConfig, ValidationConfig
from lightning_mtrl.environments.tabular_dialogue import TabularDialogue
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.sampling import SamplingConfig

WHOLE = (-1, 0, 1, 2, 10**6)
NUMBERS = (-1.0, -1e-9, 0.0, 1e-9, 0.5, 1.0, 1.0 + 1e-9, 2.0, math.inf, math.nan)
KINDS = {"int": WHOLE, "float": NUMBERS}
DEFAULT = DataConfig(conversations=10**6, personas=["Be brief."])
CASES = [(f.name, value) for f in fields(DataConfig) for value in KINDS.get(str(f.type), ())]


def build(data: DataConfig, validation: ValidationConfig) -> None:
    """What `assemble` makes of these two parts."""
    for temperature in (data.temperature, validation.temperature):
        sampling = SamplingConfig(temperature, data.top_k, data.top_p, data.min_p, data.max_response_tokens)
    Collector(
        TabularDialogue(),
        small_chat(),
        sampling=sampling,
        rows=data.rows,
        context_length=96,
        max_turns=data.max_turns,
        group_size=data.group_size,
        explore_share=data.explore_share,
        explore_temperature=data.explore_temperature,
        explore_min_p=data.explore_min_p,
        personas=tuple(data.personas),
        persona_share=data.persona_share,
        max_failure_share=data.max_failure_share,
    )
    RolloutDataModule(batch_size=data.batch_size, validation_share=data.validation_share)


def accepted(part: Any, name: str, value: float) -> Any:
    """The part with this value, or None where it is refused under its key."""
    section = type(part).__name__.removesuffix("Config").lower()
    try:
        return replace(part, **{name: value})
    except UserError as error:
        told = str(error)
    key = "conversations" if name == "group_size" and value > 1 else name
    assert told.startswith(f"{section}.{key} is ")
    return None


def test_every_number_was_tried() -> None:
    assert len({name for name, _ in CASES}) == 17


@pytest.mark.parametrize(("name", "value"), CASES)
def test_what_a_configuration_takes_is_taken_by_those_who_read_it(name: str, value: float) -> None:
    data = accepted(DEFAULT, name, value)
    if data is not None:
        build(data, ValidationConfig())


@pytest.mark.parametrize("temperature", NUMBERS)
def test_so_is_the_temperature_of_validation(temperature: float) -> None:
    validation = accepted(ValidationConfig(), "temperature", temperature)
    if validation is not None:
        build(DEFAULT, validation)


def test_a_min_p_of_one_is_refused_under_its_key() -> None:
    with pytest.raises(UserError, match=r"^data\.min_p is 1\.0, but it must be a number in \[0, 1\)"):
        DataConfig(min_p=1.0)
