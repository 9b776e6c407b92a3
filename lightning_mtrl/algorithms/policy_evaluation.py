"""Policy evaluation: fit the Q-critic to the returns of the current policy's conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from lightning_mtrl.algorithms.critic_inputs import CriticInputs, Readable
from lightning_mtrl.algorithms.fit_targets import FitTargets
from lightning_mtrl.algorithms.outcomes import all_outcomes_are
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
from lightning_mtrl.rollouts.split import owners


@dataclass(frozen=True)
class EvaluationConfig:
    """How the Q-critic is fitted.

    Attributes:
        loss: "bce" for returns in [0, 1], "mse" for any, or "hl_gauss" (classification over bins of [0, 1]);
            a return outside is refused.
        gamma: discount for each response, in (0, 1].
        target: what follows a response in what Q is fitted to: "sarsa" the log itself, which is right when
            the policy led it; "expected_sarsa" fresh responses of the policy, scored by a target network, so
            that any log will do; "retrace" these, and the log as far as the policy would have said the same
            (with the loss "mse").
        td_lambda: with "sarsa" 1 for Monte Carlo returns; less mixes in the target network's next values
            (SARSA(lambda)). With "retrace" its lambda: 0 is "expected_sarsa", where this means nothing.
        next_samples: fresh responses of the policy in each logged next state, unless `target` is "sarsa".
        target_refresh: epochs after which the critic becomes the target network. Values go back through a
            conversation by one turn each time, so let `epochs` be several times its turns times this.
        importance_clip: largest ratio of probabilities, policy to behaviour, of a response with "retrace".
        expectile: of Q over the fresh responses of "expected_sarsa"; 0.5 is their mean, more leans towards
            the best of them as ILQL does, and is then no longer Q of the policy.
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
    target: Literal["sarsa", "expected_sarsa", "retrace"] = "sarsa"
    td_lambda: float = 1.0
    next_samples: int = 8
    target_refresh: int = 1
    importance_clip: float = 1.0
    expectile: float = 0.5
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
        for name in ("layer", "epochs", "patience", "micro_batch_size", "next_samples", "target_refresh"):
            expect_at_least(f"evaluation.{name}", getattr(self, name), 1, 2)
        for name in ("learning_rate", "weight_decay", "tolerance"):
            expect_at_least(f"evaluation.{name}", getattr(self, name), 0, 1e-4)
        expect_at_least("evaluation.head_units", self.head_units, 0, 64)
        expect_above_zero("evaluation.max_norm", self.max_norm, 1.0)
        expect_above_zero("evaluation.importance_clip", self.importance_clip, 1.0)
        expect(0.0 < self.expectile < 1.0, "evaluation.expectile", self.expectile, "in (0, 1)", 0.5)
        self._expect_used()

    def _expect_used(self) -> None:
        """Refuse a setting that means nothing for this target."""
        fresh, retrace = self.target != "sarsa", self.target == "retrace"
        bootstraps = fresh or self.td_lambda < 1
        for name, used, where in (
            ("td_lambda", self.target != "expected_sarsa", "evaluation.target sarsa or retrace"),
            ("next_samples", fresh, "evaluation.target expected_sarsa or retrace"),
            ("target_refresh", bootstraps, "evaluation.td_lambda below 1, or another evaluation.target"),
            ("importance_clip", retrace, "evaluation.target retrace"),
            ("expectile", self.target == "expected_sarsa", "evaluation.target expected_sarsa"),
        ):
            value, unset = getattr(self, name), getattr(type(self), name)
            kind = f"{unset} (unset) without {where}, since it is only for that"
            expect(used or value == unset, f"evaluation.{name}", value, kind, unset)
        # Cross-entropy has no minimum there, and kept within the range targets would have another mean.
        kind = "mse with evaluation.target retrace, whose targets can leave the range of the returns"
        expect(not retrace or self.loss == "mse", "evaluation.loss", self.loss, kind, "mse")


def fit_critic(
    inputs: CriticInputs, stepper: Stepper, config: EvaluationConfig, targets: FitTargets
) -> QReport:
    """Fit the critic on the training conversations and keep what did best on held-out ones.

    Weights and optimizer both go back to it, so that a fit which went on for too long leaves the same critic
    as one that ended there, and the next one does not begin with the momentum of steps that were given up.

    Where the targets move with the critic, that is done anew after each refresh: losses against different
    targets cannot be compared, and fitting goes on to the last epoch.

    Returns:
        The report on held-out conversations.

    Raises:
        UserError: for a return that the critic's loss is not for, and where no turn can be fitted to or
            measured on, before anything has moved.
    """
    data = inputs.context.datamodule
    held_out = data.validation_conversations
    for part in (data.train_conversations, held_out):
        inputs.check(part, targets.weights)
    measured = [batch for _, batch in inputs.batches(held_out)]
    best, best_learned, stale = float("inf"), stepper.learned(), 0
    progress = PhaseProgress("evaluate", "epoch")
    epochs = progress.over(islice(inputs.epochs(), config.epochs), config.epochs)
    for number, batches in enumerate(epochs):
        if number == 0 or (targets.moving and number % config.target_refresh == 0):
            stepper.go_back(best_learned)
            targets.refresh()
            goals = [targets.on(batch) for batch in measured]
            best, stale = _loss(inputs, goals), 0
        stepper.begin()
        for batch in batches:
            stepper.step(targets.on(batch))
        loss = _loss(inputs, goals)
        progress.show(held_out_loss=loss, best=min(loss, best))
        stale = 0 if loss < best else stale + 1
        if stale == 0:
            best, best_learned = loss, stepper.learned()
        elif stale >= config.patience and not targets.moving:
            break
    stepper.go_back(best_learned)
    targets.refresh()
    return measure(inputs, held_out, targets)


def why_untrusted(report: QReport, conversations: Sequence[Conversation]) -> str:
    """Why no step shall be taken on a Q-critic, and what to do; empty if it beats a constant.

    Args:
        report: on the critic.
        conversations: that it was fitted to and measured on.
    """
    if report.beats_constant:
        return ""
    if same := all_outcomes_are(c.outcome for c in conversations):
        return f"the Q-critic does not beat a constant: {same}"
    return (
        f"the Q-critic does not beat a constant on held-out conversations (gain {report.gain[0]:z.4f} nats, "
        f"lower bound {report.gain[1]:z.4f}); collect more conversations or fit it longer"
    )


@torch.no_grad()
def _loss(inputs: CriticInputs, batches: Sequence[Readable]) -> float:
    """Mean loss over all turns of the batches."""
    critic = inputs.critic
    critic.eval()
    turns = [float((batch.turn_weights > 0).sum()) for batch in batches]
    losses = inputs.over(batches, lambda mine: [critic.loss(batch).item() for batch in mine])
    total = sum(loss * n for loss, n in zip(losses, turns, strict=True))
    return total / max(1.0, sum(turns))


@torch.no_grad()
def measure(inputs: CriticInputs, conversations: list[Conversation], targets: FitTargets) -> QReport:
    """Compare the critic's predictions with what the targets say of conversations.

    Only whether Q tells success from failure (AUC) is asked of the log's own returns, whoever led it.
    """
    critic = inputs.critic
    critic.eval()
    raw, returns, logged, row, states = _held_out_pairs(inputs, conversations, targets)
    losses = critic.objective.loss(raw, returns)
    constant = critic.objective.constant(returns).expand(len(returns), -1)
    gains = critic.objective.loss(constant, returns) - losses
    measured = row.unique()
    by_conversation = torch.stack([gains[row == c].mean() for c in measured])
    names = owners(conversations)
    predicted = critic.objective.values(raw)
    curve = calibration_curve(predicted, returns)
    return QReport(
        loss=losses.mean().item(),
        constant_loss=(losses + gains).mean().item(),
        gain=lower_bound(by_conversation, [names[c] for c in measured.tolist()]),
        auc=ranking_auc(predicted, logged > 0),
        same_state_accuracy=same_state_accuracy(predicted, returns, states),
        correlation=correlation(predicted, returns),
        calibration_error=calibration_error(curve),
        curve=curve,
        turns=len(returns),
    )


def _held_out_pairs(
    inputs: CriticInputs, conversations: list[Conversation], targets: FitTargets
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[tuple[int, ...]]]:
    """Raw output, target, logged return, conversation and state of every turn that is learned from."""
    critic = inputs.critic
    goals, returns, rows, states = [], [], [], []
    batches = [
        (places, replace(batch, turn_weights=targets.weights(batch)))
        for places, batch in inputs.batches(conversations)
    ]
    raws = inputs.over(
        batches, lambda mine: [critic(batch)[batch.turn_weights > 0].cpu() for _, batch in mine]
    )
    for places, batch in batches:
        counted = batch.turn_weights > 0
        goals.append(targets.measured(batch)[counted].cpu())
        returns.append(discounted_returns(batch.turn_rewards, batch.turn_mask, critic.gamma)[counted].cpu())
        rows.append(torch.tensor(places)[:, None].expand(counted.shape)[counted.cpu()])
        for row, column in counted.nonzero().tolist():
            states.append(_state_ids(conversations[places[row]], column))
    return torch.cat(raws), torch.cat(goals), torch.cat(returns), torch.cat(rows), states


def _state_ids(conversation: Conversation, turn: int) -> tuple[int, ...]:
    ids = list(conversation.prompt_ids)
    for earlier in conversation.turns[:turn]:
        ids += [*earlier.response_ids, *earlier.observation_ids]
    return tuple(ids)
