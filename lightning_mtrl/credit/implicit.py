"""What PRIME, ITPO and Norm-ITPO share: an implicit PRM that learns from fresh rollouts, then scores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.passes import group_minibatches, of_similar_length, referenced, token_values
from lightning_mtrl.algorithms.ranges import expect, expect_above_zero, expect_at_least
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.batch import ConversationBatch, collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import CreditAssigner
from lightning_mtrl.evaluation.ranking import rank_correlation, ranking_report
from lightning_mtrl.modules.implicit_prm import ImplicitPRM

if TYPE_CHECKING:
    from lightning_mtrl.algorithms.base import Context
    from lightning_mtrl.modules.base import RoleModule

PROBE_CONVERSATIONS = 16
PRESCALES = {"none": lambda rewards: rewards, "batch_max": objectives.scaled_by_batch_max}
Prescale = Literal["none", "batch_max"]
_KEY = "credit.init_args"


@dataclass(frozen=True)
class PRMConfig:
    """How the implicit PRM learns.

    Attributes:
        beta: reward per nat of log-ratio, above 0. Published (table 2): 0.05 for PRIME and ITPO and 0.01 for
            Norm-ITPO in math tutoring; 0.005 in document writing; 0.005, for ITPO 0.01, in the medical task.
        loss: "ce" for outcomes in [0, 1]; "pairwise" compares conversations of a group, of any range.
        epochs: passes over the fresh conversations, before they are scored.
        minibatch_groups: groups in one optimizer step.
        micro_batch_size: conversations in one forward pass, at most; null for as many as are of similar
            length.
        learning_rate: of AdamW. Published: 1e-6, with full fine-tuning.
        weight_decay: of AdamW.
        max_norm: gradients are scaled down to this norm.
    """

    beta: float = 0.05
    loss: Literal["ce", "pairwise"] = "ce"
    epochs: int = 1
    minibatch_groups: int = 4
    micro_batch_size: int | None = None
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_norm: float = 10.0

    def __post_init__(self) -> None:
        for name in ("beta", "max_norm"):
            expect_above_zero(f"{_KEY}.prm.{name}", getattr(self, name), 0.05)
        for name in ("epochs", "minibatch_groups", "micro_batch_size"):
            expect_at_least(f"{_KEY}.prm.{name}", getattr(self, name), 1, 4)
        for name in ("learning_rate", "weight_decay"):
            expect_at_least(f"{_KEY}.prm.{name}", getattr(self, name), 0, 1e-5)
        whole = self.loss != "pairwise" or self.micro_batch_size is None
        kind = "null with the loss 'pairwise', which compares all conversations of a step"
        expect(whole, f"{_KEY}.prm.micro_batch_size", self.micro_batch_size, kind, "null")


class ImplicitCredit(CreditAssigner):
    """Token rewards beta (log pi_phi - log pi_0), with pi_phi trained on the outcomes of fresh rollouts.

    pi_phi learns before it scores, as ITPO does it. In reports of how well it ranks, no conversation counts
    that it was trained on: held-out ones where `data.validation_share` gives some, else each conversation as
    it was scored before pi_phi first saw it.

    Args:
        prm: how pi_phi learns.
        prescale: "none" as in the paper; "batch_max" as in the released code: token rewards over the largest
            absolute suffix sum of the iteration's rollouts, from which beta cancels.
        drop_last_token: as in the released code, the reward of a conversation's last sampled token is 0.
    """

    def __init__(
        self,
        prm: PRMConfig = PRMConfig(),  # frozen, so it can be shared
        prescale: Prescale = "none",
        drop_last_token: bool = False,
    ) -> None:
        self.prm, self.drop_last_token = prm, drop_last_token
        self.prescale = PRESCALES[prescale]
        self._probe: list[Conversation] = []
        self._probe_rewards: list[float] = []

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
                self.stepper.step_parts(self._parts(_reweighted(batch.rows(rows))))
            fresh = fresh or dict(self.module.latest_scores)
        scores = torch.tensor([fresh[name] for name in batch.ids])
        return {**self._report(scores, batch), "reward_stability": self._stability(conversations)}

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

    def state(self) -> dict[str, Any]:
        """The fixed conversations, and the rewards that their turns had."""
        return {"probe": [c.to_json() for c in self._probe], "probe_rewards": self._probe_rewards}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put `state` back."""
        self._probe = [Conversation.from_json(record) for record in state["probe"]]
        self._probe_rewards = list(state["probe_rewards"])

    def _raw_rewards(self, batch: ConversationBatch) -> Float[Tensor, "B T"]:
        module = self.module
        known = referenced(batch, module.reference, self.context)
        return token_values(module.rewards, module.role, known, self.context)

    def _parts(self, step: ConversationBatch) -> Iterable[ConversationBatch]:
        if self.module.objective.whole_step:
            return [step]
        return (step.rows(rows) for rows in of_similar_length(step, self.prm.micro_batch_size))

    def _report(self, scores: Float[Tensor, " B"], batch: ConversationBatch) -> dict[str, float]:
        loss = self.module.objective(scores, _reweighted(batch)).item()
        return {"prm_loss": loss, **ranking_report(scores, batch.outcome, batch.group)}

    def _stability(self, conversations: list[Conversation]) -> float:
        """Spearman's correlation of turn rewards now and before, on some of the first iteration's turns."""
        self._probe = self._probe or conversations[:PROBE_CONVERSATIONS]
        chat = self.context.chat
        batch = collate(self._probe, chat.pad_id, chat.header_ids)
        rewards = self._raw_rewards(batch)
        now = objectives.turn_sums(rewards, batch.turn_index)[batch.turn_mask].tolist()
        before, self._probe_rewards = self._probe_rewards, now
        return rank_correlation(before, now) if before else float("nan")


def _reweighted(batch: ConversationBatch) -> ConversationBatch:
    """Weights that sum to 1 over these conversations."""
    return replace(batch, conversation_weights=torch.full((len(batch),), 1.0 / len(batch)))
