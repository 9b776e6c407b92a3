"""How long it takes, and how much memory, to load, validate and tokenize logged conversations.

    python benchmarks/logs.py [--conversations 100000] [--model tiny] [--threads 2]

It writes its own file first: conversations of two to six turns with replies of ten to sixty words, as a
support desk has them, some with broken lines and wrong outcomes among them. Then a fresh process reads that
file as `improve --logs` does, and tells its seconds and its peak of resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# ruff: noqa: SIM905
WORDS = (
    "order invoice delivery address customer today please thank refund account number when which where "
    "could would price offer weeks support ticket again question answer help product size colour payment"
).split()


def write_logs(path: Path, conversations: int) -> None:
    """Conversations as a support desk has them; every thousandth line is broken."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(conversations):
            file.write("{broken\n" if number % 1000 == 999 else json.dumps(record(number, rng)) + "\n")


def record(number: int, rng: random.Random) -> dict[str, object]:
    messages = [{"role": "system", "content": "You help the customers of a shop. Be short and friendly."}]
    for _ in range(rng.randint(2, 6)):
        messages.append({"role": "user", "content": sentence(rng, 5, 30)})
        messages.append({"role": "assistant", "content": sentence(rng, 10, 60)})
    return {"id": f"c-{number}", "messages": messages, "outcome": rng.randint(0, 1)}


def sentence(rng: random.Random, shortest: int, longest: int) -> str:
    return (
        " ".join(rng.choices(WORDS, k=rng.randint(shortest, longest))).capitalize() + f" {rng.random():.4f}."
    )


def measure(path: Path, model: str) -> None:
    """Read the file as a step from logs does, and print what it took."""
    from lightning_mtrl.models.load import load_model
    from lightning_mtrl.rollouts.datamodule import RolloutDataModule
    from lightning_mtrl.rollouts.log_records import Demands
    from lightning_mtrl.rollouts.log_tokens import LogEncoder
    from lightning_mtrl.rollouts.logs import read_conversations
    from lightning_mtrl.rollouts.tokens import ChatTokenizer

    chat = ChatTokenizer(load_model(model, tiny="sales").tokenizer)
    before, start, used = resident(), time.perf_counter(), time.process_time()
    encoder = LogEncoder(chat, context_length=100_000, response_tokens=64)
    demands = Demands(outcome=True, returns=(0.0, 1.0), gamma=0.95)
    loaded = read_conversations(path, demands=demands, encoder=encoder)
    read = time.perf_counter() - start
    data = RolloutDataModule(loaded.conversations, tokenizer=chat)
    seconds = time.perf_counter() - start
    spent = time.process_time() - used
    tokens = sum(len(t.response_ids) + len(t.observation_ids) for c in data.conversations for t in c.turns)
    print(f"{loaded.read} conversations, {len(loaded.messages)} left out, {tokens / 1e6:.1f} million tokens")
    print(f"{read:.1f} s to read and tokenize, {seconds:.1f} s with the split, {spent:.1f} s of cores")
    print(f"peak {resident():.2f} GiB resident, {before:.2f} GiB of it before the first line")


def resident() -> float:
    """Peak of resident memory of this process, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--model", default="tiny", help="tiny, or a folder of a model; its tokenizer is used")
    parser.add_argument("--threads", type=int, default=2, help="of the tokenizer")
    parser.add_argument("--file", type=Path, help="measure this file; for the process that measures")
    options = parser.parse_args()
    if options.file is not None:
        measure(options.file, options.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "logs.jsonl"
        write_logs(path, options.conversations)
        print(f"{path.stat().st_size / 2**20:.0f} MiB of JSON lines", flush=True)
        command = [sys.executable, __file__, f"--file={path}", f"--model={options.model}"]
        threads = {"RAYON_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "true"}
        subprocess.run(command, env={**os.environ, **threads}, check=True)


if __name__ == "__main__":
    main()
