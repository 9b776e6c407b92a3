"""The engines of `rollouts.py`: our collector, and `generate` on the whole conversation at every turn."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import measuring
from engine_options import talk_options
from lightning_mtrl.conversation import Message
from lightning_mtrl.models.load import load_model
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.sampling import SamplingConfig
from lightning_mtrl.rollouts.tokens import ChatTokenizer
from rereading import Said, generated
from talk import Talk


def arguments() -> argparse.Namespace:
    parser = talk_options(__doc__)
    parser.add_argument("--engine", choices=["ours", "peer"], required=True)
    parser.add_argument("--temperature", type=float, required=True)
    return parser.parse_args()


def seeds(number: int) -> list[int]:
    """The seeds that a collection of this size gives its environments, so that both hold the same ones."""
    import numpy as np

    sequences = (np.random.SeedSequence([0, 0, index]) for index in range(number))
    return [int(sequence.generate_state(1)[0]) for sequence in sequences]


def ours(a: argparse.Namespace, model: Any, chat: ChatTokenizer) -> tuple[Said, int]:
    """Whole conversations as token ids, and the number of sampled tokens."""
    sampling = SamplingConfig(temperature=a.temperature, max_response_tokens=a.response_tokens)
    collector = Collector(
        Talk(a.turns), chat, sampling=sampling, context_length=2048, max_turns=a.turns,
        rows=a.conversations, show_progress=False,
    )  # fmt: skip
    rollouts = collector.collect(model, conversations=a.conversations, seed=0, policy="policy")
    return [c.token_ids() for c in rollouts.conversations], rollouts.tokens


def peer(a: argparse.Namespace, model: Any, chat: ChatTokenizer) -> tuple[Said, int]:
    """The same by `generate`."""
    from transformers import GenerationConfig

    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if a.temperature else {}
    config = GenerationConfig(
        max_new_tokens=a.response_tokens, pad_token_id=chat.pad_id, eos_token_id=list(chat.end_ids), **drawn
    )
    environments, held, sampled = [], [], 0
    for seed in seeds(a.conversations):
        environments.append(Talk(a.turns))
        first = environments[-1].reset(seed)
        held.append(chat.prompt_ids((Message("system", first.system or ""), Message("user", first.text))))
    for _ in range(a.turns):
        for row, new in enumerate(generated(model, held, config, chat)):
            sampled += len(new)
            answer = environments[row].step(chat.response_text(new))
            finished, over = new[-1] in chat.end_ids, answer.terminated
            held[row] += new + chat.observation_ids(answer.observation, finished=finished, last=over)
    return held, sampled


def main() -> None:
    a = arguments()
    loaded = load_model(a.model, dtype=a.dtype)
    model: nn.Module = loaded.model
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    chat = ChatTokenizer(loaded.tokenizer)
    roll: Callable[..., tuple[Said, int]] = {"ours": ours, "peer": peer}[a.engine]
    measuring.report(engine=a.engine, threads=torch.get_num_threads())
    for turn in measuring.turns():
        torch.manual_seed(turn)
        measuring.give_back()
        start = time.perf_counter()
        held, sampled = roll(a, model, chat)
        seconds = time.perf_counter() - start
        said = hashlib.sha256(repr(held).encode()).hexdigest()
        measuring.report(
            seconds=seconds, tokens_per_second=sampled / seconds, peak_mib=measuring.peak_mib(),
            tokens=sampled, said=said,
        )  # fmt: skip


if __name__ == "__main__":
    main()
