"""Rebuild an embedded model: tokenizer, base weights and the adapter of pi_0.

    python scripts/build_tiny.py [--model sales|tasks] [--output FOLDER] [--steps N] [--threads N]

The base learns every token of scripted conversations of agents of all skills. Its loss says little; look at
the probe of its recipe (scripts/tiny_recipes.py): whether it knows how users react to what is said.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mtrl.models.tiny import ASSISTANT, TINY_MODELS, USER, build_tokenizer, tiny_config
from tiny_recipes import RECIPES, Recipe, encode


def response_mask(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """True on the tokens of responses, end-of-turn token included."""
    roles = {tokenizer.convert_tokens_to_ids(USER): 0, tokenizer.convert_tokens_to_ids(ASSISTANT): 1}
    rows = []
    for row in ids.tolist():
        inside, mask = 0, []
        for token in row:
            mask.append(inside if token not in roles else 0)
            inside = roles.get(token, inside)
        rows.append(mask)
    return torch.tensor(rows).bool() & (ids != tokenizer.pad_token_id)


def next_token_loss(model: torch.nn.Module, ids: Tensor, attention: Tensor, scored: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the scored tokens."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    wanted = scored[:, 1:]
    return F.cross_entropy(logits[wanted], ids[:, 1:][wanted])


def train_base(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, steps: int, log_every: int
) -> LlamaForCausalLM:
    """Train the base on all tokens; cosine from 2e-3 to 0 with 200 steps of warm-up."""
    torch.manual_seed(0)
    size = TINY_MODELS[recipe.model]
    model = LlamaForCausalLM(
        tiny_config(size, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warm, batch = min(200, steps // 5 + 1), 32
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warm)),
        ],
        [warm],
    )
    rng, start = random.Random(1), time.perf_counter()
    for step in range(steps):
        texts = [recipe.any_agent(rng, 10_000_000 + step * batch + i) for i in range(batch)]
        ids, attention = encode(tokenizer, texts)
        loss = next_token_loss(model, ids, attention, attention)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % log_every == log_every - 1:
            shown = {kind: round(chance, 3) for kind, chance in recipe.probe(model, tokenizer).items()}
            print(
                f"step {step + 1} loss {loss.item():.3f} probe {shown} {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return model


def train_pi_0(
    recipe: Recipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> torch.nn.Module:
    """Fit a LoRA adapter to the mediocre agent, on its responses alone."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    for step in range(recipe.pi_0_steps):
        texts = [recipe.mediocre_agent(20_000_000 + step * 32 + i) for i in range(32)]
        ids, attention = encode(tokenizer, texts)
        loss = next_token_loss(adapted, ids, attention, response_mask(ids, tokenizer))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"pi_0: loss {loss.item():.3f} after {recipe.pi_0_steps} steps", flush=True)
    return adapted


def main() -> None:
    """Build everything into the package's folder (or `--output`)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(RECIPES), default="sales")
    parser.add_argument("--output", type=Path, help="default: the model's folder in the package")
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--pi-0-only", action="store_true", help="keep the base that is in the folder")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = RECIPES[arguments.model]
    output = arguments.output or TINY_MODELS[recipe.model].folder
    if arguments.pi_0_only:
        model = LlamaForCausalLM.from_pretrained(output, dtype="float32")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(output)
    else:
        rng = random.Random(2)
        texts = [recipe.any_agent(rng, seed) for seed in range(2000)]
        tokenizer = build_tokenizer(texts, recipe.vocabulary)
        model = train_base(recipe, tokenizer, arguments.steps or recipe.base_steps, arguments.log_every)
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
    train_pi_0(recipe, model, tokenizer).save_pretrained(output / "pi_0")


if __name__ == "__main__":
    main()
