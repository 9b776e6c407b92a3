"""Peak resident memory of every phase of a run, and the longest conversation that it had, as JSON.

python phase_memory.py RUN_FOLDER CONFIG [--key value ...]
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.loop import PolicyIterationLoop
from lightning_mtrl.parsing import load_config, to_yaml
from lightning_mtrl.runs.folder import RunFolder


def give_back() -> None:
    """The peak counts from here, without what earlier phases took and the allocator kept."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class MeasuredLoop(PolicyIterationLoop):
    peaks: dict[str, int]
    longest: int

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        give_back()
        with super().phase(name, iteration):
            yield
        # pi_0 is measured before there is any optimizer state.
        self.peaks[name] = max(peak(), self.peaks.get(name, 0))

    def collect(self, iteration: int) -> list[Conversation]:
        rollouts = super().collect(iteration)
        self.longest = max(self.longest, *(len(c.token_ids()) for c in rollouts))
        return rollouts


def measured(folder: Path, config: str, overrides: list[str]) -> dict[str, Any]:
    wanted = load_config(config, overrides=overrides)
    loop = MeasuredLoop(wanted, RunFolder.create(to_yaml(wanted), str(folder), "measured"))
    loop.peaks, loop.longest = {}, 0
    loop.run()
    backbone = loop.parts.backbone
    stored = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in _tensors(backbone))
    }
    return {"peaks": loop.peaks, "tokens": loop.longest, "weights": sum(stored.values())}


def _tensors(backbone: Any) -> Iterator[Any]:
    """All that the backbone keeps, and the scales of weights in 4 bits."""
    for tensor in (*backbone.parameters(), *backbone.buffers()):
        yield tensor
        if (state := getattr(tensor, "quant_state", None)) is not None:
            yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)


if __name__ == "__main__":
    print(json.dumps(measured(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])))
