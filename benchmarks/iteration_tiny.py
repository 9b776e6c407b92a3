"""The embedded model's iteration: its share inside torch operators, and how it grows with conversations."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

import measuring
from lightning_mtrl.loop import PolicyIterationLoop
from lightning_mtrl.parsing import load_config
from lightning_mtrl.runs.folder import RunFolder

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
THREADS = 2
SIZES = (64, 128, 256, 512, 1024)
ROUNDS = 5
SHARE_WANTED = 0.7


def loop_of(file: str, conversations: int | None = None) -> PolicyIterationLoop:
    """A run of a configuration file, perhaps with another number of conversations."""
    config = load_config(CONFIGS / file)
    config = replace(
        config,
        fabric=replace(config.fabric, threads=THREADS),
        data=replace(config.data, conversations=conversations or config.data.conversations),
        loggers=[],
    )
    return PolicyIterationLoop(config, RunFolder.create("benchmark", Path(tempfile.mkdtemp()) / "run"))


def iteration(loop: PolicyIterationLoop, number: int) -> float:
    """Collect, evaluate and improve; seconds."""
    start = time.perf_counter()
    loop.parts.context.iteration = number
    rollouts = loop.collect(number)
    with loop.phase("evaluate", number):
        signal = loop.algorithm.evaluate(rollouts)
    with loop.phase("improve", number):
        loop.algorithm.improve(rollouts, signal)
    return time.perf_counter() - start


def share_in_operators() -> dict[str, Any]:
    """Of an iteration of the quickstart, after one to warm up."""
    loop = loop_of("quickstart.yaml")
    iteration(loop, 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        seconds = iteration(loop, 1)
    events = profiler.key_averages()
    inside = sum(event.self_cpu_time_total for event in events) / 1e6
    longest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:15]
    operators = [{"name": e.key, "seconds": e.self_cpu_time_total / 1e6, "calls": e.count} for e in longest]
    return {"seconds": seconds, "share": inside / seconds, "operators": operators}


def growth() -> list[dict[str, Any]]:
    """Seconds of an iteration of Norm-ITPO for each conversation, sizes in turn."""
    loops = {size: loop_of("itpo.yaml", size) for size in SIZES}
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(ROUNDS + 1):
        for size, loop in loops.items():
            times[size].append(iteration(loop, number) / size)
    return [{"conversations": size, "seconds_each": statistics.median(times[size][1:])} for size in SIZES]


def measured() -> dict[str, Any]:
    """Both, printed as tables."""
    inside = share_in_operators()
    rows = [[e["name"], f"{e['seconds']:.2f}", e["calls"]] for e in inside["operators"]]
    print(measuring.table(["operator", "s", "calls"], rows))
    print(f"inside torch operators {inside['share']:.2f} of {inside['seconds']:.1f} s (>= {SHARE_WANTED})")
    each = growth()
    rows = [[row["conversations"], f"{1000 * row['seconds_each']:.1f}"] for row in each]
    print(measuring.table(["conversations", "ms each"], rows))
    return {"profile": inside, "growth": each}
