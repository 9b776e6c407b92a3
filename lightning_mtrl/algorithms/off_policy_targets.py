"""Targets for conversations that the policy did not lead: of personas, of another version, of another system.

Monte Carlo returns of such a log are those of its behaviour policy mu. Here the turns after a response are
those of pi_k instead: pi_k gives fresh responses in every logged *next* state, and the target network scores
them (expected SARSA). Retrace(lambda) goes on along the log as far as pi_k would have said the same.

Both policies' log-probabilities are of the same tokens in different prompts: mu's are those that were kept
when the response was sampled, with the persona in its prompt; pi_k's come from a forward without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl.algorithms.critic_inputs import CriticInputs, Readable
from lightning_mtrl.algorithms.fit_targets import (
    ByConversation,
    FitTargets,
    LoggedTargets,
    by_conversation,
    logged_values,
    rows_of,
)
from lightning_mtrl.algorithms.next_responses import STATES_IN_PASS, NextResponses
from lightning_mtrl.algorithms.passes import role_logprobs, rows_in_pass, similar_rows
from lightning_mtrl.algorithms.policy_evaluation import EvaluationConfig
from lightning_mtrl.batch import collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.workload import Extent, Pass, Sampling
from lightning_mtrl.objectives import (
    effective_sample_size,
    expected_sarsa_targets,
    retrace_targets,
    turn_log_ratios,
)

CONVERSATIONS_IN_BATCH = 1024  # whose log-probabilities are computed from one batch


def fit_targets(inputs: CriticInputs, config: EvaluationConfig) -> FitTargets:
    """The targets that a configuration names, for the current conversations.

    Raises:
        UserError: for "retrace", if a response has no log-probabilities of the policy that gave it.
    """
    if config.target == "sarsa":
        return LoggedTargets(inputs)
    if config.target == "expected_sarsa":
        return ExpectedSarsaTargets(inputs, config)
    return RetraceTargets(inputs, config)


class ExpectedSarsaTargets(FitTargets):
    """r_k + gamma E_{a ~ pi_k} Q(s_{k+1}, a), with Q of the target network.

    No log-probabilities are needed, so any log will do. The critic is measured on these targets of held-out
    conversations, with itself as the target network.

    Args:
        inputs: of the critic.
        config: how many responses are sampled, and the expectile of their Q that counts.
    """

    def __init__(self, inputs: CriticInputs, config: EvaluationConfig) -> None:
        self.inputs, self.config, self.gamma = inputs, config, inputs.critic.gamma
        data = inputs.context.datamodule
        self.conversations = [*data.train_conversations, *data.validation_conversations]
        self.following = NextResponses(inputs, self.conversations, config.next_samples)
        self._after: ByConversation = {}
        trained = [torch.tensor([float(turn.trained) for turn in c.turns]) for c in self.conversations]
        self._trained = by_conversation([c.id for c in self.conversations], trained)

    def refresh(self) -> None:
        """See `FitTargets`."""
        after = self.following.values(self.config.expectile)
        self._after = by_conversation([c.id for c in self.conversations], after)

    def of(self, batch: Readable) -> Float[Tensor, "B K"]:
        """See `FitTargets`."""
        return expected_sarsa_targets(
            batch.turn_rewards, rows_of(self._after, batch), batch.turn_mask, self.gamma
        )

    def measured(self, batch: Readable) -> Float[Tensor, "B K"]:
        """See `FitTargets`."""
        return self.of(batch)

    def weights(self, batch: Readable) -> Float[Tensor, "B K"]:
        """See `FitTargets`; turns before an explored one count too, since none of its response is in them."""
        trained = rows_of(self._trained, batch)
        return trained / trained.sum().clamp(min=1.0)


class RetraceTargets(ExpectedSarsaTargets):
    """Retrace(lambda): as above, and on along the log with traces lambda min(clip, pi_k/mu).

    A trace ends at a response that was drawn for coverage or must not be learned from, since mu is not known
    there. The critic is measured on the targets of lambda 1, which hold the
    most of what really happened.

    Args:
        inputs: see `ExpectedSarsaTargets`.
        config: likewise, with lambda (`td_lambda`) and the clip.

    Raises:
        UserError: if a response has no log-probabilities of the policy that gave it.
    """

    def __init__(self, inputs: CriticInputs, config: EvaluationConfig) -> None:
        super().__init__(inputs, config)
        ratios = log_ratios(inputs, self.conversations)
        self._ratios = by_conversation([c.id for c in self.conversations], ratios)
        self._q: ByConversation = {}
        # The first response of a conversation needs no ratio: Q is given it.
        used = torch.cat([row[1:] for row in ratios])
        self._weights = used[used > -torch.inf]
        self._say()

    def refresh(self) -> None:
        """See `FitTargets`."""
        super().refresh()
        self._q = logged_values(self.inputs)

    def of(self, batch: Readable) -> Float[Tensor, "B K"]:
        """See `FitTargets`."""
        return self._traced(batch, self.config.td_lambda)

    def measured(self, batch: Readable) -> Float[Tensor, "B K"]:
        """See `FitTargets`."""
        return self._traced(batch, 1.0)

    def metrics(self) -> dict[str, float]:
        """How much the ratios of responses after the first are worth; NaN where there is none."""
        weights, number = self._weights, len(self._weights)
        if not number:
            return dict.fromkeys(("effective_sample_size", "effective_share", "clipped_ratios"), float("nan"))
        size = effective_sample_size(weights, torch.ones_like(weights, dtype=torch.bool)).item()
        clipped = (weights.exp() > self.config.importance_clip).float().mean().item()
        return {
            "effective_sample_size": size,
            "effective_share": size / number,
            "clipped_ratios": clipped,
        }

    def _traced(self, batch: Readable, td_lambda: float) -> Float[Tensor, "B K"]:
        return retrace_targets(
            batch.turn_rewards,
            rows_of(self._q, batch),
            rows_of(self._after, batch),
            rows_of(self._ratios, batch),
            batch.turn_mask,
            self.gamma,
            td_lambda,
            self.config.importance_clip,
        )

    def _say(self) -> None:
        found = self.metrics()
        self.inputs.context.say(
            f"iteration {self.inputs.context.iteration}, off-policy evaluation\n"
            f"  ratios    effective sample size {found['effective_sample_size']:,.0f} of "
            f"{len(self._weights):,} responses after a first one; "
            f"{100 * found['clipped_ratios']:.0f}% above the clip of {self.config.importance_clip:g}"
        )


def log_ratios(inputs: CriticInputs, conversations: Sequence[Conversation]) -> list[Float[Tensor, " K"]]:
    """Log pi_k/mu of each response in nats, on the CPU; minus infinity where mu is not known.

    Raises:
        UserError: if a response has no log-probabilities of the policy that gave it.
    """
    for c in conversations:
        if any(turn.trained and not turn.behaviour_logprobs for turn in c.turns):
            raise UserError(
                f"algorithm.init_args.evaluation.target is 'retrace', but conversation {c.id!r} has a "
                f"response without log-probabilities of the policy that gave it. Use a log that `collect` "
                f"wrote, or --algorithm.evaluation.target expected_sarsa, which needs none."
            )
    found: list[Tensor] = []
    chat = inputs.context.chat
    for start in range(0, len(conversations), CONVERSATIONS_IN_BATCH):
        part = conversations[start : start + CONVERSATIONS_IN_BATCH]
        batch = collate(part, chat.pad_id, chat.header_ids)
        logprobs = role_logprobs("policy", batch, inputs.context).cpu()
        rows = turn_log_ratios(logprobs, batch.behaviour_logprobs, batch.turn_index)
        for row, conversation in zip(rows, part, strict=True):
            known = torch.tensor([turn.trained and not turn.explored for turn in conversation.turns])
            found.append(torch.where(known, row[: len(known)], -torch.inf))
    return found


def off_policy_passes(critic: QCritic, config: EvaluationConfig, extent: Extent) -> list[Pass | Sampling]:
    """What these targets put through the model at most, for a plan of memory."""
    if config.target == "sarsa":
        return []
    samples, longest = config.next_samples, extent.tokens - extent.response_tokens
    sampled = min(extent.rows, extent.conversations * samples)
    tokens = extent.tokens + (samples - 1) * extent.response_tokens
    rows, key = rows_in_pass(tokens, STATES_IN_PASS), "model.context_length"
    found: list[Pass | Sampling] = [
        Sampling("evaluate", sampled, extent.tokens, -(-sampled // samples) * longest),
        Pass("evaluate", "critic", critic.role, rows, tokens, layer=critic.layer, key=key),
    ]
    if config.target == "retrace":
        scored = similar_rows(extent, CONVERSATIONS_IN_BATCH, None)
        found.append(
            Pass(
                "evaluate",
                "policy",
                "policy",
                scored,
                extent.tokens,
                extent.sampled_tokens,
                merged=True,
                key=key,
            )
        )
    return found
