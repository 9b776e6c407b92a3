"""Peak memory: of log-probabilities by tokens and vocabulary, and of all roles beside the policy alone.

    python benchmarks/memory.py --model models/SmolLM2-135M-Instruct

Prints medians and ratios, writes them as JSON, and draws `figures/memory_of_logprobs.png`. Methods and roles
that are compared live in processes of their own. With `--gpu` the same is done in bfloat16 on a GPU; where
there is none, the result says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import measuring

HERE = Path(__file__).parent
VOCABULARIES = (49_152, 262_144)
TOKENS = (1024, 8192, 65_536)
PLAIN_ELEMENTS = 2**28  # logits that a plain softmax is shown with; it takes three times their memory
STYLES = {"frozen": "-o", "trained": "--s", "plain": ":x"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="for the roles; without it they are left out")
    parser.add_argument("--parts", nargs="+", choices=["logprobs", "roles"], default=["logprobs", "roles"])
    parser.add_argument("--rounds", type=int, default=3, help="of the roles, after one to warm up")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--vocabularies", nargs="+", type=int, default=list(VOCABULARIES))
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "memory.json")
    parser.add_argument("--figure", type=Path, default=HERE / "figures" / "memory_of_logprobs.png")
    return parser.parse_args()


def logprobs(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Extra memory of each method for each vocabulary and number of tokens."""
    rows = []
    for vocabulary in a.vocabularies:
        for method in STYLES:
            small = [n for n in a.tokens if method != "plain" or n * vocabulary <= PLAIN_ELEMENTS]
            if not small:
                continue
            engine = measuring.Engine(
                [
                    *(sys.executable, str(HERE / "memory_logprobs.py"), "--method", method, *_dtype(a)),
                    *("--vocabulary", str(vocabulary), "--tokens", *map(str, small)),
                ]
            )
            for _ in small:
                rows.append({"method": method, "vocabulary": vocabulary, **engine.turn()})
                print(rows[-1], file=sys.stderr, flush=True)
            engine.close()
    return rows


def drawn(rows: list[dict[str, Any]], file: Path) -> None:
    """Extra memory over tokens, one line for each vocabulary and method."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for color, vocabulary in enumerate(sorted({row["vocabulary"] for row in rows})):
        for method, style in STYLES.items():
            found = [r for r in rows if (r["vocabulary"], r["method"]) == (vocabulary, method)]
            label = f"{method}{'' if method == 'plain' else ' head'}, V = {vocabulary}"
            points = [r["tokens"] for r in found], [r["extra_mib"] for r in found]
            axes.plot(*points, style, color=f"C{color}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="peak memory above the start, MiB")
    axes.set_title("Log-probabilities and their gradients")
    axes.legend(fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100, bbox_inches="tight")


def roles(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak of all roles and of the policy alone on a 4-bit base, in turn."""
    rows = []
    for checkpointing in (False, True):
        options = ["--gradient-checkpointing"] if checkpointing else []
        start = [sys.executable, str(HERE / "memory_roles.py"), "--model", a.model, *options, *_dtype(a)]
        alone, every = measuring.take_turns(
            [[*start, "--roles", "policy"], [*start, "--roles", "all"]], a.rounds
        )
        ratio = every.median("peak_mib") / alone.median("peak_mib")
        found = {"policy": alone.summary(), "all": every.summary(), "ratio": ratio}
        rows.append({"gradient_checkpointing": checkpointing, **found})
    return rows


def _dtype(a: argparse.Namespace) -> list[str]:
    return ["--dtype", "bfloat16" if a.gpu else "float32"]


def report(a: argparse.Namespace, found: dict[str, Any]) -> None:
    if "logprobs" in found:
        drawn(found["logprobs"], a.figure)
        cells = [
            [r["method"], r["vocabulary"], r["tokens"], f"{r['extra_mib']:.0f}", f"{r['seconds']:.1f}"]
            for r in found["logprobs"]
        ]
        print(measuring.table(["head", "vocabulary", "tokens", "extra MiB", "s"], cells))
    if "roles" in found:
        cells = [
            [
                "on" if r["gradient_checkpointing"] else "off",
                f"{r['policy']['median']['peak_mib']:.0f}",
                f"{r['all']['median']['peak_mib']:.0f}",
                f"{r['ratio']:.3f} (<= 1.3)",
            ]
            for r in found["roles"]
        ]
        print(measuring.table(["gradient checkpointing", "policy alone, MiB", "all five", "ratio"], cells))


def main() -> None:
    a = arguments()
    if not measuring.chosen_device(a.gpu, "memory", a.output):
        return
    found: dict[str, Any] = {"benchmark": "memory"}
    if "logprobs" in a.parts:
        found["logprobs"] = logprobs(a)
    if "roles" in a.parts and a.model:
        found["roles"] = roles(a)
    report(a, found)
    measuring.write(a.output, found)


if __name__ == "__main__":
    main()
