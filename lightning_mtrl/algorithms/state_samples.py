"""Fresh responses of a role in logged states."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.rollouts.engine import SampledResponse, sample_groups


def sample_responses(
    context: Context, prefixes: Sequence[Sequence[int]], samples: int, seed: int, role: str = "policy"
) -> list[list[SampledResponse]]:
    """So many responses to each prefix, as the role gives them with the sampling of a collection.

    Args:
        context: backbone, sampling, and the processes that share the work.
        prefixes: token ids of each state; those of similar length had better stand together.
        samples: responses for each.
        seed: >= 0.
        role: whose responses.
    """
    with context.backbone.sampling(role) as model:
        return context.processes.over(
            range(len(prefixes)),
            lambda numbers: sample_groups(
                model,
                [prefixes[number] for number in numbers],
                samples,
                sampling=context.sampling,
                end_ids=context.chat.end_ids,
                pad_id=context.chat.pad_id,
                seed=seed,
                rows=context.rows,
                numbers=numbers,
            ),
        )
