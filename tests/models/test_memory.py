"""Five roles on one 4-bit base take hardly more memory than the policy alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import memory_probe
import pytest


def _peak(folder: Path, roles: str) -> float:
    """MiB of a fresh process, so that nothing of another test counts."""
    command = [sys.executable, memory_probe.__file__, str(folder), roles]
    # What is freed goes back at once; what the allocator keeps of it differs from run to run by a third.
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    env = {**os.environ, **returned}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return float(done.stdout)


@pytest.mark.real_lm
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_critic_reference_and_value_head_add_at_most_three_tenths(smollm2_folder: Path) -> None:
    alone, together = _peak(smollm2_folder, "alone"), _peak(smollm2_folder, "all")
    figures = (
        f"policy alone {alone:.0f} MiB; with critic, reference and value head {together:.0f} MiB: "
        f"{together / alone:.3f} times"
    )
    print(figures)
    # A wrong figure would be far from these: weights in 4 bits, activations of 400 tokens, and libraries.
    assert alone > 500, figures
    assert together <= 1.3 * alone, figures
