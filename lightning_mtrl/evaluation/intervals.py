"""Intervals and tests for what a policy achieved: shares, means, and differences between two policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

CONFIDENCE = 0.95


def success_interval(
    successes: int, conversations: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Wilson interval of a success rate, inside [0, 1]; (0, 1) when nothing was observed.

    Args:
        successes: number of conversations that succeeded.
        conversations: number of conversations in all.
        confidence: probability that the interval holds the true rate, in (0, 1).

    Raises:
        ValueError: if there are more successes than conversations, or fewer than none.

    Source: Wilson 1927, without correction for continuity.
    """
    if not 0 <= successes <= conversations:
        raise ValueError(f"{successes} successes in {conversations} conversations cannot be")
    if conversations == 0:
        return 0.0, 1.0
    from scipy.stats import binomtest

    interval = binomtest(successes, conversations).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Student interval of a mean; (-inf, inf) for fewer than two values, which do not bound it.

    Args:
        values: independent measurements, such as returns of conversations.
        confidence: probability that the interval holds the true mean, in (0, 1).
    """
    if len(values) < 2:
        return -math.inf, math.inf
    return _student(fmean(values), stdev(values) / math.sqrt(len(values)), len(values) - 1, confidence)


def paired_interval(
    candidate: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Student interval of the mean of candidate minus baseline, for values that belong together in pairs.

    Args:
        candidate: one value for each seed or customer.
        baseline: the other policy's value for the same one, in the same order.
        confidence: probability that the interval holds the true difference, in (0, 1).

    Raises:
        ValueError: if the two have different lengths.
    """
    return mean_interval(_differences(candidate, baseline), confidence)


def difference_interval(
    candidate: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Welch interval of the difference of two means, for values measured independently of each other.

    (-inf, inf) when either side has fewer than two values.
    """
    if min(len(candidate), len(baseline)) < 2:
        return -math.inf, math.inf
    gap = fmean(candidate) - fmean(baseline)
    if stdev(candidate) == stdev(baseline) == 0:
        return gap, gap
    from scipy.stats import ttest_ind

    interval = ttest_ind(candidate, baseline, equal_var=False).confidence_interval(confidence)
    return float(interval.low), float(interval.high)


def paired_p_value(candidate: Sequence[float], baseline: Sequence[float]) -> float:
    """One-sided p-value of a paired t-test: how likely a difference so large is if candidate is no better.

    1 for fewer than two pairs, which are no evidence.

    Raises:
        ValueError: if the two have different lengths.
    """
    differences = _differences(candidate, baseline)
    if len(differences) < 2:
        return 1.0
    if stdev(differences) == 0:
        return _certain(differences[0])
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0, alternative="greater").pvalue)


def difference_p_value(candidate: Sequence[float], baseline: Sequence[float]) -> float:
    """One-sided p-value of Welch's t-test: how likely a difference so large is if candidate is no better.

    1 when either side has fewer than two values.
    """
    if min(len(candidate), len(baseline)) < 2:
        return 1.0
    if stdev(candidate) == stdev(baseline) == 0:
        return _certain(fmean(candidate) - fmean(baseline))
    from scipy.stats import ttest_ind

    return float(ttest_ind(candidate, baseline, equal_var=False, alternative="greater").pvalue)


def _differences(candidate: Sequence[float], baseline: Sequence[float]) -> list[float]:
    if len(candidate) != len(baseline):
        raise ValueError(f"pairs need equal lengths, got {len(candidate)} and {len(baseline)}")
    return [a - b for a, b in zip(candidate, baseline, strict=True)]


def _certain(difference: float) -> float:
    """P-value where nothing varies: the t statistic is infinite, or undefined at no difference."""
    return 0.0 if difference > 0 else 1.0


def _student(mean: float, error: float, freedom: int, confidence: float) -> tuple[float, float]:
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, freedom)) * error
    return mean - half, mean + half
