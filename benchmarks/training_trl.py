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
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import measuring

# What "all-linear" means for ours.
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ENDLESS = 1_000_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--algorithm", choices=["rloo", "grpo", "ppo"], required=True)
    parser.add_argument("--fine-tuning", choices=["lora", "full"], default="lora")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--scored", type=int, default=240)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


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


def settings(a: argparse.Namespace) -> dict[str, Any]:
    on_cpu = not torch.cuda.is_available()
    return {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": a.micro_batch,
        "gradient_accumulation_steps": a.conversations // a.micro_batch, "learning_rate": 1e-9,
        "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "use_cpu": on_cpu,
        "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False, "seed": 0,
    }  # fmt: skip


def compared(a: argparse.Namespace, parts: dict[str, Any], prompt: str, turns: Turns) -> Any:
    """RLOO or GRPO."""
    of = {"rloo": (trl.RLOOConfig, trl.RLOOTrainer), "grpo": (trl.GRPOConfig, trl.GRPOTrainer)}
    make_config, make_trainer = of[a.algorithm]
    config = make_config(
        **settings(a), num_generations=4, max_completion_length=a.scored, max_steps=ENDLESS, beta=0.0
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
        **settings(a), num_ppo_epochs=1, num_mini_batches=1, response_length=a.scored,
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
    a = arguments()
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype))
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=MODULES, task_type="CAUSAL_LM")
    parts = {"model": model, "tokenizer": tokenizer, "lora": lora if a.fine_tuning == "lora" else None}
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
