"""The machine's limits, the floors that they set for a model, and how near to them our decoding comes.

    python benchmarks/limits.py --model models/SmolLM2-135M-Instruct

A decoding step of B rows cannot take less than reading the weights once, nor than 2 x parameters x B
operations at the rate of the best matrix product; keys and values are left out. A training step cannot be
faster than 6 operations a parameter and token, or 4 where the weights are frozen. Rates are the best of
several, so floors are bounds; our steps are medians. Prints tables and writes JSON. With `--gpu` the same is
done in bfloat16 on a GPU; where there is none, the result says so.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import measuring
from lightning_mtrl.models.load import load_model
from lightning_mtrl.rollouts.packing import Memories
from lightning_mtrl.rollouts.sampling import sample_tokens

HERE = Path(__file__).parent
TARGET = 0.3
ROWS = (16, 32, 64)
HISTORY = 200  # tokens that a conversation holds when a step is timed: the middle of five turns


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "limits.json")
    return parser.parse_args()


def fastest(work: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of the fastest of some calls."""
    return min(seconds(work) for _ in range(repeats))


def seconds(work: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def product_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of the best of some square matrix products."""
    found = []
    for size in (512, 1024, 2048):
        one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        found.append(2 * size**3 / fastest(partial(torch.mm, one, other)))
    return max(found)


def reading_rate(device: str, dtype: torch.dtype, parameters: int) -> float:
    """Bytes a second at which weights of this volume are read by products with one row."""
    number = max(1, parameters // (1536 * 576))
    weights = [torch.randn(1536, 576, device=device, dtype=dtype) for _ in range(number)]
    one = torch.randn(1, 576, device=device, dtype=dtype)
    once = fastest(lambda: [functional.linear(one, weight) for weight in weights], 7)
    return sum(weight.nbytes for weight in weights) / once


def product_parameters(model: nn.Module) -> int:
    """Weights that take part in matrix products; a tied head counts, looking up embeddings does not."""
    return sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))


@torch.inference_mode()
def step_seconds(memories: Memories, rows: int, steps: int) -> float:
    """Median of a step: one token drawn and read in each row."""
    memory = memories.of(rows)
    (order,) = memory.arrange(range(rows))
    history = [[100 + (7 * row + place) % 900 for place in range(HISTORY + row % 40)] for row in range(rows)]
    logits = memory.extend(order, history)
    uniforms = torch.rand(rows, steps + 2, device=logits.device)

    def step(number: int) -> None:
        nonlocal logits
        tokens = sample_tokens(logits, uniforms[:, number])[0]
        tokens.tolist()  # as the collector, which must know where a response ends
        logits = memory.step(order, tokens)

    times = [seconds(partial(step, number)) for number in range(steps + 2)]
    return statistics.median(times[2:])


def measured(a: argparse.Namespace) -> dict[str, Any]:
    device, dtype = ("cuda", torch.bfloat16) if a.gpu else ("cpu", torch.float32)
    loaded = load_model(a.model, dtype=str(dtype).rpartition(".")[2])
    model: nn.Module = loaded.model
    model.to(device).eval()
    parameters = product_parameters(model)
    operations, read = product_rate(device, dtype), reading_rate(device, dtype, parameters)
    decoding = []
    with torch.inference_mode():
        memories = Memories(model, 2048, 0)
    for rows in a.rows:
        floor = max(parameters * dtype.itemsize / read, 2 * parameters * rows / operations)
        ours = step_seconds(memories, rows, a.steps)
        decoding.append({"rows": rows, "floor": floor, "ours": ours, "share": floor / ours})
    training = {"full": operations / (6 * parameters), "lora": operations / (4 * parameters)}
    rates = {"gflop_per_second": operations / 1e9, "gb_per_second": read / 1e9}
    return {
        **rates,
        "parameters": parameters,
        "decoding": decoding,
        "training_floor_tokens_per_second": training,
    }


def main() -> None:
    a = arguments()
    if not measuring.chosen_device(a.gpu, "limits", a.output):
        return
    found = measured(a)
    print(f"products {found['gflop_per_second']:.0f} GFLOP/s, weights {found['gb_per_second']:.1f} GB/s")
    shown = [
        [
            d["rows"], f"{1000 * d['floor']:.1f}", f"{1000 * d['ours']:.1f}",
            f"{d['rows'] / d['ours']:.0f}", f"{d['share']:.2f} (>= {TARGET} at 32)",
        ]
        for d in found["decoding"]
    ]  # fmt: skip
    print(measuring.table(["rows", "floor, ms", "our step, ms", "tokens/s", "share of the floor"], shown))
    floors = found["training_floor_tokens_per_second"]
    print(f"training: at most {floors['full']:.0f} tokens/s full, {floors['lora']:.0f} with frozen weights")
    measuring.write(a.output, {"benchmark": "limits", **found})


if __name__ == "__main__":
    main()
