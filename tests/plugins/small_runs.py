"""Runs of the embedded model that are made in seconds, for commands that read a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_mtrl import cli

# Two iterations with a step each, whatever the critic finds.
CONFIG = """
seed: 3
fabric: {accelerator: cpu, threads: 1}
model: {name: tiny, context_length: 384}
environment:
  class_path: lightning_mtrl.environments.SuggestedResponse
  init_args: {max_turns: 4, size: tiny}
data: {conversations: 32, max_turns: 4, max_response_tokens: 16, validation_share: 0.25}
algorithm:
  class_path: trusting.TrustingIterativePPO
  init_args:
    evaluation: {epochs: 2, gamma: 0.95}
    improvement: {rounds: 1, states: 4, samples: 2, certificate_states: 4, accept: always}
    estimator: {class_path: lightning_mtrl.algorithms.RLOO}
loop: {iterations: 2, stop_when_converged: false}
validation: {conversations: 8, sample_conversations: 0}
loggers: [csv]
"""


@contextmanager
def seeds_put_back() -> Iterator[None]:
    """Variables that a run sets are as before afterwards."""
    with pytest.MonkeyPatch.context() as patched:
        for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            patched.setenv(variable, "0")
        yield


def small_run(folder: Path, *options: str) -> Path:
    """Make a run in a folder, of `CONFIG` with further options; its own folder is "run" there."""
    (folder / "small.yaml").write_text(CONFIG)
    run = folder / "run"
    with seeds_put_back():
        assert cli.main(["fit", f"--config={folder / 'small.yaml'}", f"--run_dir={run}", *options]) == 0
    return run
