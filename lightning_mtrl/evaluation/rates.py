"""Two success rates against each other: the score interval of their difference, and the test to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

_EDGE = 1e-12  # distance from a difference of -1 or 1, at which a variance is 0


@dataclass(frozen=True)
class RateDifference:
    """Success rate of a candidate minus that of a baseline, of conversations that are independent.

    Interval and test are one: the interval at confidence 1 - p ends at 0. Rates of 0 and 1 need no special
    care, as they do with the normal approximation.

    Source: Miettinen and Nurminen 1985, Statistics in Medicine 4, 213-226 (score statistic, with the factor
    N / (N - 1)); method 6 in the comparison of Newcombe 1998, Statistics in Medicine 17, 873-890.

    Attributes:
        candidate: (successes, conversations) of the candidate; clusters in which nothing varies count as one
            conversation each, and their successes need be no whole number.
        baseline: the same of the baseline.
    """

    candidate: tuple[float, int]
    baseline: tuple[float, int]
    method = "Miettinen-Nurminen score interval and test"

    def __post_init__(self) -> None:
        for successes, conversations in (self.candidate, self.baseline):
            if not 0 <= successes <= conversations or conversations == 0:
                raise ValueError(f"{successes} successes in {conversations} conversations cannot be compared")

    @property
    def estimate(self) -> float:
        """The difference that was observed."""
        return self.candidate[0] / self.candidate[1] - self.baseline[0] / self.baseline[1]

    @property
    def p_value(self) -> float:
        """Two-sided: how likely a difference at least so large is where the two rates are equal."""
        return float(2 * ndtr(-abs(self._statistic(0.0))))

    def interval(self, confidence: float) -> tuple[float, float]:
        """Differences that the test at level 1 - `confidence` does not refuse.

        Args:
            confidence: in (0, 1).
        """
        critical = -float(ndtri((1 - confidence) / 2))
        return self._limit(-1 + _EDGE, critical), self._limit(1 - _EDGE, -critical)

    def _limit(self, end: float, wanted: float) -> float:
        """Where the statistic, which falls as the supposed difference grows, has the wanted value."""

        def excess(difference: float) -> float:
            return self._statistic(difference) - wanted

        start = min(max(self.estimate, -1 + _EDGE), 1 - _EDGE)
        if math.copysign(1, wanted) * excess(end) <= 0 or start == end:
            return math.copysign(1.0, end)
        return float(brentq(excess, start, end, xtol=1e-12))

    def _statistic(self, difference: float) -> float:
        """Standard normal where `difference` is the true one."""
        (x1, n1), (x0, n0) = self.candidate, self.baseline
        low = _restricted_rate(x1, n1, x0, n0, difference)
        high = low + difference
        variance = (high * (1 - high) / n1 + low * (1 - low) / n0) * (n1 + n0) / max(1, n1 + n0 - 1)
        gap = self.estimate - difference
        if variance <= 0:
            return math.copysign(math.inf, gap) if gap else 0.0
        return gap / math.sqrt(variance)


def _restricted_rate(x1: float, n1: int, x0: float, n0: int, difference: float) -> float:
    """The baseline's likeliest rate where the candidate's is larger by `difference`.

    The score equation, a cubic in it, has one root where both rates lie in [0, 1]; the formula is that of the
    appendix of Miettinen and Nurminen.
    """
    total = n1 + n0
    a = x0 * difference * (1 - difference)
    b = (n0 * difference - total - 2 * x0) * difference + x1 + x0
    c = (n1 + 2 * n0) * difference - total - x1 - x0
    shift = c / (3 * total)
    q = shift**3 - c * b / (6 * total**2) + a / (2 * total)
    size = math.copysign(math.sqrt(max(0.0, shift**2 - b / (3 * total))), q)
    if size == 0:
        return _inside(-shift, difference)
    angle = (math.pi + math.acos(min(1.0, max(-1.0, q / size**3)))) / 3
    return _inside(2 * size * math.cos(angle) - shift, difference)


def _inside(rate: float, difference: float) -> float:
    return min(max(rate, 0.0, -difference), 1.0, 1.0 - difference)
