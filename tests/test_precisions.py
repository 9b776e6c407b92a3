"""Every precision that a configuration accepts trains all kinds of modules."""

from __future__ import annotations

import math

import pytest
from one_iteration import ITPO, PPO, one_iteration

# Seconds of computing, but a busy machine can make minutes of them.
pytestmark = pytest.mark.timeout(600)


# Both as they are by default is what every other test runs in.
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "float32"), ("32-true", "bfloat16"), ("bf16-mixed", "bfloat16")]
)
@pytest.mark.parametrize(("algorithm", "loss"), [(PPO, "q_loss"), (ITPO, "prm_loss")], ids=["PPO", "ITPO"])
def test_an_iteration_takes_all_its_steps(
    algorithm: list[str], loss: str, precision: str, dtype: str
) -> None:
    measured, said = one_iteration([*algorithm, f"--fabric.precision={precision}", f"--model.dtype={dtype}"])
    assert not [text for text in said if "was skipped" in text]
    assert all(math.isfinite(measured[name]) for name in (loss, "kl", "advantage_std"))
