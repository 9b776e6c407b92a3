"""Engines that live in processes of their own and take turns, and what such a process used.

An engine prints one JSON object a line: first what it is, then what each turn took. It works only after a
line on its standard input, so engines that are compared never work at the same time, and see the same minutes
of a machine that may have other work. This file runs in the peers' environments too: it needs torch alone.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

REPORT = "engine-report: "


def give_back() -> None:
    """Return freed memory to the system, and count the peak of this process from here."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Peak memory in MiB since `give_back`: of the device if it is a GPU, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return status_mib("VmHWM")


def status_mib(field: str) -> float:
    """A field of /proc/self/status in MiB; NaN where there is no such file."""
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.is_file() else []
    found = (int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))
    return next(found, float("nan"))


def report(**values: Any) -> None:
    """Say something to the process that compares."""
    print(REPORT + json.dumps(values), flush=True)


def turns() -> Iterator[int]:
    """Numbers of the turns, as they are given; ends with the standard input."""
    for number, _ in enumerate(sys.stdin):
        yield number


class Engine:
    """A process that takes turns.

    Args:
        command: starts it.

    Attributes:
        facts: what it said of itself.
        taken: what its turns took.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.taken: list[dict[str, Any]] = []
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.facts = self._next()

    def turn(self) -> dict[str, Any]:
        """Let it work once."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._next()

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def median(self, key: str) -> float:
        return float(statistics.median(row[key] for row in self.taken))

    def summary(self) -> dict[str, Any]:
        """Facts, medians and all figures, for a file."""
        keys = [key for key, value in self.taken[0].items() if isinstance(value, float)]
        return {"facts": self.facts, "median": {key: self.median(key) for key in keys}, "all": self.taken}

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(REPORT):
                found: dict[str, Any] = json.loads(line.removeprefix(REPORT))
                return found
        raise RuntimeError(f"{self.command} ended with status {self._process.wait()}; see its messages")


def take_turns(commands: Sequence[Sequence[str]], rounds: int) -> list[Engine]:
    """Start engines, let each warm up once, then let them take turns; they are closed when it is over."""
    engines: list[Engine] = []
    try:
        for command in commands:
            engines.append(Engine(command))
            engines[-1].turn()
        for _ in range(rounds):
            for engine in engines:
                engine.taken.append(engine.turn())
                print(engine.facts["engine"], engine.taken[-1], file=sys.stderr, flush=True)
    finally:
        for engine in engines:
            engine.close()
    return engines


def machine() -> dict[str, Any]:
    """Where and when a figure was taken."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(path: Path, values: dict[str, Any]) -> None:
    """Write figures with the machine that they were taken on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **values}, indent=1) + "\n")


def chosen_device(gpu: bool, benchmark: str, output: Path) -> bool:
    """Whether a benchmark can run where it was asked to; it hides a GPU that was not asked for.

    Where there is no GPU, the result says that it was not run.
    """
    if gpu and not torch.cuda.is_available():
        print("not run: there is no GPU here")
        write(output, {"benchmark": benchmark, "gpu": "not run"})
        return False
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return True


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
