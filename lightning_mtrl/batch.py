"""Conversations as tensors. Masks come from construction, never from searching the text for markers.

Shape letters: B conversations (or rows), T tokens, K turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl.conversation import Conversation


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens, in the form every module reads.

    A row is either one whole conversation or one state with several responses that share its prefix;
    `predecessor` and the attention mask hold the difference, so a module's forward is the same for both.

    Attributes:
        input_ids: token ids; padding at the right.
        attention_mask: [B, T], True on real tokens (causal order is implied); or [B, T, T], True where
            the first position may look at the second.
        position_ids: position of each token in its own conversation.
        predecessor: index, in the same row, of the token whose hidden state predicts this token.
        response_mask: True on tokens that the policy sampled, end-of-turn token included.
        behaviour_logprobs: log-probability in nats of each sampled token under the policy that
            sampled it; 0 elsewhere.
    """

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"] | Bool[Tensor, "B T T"]
    position_ids: Int[Tensor, "B T"]
    predecessor: Int[Tensor, "B T"]
    response_mask: Bool[Tensor, "B T"]
    behaviour_logprobs: Float[Tensor, "B T"]

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device (Lightning calls this for plain `Trainer` use too)."""
        moved = {f.name: _moved(getattr(self, f.name), device) for f in fields(self)}
        return replace(self, **moved)

    def rows(self, index: slice | Int[Tensor, " R"]) -> Self:
        """Some of the rows, without the columns that only other rows need; weights keep their values."""
        size, width = self.input_ids.shape
        mask = self.attention_mask[index]
        real = mask if mask.dim() == 2 else _not_alone(mask)
        needed = max(1, int((real.any(0).nonzero().amax() + 1) if bool(real.any()) else 1))
        chosen = {f.name: _chosen(getattr(self, f.name), index, size, width, needed) for f in fields(self)}
        return replace(self, **chosen)

    def __len__(self) -> int:
        return self.input_ids.size(0)


def _moved(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _chosen(value: Any, index: slice | Tensor, size: int, width: int, needed: int) -> Any:
    chosen = _at_rows(value, index, size)
    if not isinstance(value, Tensor):
        return chosen
    for dimension in range(1, value.dim()):
        if value.size(dimension) == width:
            chosen = chosen.narrow(dimension, 0, needed)
    return chosen


def _at_rows(value: Any, index: slice | Tensor, size: int) -> Any:
    if isinstance(value, tuple):
        # An index on an accelerator takes rows of what lies there, and nothing that is on the CPU.
        places = torch.arange(size)[index.cpu() if isinstance(index, Tensor) else index]
        return tuple(value[i] for i in places.tolist())
    return value[index] if isinstance(value, Tensor) else value


def _not_alone(mask: Bool[Tensor, "B T T"]) -> Bool[Tensor, "B T"]:
    """True on positions that are not padding: padding looks at itself alone, and so does only the first."""
    alone = mask.sum(-1) == 1
    alone[:, 0] = False
    return ~alone


@dataclass(frozen=True)
class ConversationBatch(TokenBatch):
    """Whole conversations, one a row.

    Attributes:
        turn_index: 0 outside responses, k on the tokens of the k-th response (k = 1, 2, ...).
        turn_mask: True where the conversation has a k-th turn (column k - 1).
        turn_end: index of the last token of each response.
        turn_read: index of the last token of the header that follows each response: the place where
            a pretrained model already predicts the reaction to it.
        turn_rewards: reward observed after each response.
        turn_weights: weight of each turn in a loss over (state, response) pairs. All turns of the list that
            was collated weigh the same and sum to 1, but for two kinds that weigh 0: one before the turn that
            was drawn to be explored, because its return is not one of the policy, and one that must not be
            learned from. Rows taken out with `rows` keep their weights, so a loss summed over micro-batches
            is the loss of the whole.
        conversation_weights: weight of each conversation in a loss over conversations. All of the list that
            was collated weigh the same and sum to 1; rows taken out with `rows` keep their weights.
        outcome: outcome of each conversation; NaN where it is unknown.
        group: number of the group of each conversation; those of one group share their initial state.
        ids: the conversations' ids, in row order.
        turn_targets: what Q of each turn is regressed on, where that is not to be computed from
            `turn_rewards` alone; None elsewhere.
    """

    turn_index: Int[Tensor, "B T"]
    turn_mask: Bool[Tensor, "B K"]
    turn_end: Int[Tensor, "B K"]
    turn_read: Int[Tensor, "B K"]
    turn_rewards: Float[Tensor, "B K"]
    turn_weights: Float[Tensor, "B K"]
    conversation_weights: Float[Tensor, " B"]
    outcome: Float[Tensor, " B"]
    group: Int[Tensor, " B"]
    ids: tuple[str, ...] = ()
    turn_targets: Float[Tensor, "B K"] | None = None


@dataclass(frozen=True)
class ReferencedBatch(ConversationBatch):
    """Whole conversations that the initial policy has scored, once for all who need it.

    Attributes:
        reference_logprobs: log-probability in nats of each sampled token under pi_0; 0 elsewhere.
    """

    reference_logprobs: Float[Tensor, "B T"] = field(kw_only=True)


def collate(
    conversations: Sequence[Conversation], pad_id: int, header_ids: Sequence[int] = ()
) -> ConversationBatch:
    """Put conversations into one right-padded batch.

    Args:
        conversations: with token ids (`Conversation.has_tokens`).
        pad_id: id written on padding; its value has no influence.
        header_ids: the glue that follows a finished response, up to where the next message's content
            begins (`ChatTokenizer.header_ids`). It is appended to a conversation that ended right
            after its last response, so that `turn_read` exists for every turn.

    Raises:
        ValueError: for an empty list, or a conversation without token ids.
    """
    if not conversations:
        raise ValueError("collate needs at least one conversation")
    rows = [_row(c, list(header_ids)) for c in conversations]
    width, turns = max(len(r.ids) for r in rows), max(len(r.ends) for r in rows)
    lengths = torch.tensor([len(r.ids) for r in rows])
    attention = torch.arange(width) < lengths[:, None]
    turn_index = _padded([r.turn_index for r in rows], width, 0)
    positions = torch.arange(width).expand(len(rows), width)
    counted = _padded([_counted(c) for c in conversations], turns, 0.0)
    return ConversationBatch(
        input_ids=_padded([r.ids for r in rows], width, pad_id),
        attention_mask=attention,
        position_ids=torch.where(attention, positions, 0),
        predecessor=(positions - 1).clamp(min=0).contiguous(),
        response_mask=_padded([r.trained for r in rows], width, 0).bool(),
        behaviour_logprobs=_padded([r.logprobs for r in rows], width, 0.0),
        turn_index=turn_index,
        turn_mask=torch.arange(turns) < torch.tensor([len(r.ends) for r in rows])[:, None],
        turn_end=_padded([r.ends for r in rows], turns, 0),
        turn_read=_padded([r.reads for r in rows], turns, 0),
        turn_rewards=_padded([c.rewards for c in conversations], turns, 0.0),
        turn_weights=counted / counted.sum().clamp(min=1.0),
        conversation_weights=torch.full((len(rows),), 1.0 / len(rows)),
        outcome=torch.tensor([float("nan") if c.outcome is None else c.outcome for c in conversations]),
        group=torch.tensor([c.group for c in conversations]),
        ids=tuple(c.id for c in conversations),
    )


def _counted(conversation: Conversation) -> list[float]:
    """1 for turns to learn from whose return is one of the policy: the one drawn to be explored, and later.

    The draw decides, whether the conversation got there or not: of those that would have, only the ones that
    ended early would be left, and when one ends has to do with its outcome.
    """
    first = conversation.explored_turn
    return [float(k >= first and turn.trained) for k, turn in enumerate(conversation.turns, start=1)]


@dataclass(frozen=True)
class _Row:
    ids: list[int]
    turn_index: list[int]
    trained: list[int]
    logprobs: list[float]
    ends: list[int]
    reads: list[int]


def _row(conversation: Conversation, header_ids: list[int]) -> _Row:
    if not conversation.has_tokens:
        raise ValueError(
            f"conversation {conversation.id!r} has no token ids; pass it through ChatTokenizer.encode first"
        )
    outside = [0] * len(conversation.prompt_ids)
    row = _Row(list(conversation.prompt_ids), [*outside], [*outside], [0.0] * len(outside), [], [])
    for number, turn in enumerate(conversation.turns, start=1):
        row.ids.extend(turn.response_ids)
        row.turn_index.extend([number] * len(turn.response_ids))
        row.trained.extend([int(turn.trained)] * len(turn.response_ids))
        row.logprobs.extend(turn.behaviour_logprobs or [0.0] * len(turn.response_ids))
        row.ends.append(len(row.ids) - 1)
        after = list(turn.observation_ids) or header_ids
        # A response that hit its length limit is closed by one end-of-turn token of the glue.
        closed = int(after[: len(header_ids)] != header_ids)
        row.reads.append(row.ends[-1] + closed + len(header_ids))
        row.ids.extend(after)
        row.turn_index.extend([0] * len(after))
        row.trained.extend([0] * len(after))
        row.logprobs.extend([0.0] * len(after))
    return row


def _padded(rows: Sequence[Sequence[float]], width: int, value: float) -> Tensor:
    dtype = torch.float32 if isinstance(value, float) else torch.int64
    out = torch.full((len(rows), width), value, dtype=dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


@dataclass(frozen=True)
class ImprovementBatch(TokenBatch):
    """Responses with everything that an improvement step needs; rows are conversations or states.

    Attributes:
        reference_logprobs: log-probability in nats of each sampled token under the reference policy.
        advantages: advantage of each sampled token; 0 elsewhere.
        returns: target of the value head at each sampled token.
        values: prediction of the value head for it when the responses were scored.
        loss_weights: weight of each sampled token in a loss; they sum to 1 over one optimizer step, so the
            loss does not depend on how the step is cut into micro-batches.
        turn_index: k on the tokens of the k-th response of the row, 0 elsewhere; None where each run of
            sampled tokens is one response.
    """

    reference_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"]
    loss_weights: Float[Tensor, "B T"]
    turn_index: Int[Tensor, "B T"] | None = None


@dataclass(frozen=True)
class TurnFeatures:
    """What a Q-critic's head reads of whole conversations, in place of their tokens.

    Attributes:
        features: hidden state at each turn's reading place.
        turn_mask, turn_rewards, turn_weights, ids, turn_targets: as in `ConversationBatch`.
    """

    features: Float[Tensor, "B K H"]
    turn_mask: Bool[Tensor, "B K"]
    turn_rewards: Float[Tensor, "B K"]
    turn_weights: Float[Tensor, "B K"]
    ids: tuple[str, ...]
    turn_targets: Float[Tensor, "B K"] | None = None

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return replace(self, **{f.name: _moved(getattr(self, f.name), device) for f in fields(self)})

    def rows(self, index: slice | Int[Tensor, " R"]) -> Self:
        """Some of the conversations; weights keep their values."""
        chosen = {f.name: _at_rows(getattr(self, f.name), index, len(self)) for f in fields(self)}
        return replace(self, **chosen)

    def __len__(self) -> int:
        return self.features.size(0)
