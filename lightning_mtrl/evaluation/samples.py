"""Outcomes of many conversations, and the difference of the means of two such samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from lightning_mtrl.evaluation.intervals import (
    Floats,
    half_width,
    influences,
    mean_interval,
    squared_error,
    success_interval,
    without_rounding,
)
from lightning_mtrl.evaluation.rates import RateDifference

_numbers = count()  # no two conversations that stand for themselves share a name


@dataclass(frozen=True)
class Sample:
    """What was measured under one policy.

    Attributes:
        outcomes: one for each conversation, finite.
        clusters: for each conversation what it belongs to, such as a customer; conversations of a cluster may
            depend on each other, also those of the two samples that are compared.
    """

    outcomes: Floats
    clusters: NDArray[np.str_]

    @classmethod
    def of(cls, outcomes: Sequence[float], clusters: Sequence[str] | None = None) -> Sample:
        """A sample of numbers; without `clusters` each conversation stands for itself alone."""
        names = [f"alone/{next(_numbers)}" for _ in outcomes] if clusters is None else clusters
        return cls(np.asarray(outcomes, dtype=np.float64), np.asarray(names, dtype=np.str_))

    def __len__(self) -> int:
        return len(self.outcomes)

    @property
    def mean(self) -> float:
        """Mean outcome; the success rate where outcomes are 0 and 1."""
        return float(self.outcomes.mean())

    @property
    def spread(self) -> float:
        """Standard deviation of the outcomes (n - 1 below); 0 for fewer than two."""
        return without_rounding(float(self.outcomes.std(ddof=1)), self.outcomes) if len(self) > 1 else 0.0

    @property
    def is_binary(self) -> bool:
        """True when every outcome is 0 or 1."""
        return bool(np.isin(self.outcomes, (0.0, 1.0)).all())

    @property
    def successes(self) -> int:
        """Number of outcomes above 0, which for 0 and 1 is that of the successes."""
        return int((self.outcomes > 0).sum())

    @property
    def num_clusters(self) -> int:
        """Number of different clusters."""
        return len(np.unique(self.clusters))

    def influences(self) -> tuple[NDArray[np.str_], Floats]:
        """The clusters, and how far each one alone moves the mean."""
        return influences(self.outcomes, self.clusters)

    def variance(self) -> float:
        """Squared standard error of the mean, robust to clusters; s^2 / n where each has one conversation."""
        return without_rounding(math.sqrt(squared_error(self.influences()[1])), self.outcomes) ** 2

    def interval(self, confidence: float) -> tuple[float, float]:
        """Interval of the mean: Wilson's for 0 and 1 without clusters, else Student's.

        Where 0 and 1 do not vary between clusters, which small numbers of them do not prove, each counts as
        one conversation of Wilson's.
        """
        if self.is_binary and self.num_clusters == len(self):
            return success_interval(self.successes, len(self), confidence)
        if self.is_binary and self.variance() == 0:
            return success_interval(self.mean * self.num_clusters, self.num_clusters, confidence)
        low, high = mean_interval(self.outcomes, confidence, self.clusters)
        return (max(low, 0.0), min(high, 1.0)) if self.is_binary else (low, high)

    def design_effect(self) -> float | None:
        """How many times the variance of the mean is that without clusters, at least 1.

        None where several conversations are all of one cluster, which cannot tell.
        """
        alone = self.spread**2 / max(1, len(self))
        if self.num_clusters == 1 < len(self):
            return None
        if alone == 0 or self.num_clusters == len(self):
            return 1.0
        return max(1.0, self.variance() / alone)


class Difference(Protocol):
    """Candidate minus baseline."""

    @property
    def method(self) -> str:
        """Name of the interval and the test."""
        ...

    @property
    def estimate(self) -> float:
        """What was observed."""
        ...

    @property
    def p_value(self) -> float:
        """Two-sided, for no difference."""
        ...

    def interval(self, confidence: float) -> tuple[float, float]:
        """Interval that holds the true difference with probability `confidence`."""
        ...


@dataclass(frozen=True)
class MeanDifference:
    """Difference of two means by Student's t.

    Attributes:
        estimate: candidate minus baseline.
        standard_error: of it.
        degrees: of freedom. Where this or the error is 0, nothing bounds the difference: the interval is
            infinite and the p-value 1.
        method: name of the interval and the test.
    """

    estimate: float
    standard_error: float
    degrees: float
    method: str

    @property
    def p_value(self) -> float:
        """Two-sided."""
        if self.degrees <= 0 or self.standard_error == 0:
            return 1.0
        return float(2 * student.sf(abs(self.estimate) / self.standard_error, self.degrees))

    def interval(self, confidence: float) -> tuple[float, float]:
        """Symmetric around the estimate."""
        half = half_width(self.standard_error, confidence, self.degrees) if self.standard_error else math.inf
        return self.estimate - half, self.estimate + half


def difference(candidate: Sample, baseline: Sample) -> Difference:
    """The difference of two means, by the method that fits the outcomes.

    - 0 and 1, every conversation for itself: Miettinen and Nurminen's score interval and test.
    - graded, every conversation for itself: Welch's.
    - clusters: the variance is that of the sums over clusters, with Student's t. Where a cluster has
      conversations in both samples, what they share cancels out (with one each it is the paired t-test), and
      the degrees of freedom are those of the sample with fewer clusters.
    - 0 and 1 that do not vary between clusters: the score interval and test, each cluster counting as one.
    - graded outcomes that do not vary: nothing bounds the difference.

    Args:
        candidate: at least one conversation.
        baseline: at least one conversation.
    """
    shared = bool(np.isin(candidate.clusters, baseline.clusters).any())
    alone = all(sample.num_clusters == len(sample) for sample in (candidate, baseline)) and not shared
    binary = candidate.is_binary and baseline.is_binary
    if alone and binary:
        return RateDifference((candidate.successes, len(candidate)), (baseline.successes, len(baseline)))
    estimate = without_rounding(candidate.mean - baseline.mean, candidate.outcomes, baseline.outcomes)
    error, degrees = _paired(candidate, baseline) if shared else _apart(candidate, baseline)
    if binary and error == 0 and degrees > 0:
        one, other = candidate.num_clusters, baseline.num_clusters
        return RateDifference((candidate.mean * one, one), (baseline.mean * other, other))
    method = "Welch's interval and t-test" if alone else "cluster-robust interval and t-test"
    return MeanDifference(estimate, error, degrees, method)


def _apart(candidate: Sample, baseline: Sample) -> tuple[float, float]:
    """Standard error and Welch's degrees of freedom, for samples that have no cluster in common."""
    free = [candidate.num_clusters - 1, baseline.num_clusters - 1]
    if min(free) < 1:
        return 0.0, 0.0
    parts = [candidate.variance(), baseline.variance()]
    total = sum(parts)
    if total == 0:
        return 0.0, float(sum(free))
    below = sum((part / total) ** 2 / number for part, number in zip(parts, free, strict=True))
    return math.sqrt(total), 1 / below


def _paired(candidate: Sample, baseline: Sample) -> tuple[float, float]:
    """The same for samples with clusters in common."""
    (new, gains), (old, losses) = candidate.influences(), baseline.influences()
    _, codes = np.unique(np.concatenate([new, old]), return_inverse=True)
    moved = np.bincount(codes, weights=np.concatenate([gains, -losses])).astype(np.float64)
    error = without_rounding(math.sqrt(squared_error(moved)), candidate.outcomes, baseline.outcomes)
    return error, float(min(len(new), len(old)) - 1)
