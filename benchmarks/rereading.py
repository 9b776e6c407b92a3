"""The peer's way to a response: `generate` on whole conversations, padded at the left, with nothing kept."""

from __future__ import annotations

from typing import Any

import torch

from lightning_mtrl.rollouts.tokens import ChatTokenizer

Said = list[list[int]]


def generated(model: Any, held: Said, config: Any, chat: ChatTokenizer) -> Said:
    """One response in each conversation, end-of-turn token included."""
    width = max(map(len, held))
    padded = [[chat.pad_id] * (width - len(ids)) + ids for ids in held]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in held]
    with torch.no_grad():
        found = model.generate(
            input_ids=torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=config,
        )
    return [up_to_end(row, chat) for row in found[:, width:].tolist()]


def up_to_end(ids: list[int], chat: ChatTokenizer) -> list[int]:
    ends = (place for place, token in enumerate(ids, start=1) if token in chat.end_ids)
    return ids[: next(ends, len(ids))]
