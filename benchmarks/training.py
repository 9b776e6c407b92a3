"""Training steps of ours and of TRL on the same conversations: tokens a second and peak memory.

    python benchmarks/training.py --model models/SmolLM2-135M-Instruct --ppo-python PATH

Each case starts two processes that take turns, step by step: ours (`training_ours.py`) and TRL's trainer
(`training_trl.py`). `--peer-python` is an interpreter with TRL 1.16, by default this one; `--ppo-python` one
with TRL 1.12, the last with a PPO trainer. It prints medians and ratios and writes them as JSON. With `--gpu`
the same is done in bfloat16 on a GPU; where there is none, the result says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import measuring

HERE = Path(__file__).parent
CASES = [f"{tuned}-{algorithm}" for tuned in ("lora", "full") for algorithm in ("rloo", "grpo", "ppo")]
# What we want: tokens a second of the peer's at least, peak memory of the peer's at most.
TARGETS = {
    "lora-rloo": (2.0, 0.5), "lora-grpo": (1.7, 0.5), "lora-ppo": (4.0, 0.4),
    "full-rloo": (1.4, 0.6), "full-grpo": (1.4, 0.6), "full-ppo": (4.0, 0.4),
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each engine after one to warm up")
    parser.add_argument("--conversations", type=int, default=8, help="in a step; a multiple of 4")
    parser.add_argument("--tokens", type=int, default=300, help="of a conversation")
    parser.add_argument("--scored", type=int, default=240, help="of these, sampled by the policy")
    parser.add_argument("--micro-batch", type=int, default=2, help="conversations in a forward pass of ours")
    parser.add_argument("--peer-micro-batch", type=int, default=4, help="the same of TRL's")
    parser.add_argument("--value-role", choices=["value", "policy"], default="value", help="of our PPO")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--ppo-python", help="without it, PPO is left out")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "training.json")
    return parser.parse_args()


def command(python: str, script: str, case: str, micro_batch: int, a: argparse.Namespace) -> list[str]:
    tuned, algorithm = case.split("-")
    options = {
        "model": a.model, "algorithm": algorithm, "fine-tuning": tuned, "conversations": a.conversations,
        "tokens": a.tokens, "scored": a.scored, "micro-batch": micro_batch,
        "dtype": "bfloat16" if a.gpu else "float32",
    }  # fmt: skip
    return [python, str(HERE / script), *(f"--{name}={value}" for name, value in options.items())]


def compare(case: str, a: argparse.Namespace) -> dict[str, Any]:
    """Let the two engines of a case take turns."""
    peer_python = a.ppo_python if case.endswith("ppo") else a.peer_python
    commands = [
        [
            *command(sys.executable, "training_ours.py", case, a.micro_batch, a),
            f"--value-role={a.value_role}",
        ],
        command(peer_python, "training_trl.py", case, a.peer_micro_batch, a),
    ]
    ours, peer = measuring.take_turns(commands, a.rounds)
    row: dict[str, Any] = {"case": case, "rounds": a.rounds, "ours": ours.summary(), "peer": peer.summary()}
    # A busy machine takes time from both, but work done per second of a core is what it was.
    row["cpu_ratio"] = peer.median("cpu_seconds") / ours.median("cpu_seconds")
    for key in ("tokens_per_second", "peak_mib"):
        row[f"{key}_ratio"] = ours.median(key) / peer.median(key)
    return row


def shown(row: dict[str, Any]) -> list[str]:
    faster, smaller = TARGETS[row["case"]]
    ours, peer = row["ours"]["median"], row["peer"]["median"]
    return [
        row["case"],
        row["peer"]["facts"]["engine"],
        f"{ours['tokens_per_second']:.0f}",
        f"{peer['tokens_per_second']:.0f}",
        f"{row['tokens_per_second_ratio']:.2f} (>= {faster})",
        f"{row['cpu_ratio']:.2f}",
        f"{ours['peak_mib']:.0f}",
        f"{peer['peak_mib']:.0f}",
        f"{row['peak_mib_ratio']:.2f} (<= {smaller})",
    ]


HEADER = ["case", "peer", "ours, tokens/s", "peer", "ratio", "of CPU time", "ours, peak MiB", "peer", "ratio"]


def main() -> None:
    a = arguments()
    if not measuring.chosen_device(a.gpu, "training", a.output):
        return
    rows = []
    for case in a.cases:
        if case.endswith("ppo") and a.ppo_python is None:
            print(f"{case}: not run, --ppo-python names no interpreter with TRL 1.12", file=sys.stderr)
            continue
        rows.append(compare(case, a))
        print(measuring.table(HEADER, [shown(row) for row in rows]), flush=True)
        shape = {"conversations": a.conversations, "tokens": a.tokens, "scored": a.scored}
        batches = {"micro_batch": a.micro_batch, "peer_micro_batch": a.peer_micro_batch}
        measuring.write(a.output, {"benchmark": "training", **shape, **batches, "rows": rows})


if __name__ == "__main__":
    main()
