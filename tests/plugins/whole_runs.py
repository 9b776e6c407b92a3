"""Whole runs in a test's own process: their configuration, a key, and what they leave in the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SECRET = "sk-very-secret-0123456789"  # stands for a server's key, which must be found nowhere


def end_with_the_test(patch: pytest.MonkeyPatch) -> None:
    """Let the environment variables that a run sets be put back after the test."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        patch.setenv(name, "0")


def written(folder: Path, config: Mapping[str, Any]) -> str:
    """The option that names a file with this configuration."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return f"--config={file}"


def texts_of(folder: Path) -> str:
    """All bytes of all files of a folder, in one text."""
    return "\n".join(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file())
