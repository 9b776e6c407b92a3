"""What logs say of the policy that led them, and what a step on them has brought, in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lightning_mtrl.conversation import Conversation, Turn
from lightning_mtrl.counting import by_cause, counted
from lightning_mtrl.evaluation.intervals import mean_interval
from lightning_mtrl.evaluation.validate import Validation, figures_of
from lightning_mtrl.rollouts.behaviour import Coverage, coverage_of, told
from lightning_mtrl.rollouts.logs import LoadedLogs
from lightning_mtrl.runs.folder import RunFolder

DIFFERENT = 0.1  # nats a response between the log's policy and pi_k that deserve a warning
# Nats a token, on average, below which a policy cannot have said the responses. Of its own ones the mean is
# minus its entropy, rarely below -4 in conversations; -8 is that of a choice among 3,000 equally likely
# tokens in every place.
FOREIGN = -8.0
_ANY_LOG = "set evaluation.target expected_sarsa (of IterativePPO), for which any log will do"


@dataclass(frozen=True)
class LogFit:
    """Whether the logged responses are those of the policy at hand.

    Attributes:
        token_logprob: mean log-probability of a logged token under pi_k, in nats; NaN where none was scored.
        difference: mean over responses of log mu(a) - log pi_k(a), mu being the policy that gave them: an
            estimate of KL(mu || pi_k) in nats a response. None where the log has no log-probabilities.
        difference_interval: its 95% interval (Student), robust to what responses of a conversation share.
    """

    token_logprob: float
    difference: float | None
    difference_interval: tuple[float, float] | None

    @classmethod
    def of(cls, logged: Sequence[Conversation], scored: Sequence[Conversation]) -> LogFit:
        """Compare conversations as they were logged with the same ones scored by pi_k."""
        tokens = [value for c in scored for turn in c.turns for value in turn.behaviour_logprobs]
        mean = fmean(tokens) if tokens else float("nan")
        known = [
            (_log_likelihood(a) - _log_likelihood(b), str(place))
            for place, (one, two) in enumerate(zip(logged, scored, strict=True))
            for a, b in zip(one.turns, two.turns, strict=True)
            if a.behaviour_logprobs
        ]
        if not known:
            return cls(mean, None, None)
        differences, places = zip(*known, strict=True)
        return cls(mean, fmean(differences), mean_interval(differences, clusters=places))

    @property
    def differs(self) -> bool:
        """Whether the log is of another policy, beyond chance and by enough to matter."""
        return self.difference_interval is not None and self.difference_interval[0] > DIFFERENT

    @property
    def is_foreign(self) -> bool:
        """Whether the policy cannot have said the logged responses, so unlikely are they to it."""
        return self.token_logprob < FOREIGN

    @property
    def own(self) -> bool | None:
        """Whether the log is the policy's own; None where that cannot be known."""
        if self.differs or self.is_foreign:
            return False
        agrees = self.difference_interval is not None and self.difference_interval[1] <= DIFFERENT
        return True if agrees else None

    def row(self) -> dict[str, Any]:
        """The figures for the report."""
        interval = None if self.difference_interval is None else list(self.difference_interval)
        return {
            "own": self.own,
            "token_logprob": self.token_logprob,
            "kl_to_behaviour": self.difference,
            "kl_to_behaviour_interval": interval,
        }


def measured_in(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Those of a log that its policy is measured by: they ended with an outcome, or a limit cut them off.

    The others' outcome is not known. Where some are the policy's own behaviour, only these count.
    """
    known = [c for c in conversations if c.turns and (c.truncated or c.outcome is not None)]
    own = [c for c in known if coverage_of(c) is None]
    return own if any(not c.truncated for c in own) else known


def logged_figures(measured: list[Conversation], gamma: float, dropped: Counter[str]) -> Validation:
    """What a log says of the policy that led it, counted as `validate` counts fresh conversations.

    Args:
        measured: `measured_in` the log.
        gamma: discount for each response.
        dropped: what could not be used, by cause; truncated conversations are counted among the measured.
    """
    causes = {cause: number for cause, number in sorted(dropped.items()) if cause != "truncated"}
    return figures_of(measured, gamma, sum(c.truncated for c in measured), causes)


def logged_block(
    path: str,
    loaded: LoadedLogs,
    unused: Mapping[str, int],
    found: Validation,
    fit: LogFit,
    coverage: Counter[Coverage],
    takes_returns: bool,
    own_only: bool = False,
) -> str:
    """The block of text before a critic is fitted.

    Args:
        path: of the log.
        loaded: what was read of it.
        unused: conversations without a return, by cause.
        found: figures of the conversations with an outcome, and of those that a limit cut off.
        fit: of the logged responses to the policy.
        coverage: conversations with an outcome that are not the policy's own. `found` and `fit` are of the
            others, and `found` of these where there are no others.
        takes_returns: whether the algorithm takes the log's returns for the policy's.
        own_only: whether it leaves out what is not the policy's own.
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
        f"{counted(found.conversations, 'conversation')}{_cut_off(found.truncated)}",
        *_of_coverage(coverage, loaded.read - sum(unused.values()), own_only),
        *_of_fit(fit),
    ]
    if takes_returns:
        lines += [f"  WARNING   {text}" for text in _warnings(fit, Counter() if own_only else coverage)]
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


def _cut_off(truncated: int) -> str:
    return f" ({truncated} cut off by a limit, which is no success)" if truncated else ""


def _of_coverage(coverage: Counter[Coverage], usable: int, own_only: bool) -> list[str]:
    """Whether the policy's figures leave out what is not its own."""
    if not coverage:
        return []
    kinds, number = told(coverage), coverage.total()
    if number == usable:
        return [f"            these are all not the policy's own behaviour: {kinds}"]
    return [
        f"            without {counted(number, 'conversation')} that {'is' if number == 1 else 'are'} not "
        f"its own behaviour ({kinds}); {'they are not' if own_only else 'all are'} learned from"
    ]


def _of_fit(fit: LogFit) -> list[str]:
    if math.isnan(fit.token_logprob):
        return ["  own       not known: in no conversation did the policy alone speak"]
    return [
        f"  words     log-probability of a logged token under the policy {fit.token_logprob:.2f} nats"
        f"{_compared(fit)}",
        f"  own       {_verdict(fit)}",
    ]


def _verdict(fit: LogFit) -> str:
    """Whether the log is the policy's own, in a sentence."""
    if fit.differs:
        return "no: the log's own log-probabilities are not those of the policy"
    if fit.is_foreign:
        return (
            f"no: below {FOREIGN:g} nats a token on average, the policy cannot have said this; another "
            f"system did"
        )
    if fit.difference is None:
        return "not known: the log has no log-probabilities, by which it could be told"
    if fit.own is None:
        return "not known: too few responses to tell its log-probabilities from those of the policy"
    return "yes: the log's own log-probabilities agree with those of the policy"


def _warnings(fit: LogFit, coverage: Counter[Coverage]) -> list[str]:
    """What is wrong with taking the log's returns for the policy's."""
    found = []
    if fit.own is False:
        found.append(
            f"the responses are not those of the policy: Q will be that of whoever gave them. Name its "
            f"adapter with --model.adapter, or its run with --run; if another system led the log, {_ANY_LOG}"
        )
    if coverage["persona"]:
        found.append(
            f"under a persona ({counted(coverage['persona'], 'conversation')}) returns are not the policy's, "
            f"and they are taken for it; {_ANY_LOG}"
        )
    return found


def _compared(fit: LogFit) -> str:
    if fit.difference is None or fit.difference_interval is None:
        return "; the log has none of its own"
    low, high = fit.difference_interval
    return f"; KL from the logged policy {fit.difference:z.3f} [{low:z.3f}, {high:z.3f}] nats a response"


def _log_likelihood(turn: Turn) -> float:
    return sum(turn.behaviour_logprobs)
