from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_mtrl.models.load import blank_model, load_model
from lightning_mtrl.models.weights import base_bytes


def _stored(model: Any) -> int:
    """Bytes of all that a loaded model keeps, the scales of its 4-bit weights included; nothing twice."""
    found: list[Tensor] = [*model.parameters(), *model.buffers()]
    for weight in model.parameters():
        if (state := getattr(weight, "quant_state", None)) is not None:
            found += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("tiny", ["sales", "tasks"])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("float32", "nf4")]
)
def test_bytes_of_an_embedded_model_are_those_of_the_loaded_one(
    tiny: str, dtype: str, quantization: Any
) -> None:
    blank = blank_model("tiny", dtype=dtype, tiny=tiny)
    loaded = load_model("tiny", dtype=dtype, quantization=quantization, tiny=tiny).model
    assert base_bytes(blank, quantization == "nf4") == _stored(loaded)


@pytest.mark.real_lm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_bytes_of_a_real_model_are_those_of_the_loaded_one(smollm2_folder: Path, quantization: Any) -> None:
    blank = blank_model(str(smollm2_folder))
    loaded = load_model(str(smollm2_folder), quantization=quantization).model
    assert base_bytes(blank, quantization == "nf4") == _stored(loaded)
