"""What engines that are compared are told alike; it needs the standard library alone, as a peer's has it."""

from __future__ import annotations

import argparse

# Of an iteration's one step.
KL_COEF = 1e-3  # to pi_0
LEARNING_RATE = 1e-6


def talk_options(description: str | None) -> argparse.ArgumentParser:
    """Of an engine that holds the conversations of `talk.py`."""
    parser = _options(description)
    parser.add_argument("--conversations", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--response-tokens", type=int, required=True)
    return parser


def training_options(description: str | None, micro_batch: int) -> argparse.ArgumentParser:
    """Of an engine that trains on random conversations; `micro_batch` is the one that is fastest for it."""
    parser = _options(description)
    parser.add_argument("--algorithm", choices=["rloo", "grpo", "ppo"], required=True)
    parser.add_argument("--fine-tuning", choices=["lora", "full"], default="lora")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--scored", type=int, default=240)
    parser.add_argument("--micro-batch", type=int, default=micro_batch)
    return parser


def _options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    return parser
