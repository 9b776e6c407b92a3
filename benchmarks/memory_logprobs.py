"""An engine of `memory.py`: log-probabilities and entropies of more and more tokens, and their gradients.

The hidden states are narrow, so that what grows with tokens x vocabulary would be seen beside them.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import measuring
from lightning_mtrl.models.logprobs import LogitHead, token_logprobs_and_entropies

WIDTH = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--method", choices=["frozen", "trained", "plain"], required=True)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def scored(method: str, head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities by the product, or as a logits tensor for all tokens gives them."""
    if method != "plain":
        return token_logprobs_and_entropies(LogitHead(head), hidden, targets, entropy_trained=False)[0]
    logprobs: Tensor = head(hidden).float().log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1)


def main() -> None:
    a = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = getattr(torch, a.dtype)
    head = nn.Linear(WIDTH, a.vocabulary, bias=False, dtype=dtype, device=device)
    head.requires_grad_(a.method == "trained")
    measuring.report(engine=a.method, threads=torch.get_num_threads())
    for number in measuring.turns():
        tokens = a.tokens[number % len(a.tokens)]
        hidden = torch.randn(tokens, WIDTH, dtype=dtype, device=device, requires_grad=True)
        targets = torch.randint(a.vocabulary, (tokens,), device=device)
        measuring.give_back()
        before = torch.cuda.memory_allocated() / 2**20 if device == "cuda" else measuring.status_mib("VmRSS")
        start = time.perf_counter()
        scored(a.method, head, hidden, targets).sum().backward()
        seconds = time.perf_counter() - start
        head.weight.grad = None
        extra = measuring.peak_mib() - before
        measuring.report(tokens=tokens, seconds=seconds, extra_mib=extra)


if __name__ == "__main__":
    main()
