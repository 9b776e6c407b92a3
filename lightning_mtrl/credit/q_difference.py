"""Credit from the Q-critic of Iterative PPO: how much each response changed what is to be expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.critic_inputs import CriticInputs, critic_passes, predict
from lightning_mtrl.algorithms.fit_targets import LoggedTargets
from lightning_mtrl.algorithms.policy_evaluation import EvaluationConfig, fit_critic
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit, CreditAssigner, turn_ends, turn_mask
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.workload import Extent, Work

if TYPE_CHECKING:
    from lightning_mtrl.algorithms.base import Context
    from lightning_mtrl.modules.base import RoleModule


class QDifference(CreditAssigner):
    """r_k = Q(s_k, a_k) - Q(s_{k-1}, a_{k-1}), with 0 before the first turn and the outcome after the last.

    The last reward is R - Q_{K-1}, what really happened less what was expected, so the rewards of a
    conversation telescope to its outcome whatever the critic says, and return-to-go from turn k is
    R - Q_{k-1}: it is shaping with the potential Q. A reward holds the luck of the observation before the
    response too.

    Args:
        evaluation: how the critic is fitted; its gamma should be 1, since an outcome is shared out and not
            discounted.

    Raises:
        UserError: for a target of another policy's logs.
    """

    def __init__(self, evaluation: EvaluationConfig = EvaluationConfig(gamma=1.0)) -> None:  # noqa: B008
        self.evaluation = evaluation
        if evaluation.target != "sarsa":
            raise UserError(
                f"evaluation.target is {evaluation.target!r}, but the credit QDifference shares out the "
                f"outcomes of the policy's own fresh conversations: leave it at 'sarsa'."
            )

    def setup(self, context: Context) -> None:
        """Create the critic."""
        super().setup(context)
        if not context.datamodule.validation_share:
            raise UserError(
                "data.validation_share is 0, but the credit QDifference fits a Q-critic, which is stopped "
                "and measured on held-out conversations. Pass --data.validation_share 0.2."
            )
        e = self.evaluation
        critic = QCritic(
            context.backbone,
            e.loss,
            e.gamma,
            e.td_lambda,
            e.read,
            e.layer,
            e.learning_rate,
            e.weight_decay,
            trunk=e.trunk,
            head_units=e.head_units,
        )
        self.stepper = Stepper(context, critic, e.max_norm, e.micro_batch_size)
        self.critic: QCritic = self.stepper.module.module
        self.inputs = CriticInputs(self.critic, context)

    def fit(self, batch: ConversationBatch, conversations: list[Conversation]) -> Mapping[str, float]:
        """Regress Q on the returns of the current policy's conversations; the report is on held-out ones."""
        for conversation in conversations:
            if abs(sum(conversation.rewards) - float(conversation.outcome or 0.0)) > 1e-6:
                raise UserError(
                    f"conversation {conversation.id!r} has rewards that sum to "
                    f"{sum(conversation.rewards):g} and outcome {conversation.outcome:g}, but QDifference "
                    f"shares out what its critic predicts, the rewards. Let the environment give the outcome "
                    f"as reward, or use another credit."
                )
        self.inputs = CriticInputs(self.critic, self.context)
        return fit_critic(self.inputs, self.stepper, self.evaluation, LoggedTargets(self.inputs)).metrics()

    def assign(self, batch: ConversationBatch, conversations: list[Conversation]) -> Credit:
        """Differences of Q at the ends of the responses."""
        self.critic.eval()
        present = turn_mask(batch)
        potential = torch.zeros(len(batch), present.size(1) + 1)
        for row, q in enumerate(predict(self.inputs, conversations)):
            potential[row, 1 : len(q) + 1] = q
            potential[row, len(q)] = batch.outcome[row]
        rewards = objectives.place_turn_rewards(potential.diff(dim=1), batch.turn_index)
        return Credit(rewards, turn_ends(batch), includes_outcome=True)

    def workload(self, extent: Extent) -> list[Work]:
        """The critic's."""
        rows = self.evaluation.micro_batch_size or extent.batch_size
        return critic_passes(self.critic, extent, rows, "evaluation.micro_batch_size")

    def modules(self) -> dict[str, tuple[RoleModule, Any]]:
        """The critic."""
        return {"critic": (self.critic, self.stepper.optimizer)}
