"""Policy evaluation: fit the Q-critic to the returns of the current policy's conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl.algorithms.critic_inputs import CriticInputs, Readable
from lightning_mtrl.algorithms.progress import PhaseProgress
from lightning_mtrl.algorithms.ranges import expect, expect_above_zero, expect_at_least
from lightning_mtrl.algorithms.stepping import Stepper
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
from lightning_mtrl.objectives import discounted_returns


@dataclass(frozen=True)
class EvaluationConfig:
    """How the Q-critic is fitted.

    Attributes:
        loss: "bce" for returns in [0, 1], "mse" for any, or "hl_gauss" (classification over bins of [0, 1]);
            a return outside is refused.
        gamma: discount for each response, in (0, 1].
        td_lambda: 1 for Monte Carlo returns; less mixes in the critic's next values (SARSA(lambda)).
        read: hidden state that the critic reads: "header" after the response, or its "end".
        layer: hidden layer that the critic reads, 1 being the first; null for the last.
        trunk: "adapter" trains an adapter below the head; "frozen" reads the base as it is, which needs
            fewer conversations and next to no time when the base already knows how people react.
        head_units: units of a hidden layer of the head; 0 for a linear head.
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
    trunk: Literal["adapter", "frozen"] = "adapter"
    head_units: int = 0
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
        expect_at_least("evaluation.head_units", self.head_units, 0, 64)
        expect_above_zero("evaluation.max_norm", self.max_norm, 1.0)


def fit_critic(inputs: CriticInputs, stepper: Stepper, config: EvaluationConfig) -> QReport:
    """Fit the critic on the training conversations and keep the weights that did best on held-out ones.

    Returns:
        The report on held-out conversations.

    Raises:
        UserError: for a return that the critic's loss is not for, before anything has moved.
    """
    critic, data = inputs.critic, inputs.context.datamodule
    held_out = data.validation_conversations
    inputs.check_returns([*data.train_conversations, *held_out])
    measured = [batch for _, batch in inputs.batches(held_out)]
    best, best_state, stale = _loss(inputs, measured), critic.state(), 0
    progress = PhaseProgress("evaluate", "epoch")
    for batches in progress.over(islice(inputs.epochs(), config.epochs), config.epochs):
        stepper.begin()
        for batch in batches:
            stepper.step(batch)
        loss = _loss(inputs, measured)
        progress.show(held_out_loss=loss, best=min(loss, best))
        stale = 0 if loss < best else stale + 1
        if stale == 0:
            best, best_state = loss, critic.state()
        elif stale >= config.patience:
            break
    critic.load_state(best_state)
    return measure(inputs, held_out)


@torch.no_grad()
def _loss(inputs: CriticInputs, batches: Sequence[Readable]) -> float:
    """Mean loss over all turns of the batches."""
    critic = inputs.critic
    critic.eval()
    turns = [float((batch.turn_weights > 0).sum()) for batch in batches]
    losses = inputs.over(batches, lambda mine: [critic.loss(batch).item() for batch in mine])
    total = sum(loss * n for loss, n in zip(losses, turns, strict=True))
    return total / max(1.0, sum(turns))


def predict(inputs: CriticInputs, conversations: list[Conversation]) -> list[Float[Tensor, " K"]]:
    """Q of every turn of each conversation, in the order given."""
    found: dict[int, Tensor] = {}
    batches = list(inputs.batches(conversations))
    with inputs.context.fabric.autocast():
        scored = inputs.over(
            batches, lambda mine: [inputs.critic.values(batch).float().cpu() for _, batch in mine]
        )
    for (places, batch), values in zip(batches, scored, strict=True):
        for row, place in enumerate(places):
            found[place] = values[row][batch.turn_mask[row].cpu()]
    return [found[place] for place in range(len(conversations))]


@torch.no_grad()
def measure(inputs: CriticInputs, conversations: list[Conversation]) -> QReport:
    """Compare the critic's predictions with the Monte Carlo returns of conversations."""
    critic = inputs.critic
    critic.eval()
    raw, returns, owner, states = _held_out_pairs(inputs, conversations)
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
    inputs: CriticInputs, conversations: list[Conversation]
) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, ...]]]:
    """Raw output, return, owner and state of every turn whose return is one of the policy."""
    critic = inputs.critic
    returns, owners, states = [], [], []
    batches = list(inputs.batches(conversations))
    with inputs.context.fabric.autocast():
        raws = inputs.over(
            batches, lambda mine: [critic(batch)[batch.turn_weights > 0].float().cpu() for _, batch in mine]
        )
    for places, batch in batches:
        counted = batch.turn_weights > 0
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
