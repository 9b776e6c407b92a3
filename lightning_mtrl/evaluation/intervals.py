"""Intervals for what a policy achieved: shares and means."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
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


def mean_interval(
    values: Sequence[float], confidence: float = CONFIDENCE, clusters: Sequence[str] | None = None
) -> tuple[float, float]:
    """Student interval of a mean; (-inf, inf) for fewer than two values or clusters, which do not bound it.

    Args:
        values: measurements, such as returns of conversations.
        confidence: probability that the interval holds the true mean, in (0, 1).
        clusters: what each value belongs to, such as a customer: values of a cluster may depend on each
            other. None where all are independent, which is the same as a cluster for each.

    Source of the variance of clusters: Liang and Zeger 1986, Biometrika 73, 13-22, with G / (G - 1).
    """
    names = range(len(values)) if clusters is None else clusters
    mean = fmean(values) if len(values) else 0.0
    moved = defaultdict[Hashable, float](float)  # how far each cluster alone moves the mean
    for value, name in zip(values, names, strict=True):
        moved[name] += (value - mean) / len(values)
    if len(moved) < 2:
        return -math.inf, math.inf
    error = stdev(moved.values()) * math.sqrt(len(moved))
    return _student(mean, error, len(moved) - 1, confidence)


def _student(mean: float, error: float, freedom: int, confidence: float) -> tuple[float, float]:
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, freedom)) * error
    return mean - half, mean + half
