"""What a device has, and what libraries take of it before a model comes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

# A CUDA context with cuBLAS and its workspaces; measured by others at 0.4 to 0.7 GiB, and not by us.
CUDA_CONTEXT = 600 * 2**20
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Device:
    """Where a run computes.

    Attributes:
        kind: "cpu", "cuda" or "mps".
        name: for people.
        size: bytes of its memory; None where it is not here.
    """

    kind: str
    name: str
    size: int | None


def device_of(accelerator: str) -> Device:
    """The device that an accelerator of `fabric.accelerator` stands for on this machine."""
    kind = {"gpu": "cuda", "auto": _best()}.get(accelerator, accelerator)
    if kind == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Device("cuda", found.name, int(found.total_memory))
    if kind == "cpu":
        return Device("cpu", "the memory of this machine", _memory())
    return Device(kind, f"a {kind} device", None)


def _best() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _memory() -> int:
    """Bytes that this process may use, that of a container where it has a limit."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = _CGROUP.read_text().strip() if _CGROUP.is_file() else ""
    return min(whole, int(text)) if text.isdecimal() else whole


def libraries_bytes(device: Device) -> int:
    """Bytes that are taken before a model is there: on a CPU what this process holds now."""
    if device.kind != "cpu":
        return CUDA_CONTEXT
    import datasets  # noqa: F401  # a run imports them later, and they stay
    import matplotlib.pyplot  # noqa: F401
    from torch.utils import tensorboard  # noqa: F401

    return resident_bytes()


def resident_bytes() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)
