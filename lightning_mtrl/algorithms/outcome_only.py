"""The baseline without credit: every token of a conversation is reinforced by the conversation's outcome.

Multi-turn REINFORCE with a clipped ratio (token-level PPO on whole conversations). It is what Iterative PPO
becomes when Q(s, a) is replaced by the outcome, and what its Q-critic has to beat.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.base import Algorithm, Context, Improvement, Signal
from lightning_mtrl.algorithms.ranges import expect, expect_above_zero, expect_at_least
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.batch import ConversationBatch, ImprovementBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.modules.base import RoleModule
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.workload import Extent, Pass, Sampling, module_passes


@dataclass(frozen=True)
class OutcomeConfig:
    """How the policy is trained on outcomes.

    Attributes:
        gamma: discount for each response, used in reported returns only.
        epochs: passes over the conversations of an iteration.
        micro_batch_size: conversations in one forward pass; null for all of a step (`data.batch_size`).
        learning_rate: of AdamW.
        clip_range: half-width of the allowed probability ratio of a token.
        kl_coef: weight of the KL penalty to pi_i in the loss, in reward per nat.
        entropy_coef: weight of the entropy bonus, in reward per nat.
        max_norm: gradients are scaled down to this norm.
    """

    gamma: float = 0.95
    epochs: int = 2
    micro_batch_size: int | None = None
    learning_rate: float = 1e-5
    clip_range: float = 0.2
    kl_coef: float = 0.02
    entropy_coef: float = 0.0
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        expect(0.0 < self.gamma <= 1.0, "settings.gamma", self.gamma, "in (0, 1]", 0.95)
        expect(0.0 < self.clip_range < 1.0, "settings.clip_range", self.clip_range, "in (0, 1)", 0.2)
        for name in ("epochs", "micro_batch_size"):
            expect_at_least(f"settings.{name}", getattr(self, name), 1, 2)
        for name in ("learning_rate", "kl_coef", "entropy_coef"):
            expect_at_least(f"settings.{name}", getattr(self, name), 0, 1e-5)
        expect_above_zero("settings.max_norm", self.max_norm, 1.0)


class OutcomeOnly(Algorithm):
    """Reinforce all responses of a conversation with its outcome, less the mean outcome.

    It evaluates nothing: there is no critic, and no certificate.

    Args:
        settings: how the policy is trained.
    """

    learns_from_logs = True
    needs_logprobs = True
    learns_from_own = True

    def __init__(self, settings: OutcomeConfig = OutcomeConfig()) -> None:
        self.settings = settings

    @property
    def gamma(self) -> float:
        """Discount for each response, in reports."""
        return self.settings.gamma

    def setup(self, context: Context) -> None:
        """Create the policy's module and optimizer."""
        s = self.settings
        self.context = context
        policy = Policy(context.backbone, s.clip_range, KLTerm(s.kl_coef), s.entropy_coef, s.learning_rate)
        self.stepper = Stepper(context, policy, s.max_norm, s.micro_batch_size)

    def evaluate(self, rollouts: list[Conversation]) -> Signal:
        """The outcome is the signal."""
        outcomes = [c.outcome for c in rollouts if c.outcome is not None]
        return Signal({"outcome": sum(outcomes) / max(1, len(outcomes))})

    def improve(self, rollouts: list[Conversation], signal: Signal) -> Improvement:
        """Clipped policy-gradient steps on the logged conversations."""
        baseline = signal.metrics["outcome"]
        self.stepper.begin()
        for _ in range(self.settings.epochs):
            for batch in self.context.datamodule.train_dataloader():
                self.stepper.step(outcome_batch(batch, baseline))
        return Improvement({})

    def converged(self, signal: Signal) -> bool:
        """There is no Q that could converge."""
        return False

    def modules(self) -> dict[str, tuple[RoleModule, Any]]:
        """The policy alone."""
        return {"policy": (self.stepper.module.module, self.stepper.optimizer)}

    def workload(self, extent: Extent) -> list[Pass | Sampling]:
        """Whole conversations, as many as go through the model together."""
        rows = self.settings.micro_batch_size or extent.batch_size
        return list(module_passes(self.modules(), extent, rows, "settings.micro_batch_size"))


def outcome_batch(batch: ConversationBatch, baseline: float) -> ImprovementBatch:
    """Whole conversations whose every sampled token has the advantage outcome - baseline."""
    advantages = (batch.outcome - baseline)[:, None] * batch.response_mask
    zeros = torch.zeros_like(batch.behaviour_logprobs)
    shared = {f.name: getattr(batch, f.name) for f in fields(ImprovementBatch) if hasattr(batch, f.name)}
    return ImprovementBatch(
        **shared,
        reference_logprobs=batch.behaviour_logprobs,
        advantages=advantages.to(zeros.dtype),
        returns=zeros,
        values=zeros,
        loss_weights=objectives.token_weights(batch.response_mask),
    )
