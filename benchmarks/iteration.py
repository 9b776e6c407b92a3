"""A whole iteration of RLOO on outcomes, ours and one of TRL's parts; and the embedded model's own.

    python benchmarks/iteration.py --model models/SmolLM2-135M-Instruct
    python benchmarks/iteration.py --tiny

The first holds conversations with the scripted user of `talk.py`, scores them under pi_0 and takes one step
with LoRA, in two processes that take turns. `--peer-python` is an interpreter with TRL 1.16, by default this
one. The second profiles an iteration of the quickstart (how much of its time lies inside torch operators),
and times iterations of ITPO with more and more conversations. Prints medians and ratios and writes JSON. With
`--gpu` the first is done in bfloat16 on a GPU; where there is none, the result says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import measuring

HERE = Path(__file__).parent
TARGET = 2.5  # of the peer's iterations in the same time, at least


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or Hub id")
    parser.add_argument("--conversations", type=int, default=32, help="in an iteration; a multiple of 4")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="iterations of each after one to warm up")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--tiny", action="store_true", help="profile the quickstart instead")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "iteration.json")
    a = parser.parse_args()
    if not (a.model or a.tiny):
        parser.error("give --model, or --tiny")
    return a


def compare(a: argparse.Namespace) -> dict[str, Any]:
    """Let the two engines take turns."""
    options = {
        "model": a.model, "conversations": a.conversations, "turns": a.turns,
        "response-tokens": a.response_tokens, "dtype": "bfloat16" if a.gpu else "float32",
    }  # fmt: skip
    given = [f"--{name}={value}" for name, value in options.items()]
    ours, peer = measuring.take_turns(
        [
            [sys.executable, str(HERE / "iteration_ours.py"), *given],
            [a.peer_python, str(HERE / "iteration_trl.py"), *given],
        ],
        a.rounds,
    )
    ratio = ours.median("tokens_per_second") / peer.median("tokens_per_second")
    return {"ours": ours.summary(), "peer": peer.summary(), "ratio": ratio}


def main() -> None:
    a = arguments()
    if a.tiny:
        from iteration_tiny import measured

        measuring.write(a.output.with_name("iteration_tiny.json"), {"benchmark": "iteration", **measured()})
        return
    if not measuring.chosen_device(a.gpu, "iteration", a.output):
        return
    found = compare(a)
    cells = [
        [
            name, f"{found[name]['median']['seconds']:.1f}", f"{found[name]['median']['rollout']:.1f}",
            f"{found[name]['median']['tokens_per_second']:.1f}", f"{found[name]['median']['peak_mib']:.0f}",
        ]
        for name in ("ours", "peer")
    ]  # fmt: skip
    print(measuring.table(["engine", "seconds", "of which rollouts", "sampled tokens/s", "peak MiB"], cells))
    print(f"ratio of sampled tokens a second {found['ratio']:.2f} (>= {TARGET})")
    shape = {"conversations": a.conversations, "turns": a.turns, "response_tokens": a.response_tokens}
    measuring.write(a.output, {"benchmark": "iteration", **shape, **found})


if __name__ == "__main__":
    main()
