"""Intervals for what a policy achieved: shares and means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
_ROUNDING = 1e-12  # of the largest value: below it lies what rounding leaves of 0


def success_interval(
    successes: float, conversations: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Wilson interval of a success rate, inside [0, 1]; (0, 1) when nothing was observed.

    Args:
        successes: number of conversations that succeeded; no whole one where each is a part of a cluster.
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
    from scipy.special import ndtri

    squared = float(ndtri((1 + confidence) / 2)) ** 2
    failures, total = conversations - successes, conversations + squared
    half = math.sqrt(squared * (successes * failures / conversations + squared / 4))
    low, high = (successes + squared / 2 - half) / total, (successes + squared / 2 + half) / total
    return (low if successes else 0.0), (high if failures else 1.0)


def mean_interval(
    values: Sequence[float] | Floats,
    confidence: float = CONFIDENCE,
    clusters: Sequence[str] | NDArray[np.str_] | None = None,
) -> tuple[float, float]:
    """Student interval of a mean; (-inf, inf) for fewer than two values or clusters, which do not bound it.

    Args:
        values: measurements, such as returns of conversations.
        confidence: probability that the interval holds the true mean, in (0, 1).
        clusters: what each value belongs to, such as a customer: values of a cluster may depend on each
            other. None where all are independent, which is the same as a cluster for each.
    """
    if not len(values):
        return -math.inf, math.inf
    numbers = np.asarray(values, dtype=np.float64)
    owners = np.arange(len(numbers)) if clusters is None else np.asarray(clusters)
    _, moved = influences(numbers, owners)
    error = without_rounding(math.sqrt(squared_error(moved)), numbers)
    mean, half = float(numbers.mean()), half_width(error, confidence, len(moved) - 1)
    return mean - half, mean + half


def without_rounding(found: float, *values: Floats) -> float:
    """What was found of these values by subtraction, 0 where it is no more than rounding leaves of it."""
    largest = max(float(np.abs(part).max(initial=0.0)) for part in values)
    return 0.0 if abs(found) <= _ROUNDING * largest else found


def influences(values: Floats, clusters: NDArray[Any]) -> tuple[NDArray[Any], Floats]:
    """The clusters, and how far each one alone moves the mean of the values (one at least)."""
    names, codes = np.unique(clusters, return_inverse=True)
    moved = np.bincount(codes, weights=(values - values.mean()) / len(values))
    return names, moved.astype(np.float64)


def squared_error(influences: Floats) -> float:
    """Squared standard error of a mean, robust to clusters; s^2 / n where each has one value.

    Args:
        influences: how far each cluster alone moves the mean; 0 is found for fewer than two.

    Source: Liang and Zeger 1986, Biometrika 73, 13-22, with G / (G - 1).
    """
    number = len(influences)
    return float(number / (number - 1) * (influences**2).sum()) if number > 1 else 0.0


def half_width(error: float, confidence: float, degrees: float) -> float:
    """Half of Student's interval around an estimate with this standard error; infinite at 0 degrees."""
    from scipy.stats import t

    return error * float(t.ppf((1 + confidence) / 2, degrees)) if degrees > 0 else math.inf
