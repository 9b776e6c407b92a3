"""Sampling responses: many conversations at once, each token computed once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from lightning_mtrl.models.layers import evaluating
from lightning_mtrl.rollouts.decoding import Decoding, Draw, SampledResponse
from lightning_mtrl.rollouts.packing import Memories
from lightning_mtrl.rollouts.sampling import SamplingConfig

__all__ = ["ConversationEngine", "Draw", "SampledResponse", "inference", "sample_groups"]


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout; each part of the model is put back into the mode it was in."""
    with evaluating(model), torch.inference_mode():
        yield


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
        self._sampling = sampling
        self._unread: dict[int, int] = {}  # row -> its last sampled token, which no forward has seen
        with inference(model):
            self._memory = Memories(model, context_length, pad_id).of(rows)
        self._decoding = Decoding(self._memory, sampling, frozenset(end_ids))

    @property
    def responding(self) -> set[int]:
        """Rows in which a response was begun and is not finished."""
        return self._decoding.rows

    def length(self, row: int) -> int:
        """Tokens that the row's conversation holds."""
        return self._memory.length(row) + int(row in self._unread)

    def release(self, row: int) -> None:
        """End the row's conversation; the next one in this row starts empty."""
        self._memory.rewind(row, 0)
        self._unread.pop(row, None)

    def begin(self, row: int, new_ids: Sequence[int], draw: Draw) -> None:
        """Append ids to a conversation and let a response follow; `advance` samples it.

        Args:
            row: below the engine's number of rows, and not responding.
            new_ids: what was said since the row's last response; not empty.
            draw: decides the response, which depends on its conversation and this, and on no other row.

        Raises:
            ValueError: if the row is responding, nothing was said, or the conversation could outgrow the
                context.
        """
        held, limit = self.length(row), self._sampling.max_response_tokens
        if not new_ids or held + len(new_ids) + limit > self._context_length:
            raise ValueError(
                f"row {row} holds {held} tokens and gets {len(new_ids)} (at least one); a "
                f"response of {limit} must then fit {self._context_length}"
            )
        unread = [self._unread.pop(row)] if row in self._unread else []
        self._decoding.begin(row, [*unread, *new_ids], draw)

    def advance(self, others: Callable[[], int] = lambda: 0) -> dict[int, SampledResponse]:
        """Sample on in all rows that were begun, until some responses are finished.

        Args:
            others: how many rows could be begun by now; with enough of them it stops, to let them join.

        Returns:
            The finished responses, by row; perhaps none.

        Raises:
            FloatingPointError: if the model's logits are not finite.
        """
        with inference(self._model):
            finished = self._decoding.advance(others)
        for row, response in finished.items():
            self._unread[row] = response.ids[-1]
        return finished

    def cancel(self) -> None:
        """Responses that are not finished cost nothing until `advance` goes on with them."""

    def respond(
        self, rows: Sequence[int], new_ids: Sequence[Sequence[int]], draws: Sequence[Draw]
    ) -> list[SampledResponse]:
        """Begin in each of these rows and go on until they are finished; the responses in their order."""
        for row, ids, draw in zip(rows, new_ids, draws, strict=True):
            self.begin(row, ids, draw)
        found: dict[int, SampledResponse] = {}
        while not found.keys() >= set(rows):
            found |= self.advance()
        return [found[row] for row in rows]


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
    (first,) = memory.arrange(range(len(indices)))
    logits = memory.extend(first, [prompts[indices[row]] for row in first])
    memory.repeat(len(indices), times)
    size = sampling.max_response_tokens
    uniforms = (np.random.default_rng(stream).random(size, dtype=np.float32) for stream in streams)
    decoding = Decoding(memory, sampling, end_ids)
    draws = [Draw(numbers, sampling.temperature, sampling.min_p) for numbers in uniforms]
    decoding.begin_at(logits.repeat_interleave(times, dim=0), draws)
    found: dict[int, SampledResponse] = {}
    while decoding.rows:
        finished = decoding.advance()
        for row in finished:
            memory.rewind(row, 0)  # it says nothing more, so it need not be kept when rows move
        found |= finished
    return [found[row] for row in range(len(batch))]
