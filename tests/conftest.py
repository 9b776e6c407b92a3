"""What every test can rely on: no network, fixed seeds, few threads, and nothing left behind."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

# Set before torch, transformers or matplotlib is imported; child processes inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Written by libraries when they are imported or used, and harmless to the tests after it.
WRITTEN_BY_LIBRARIES = (
    "PYTEST_",
    "KMP_",
    "CUDA_",
    "PYTORCH_NVML_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "BNB_",
    "HYPOTHESIS_",
)
SEED = 2511


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    # A test that needs no torch does not pay for its import.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves an environment variable changed or a thread running, and undoes the former."""
    before, threads = dict(os.environ), set(threading.enumerate())
    yield
    changed = sorted(
        name
        for name in before.keys() | os.environ.keys()
        if before.get(name) != os.environ.get(name) and not name.startswith(WRITTEN_BY_LIBRARIES)
    )
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    left = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    for thread in left:
        thread.join(timeout=2)
    running = [thread.name for thread in left if thread.is_alive()]
    assert not changed, f"the test left environment variables changed: {', '.join(changed)}"
    assert not running, f"the test left threads running: {', '.join(running)}"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct, written by `python scripts/fetch_smollm2.py FOLDER`."""
    folder = os.environ.get("LIGHTNING_MTRL_SMOLLM2")
    if folder is None:
        pytest.skip(
            "LIGHTNING_MTRL_SMOLLM2 is not set; run scripts/fetch_smollm2.py FOLDER and set it to FOLDER"
        )
    path = Path(folder)
    assert (path / "config.json").is_file(), f"LIGHTNING_MTRL_SMOLLM2 is {folder!r}, which holds no model"
    return path
