"""Going through an iteration's rollouts: scoring in passes of similar length, training in steps of groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.batch import ConversationBatch, ReferencedBatch, TokenBatch
from lightning_mtrl.modules.base import scored_logprobs
from lightning_mtrl.modules.workload import Extent
from lightning_mtrl.processes import Processes

TOKENS_IN_PASS = 16384  # padding included, in a pass without gradients
SCORED_TOKENS = 2**16  # the same, for passes of a fixed number of rows; few are so long that it counts
SHORTEST = 0.75  # of the longest conversation of a pass; the rest of its row is padding

Batch = TypeVar("Batch", bound=TokenBatch)


def by_token(
    score: Callable[[Batch], Float[Tensor, "R W"]],
    batch: Batch,
    passes: Sequence[slice | Tensor],
    processes: Processes,
) -> Float[Tensor, "B T"]:
    """One number for each token of a batch, which is scored in passes over some of its rows.

    A pass has only the columns that its own rows need, so the width of what it finds is its own.

    Args:
        score: gives the numbers of some rows, 0 where there is none.
        batch: all rows.
        passes: rows of each pass; together all of them.
        processes: share the passes out among them.
    """

    def mine() -> Tensor:
        values = torch.zeros(batch.input_ids.shape, device=batch.input_ids.device)
        for rows in processes.dealt(passes):
            found = score(batch.rows(rows))
            values[rows, : found.size(1)] = found.to(values)
        return values

    # Every token has been scored by one process, and is 0 on the others.
    return processes.sum(processes.together(mine))


@torch.no_grad()
def token_values(
    score: Callable[[ConversationBatch], Float[Tensor, "R W"]],
    role: str,
    batch: ConversationBatch,
    context: Context,
) -> Float[Tensor, "B T"]:
    """One number for each token of all rollouts, on the CPU.

    The role's adapter is merged meanwhile, if that computes the same, and conversations of similar length go
    through the model together.
    The cut depends on the lengths alone, so two roles of equal weights get equal numbers.

    Args:
        score: gives the numbers of some conversations, 0 where there is none; it runs in evaluation mode.
        role: the only role that it may read, since no other one is there meanwhile.
        batch: on the CPU.
        context: device, precision and backbone.
    """
    # Autocast comes first, since an adapter is not merged under it.
    with context.fabric.autocast(), context.backbone.sampling(role):
        return by_token(
            lambda part: score(part.to(context.fabric.device)),
            batch,
            list(of_similar_length(batch)),
            context.processes,
        )


def role_logprobs(role: str, batch: ConversationBatch, context: Context) -> Float[Tensor, "B T"]:
    """Log-probability in nats of each sampled token under a role, as `token_values` computes; 0 elsewhere."""
    return token_values(partial(scored_logprobs, context.backbone, role), role, batch, context)


@torch.no_grad()
def training_logprobs(
    role: str, batch: TokenBatch, passes: Sequence[slice | Tensor], context: Context
) -> Float[Tensor, "B T"]:
    """The same as a training step of the role computes it but for dropout, so that the two can be compared.

    Args:
        role: whose probabilities; its adapter is not merged.
        batch: on any device.
        passes: rows of each pass; together all of them.
        context: device, precision and backbone.
    """
    context.backbone.eval()

    def score(part: TokenBatch) -> Tensor:
        return scored_logprobs(context.backbone, role, part.to(context.fabric.device))

    with context.reading(role):
        return by_token(score, batch, passes, context.processes)


def referenced(batch: ConversationBatch, reference: str, context: Context) -> ReferencedBatch:
    """The batch with the log-probabilities of pi_0, as it is where it has them."""
    if isinstance(batch, ReferencedBatch):
        return batch
    shared = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return ReferencedBatch(**shared, reference_logprobs=role_logprobs(reference, batch, context))


def group_minibatches(
    batch: ConversationBatch, number: int, generator: torch.Generator
) -> Iterator[Int[Tensor, " R"]]:
    """Rows of whole groups, in a new order, `number` groups at a time; the last time may have fewer."""
    members = batch.group.unique(return_inverse=True)[1]
    for chosen in torch.randperm(int(members.max()) + 1, generator=generator).split(number):
        yield torch.isin(members, chosen).nonzero().flatten()


def slices(number: int, at_most: int, processes: Processes) -> list[slice]:
    """All rows in order, `at_most` in a pass, and a pass for every process if there are so many rows."""
    size = max(1, min(at_most, math.ceil(number / processes.size)))
    return [slice(start, start + size) for start in range(0, number, size)]


def rows_in_pass(tokens: int, most: int) -> int:
    """Rows of so many tokens that are scored together: `most`, or fewer where they are long."""
    return min(most, max(1, SCORED_TOKENS // max(1, tokens)))


def similar_rows(extent: Extent, step: int, rows: int | None) -> int:
    """The most conversations of full length that `of_similar_length` puts into one pass.

    Args:
        extent: how large conversations get.
        step: conversations that it is given.
        rows: at most so many, as there.
    """
    return min(step, extent.conversations, rows or max(1, TOKENS_IN_PASS // max(1, extent.tokens)))


def of_similar_length(batch: TokenBatch, rows: int | None = None) -> Iterator[Int[Tensor, " R"]]:
    """All rows of whole conversations, cut where they differ much in length, the longest first.

    Args:
        batch: whole conversations.
        rows: at most so many at a time; by default as many as `TOKENS_IN_PASS` allows.
    """
    lengths = batch.attention_mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    while len(order):
        longest = int(lengths[order[0]])
        similar = int((lengths[order] >= SHORTEST * longest).sum())
        size = min(similar, rows or max(1, TOKENS_IN_PASS // max(1, longest)))
        yield order[:size]
        order = order[size:]
