"""ITPO: whole-conversation policy optimisation with a reward for each turn.

Wang, Chen, Luo, Zhang, Wen and Li 2026, "Implicit Turn-Wise Policy Optimization for Proactive User-LLM
Interaction" (arXiv:2603.23550). One iteration:

    collect n conversations from each initial state, with outcomes R          (the loop does this)
    train the implicit PRM on the fresh outcomes                              `evaluate`: credit.fit
    score them: turn rewards r_k, or shares of the outcome w_k R              `evaluate`: credit.assign
    A = w_phi Adv[r] + w_phi Adv[token penalty] + w_R Adv[R at the end]       `improve`: mixed_advantages
    clipped policy steps with a KL penalty to pi_0 and an entropy bonus       `improve`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl import objectives, ranges
from lightning_mtrl.algorithms.agreement import BehaviourCheck
from lightning_mtrl.algorithms.base import Algorithm, Context, Improvement, Signal
from lightning_mtrl.algorithms.conversation_estimators import RLOO, ConversationEstimator
from lightning_mtrl.algorithms.estimators import idle_of_values
from lightning_mtrl.algorithms.fresh import CreditedRollouts, credited, fresh_rollouts
from lightning_mtrl.algorithms.itpo_config import ITPOConfig
from lightning_mtrl.algorithms.mixing import mixed_advantages, reward_streams, rewarded
from lightning_mtrl.algorithms.outcomes import all_outcomes_are
from lightning_mtrl.algorithms.passes import (
    group_minibatches,
    of_similar_length,
    similar_rows,
    token_values,
)
from lightning_mtrl.algorithms.stepping import Stepper, begin
from lightning_mtrl.batch import ImprovementBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import CreditAssigner
from lightning_mtrl.credit.prm_config import PRMConfig
from lightning_mtrl.idle_keys import Idle
from lightning_mtrl.modules.base import RoleModule
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.surrogate import MEAN_OVER
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.modules.workload import Extent, Pass, Work, module_passes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLE = 16  # conversations of an iteration whose stored log-probabilities are checked
INITIAL = "initial"  # the role of pi_0: reference of the KL penalty and of the implicit PRM


class ITPO(Algorithm):
    """Multi-turn policy gradient on fresh conversations, with any credit assigner and any estimator.

    With `credit.NormITPO` it is Norm-ITPO, with `credit.ITPO` ITPO, with `credit.PRIME` PRIME, and with
    `credit.Outcome` PPO, RLOO or GRPO on outcomes. It learns from the simulator's conversations of this
    iteration only, and never from logs.

    Args:
        credit: who says which turns earned the outcome; null for Norm-ITPO as in the paper.
        estimator: from rewards to advantages: `RLOO` (null), `GRPO`, `GAE`, `REINFORCE`, or your own.
        settings: what is rewarded, and how the policy steps.
        prm: how the implicit PRM of `credit.PRIME`, `credit.ITPO` or `credit.NormITPO` learns.
    """

    turn_value_name = "reward"
    learns_from_own = True

    def __init__(
        self,
        credit: CreditAssigner | None = None,
        estimator: ConversationEstimator | None = None,
        settings: ITPOConfig = ITPOConfig(),  # noqa: B008  # frozen, so it can be shared
        prm: PRMConfig = PRMConfig(),  # noqa: B008
    ) -> None:
        self.credit, self.estimator, self.settings = credit or _norm_itpo(), estimator or RLOO(), settings
        self.credit.prm = prm
        self._clamp_is_told = False

    def idle(self) -> list[Idle]:
        """Settings of a value head or an implicit PRM that there is none of."""
        found = idle_of_values("algorithm.init_args.settings", self.settings, self.estimator)
        if not self.credit.has_prm:
            names = [f.name for f in fields(PRMConfig)]
            why = f"{type(self.credit).__name__} has no implicit PRM"
            found.append(Idle("algorithm.init_args.prm", self.credit.prm, names, why))
        return found

    def setup(self, context: Context) -> None:
        """Create policy, pi_0 (a frozen copy of it), value head, and what the credit assigner needs.

        Raises:
            UserError: for groups of one with an estimator that compares the members of a group.
        """
        if self.estimator.needs_others:
            kind = f"at least 2 with {type(self.estimator).__name__}, which compares the members of a group"
            size = context.group_size
            ranges.expect(size is None or size > 1, "data.group_size", size, kind, 8)
        s, self.context = self.settings, context
        if INITIAL not in context.backbone.roles:
            context.backbone.add_role(INITIAL, like="policy", trainable=False)
        self.credit.setup(context)
        kl = KLTerm(s.kl_coef, s.kl_estimator)
        policy = Policy(context.backbone, s.clip, kl, s.entropy_coef, s.learning_rate)
        self.policy_stepper = Stepper(context, policy, s.max_norm, s.micro_batch_size)
        self.behaviour = BehaviourCheck(context, policy, s.max_logprob_difference, SAMPLE)
        self.value_stepper = None
        if self.estimator.needs_values:
            clip, rate = s.value_clip_range, s.value_learning_rate
            value = ValueHead(context.backbone, s.value_role, rate, clip_range=clip)
            self.value_stepper = Stepper(context, value, s.max_norm, s.micro_batch_size)
        self.steppers = self.policy_stepper.joined_by(self.value_stepper)

    def evaluate(self, rollouts: list[Conversation]) -> Signal:
        """Let the credit assigner learn from the outcomes, then assign rewards to all conversations."""
        data = self.context.datamodule
        fresh = fresh_rollouts(data.usable_conversations, INITIAL, self.context)
        held_out = {c.id for c in data.validation_conversations}
        to_fit = fresh.part(torch.tensor([i for i, n in enumerate(fresh.batch.ids) if n not in held_out]))
        learned = self.credit.fit(to_fit.batch, to_fit.conversations)
        outcome = fresh.batch.outcome
        fresh = replace(fresh, batch=rewarded(fresh.batch, self.settings))
        credit = self.credit.assign(fresh.batch, fresh.conversations)
        self.credited = credited(fresh, credit, self.estimator.needs_others)
        self._say_if_clamped(outcome, fresh.batch.outcome)
        unvaried = objectives.zero_variance_groups(fresh.batch.outcome, fresh.batch.group).item()
        measured = {"outcome": outcome.mean().item(), "zero_variance_groups": unvaried}
        self._say_if_outcomes_are_silent(fresh.batch.outcome, unvaried)
        return Signal({**learned, **credit.metrics, **measured})

    def improve(self, rollouts: list[Conversation], signal: Signal) -> Improvement:
        """Clipped policy-gradient steps on whole conversations."""
        s, learnt = self.settings, self.credited
        streams = reward_streams(learnt.credit, learnt.fresh.batch, learnt.fresh.conversations, s)
        values = self._values(learnt)
        advantages, returns = mixed_advantages(streams, self.estimator, values, learnt.fresh.batch, s.whiten)
        batch = _improvement_batch(learnt, advantages, returns, values)
        batch, agreement = self.behaviour.agreed(batch, of_similar_length)
        generator = torch.Generator().manual_seed(self.context.seed)
        for _ in range(s.epochs):
            self._epoch(batch, learnt, generator)
        return Improvement({**_measured(learnt, advantages), **agreement})

    def converged(self, signal: Signal) -> bool:
        """There is no Q that could converge."""
        return False

    def modules(self) -> dict[str, tuple[RoleModule, Any]]:
        """The policy, the value head where the estimator has one, and the credit assigner's modules."""
        steppers = {"policy": self.policy_stepper, "value": self.value_stepper}
        own = {name: (s.module.module, s.optimizer) for name, s in steppers.items() if s is not None}
        return {**own, **self.credit.modules()}

    def workload(self, extent: Extent) -> list[Work]:
        """pi_0 scores whole conversations, the credit assigner learns from them, then the policy does."""
        s, tokens, scored = self.settings, extent.tokens, extent.sampled_tokens
        scoring = similar_rows(extent, extent.conversations, None)
        rows = similar_rows(extent, s.minibatch_groups * extent.group_size, s.micro_batch_size)
        trained = [stepper.module.module for stepper in self.steppers]
        own = {name: found for name, found in self.modules().items() if found[0] in trained}
        return [
            Pass("evaluate", INITIAL, INITIAL, scoring, tokens, scored, merged=True),
            *self.credit.workload(extent),
            *module_passes(own, extent, rows, "settings.micro_batch_size"),
        ]

    def state(self) -> dict[str, Any]:
        """What the credit assigner remembers."""
        return {"credit": self.credit.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put `state` back."""
        self.credit.load_state(state["credit"])

    def figures(self) -> Mapping[str, Figure]:
        """The credit assigner's."""
        return self.credit.figures()

    def turn_values(self, conversations: list[Conversation]) -> list[list[float]]:
        """Reward of each turn; NaN in a conversation without an outcome or without credit."""
        found = {c.id: [float("nan")] * len(c.turns) for c in conversations}
        known = [c for c in conversations if c.outcome is not None and c.turns]
        if known:
            fresh = fresh_rollouts(known, INITIAL, self.context)
            credit = self.credit.assign(rewarded(fresh.batch, self.settings), known)
            sums = objectives.turn_sums(credit.rewards, fresh.batch.turn_index)
            for row, conversation in enumerate(known):
                if credit.known is None or bool(credit.known[row]):
                    found[conversation.id] = sums[row, : len(conversation.turns)].tolist()
        return [found[c.id] for c in conversations]

    def _say_if_clamped(self, outcome: Float[Tensor, " B"], rewarded: Float[Tensor, " B"]) -> None:
        """Say once that outcomes are not rewarded as they are."""
        changed = int((outcome != rewarded).sum())
        if changed and not self._clamp_is_told:
            self._clamp_is_told = True
            self.context.say(
                f"WARNING: {changed} of {len(outcome)} outcomes lie outside [-1, 1] and are rewarded as -1 "
                f"or 1, so that those beyond look alike. Scale the environment's outcomes, or pass "
                f"--algorithm.settings.clamp false."
            )

    def _say_if_outcomes_are_silent(self, outcome: Float[Tensor, " B"], unvaried: float) -> None:
        """Say that a step gets nothing from outcomes, where no two that it compares differ."""
        said = all_outcomes_are(outcome.tolist())
        if not said and unvaried == 1.0 and self.estimator.needs_others:
            said = (
                "in no group do outcomes differ, and only members of a group are compared; larger groups "
                "(data.group_size), or more of them (data.conversations), are needed"
            )
        if said:
            self.context.say(f"WARNING: this step has no signal from outcomes: {said}.")

    def _values(self, learnt: CreditedRollouts) -> Float[Tensor, "B T"]:
        if self.value_stepper is None:
            return torch.zeros(learnt.fresh.batch.input_ids.shape)
        value = self.value_stepper.module.module
        return token_values(value, value.role, learnt.fresh.batch, self.context)

    def _epoch(self, batch: ImprovementBatch, learnt: CreditedRollouts, generator: torch.Generator) -> None:
        mean_over = self.settings.mean_over or MEAN_OVER[self.settings.ratio]
        begin(self.steppers)
        for rows in group_minibatches(learnt.fresh.batch, self.settings.minibatch_groups, generator):
            step = batch.rows(rows)
            weights = objectives.token_weights(step.response_mask, mean_over, step.turn_index)
            step = replace(step, loss_weights=weights)
            for stepper in self.steppers:
                stepper.step(step, of_similar_length)


def _improvement_batch(
    learnt: CreditedRollouts, advantages: Tensor, returns: Tensor, values: Tensor
) -> ImprovementBatch:
    """All conversations with their advantages; weights are given out step by step."""
    batch = learnt.fresh.batch
    shared = {f.name: getattr(batch, f.name) for f in fields(ImprovementBatch) if hasattr(batch, f.name)}
    return ImprovementBatch(
        **shared,
        advantages=advantages,
        returns=returns,
        values=values,
        loss_weights=torch.zeros_like(values),
    )


def _measured(learnt: CreditedRollouts, advantages: Tensor) -> dict[str, float]:
    batch = learnt.fresh.batch
    responses = batch.turn_mask.sum().item()
    log_ratio = torch.where(batch.response_mask, batch.behaviour_logprobs - batch.reference_logprobs, 0.0)
    return {
        "kl": log_ratio.sum().item() / responses,
        "response_tokens": batch.response_mask.sum().item() / responses,
        "turns": responses / len(batch),
        "advantage_std": advantages[batch.response_mask].std().item(),
        "left_out": float(learnt.left_out),
    }


def _norm_itpo() -> CreditAssigner:
    # Assigners may use what this package has, so the default one is imported when it is needed.
    from lightning_mtrl.credit.norm_itpo import NormITPO

    return NormITPO()
