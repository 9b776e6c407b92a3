"""The plan against the resident memory of real runs, each in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import phase_memory
import pytest

from lightning_mtrl.planning.memory_plan import PHASES

# Of the measured peak. What one phase has freed is not all given back to the system before the next.
TOLERANCE = {"none": 0.25, "nf4": 0.35}
TINY = """
model: {name: tiny, context_length: 256}
fabric: {accelerator: cpu, threads: 1}
environment: {class_path: lightning_mtrl.environments.SuggestedResponse, init_args: {size: tiny}}
data: {conversations: 256, max_turns: 6, max_response_tokens: 16}
algorithm:
  class_path: lightning_mtrl.algorithms.IterativePPO
  init_args:
    evaluation: {epochs: 1}
    improvement: {rounds: 1, states: 32, samples: 8, epochs: 1, certificate_states: 16, accept: always}
    estimator: lightning_mtrl.algorithms.RLOO
loop: {iterations: 1}
validation: {conversations: 128}
loggers: [csv]
"""
SMALL = """
model: {context_length: 1024}
fabric: {accelerator: cpu, threads: 1}
environment: {class_path: lightning_mtrl.environments.SuggestedResponse, init_args: {max_turns: 2}}
data: {conversations: 8, max_turns: 2, rows: 8, max_response_tokens: 16, validation_share: 0.25}
algorithm:
  class_path: lightning_mtrl.algorithms.IterativePPO
  init_args:
    evaluation: {epochs: 1, micro_batch_size: 4}
    improvement: {rounds: 1, states: 4, samples: 4, epochs: 1, minibatch_states: 2, certificate_states: 4}
    estimator: lightning_mtrl.algorithms.RLOO
loop: {iterations: 1}
validation: {conversations: 8}
"""


PLANNING = """
import json, sys
from pathlib import Path
from lightning_mtrl.parsing import load_config
from lightning_mtrl.planning.memory_plan import PHASES
from lightning_mtrl.planning.plan import plan_memory

config, tokens, *options = sys.argv[1:]
plan = plan_memory(load_config(Path(config), overrides=options), int(tokens))
weights = sum(part.size for part in plan.held if part.name.endswith(("weights", "adapter", "copy")))
print(json.dumps({"weights": weights, "totals": {phase: plan.total(phase) for phase in PHASES}}))
"""


def _compared(text: str, folder: Path, *options: str) -> dict[str, tuple[float, float]]:
    """Measured and planned MiB of each phase."""
    config = folder / "config.yaml"
    config.write_text(text)
    command = [sys.executable, phase_memory.__file__, str(folder / "run"), str(config), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    truth: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # What libraries take is read from the process that plans, so that one is fresh too.
    done = subprocess.run(
        [sys.executable, "-c", PLANNING, str(config), str(truth["tokens"]), *options],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    plan: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert plan["weights"] == truth["weights"]
    found = {phase: (truth["peaks"][phase] / 2**20, plan["totals"][phase] / 2**20) for phase in PHASES}
    print({phase: f"measured {a:.0f} MiB, planned {b:.0f}" for phase, (a, b) in found.items()})
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peaks_of_the_embedded_model_are_as_planned(tmp_path: Path) -> None:
    for phase, (measured, planned) in _compared(TINY, tmp_path).items():
        assert planned == pytest.approx(measured, rel=TOLERANCE["none"]), phase


@pytest.mark.real_lm
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("quantization", TOLERANCE)
def test_peaks_of_a_real_model_are_as_planned(
    smollm2_folder: Path, tmp_path: Path, quantization: str
) -> None:
    options = (f"--model.name={smollm2_folder}", f"--model.quantization={quantization}")
    for phase, (measured, planned) in _compared(SMALL, tmp_path, *options).items():
        assert planned == pytest.approx(measured, rel=TOLERANCE[quantization]), phase
