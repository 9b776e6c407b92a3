"""Policy evaluation: fit the Q-critic to the returns of the current policy's conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.ranges import expect, expect_above_zero, expect_at_least
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.batch import ConversationBatch, collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.calibration import (
    QReport,
    calibration_curve,
    calibration_error,
    correlation,
    lower_bound,
    ranking_auc,
    same_state_accuracy,
)
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.objectives import discounted_returns

SCORING_BATCH = 128  # conversations in a pass without gradients


@dataclass(frozen=True)
class EvaluationConfig:
    """How the Q-critic is fitted.

    Attributes:
        loss: "bce" for returns in [0, 1], "mse", or "hl_gauss" (classification over bins of [0, 1]).
        gamma: discount for each response, in (0, 1].
        td_lambda: 1 for Monte Carlo returns; less mixes in the critic's next values (SARSA(lambda)).
        read: hidden state that the critic reads: "header" after the response, or its "end".
        layer: hidden layer that the critic reads, 1 being the first; null for the last.
        epochs: passes over the conversations in each iteration, at most.
        patience: passes without a better held-out loss after which fitting stops.
        micro_batch_size: conversations in one forward pass; null for all of a step (`data.batch_size`).
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        max_norm: gradients are scaled down to this norm.
        tolerance: Q has converged when its mean change on a fixed set of turns is below this.
    """

    loss: Literal["bce", "mse", "hl_gauss"] = "bce"
    gamma: float = 0.95
    td_lambda: float = 1.0
    read: Literal["header", "end"] = "header"
    layer: int | None = None
    epochs: int = 4
    patience: int = 2
    micro_batch_size: int | None = None
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    max_norm: float = 1.0
    tolerance: float = 0.005

    def __post_init__(self) -> None:
        expect(0.0 < self.gamma <= 1.0, "evaluation.gamma", self.gamma, "in (0, 1]", 0.95)
        expect(0.0 <= self.td_lambda <= 1.0, "evaluation.td_lambda", self.td_lambda, "in [0, 1]", 1.0)
        for name in ("layer", "epochs", "patience", "micro_batch_size"):
            expect_at_least(f"evaluation.{name}", getattr(self, name), 1, 2)
        for name in ("learning_rate", "weight_decay", "tolerance"):
            expect_at_least(f"evaluation.{name}", getattr(self, name), 0, 1e-4)
        expect_above_zero("evaluation.max_norm", self.max_norm, 1.0)


def fit_critic(critic: QCritic, stepper: Stepper, config: EvaluationConfig, context: Context) -> QReport:
    """Fit the critic on the training conversations and keep the weights that did best on held-out ones.

    Returns:
        The report on held-out conversations.
    """
    held_out = context.datamodule.validation_conversations
    best, best_state, stale = measure(critic, held_out, context), critic.state(), 0
    for _ in range(config.epochs):
        for batch in context.datamodule.train_dataloader():
            stepper.step(batch)
        report = measure(critic, held_out, context)
        stale = 0 if report.loss < best.loss else stale + 1
        if stale == 0:
            best, best_state = report, critic.state()
        elif stale >= config.patience:
            break
    critic.load_state(best_state)
    return best


def predict(
    critic: QCritic, conversations: list[Conversation], context: Context
) -> list[Float[Tensor, " K"]]:
    """Q of every turn of each conversation, in the order given."""
    found: dict[int, Tensor] = {}
    for places, batch in scoring_batches(conversations, context):
        with context.fabric.autocast():
            values = critic.values(batch).float().cpu()
        for row, place in enumerate(places):
            found[place] = values[row][batch.turn_mask[row].cpu()]
    return [found[place] for place in range(len(conversations))]


@torch.no_grad()
def measure(critic: QCritic, conversations: list[Conversation], context: Context) -> QReport:
    """Compare the critic's predictions with the Monte Carlo returns of conversations."""
    critic.eval()
    raw, returns, owner, states = _held_out_pairs(critic, conversations, context)
    losses = critic.objective.loss(raw, returns)
    constant = critic.objective.constant(returns).expand(len(returns), -1)
    gains = critic.objective.loss(constant, returns) - losses
    by_conversation = torch.stack([gains[owner == c].mean() for c in owner.unique()])
    predicted = critic.objective.values(raw)
    curve = calibration_curve(predicted, returns)
    return QReport(
        loss=losses.mean().item(),
        constant_loss=(losses + gains).mean().item(),
        gain=lower_bound(by_conversation),
        auc=ranking_auc(predicted, returns > 0),
        same_state_accuracy=same_state_accuracy(predicted, returns, states),
        correlation=correlation(predicted, returns),
        calibration_error=calibration_error(curve),
        curve=curve,
        turns=len(returns),
    )


def _held_out_pairs(
    critic: QCritic, conversations: list[Conversation], context: Context
) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, ...]]]:
    """Raw output, return, owner and state of every turn whose return is one of the policy."""
    raws, returns, owners, states = [], [], [], []
    for places, batch in scoring_batches(conversations, context):
        counted = batch.turn_weights > 0
        with context.fabric.autocast():
            raws.append(critic(batch)[counted].float().cpu())
        returns.append(discounted_returns(batch.turn_rewards, batch.turn_mask, critic.gamma)[counted].cpu())
        owners.append(torch.tensor(places)[:, None].expand(counted.shape)[counted.cpu()])
        for row, column in counted.nonzero().tolist():
            states.append(_state_ids(conversations[places[row]], column))
    return torch.cat(raws), torch.cat(returns), torch.cat(owners), states


def _state_ids(conversation: Conversation, turn: int) -> tuple[int, ...]:
    ids = list(conversation.prompt_ids)
    for earlier in conversation.turns[:turn]:
        ids += [*earlier.response_ids, *earlier.observation_ids]
    return tuple(ids)


def scoring_batches(
    conversations: list[Conversation], context: Context
) -> list[tuple[list[int], ConversationBatch]]:
    """Conversations of similar length together, with their places in the list given."""
    order = sorted(range(len(conversations)), key=lambda place: len(conversations[place].token_ids()))
    chat, device = context.chat, context.fabric.device
    found = []
    for start in range(0, len(order), SCORING_BATCH):
        places = order[start : start + SCORING_BATCH]
        batch = collate([conversations[p] for p in places], chat.pad_id, chat.header_ids)
        found.append((places, batch.to(device)))
    return found
