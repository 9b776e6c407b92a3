"""Sampling responses: many conversations at once, each token computed once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_mtrl.rollouts.decoding import Draws, SampledResponse, decode
from lightning_mtrl.rollouts.packing import Memories
from lightning_mtrl.rollouts.sampling import SamplingConfig

__all__ = ["ConversationEngine", "SampledResponse", "inference", "sample_groups"]


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout; each part of the model is put back into the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


class ConversationEngine:
    """Holds up to `rows` conversations and lets the policy respond in any of them.

    What a conversation said is remembered across its turns: an observation is read once and the
    history never again. The model must not change between the first response of a conversation and
    its last. It does not know environments or text; `Collector` does.

    Args:
        model: a transformers causal language model (or what wraps one and is called the same way).
        rows: conversations held at once.
        context_length: tokens that a conversation may hold, responses included.
        end_ids: ids that end a response.
        sampling: how tokens are drawn.
        pad_id: id written on padding; without influence.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rows: int,
        context_length: int,
        end_ids: Collection[int],
        sampling: SamplingConfig,
        pad_id: int,
    ) -> None:
        self._model = model
        self._context_length = context_length
        self._end_ids = frozenset(end_ids)
        self._sampling = sampling
        self._unread: dict[int, int] = {}  # row -> its last sampled token, which no forward has seen
        with inference(model):
            self._memory = Memories(model, context_length, pad_id).of(rows)

    def length(self, row: int) -> int:
        """Tokens that the row's conversation holds."""
        return self._memory.length(row) + int(row in self._unread)

    def release(self, row: int) -> None:
        """End the row's conversation; the next one in this row starts empty."""
        self._memory.rewind(row, 0)
        self._unread.pop(row, None)

    def respond(
        self,
        rows: Sequence[int],
        new_ids: Sequence[Sequence[int]],
        uniforms: Sequence[NDArray[np.floating[Any]]],
        temperatures: Sequence[float] | None = None,
        min_ps: Sequence[float] | None = None,
    ) -> list[SampledResponse]:
        """Append ids to conversations and sample one response in each.

        Args:
            rows: distinct rows, each below the engine's number of rows.
            new_ids: for each row what was said since its last response; not empty.
            uniforms: for each row numbers in [0, 1), at least `max_response_tokens` of them. A
                response depends on its conversation and these numbers, and on no other row.
            temperatures: one a row, instead of the configured one.
            min_ps: one a row, instead of the configured one.

        Returns:
            The responses in the order of `rows`.

        Raises:
            ValueError: if rows repeat, nothing was said, or a conversation could outgrow the context.
            FloatingPointError: if the model's logits are not finite.
        """
        self._check(rows, new_ids)
        with inference(self._model):
            order = self._memory.arrange(rows)
            position = {row: index for index, row in enumerate(rows)}
            said = [self._take_unread(row) + list(new_ids[position[row]]) for row in order]
            logits = self._memory.extend(order, said)
            places = [position[row] for row in order]
            draws = Draws.of(self._sampling, logits, [uniforms[i] for i in places])
            draws.override(_picked(temperatures, places), _picked(min_ps, places))
            responses = decode(self._memory, order, logits, draws, self._end_ids)
        for row, response in zip(order, responses, strict=True):
            self._unread[row] = response.ids[-1]
        by_row = dict(zip(order, responses, strict=True))
        return [by_row[row] for row in rows]

    def _take_unread(self, row: int) -> list[int]:
        return [self._unread.pop(row)] if row in self._unread else []

    def _check(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> None:
        if len(set(rows)) < len(rows):
            raise ValueError(f"rows {list(rows)} name a row twice")
        for row, ids in zip(rows, new_ids, strict=True):
            total = self.length(row) + len(ids) + self._sampling.max_response_tokens
            if not ids or total > self._context_length:
                raise ValueError(
                    f"row {row} holds {self.length(row)} tokens and gets {len(ids)} (at least one); a "
                    f"response of {self._sampling.max_response_tokens} must then fit {self._context_length}"
                )


def sample_groups(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    *,
    sampling: SamplingConfig,
    end_ids: Collection[int],
    pad_id: int,
    seed: int,
    rows: int = 256,
    numbers: Sequence[int] | None = None,
) -> list[list[SampledResponse]]:
    """Several responses to each prompt. A prompt is read once and its keys and values are repeated.

    The random numbers of a response come from (seed, number of the prompt, index of the sample), so it
    does not depend on `rows` or on the other prompts.

    Args:
        model: a transformers causal language model.
        prompts: token ids, each ending with the header that opens a response.
        num_samples: responses to each prompt.
        sampling: how tokens are drawn.
        end_ids: ids that end a response.
        pad_id: id written on padding; without influence.
        seed: >= 0.
        rows: responses sampled at once. Each needs memory for the keys and values of its whole prompt.
        numbers: of the prompts, where they are some of many; by default 0, 1, 2 and so on.

    Returns:
        For each prompt, in order, its `num_samples` responses.

    Raises:
        ValueError: for an empty prompt, or no samples.
    """
    if num_samples < 1 or not all(prompts):
        raise ValueError(
            f"num_samples is {num_samples}, and prompts must not be empty; both need at least one"
        )
    work = [
        (i, j) for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])) for j in range(num_samples)
    ]
    answers: dict[tuple[int, int], SampledResponse] = {}
    with inference(model):
        longest = max(map(len, prompts), default=0)
        memories = Memories(model, longest + sampling.max_response_tokens, pad_id)
        for batch in _batches(work, num_samples, rows):
            streams = [(seed, i if numbers is None else numbers[i], j) for i, j in batch]
            responses = _respond_once(memories, prompts, batch, sampling, frozenset(end_ids), streams)
            answers.update(zip(batch, responses, strict=True))
    return [[answers[i, j] for j in range(num_samples)] for i in range(len(prompts))]


def _batches(work: list[tuple[int, int]], num_samples: int, rows: int) -> Iterator[list[tuple[int, int]]]:
    """Whole prompts as long as their samples fit; otherwise one prompt's samples in parts."""
    if num_samples <= rows:
        size = rows // num_samples * num_samples
        yield from (work[start : start + size] for start in range(0, len(work), size))
        return
    for start in range(0, len(work), num_samples):
        stop = start + num_samples
        yield from (work[part : min(part + rows, stop)] for part in range(start, stop, rows))


def _respond_once(
    memories: Memories,
    prompts: Sequence[Sequence[int]],
    batch: list[tuple[int, int]],
    sampling: SamplingConfig,
    end_ids: frozenset[int],
    streams: list[tuple[int, int, int]],
) -> list[SampledResponse]:
    indices = list(dict.fromkeys(i for i, _ in batch))
    times = len(batch) // len(indices)
    longest = max(len(prompts[i]) for i in indices)
    memory = memories.of(len(batch), longest + sampling.max_response_tokens)
    first = memory.arrange(range(len(indices)))
    logits = memory.extend(first, [prompts[indices[row]] for row in first])
    memory.repeat(len(indices), times)
    size = sampling.max_response_tokens
    uniforms = [np.random.default_rng(stream).random(size, dtype=np.float32) for stream in streams]
    logits = logits.repeat_interleave(times, dim=0)
    return decode(memory, list(range(len(batch))), logits, Draws.of(sampling, logits, uniforms), end_ids)


def _picked(values: Sequence[float] | None, places: Sequence[int]) -> list[float] | None:
    return None if values is None else [values[place] for place in places]
