"""What logs say of the policy that led them, and what a step on them has brought, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lightning_mtrl.conversation import Conversation, Turn
from lightning_mtrl.counting import by_cause, counted
from lightning_mtrl.evaluation.intervals import mean_interval
from lightning_mtrl.evaluation.validate import Validation
from lightning_mtrl.rollouts.logs import LoadedLogs
from lightning_mtrl.runs.folder import RunFolder

DIFFERENT = 0.1  # nats a response between the log's policy and pi_k that deserve a warning


@dataclass(frozen=True)
class LogFit:
    """Whether the logged responses are those of the policy at hand.

    Attributes:
        token_logprob: mean log-probability of a logged token under pi_k, in nats; NaN where none was scored.
        difference: mean over responses of log mu(a) - log pi_k(a), mu being the policy that gave them: an
            estimate of KL(mu || pi_k) in nats a response. None where the log has no log-probabilities.
        difference_interval: its 95% interval (Student).
    """

    token_logprob: float
    difference: float | None
    difference_interval: tuple[float, float] | None

    @classmethod
    def of(cls, logged: Sequence[Conversation], scored: Sequence[Conversation]) -> LogFit:
        """Compare conversations as they were logged with the same ones scored by pi_k."""
        pairs = [
            (a, b)
            for one, two in zip(logged, scored, strict=True)
            for a, b in zip(one.turns, two.turns, strict=True)
        ]
        tokens = [value for _, turn in pairs for value in turn.behaviour_logprobs]
        known = [_log_likelihood(a) - _log_likelihood(b) for a, b in pairs if a.behaviour_logprobs]
        mean = fmean(tokens) if tokens else float("nan")
        return cls(mean, fmean(known), mean_interval(known)) if known else cls(mean, None, None)

    @property
    def differs(self) -> bool:
        """Whether the log is of another policy, beyond chance and by enough to matter."""
        return self.difference_interval is not None and self.difference_interval[0] > DIFFERENT

    def row(self) -> dict[str, Any]:
        """The figures for the report."""
        interval = None if self.difference_interval is None else list(self.difference_interval)
        return {
            "token_logprob": self.token_logprob,
            "kl_to_behaviour": self.difference,
            "kl_to_behaviour_interval": interval,
        }


def logged_block(
    path: str, loaded: LoadedLogs, unused: Mapping[str, int], found: Validation, fit: LogFit
) -> str:
    """The block of text before a critic is fitted.

    Args:
        path: of the log.
        loaded: what was read of it.
        unused: conversations without a return, by cause.
        found: figures of the conversations with an outcome.
        fit: of the logged responses to the policy.
    """
    low, high = found.success_rate_interval
    first, last = found.mean_return_interval
    without = by_cause(unused) or "none"
    lines = [
        path,
        f"  read      {loaded.counts()}",
        f"  unused    without a return: {without}",
        f"  policy    success rate {found.success_rate:.3f} [{low:.3f}, {high:.3f}], return "
        f"{found.mean_return:z.3f} [{first:z.3f}, {last:z.3f}], {found.turns:.1f} turns, in "
        f"{counted(found.conversations, 'conversation')}",
        f"  words     log-probability of a logged token under the policy {fit.token_logprob:.2f} nats"
        f"{_told(fit)}",
    ]
    if fit.differs:
        lines.append(
            "  WARNING   the responses are not those of the policy: Q will be that of whoever gave them. "
            "Name its adapter with --model.adapter, or its run with --run"
        )
    return "\n".join(lines)


def step_block(number: int, taken: bool, metrics: Mapping[str, float], folder: RunFolder) -> str:
    """The block of text after a step: what it gained, where the policy is, and how to go on.

    Args:
        number: of the policy that the logs are of.
        taken: whether the step was kept.
        metrics: of the improvement.
        folder: of the run.
    """
    lines = [f"policy {number + 1}"]
    if "gain" in metrics:
        gain, low, high = (metrics[name] for name in ("gain", "gain_low", "gain_high"))
        lines.append(
            f"  gain      E[Q under policy {number + 1}] - E[Q under policy {number}] on held-out states is "
            f"{gain:z.4f}, 95% interval {low:z.4f} to {high:z.4f}"
        )
    lines += [
        "  step      taken" if taken else f"  step      not taken: it is policy {number} as it was",
        f"  deploy    {folder.policy_adapter} (peft and vLLM load it; `export` makes a model of it)",
        f"  next      log conversations of it, then: python -m lightning_mtrl improve --run {folder.path} "
        f"--logs NEW.jsonl",
    ]
    return "\n".join(lines)


def _told(fit: LogFit) -> str:
    if fit.difference is None or fit.difference_interval is None:
        return "; the log has none of its own"
    low, high = fit.difference_interval
    return f"; KL from the logged policy {fit.difference:z.3f} [{low:z.3f}, {high:z.3f}] nats a response"


def _log_likelihood(turn: Turn) -> float:
    return sum(turn.behaviour_logprobs)
