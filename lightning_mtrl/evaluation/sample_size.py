"""How many conversations a comparison needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import ndtri

from lightning_mtrl.counting import counted
from lightning_mtrl.errors import UserError
from lightning_mtrl.evaluation.arms import Arm
from lightning_mtrl.evaluation.looks import Looks
from lightning_mtrl.evaluation.samples import Sample


def rate_sample_size(rate: float, detect: float, alpha: float, power: float) -> float:
    """Conversations of each policy that show a difference of success rates (not yet a whole number).

    Args:
        rate: of the baseline, in [0, 1].
        detect: candidate's rate minus it, not 0.
        alpha: of the two-sided test, in (0, 1).
        power: chance to see the difference, in (alpha, 1).

    Source: Fleiss, Levin and Paik 2003, Statistical Methods for Rates and Proportions, section 4.2, without
    correction for continuity.
    """
    other = rate + detect
    middle = (rate + other) / 2
    same = -float(ndtri(alpha / 2)) * math.sqrt(2 * middle * (1 - middle))
    apart = float(ndtri(power)) * math.sqrt(rate * (1 - rate) + other * (1 - other))
    return ((same + apart) / detect) ** 2


def mean_sample_size(spread: float, detect: float, alpha: float, power: float) -> float:
    """Conversations of each policy that show a difference of mean outcomes (not yet a whole number).

    Args:
        spread: standard deviation of the outcomes of both policies.
        detect: candidate's mean minus the baseline's, not 0.
        alpha: of the two-sided t-test, in (0, 1).
        power: chance to see the difference, in (alpha, 1).

    Source: the normal approximation, with Guenther's term for the t-test (1981, The American Statistician 35,
    243-244).
    """
    one_side = -float(ndtri(alpha / 2))
    return 2 * ((one_side + float(ndtri(power))) * spread / detect) ** 2 + one_side**2 / 4


@dataclass(frozen=True)
class Plan:
    """How many conversations of each policy a comparison needs.

    Attributes:
        detect: difference of candidate and baseline that shall be seen.
        power: chance to see it.
        alpha: chance to find a difference where there is none.
        baseline_mean: the baseline's success rate or mean outcome, at which it is planned.
        scored: conversations with an outcome, of each policy, by the last look.
        conversations: to be held of each policy, so that so many have an outcome.
        per_look: the same by each look.
        design_effect: by how much clusters raise the number; None where the baseline has one cluster alone,
            so that it is not known and the number is that without clusters.
        inflation: by how much the looks do.
    """

    detect: float
    power: float
    alpha: float
    baseline_mean: float
    scored: int
    conversations: int
    per_look: tuple[int, ...]
    design_effect: float | None
    inflation: float


def plan_sample_size(
    baseline: Arm,
    detect: float,
    power: float,
    alpha: float = 0.05,
    looks: Looks = Looks(),  # noqa: B008  # frozen, so it can be shared
    cluster: str | None = None,
) -> Plan:
    """How many conversations a comparison with this baseline needs.

    Args:
        baseline: conversations of the policy that is there; their rate, spread, clusters and share without an
            outcome are expected of the next ones too.
        detect: difference that shall be seen, not 0.
        power: chance to see it, in (alpha, 1).
        alpha: chance to find a difference where there is none, over all looks.
        looks: when it will be looked at.
        cluster: as in `compare`.

    Raises:
        UserError: if the baseline has no outcome, its graded outcomes do not vary, or no rate can differ so
            much from its own.
    """
    baseline.expect_outcomes()
    if cluster is not None:
        baseline.expect_key("--cluster", cluster)
    sample = baseline.sample(cluster)
    if sample.is_binary and not 0 <= sample.mean + detect <= 1:
        raise UserError(
            f"--detect is {detect}, but the success rate of {baseline.file} is {sample.mean:.3f}, and no "
            f"rate is {sample.mean + detect:.3f}. Name a difference between {-sample.mean:.3f} and "
            f"{1 - sample.mean:.3f}."
        )
    if not sample.is_binary and sample.spread == 0:
        raise UserError(
            f"--detect is {detect}, but {baseline.file} holds {counted(len(sample), 'outcome')} that "
            f"{'is' if len(sample) == 1 else 'are all'} {sample.mean:g}, and how many conversations are "
            f"needed follows from how much graded outcomes vary. Name a log with different ones."
        )
    factor = looks.inflation(alpha, power)
    scored = max(2, math.ceil(_scored(sample, detect, alpha, power) * factor - 1e-9))
    conversations = math.ceil(scored * len(baseline.conversations) / len(baseline.scored))
    return Plan(
        detect=detect,
        power=power,
        alpha=alpha,
        baseline_mean=sample.mean,
        scored=scored,
        conversations=conversations,
        per_look=tuple(math.ceil(conversations * fraction - 1e-9) for fraction in looks.fractions),
        design_effect=sample.design_effect(),
        inflation=factor,
    )


def _scored(baseline: Sample, detect: float, alpha: float, power: float) -> float:
    """Conversations with an outcome of each policy, at the baseline's own rate or spread and clusters."""
    if baseline.is_binary:
        alone = rate_sample_size(baseline.mean, detect, alpha, power)
    else:
        alone = mean_sample_size(baseline.spread, detect, alpha, power)
    return alone * (baseline.design_effect() or 1.0)
