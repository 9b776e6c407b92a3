"""Rebuild the embedded model: tokenizer, base weights and the adapter of pi_0.

    python scripts/build_tiny.py [--output FOLDER] [--steps N] [--threads N] [--pi-0-only]

The base learns every token of scripted conversations of agents of all skills. Its loss says little; look at
the probe: the chance that the model gives to a sale after a fitting offer, an offer of the wrong product, and
one of the wrong version, in states where the customer has said what they need and can spend.
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

from lightning_mtrl.environments.sales_agents import MEDIOCRE, Habits, play, random_habits
from lightning_mtrl.environments.sales_dynamics import FITTING_TIER
from lightning_mtrl.environments.sales_language import ACT_PHRASES, NEEDS, REPLIES, TIERS
from lightning_mtrl.environments.suggested_response import SuggestedResponse
from lightning_mtrl.models.tiny import ASSISTANT, END, TINY_FOLDER, USER, build_tokenizer, tiny_config

ENVIRONMENT = SuggestedResponse(instructions=False)


def conversation_text(habits: Habits, seed: int) -> str:
    """One scripted conversation in the chat template's form."""
    messages, _ = play(ENVIRONMENT, habits, seed)
    return "".join(f"<|{role}|>{text}{END}" for role, text in messages)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Right-padded ids and a mask of the real tokens."""
    batch = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    )
    return batch["input_ids"], batch["attention_mask"].bool()


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


@torch.no_grad()
def probe(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Chance of a sale after fitting and other offers in informed states, by the base model itself."""
    rng = random.Random(0)
    texts: dict[str, list[str]] = {"fitting": [], "wrong need": [], "wrong tier": []}
    for _ in range(64):
        need, size = rng.choice(NEEDS), rng.choice(("small", "large"))
        other = rng.choice([n for n in NEEDS if n != need])
        fit = FITTING_TIER[size]
        misfit = next(t for t in TIERS if t != fit)
        for kind, (n, t) in {
            "fitting": (need, fit),
            "wrong need": (other, fit),
            "wrong tier": (need, misfit),
        }.items():
            lines = [
                ("user", "Hello."),
                ("assistant", rng.choice(ACT_PHRASES["ask_need"])),
                ("user", rng.choice(REPLIES["stated_need"]).format(need=need)),
                ("assistant", rng.choice(ACT_PHRASES["ask_budget"])),
                ("user", rng.choice(REPLIES[f"stated_budget_{size}"])),
                ("assistant", rng.choice(ACT_PHRASES["offer"]).format(need=n, tier=t)),
            ]
            texts[kind].append("".join(f"<|{r}|>{x}{END}" for r, x in lines) + f"{USER}")
    bought = [
        tokenizer(reply.split()[0].rstrip(","), add_special_tokens=False)["input_ids"][0]
        for reply in REPLIES["bought"]
    ]
    found = {}
    for kind, rows in texts.items():
        ids, attention = encode(tokenizer, rows)
        last = attention.sum(1) - 1
        logits = model(input_ids=ids, attention_mask=attention).logits
        chances = logits[torch.arange(len(rows)), last].softmax(-1)
        found[kind] = chances[:, bought].sum(1).mean().item()
    return found


def train_base(tokenizer: PreTrainedTokenizerFast, steps: int, log_every: int) -> LlamaForCausalLM:
    """Train the base on all tokens; cosine from 2e-3 to 0 with 200 steps of warm-up."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id))
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
        texts = [conversation_text(random_habits(rng), 10_000_000 + step * batch + i) for i in range(batch)]
        ids, attention = encode(tokenizer, texts)
        loss = next_token_loss(model, ids, attention, attention)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % log_every == log_every - 1:
            shown = {kind: round(chance, 3) for kind, chance in probe(model, tokenizer).items()}
            print(
                f"step {step + 1} loss {loss.item():.3f} sale {shown} {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return model


def train_pi_0(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int = 80
) -> torch.nn.Module:
    """Fit a LoRA adapter to the mediocre agent, on its responses alone."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    for step in range(steps):
        texts = [conversation_text(MEDIOCRE, 20_000_000 + step * 32 + i) for i in range(32)]
        ids, attention = encode(tokenizer, texts)
        loss = next_token_loss(adapted, ids, attention, response_mask(ids, tokenizer))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"pi_0: loss {loss.item():.3f} after {steps} steps", flush=True)
    return adapted


def main() -> None:
    """Build everything into the package's folder (or `--output`)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=TINY_FOLDER)
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--pi-0-only", action="store_true", help="keep the base that is in the folder")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.pi_0_only:
        model = LlamaForCausalLM.from_pretrained(arguments.output, dtype="float32")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.output)
    else:
        rng = random.Random(2)
        tokenizer = build_tokenizer([conversation_text(random_habits(rng), seed) for seed in range(2000)])
        model = train_base(tokenizer, arguments.steps, arguments.log_every)
        model.save_pretrained(arguments.output)
        tokenizer.save_pretrained(arguments.output)
    train_pi_0(model, tokenizer).save_pretrained(arguments.output / "pi_0")


if __name__ == "__main__":
    main()
