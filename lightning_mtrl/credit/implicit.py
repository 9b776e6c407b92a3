"""What PRIME, ITPO and Norm-ITPO share: an implicit PRM that learns from fresh rollouts, then scores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.passes import (
    group_minibatches,
    of_similar_length,
    referenced,
    similar_rows,
    token_values,
)
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.batch import ConversationBatch, ReferencedBatch, collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import CreditAssigner
from lightning_mtrl.credit.probe import PRMProbe
from lightning_mtrl.credit.probe_figures import probe_figures
from lightning_mtrl.evaluation.ranking import ranking_report
from lightning_mtrl.modules.implicit_prm import ImplicitPRM
from lightning_mtrl.modules.workload import Extent, Pass, Sampling, module_passes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_mtrl.algorithms.base import Context
    from lightning_mtrl.modules.base import RoleModule

PRESCALES = {"none": lambda rewards: rewards, "batch_max": objectives.scaled_by_batch_max}
Prescale = Literal["none", "batch_max"]


class ImplicitCredit(CreditAssigner):
    """Token rewards beta (log pi_phi - log pi_0), with pi_phi trained on the outcomes of fresh rollouts.

    pi_phi learns before it scores, as ITPO does it. In reports of how well it ranks, no conversation counts
    that it was trained on: held-out ones where `data.validation_share` gives some, else each conversation as
    it was scored before pi_phi first saw it.

    Args:
        prescale: "none" as in the paper; "batch_max" as in the released code: token rewards over the largest
            absolute suffix sum of the iteration's rollouts, from which beta cancels.
        drop_last_token: as in the released code, the reward of a conversation's last sampled token is 0.
    """

    has_prm = True

    def __init__(self, prescale: Prescale = "none", drop_last_token: bool = False) -> None:
        self.drop_last_token = drop_last_token
        self.prescale = PRESCALES[prescale]
        self.probe = PRMProbe()
        self._probe_batch: ReferencedBatch | None = None

    def setup(self, context: Context) -> None:
        """Create pi_phi and pi_0, both as the policy is now."""
        super().setup(context)
        p = self.prm
        module = ImplicitPRM(context.backbone, p.beta, p.loss, p.learning_rate, p.weight_decay)
        self.stepper = Stepper(context, module, p.max_norm, p.micro_batch_size)
        self.module: ImplicitPRM = self.stepper.module.module

    def fit(self, batch: ConversationBatch, conversations: list[Conversation]) -> Mapping[str, float]:
        """Train pi_phi on outcomes; the report is on conversations that it had not seen."""
        generator = torch.Generator().manual_seed(self.context.seed)
        self.module.latest_scores.clear()
        fresh: dict[str, float] = {}
        for _ in range(self.prm.epochs):
            self.stepper.begin()
            for rows in group_minibatches(batch, self.prm.minibatch_groups, generator):
                self._step(_reweighted(batch.rows(rows)))
            fresh = fresh or self._latest_scores()
        scores = torch.tensor([fresh[name] for name in batch.ids])
        report = self._report(scores, batch)
        self._look_again(conversations, report["kendall_tau"])
        stability = self.probe.agreement(-2, -1) if len(self.probe.rewards) > 1 else float("nan")
        return {**report, "reward_stability": stability, "score_slope": self.probe.slope(-1)}

    def token_rewards(self, batch: ConversationBatch) -> tuple[Float[Tensor, "B T"], dict[str, float]]:
        """Rewards of all sampled tokens; and the report on held-out conversations, where there are some."""
        rewards = self._raw_rewards(batch)
        held_out = {c.id for c in self.context.datamodule.validation_conversations}
        rows = torch.tensor([i for i, name in enumerate(batch.ids) if name in held_out], dtype=torch.int64)
        report = self._report(rewards[rows].sum(1), batch.rows(rows)) if len(rows) else {}
        if self.drop_last_token:
            places = torch.arange(rewards.size(1)).expand_as(rewards)
            last = torch.where(batch.response_mask, places, 0).amax(1)
            rewards = objectives.without_rewards_from(rewards, last)
        return self.prescale(rewards), report

    def modules(self) -> dict[str, tuple[RoleModule, Any]]:
        """pi_phi."""
        return {"prm": (self.module, self.stepper.optimizer)}

    def workload(self, extent: Extent) -> list[Pass | Sampling]:
        """pi_phi learns from whole conversations, then scores them."""
        step = self.prm.minibatch_groups * extent.group_size
        rows = (
            step
            if self.module.objective.whole_step
            else similar_rows(extent, step, self.prm.micro_batch_size)
        )
        scoring = similar_rows(extent, extent.conversations, None)
        passes = list(module_passes(self.modules(), extent, rows, "prm.micro_batch_size"))
        return [*passes, *(replace(p, rows=scoring, trains=False, merged=True) for p in passes)]

    def state(self) -> dict[str, Any]:
        """The fixed conversations, and the rewards that their tokens had."""
        return self.probe.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put `state` back."""
        self.probe, self._probe_batch = PRMProbe.from_state(state), None

    def figures(self) -> dict[str, Figure]:
        """How the PRM's scores developed: figures 2, 3, 5 and 7 of the paper, for this run."""
        return probe_figures(self.probe) if self.probe.rewards else {}

    def _raw_rewards(self, batch: ConversationBatch) -> Float[Tensor, "B T"]:
        module = self.module
        known = referenced(batch, module.reference, self.context)
        return token_values(module.rewards, module.role, known, self.context)

    def _step(self, step: ConversationBatch) -> None:
        if self.module.objective.whole_step:
            self.stepper.step_whole(step)
        else:
            self.stepper.step(step, of_similar_length)

    def _latest_scores(self) -> dict[str, float]:
        """Of all conversations; each process has trained on some."""
        shares = self.context.processes.each(lambda: dict(self.module.latest_scores))
        return {name: score for share in shares for name, score in share.items()}

    def _report(self, scores: Float[Tensor, " B"], batch: ConversationBatch) -> dict[str, float]:
        loss = self.module.objective(scores, _reweighted(batch)).item()
        return {"prm_loss": loss, **ranking_report(scores, batch.outcome, batch.group)}

    def _look_again(self, conversations: list[Conversation], tau: float) -> None:
        """Score the fixed conversations."""
        self.probe.choose(conversations)
        if self._probe_batch is None:  # pi_0 does not change, so it scores them once
            chat = self.context.chat
            plain = collate(self.probe.conversations, chat.pad_id, chat.header_ids)
            self._probe_batch = referenced(plain, self.module.reference, self.context)
        batch = self._probe_batch
        rewards = self._raw_rewards(batch)
        found = [
            [
                rewards[row][batch.turn_index[row] == number].tolist()
                for number in range(1, len(conversation.turns) + 1)
            ]
            for row, conversation in enumerate(self.probe.conversations)
        ]
        self.probe.rewards.append(found)
        self.probe.taus.append(tau)


def _reweighted(batch: ConversationBatch) -> ConversationBatch:
    """Weights that sum to 1 over these conversations."""
    return replace(batch, conversation_weights=torch.full((len(batch),), 1.0 / len(batch)))
