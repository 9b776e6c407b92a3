"""Policy improvement: single-turn, token-level PPO on logged states, with Q as the reward of a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.agreement import BehaviourCheck
from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.estimators import AdvantageEstimator
from lightning_mtrl.algorithms.improvement_config import ImprovementConfig
from lightning_mtrl.algorithms.passes import by_token, rows_in_pass, slices, training_logprobs
from lightning_mtrl.algorithms.progress import PhaseProgress
from lightning_mtrl.algorithms.state_samples import sample_responses
from lightning_mtrl.algorithms.stepping import Stepper, begin
from lightning_mtrl.batch import ImprovementBatch
from lightning_mtrl.evaluation.intervals import mean_interval
from lightning_mtrl.modules.policy import Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.rollouts.datamodule import State
from lightning_mtrl.rollouts.engine import SampledResponse
from lightning_mtrl.rollouts.groups import Glue, GroupBatch, group_batch

SCORING_STATES = 64  # states in a pass without gradients, at most
SAMPLE = 4  # states of a round whose responses' stored log-probabilities are checked


@dataclass(frozen=True)
class ScoredGroups:
    """Responses of some states with their Q.

    Attributes:
        batch: the packed tokens.
        q: Q of each response, in units of reward.
        owners: what each state comes from (`State.owner`).
    """

    batch: GroupBatch
    q: Float[Tensor, "S n"]
    owners: tuple[str, ...]


class SingleTurnImprover:
    """Token-level RL on the prompts of logged states.

    Each round: sample responses of the current policy, reward each with Q at its last token, estimate
    advantages, and take clipped steps. It never touches an environment.
    """

    def __init__(
        self,
        config: ImprovementConfig,
        estimator: AdvantageEstimator,
        critic: QCritic,
        policy: Stepper,
        value: Stepper | None,
        context: Context,
    ) -> None:
        self.config, self.estimator, self.critic, self.context = config, estimator, critic, context
        self.steppers, self.processes = policy.joined_by(value), context.processes
        self.policy: Policy = policy.module.module
        self.value: ValueHead | None = value.module.module if value else None
        self.behaviour = BehaviourCheck(context, self.policy, config.max_logprob_difference, SAMPLE)
        self.kl_coef = config.kl_coef
        chat = context.chat
        self.glue = Glue(chat.pad_id, chat.end_id, tuple(chat.header_ids))

    def run(self, states: Sequence[State]) -> dict[str, float]:
        """Improve the policy on these states until the rounds are over or the KL ceiling is reached."""
        generator = torch.Generator().manual_seed(self.context.seed)
        self.policy.kl_coef = self.kl_coef if self.config.kl_in == "loss" else 0.0
        history: list[dict[str, float]] = []
        progress = PhaseProgress("improve", "round")
        for number in progress.over(range(self.config.rounds), self.config.rounds):
            drawn = torch.randperm(len(states), generator=generator)[: self.config.states].tolist()
            scored = self.sample([states[i] for i in drawn], self.context.seed + number)
            batch, measured = self.prepare(scored)
            history.append(measured)
            progress.show(mean_q=measured["q"], kl=measured["kl"])
            if self.config.kl_ceiling is not None and measured["kl"] > self.config.kl_ceiling:
                break
            if len(history) > 1:  # before the first steps the policy is pi_i, and its KL to it 0
                self._adapt(measured["kl"])
            for _ in range(self.config.epochs):
                self._epoch(batch, generator)
        recomputed = sum(measured["behaviour_recomputed"] for measured in history)
        counts = {"rounds": float(len(history)), "behaviour_recomputed": recomputed}
        return {**history[-1], **counts, "kl_coef": self.kl_coef}

    def sample(self, states: Sequence[State], seed: int, role: str = "policy") -> ScoredGroups:
        """Sample responses for each state and score them with Q."""
        # States of similar length stand together, so that a pass over some of them has little padding.
        states = sorted(states, key=lambda state: len(state.ids))
        prefixes = [state.ids for state in states]
        return self.score(states, sample_responses(self.context, prefixes, self.config.samples, seed, role))

    @torch.no_grad()
    def score(self, states: Sequence[State], responses: Sequence[Sequence[SampledResponse]]) -> ScoredGroups:
        """Q of given responses, one pass for each state."""
        self.critic.eval()
        prefixes = [state.ids for state in states]
        batch = group_batch(prefixes, responses, self.glue).to(self.context.fabric.device)
        with self.context.reading(self.critic.role):
            parts = self.processes.over(
                self._passes(batch),
                lambda passes: [self.critic.values(batch.rows(rows)).cpu() for rows in passes],
            )
        owners = tuple(state.owner for state in states)
        return ScoredGroups(batch, torch.cat(parts).to(batch.input_ids.device), owners)

    @torch.no_grad()
    def prepare(self, scored: ScoredGroups) -> tuple[ImprovementBatch, dict[str, float]]:
        """Rewards, advantages and loss weights of a round; and what they look like."""
        config = self.config
        batch, agreement = self.behaviour.agreed(scored.batch, self._passes)
        reference = self._reference_logprobs(batch)
        kl = torch.where(batch.response_mask, batch.behaviour_logprobs - reference, 0.0)
        rewards = self._token_rewards(scored, kl)
        mask = batch.by_response(batch.response_mask)
        values = self._values(batch)
        advantages, returns = self.estimator.estimate(
            rewards, batch.by_response(values), mask, self._groups(scored)
        )
        weights = objectives.token_weights(mask, config.mean_over)
        improvement = ImprovementBatch(
            **{f.name: getattr(batch, f.name) for f in fields(ImprovementBatch) if hasattr(batch, f.name)},
            reference_logprobs=reference,
            advantages=batch.by_row(advantages),
            returns=batch.by_row(returns),
            values=values,
            loss_weights=batch.by_row(weights),
        )
        return improvement, {**self._measured(scored, kl, mask, advantages), **agreement}

    def gain(self, before: ScoredGroups, after: ScoredGroups) -> tuple[float, float, float]:
        """E_{a~pi'}[Q] - E_{a~pi}[Q] on the same states, with its 95% interval (Theorem 1's precondition).

        The interval is robust to what states of one conversation, group or customer have in common.
        """
        difference = (after.q.mean(1) - before.q.mean(1)).tolist()
        low, high = mean_interval(difference, clusters=before.owners)
        return sum(difference) / len(difference), low, high

    @torch.no_grad()
    def reference_log_likelihood(self, scored: ScoredGroups) -> Float[Tensor, " N"]:
        """Log-probability in nats that pi_i gives each response."""
        batch = scored.batch
        return batch.by_response(self._reference_logprobs(batch) * batch.response_mask).sum(1)

    @torch.no_grad()
    def kl(self, scored: ScoredGroups) -> float:
        """KL(policy || pi_i) per response in nats, from responses that `sample` drew of the policy.

        Exact in expectation at a sampling temperature of 1.
        """
        batch = scored.batch
        ratio = batch.behaviour_logprobs - self._reference_logprobs(batch)
        return (ratio * batch.response_mask).sum().item() / scored.q.numel()

    def _epoch(self, batch: ImprovementBatch, generator: torch.Generator) -> None:
        order = torch.randperm(len(batch), generator=generator)
        begin(self.steppers)
        for chosen in order.split(self.config.minibatch_states):
            part = _reweighted(batch.rows(chosen.to(batch.input_ids.device)))
            for stepper in self.steppers:
                stepper.step(part)

    def _token_rewards(self, scored: ScoredGroups, kl: Float[Tensor, "S T"]) -> Float[Tensor, "N L"]:
        batch = scored.batch
        reward = scored.q.clamp(1e-4, 1 - 1e-4).logit() if self.config.reward == "logit" else scored.q
        rewards = torch.zeros_like(kl).scatter(1, batch.turn_end, reward.to(kl.dtype))
        if self.config.kl_in == "reward":
            rewards = rewards - self.kl_coef * kl
        return batch.by_response(rewards)

    def _reference_logprobs(self, batch: GroupBatch) -> Float[Tensor, "S T"]:
        return training_logprobs("reference", batch, self._passes(batch), self.context)

    def _values(self, batch: GroupBatch) -> Float[Tensor, "S T"]:
        if self.value is None or not self.estimator.needs_values:
            return torch.zeros_like(batch.behaviour_logprobs)
        with self.context.reading(self.value.role):
            return by_token(self.value, batch, self._passes(batch), self.processes)

    def _passes(self, batch: GroupBatch) -> list[slice]:
        return slices(len(batch), rows_in_pass(batch.input_ids.size(1), SCORING_STATES), self.processes)

    def _groups(self, scored: ScoredGroups) -> Int[Tensor, " N"]:
        states, number = scored.q.shape
        return torch.arange(states, device=scored.q.device).repeat_interleave(number)

    def _adapt(self, kl: float) -> None:
        if self.config.kl_target is not None:
            self.kl_coef = objectives.adaptive_kl_coef(self.kl_coef, kl, self.config.kl_target)
            self.policy.kl_coef = self.kl_coef if self.config.kl_in == "loss" else 0.0

    def _measured(self, scored: ScoredGroups, kl: Tensor, mask: Tensor, advantages: Tensor) -> dict[str, Any]:
        per_response = scored.batch.by_response(kl).sum(1)
        return {
            "kl": per_response.mean().item(),
            "q": scored.q.mean().item(),
            "q_spread": scored.q.std(1, correction=min(1, scored.q.size(1) - 1)).mean().item(),
            "response_tokens": mask.sum(1).float().mean().item(),
            "advantage_std": advantages[mask].std().item(),
        }


def _reweighted(batch: ImprovementBatch) -> ImprovementBatch:
    """Weights that sum to 1 over this optimizer step."""
    return replace(batch, loss_weights=batch.loss_weights / batch.loss_weights.sum().clamp(min=1e-12))
