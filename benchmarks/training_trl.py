"""An engine of `training.py`: the training part of one optimisation step of TRL's RLOO, GRPO or PPO trainer.

Generation is replaced by random tokens of a fixed number, and its time is taken off, so only TRL's own work
after generation counts: old log-probabilities where TRL computes them, rewards (random numbers), forward and
backward passes, optimizer. For PPO also the passes of reference, value and reward model, the last being a
toy; the value model has the policy's size. The log-probabilities that PPO takes from generation cost nothing
here. Settings that are fastest for TRL: no logging, no saving, no gradient checkpointing, and beta 0 for RLOO
and GRPO, which then have no reference model.

It runs in the peer's environment, with TRL 1.16 for RLOO and GRPO and TRL 1.12, the last with it, for PPO.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback

import measuring
from engine_options import training_options
from trl_settings import ENDLESS, loaded, lora, settings

LEARNING_RATE = 1e-9


class Turns(TrainerCallback):
    """Stops the trainer between two steps until it is its turn, and says what a step took.

    Attributes:
        away: seconds since the step began that are not TRL's training.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens, self.away, self.turns = tokens, 0.0, measuring.turns()
        self.start, self.worked = 0.0, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self.start - self.away
        cpu, peak = time.process_time() - self.worked, measuring.peak_mib()
        rate = self.tokens / seconds
        measuring.report(seconds=seconds, cpu_seconds=cpu, tokens_per_second=rate, peak_mib=peak)
        self._wait(control)

    def _wait(self, control: Any = None) -> None:
        if next(self.turns, None) is None:
            raise SystemExit
        measuring.give_back()
        self.start, self.worked, self.away = time.perf_counter(), time.process_time(), 0.0


def random_generation(a: argparse.Namespace, turns: Turns, vocabulary: int) -> Callable[..., Any]:
    """Stands in for `model.generate`: the prompts and as many random tokens as are to be scored."""

    def generate(*_: Any, input_ids: torch.Tensor, **__: Any) -> Any:
        start = time.perf_counter()
        shape = (len(input_ids), a.scored)
        drawn = torch.randint(100, min(vocabulary, 40_000), shape, device=input_ids.device)
        found: Any = torch.cat([input_ids, drawn], 1)
        if a.algorithm == "ppo":
            scores = torch.zeros(len(input_ids), vocabulary, device=input_ids.device)
            found = SimpleNamespace(sequences=found, scores=(scores,) * a.scored)
        turns.away += time.perf_counter() - start
        return found

    return generate


def compared(a: argparse.Namespace, parts: dict[str, Any], prompt: str, turns: Turns) -> Any:
    """RLOO or GRPO."""
    of = {"rloo": (trl.RLOOConfig, trl.RLOOTrainer), "grpo": (trl.GRPOConfig, trl.GRPOTrainer)}
    make_config, make_trainer = of[a.algorithm]
    config = make_config(
        **settings(a, LEARNING_RATE),
        num_generations=4,
        max_completion_length=a.scored,
        max_steps=ENDLESS,
        beta=0.0,
    )
    trainer = make_trainer(
        model=parts["model"], args=config, processing_class=parts["tokenizer"], peft_config=parts["lora"],
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 64), callbacks=[turns],
        reward_funcs=lambda completions, **_: [random.random() for _ in completions],
    )  # fmt: skip
    trainer.model.generate = random_generation(a, turns, parts["model"].config.vocab_size)
    return trainer


def valued(a: argparse.Namespace, parts: dict[str, Any], prompt: str, turns: Turns) -> Any:
    """PPO."""
    from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    model, tokenizer = parts["model"], parts["tokenizer"]
    toy: Any = LlamaConfig
    toy = toy(
        vocab_size=model.config.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    value = AutoModelForSequenceClassification.from_pretrained(
        a.model, num_labels=1, dtype=getattr(torch, a.dtype)
    )
    config = PPOConfig(
        **settings(a, LEARNING_RATE), num_ppo_epochs=1, num_mini_batches=1, response_length=a.scored,
        total_episodes=a.conversations * 1000, local_rollout_forward_batch_size=a.micro_batch,
        num_sample_generations=0, stop_token="eos",
    )  # fmt: skip
    rows = [{"input_ids": tokenizer.encode(prompt, add_special_tokens=False)}] * 64
    trainer = PPOTrainer(
        args=config, processing_class=tokenizer, model=model, ref_model=None, value_model=value,
        reward_model=LlamaForSequenceClassification(toy), train_dataset=Dataset.from_list(rows),
        peft_config=parts["lora"], callbacks=[turns],
    )  # fmt: skip
    trainer.model.policy.generate = random_generation(a, turns, model.config.vocab_size)
    trainer.log = lambda *_, **__: None
    return trainer


def main() -> None:
    a = training_options(__doc__, micro_batch=4).parse_args()
    model, tokenizer = loaded(a)
    parts = {"model": model, "tokenizer": tokenizer, "lora": lora() if a.fine_tuning == "lora" else None}
    prompt = " the" * (a.tokens - a.scored)
    found = len(tokenizer.encode(prompt, add_special_tokens=False))
    if found != a.tokens - a.scored:
        raise SystemExit(f"the prompt has {found} tokens where {a.tokens - a.scored} were wanted")
    turns = Turns(a.tokens * a.conversations)
    trainer = (valued if a.algorithm == "ppo" else compared)(a, parts, prompt, turns)
    measuring.report(
        engine=f"TRL {trl.__version__}", threads=torch.get_num_threads(), tokens=turns.tokens,
        scored=a.scored * a.conversations, transformers=transformers.__version__,
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
