"""Multi-turn rollouts of ours and of a peer that reads the whole history anew at every turn.

    python benchmarks/rollouts.py --model models/SmolLM2-135M-Instruct

The peer is the way of TRL's trainers with transformers: `generate` on the whole conversations, left-padded,
at each turn. Two processes take turns; both hold the same conversations with the scripted user of `talk.py`.
Prints medians and ratios and writes them as JSON. With `--check` both sample greedily and must say the same.
With `--gpu` the same is done in bfloat16 on a GPU; where there is none, the result says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import measuring

HERE = Path(__file__).parent
TARGETS = {16: 2.5, 32: 3.2}  # of the peer's tokens a second, at least


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--conversations", nargs="+", type=int, default=[16, 32])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="rollouts of each engine after one to warm up")
    parser.add_argument("--check", action="store_true", help="greedy, once, and compare what was said")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "rollouts.json")
    return parser.parse_args()


def compare(conversations: int, a: argparse.Namespace) -> dict[str, Any]:
    """Let the two engines take turns."""
    options = {
        "model": a.model, "conversations": conversations, "turns": a.turns,
        "response-tokens": a.response_tokens, "dtype": "bfloat16" if a.gpu else "float32",
        "temperature": 0.0 if a.check else 1.0,
    }  # fmt: skip
    script = [sys.executable, str(HERE / "rollouts_engines.py")]
    given = [f"--{name}={value}" for name, value in options.items()]
    ours, peer = measuring.take_turns(
        [[*script, f"--engine={name}", *given] for name in ("ours", "peer")], 1 if a.check else a.rounds
    )
    same = [mine["said"] == theirs["said"] for mine, theirs in zip(ours.taken, peer.taken, strict=True)]
    ratio = ours.median("tokens_per_second") / peer.median("tokens_per_second")
    row = {"conversations": conversations, "ours": ours.summary(), "peer": peer.summary(), "ratio": ratio}
    return {**row, "same": all(same)} if a.check else row


def shown(row: dict[str, Any]) -> list[str]:
    ours, peer = row["ours"]["median"], row["peer"]["median"]
    target = TARGETS.get(row["conversations"])
    return [
        str(row["conversations"]),
        f"{ours['tokens_per_second']:.0f}",
        f"{peer['tokens_per_second']:.0f}",
        f"{row['ratio']:.2f}" + (f" (>= {target})" if target else ""),
        f"{ours['peak_mib']:.0f}",
        f"{peer['peak_mib']:.0f}",
        {True: "yes", False: "NO"}.get(row.get("same", ""), ""),
    ]


HEADER = ["conversations", "ours, tokens/s", "peer", "ratio", "ours, peak MiB", "peer", "same greedy tokens"]


def main() -> None:
    a = arguments()
    if not measuring.chosen_device(a.gpu, "rollouts", a.output):
        return
    rows = []
    for conversations in a.conversations:
        rows.append(compare(conversations, a))
        print(measuring.table(HEADER, [shown(row) for row in rows]), flush=True)
    measuring.write(
        a.output,
        {"benchmark": "rollouts", "turns": a.turns, "response_tokens": a.response_tokens, "rows": rows},
    )
    if any(not row.get("same", True) for row in rows):
        sys.exit("the two engines did not say the same")


if __name__ == "__main__":
    main()
