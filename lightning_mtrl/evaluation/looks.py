"""Looking at a comparison while it still runs, so that all looks together err no more than one would.

A comparison that is looked at K times, at information fractions 0 < t_1 < ... < t_K = 1 (the share of the
planned conversations that has come in), has statistics Z_1, ..., Z_K with Corr(Z_j, Z_k) = sqrt(t_j / t_k).
It ends at the first look k with |Z_k| above the boundary. What is computed here is exact for these normal
statistics, by numerical integration from look to look.

Sources: Armitage, McPherson and Rowe 1969, J. R. Statist. Soc. A 132, 235-244 (the integration); O'Brien and
Fleming 1979, Biometrics 35, 549-556; Pocock 1977, Biometrika 64, 191-199; Lan and DeMets 1983, Biometrika 70,
659-663 (spending); Jennison and Turnbull 2000, Group Sequential Methods (repeated intervals and p-values,
inflation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

NODES = 200
LEAST_STEP = 0.01  # between two fractions; the integration resolves no less
_FAR = 12.0  # standard deviations, beyond which nothing is left to integrate
_TINY = 1e-250
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(NODES)


def crossing_probabilities(
    critical_values: Sequence[float], fractions: Sequence[float], drift: float = 0.0
) -> list[float]:
    """Probability that a comparison ends at each look, on either side.

    Args:
        critical_values: of |Z| at each look; infinity where nothing can end it.
        fractions: information at each look, rising to at most 1.
        drift: expected Z at fraction 1; 0 without a difference.
    """
    places, mass = np.zeros(1), np.ones(1)  # where the sum Z_k sqrt(t_k) is while nothing has ended
    earlier = 0.0
    crossed = []
    for critical, fraction in zip(critical_values, fractions, strict=True):
        step = fraction - earlier
        spread, mean = math.sqrt(step), places + drift * step
        edge = critical * math.sqrt(fraction)
        crossed.append(float(mass @ (ndtr((mean - edge) / spread) + ndtr((-edge - mean) / spread))))
        reach = min(edge, _FAR * math.sqrt(fraction) + abs(drift))
        inside = reach * _POINTS
        density = np.exp(-0.5 * ((inside[:, None] - mean) / spread) ** 2) / (spread * math.sqrt(2 * math.pi))
        places, mass, earlier = inside, reach * _WEIGHTS * (density @ mass), fraction
    return crossed


class Boundary(Protocol):
    """A way to share the chance of a false alarm among the looks."""

    def critical_values(self, alpha: float, fractions: Sequence[float]) -> list[float]:
        """What |Z| must exceed at each look.

        Args:
            alpha: chance of a false alarm over all looks and both sides, in (0, 1).
            fractions: information at each look, rising.
        """
        ...

    def p_value(self, statistic: float, look: int, fractions: Sequence[float]) -> float:
        """The repeated p-value: the smallest `alpha` at which |Z| = `statistic` ends it at this look.

        Args:
            statistic: |Z|.
            look: number of the look, from 1.
            fractions: information at each look.
        """
        ...


class ShapedBoundary:
    """Critical values c * t_k ** power, with c so that all looks together err with probability alpha.

    It asks for the fractions of all looks, the coming ones too.

    Args:
        power: -0.5 for O'Brien and Fleming's, strict at first and at the end nearly as without looks; 0 for
            Pocock's, the same at each look.
    """

    def __init__(self, power: float) -> None:
        self.power = power

    def critical_values(self, alpha: float, fractions: Sequence[float]) -> list[float]:
        """See `Boundary`."""
        constant = brentq(lambda c: self._error(c, fractions) - alpha, 1e-9, 40.0, xtol=1e-12)
        return [constant * fraction**self.power for fraction in fractions]

    def p_value(self, statistic: float, look: int, fractions: Sequence[float]) -> float:
        """See `Boundary`."""
        return min(1.0, self._error(statistic / fractions[look - 1] ** self.power, fractions))

    def _error(self, constant: float, fractions: Sequence[float]) -> float:
        critical = [constant * fraction**self.power for fraction in fractions]
        return sum(crossing_probabilities(critical, fractions))


class SpendingBoundary:
    """Lan and DeMets' spending: by fraction t, 4 (1 - Phi(z_{alpha/4} / sqrt(t))), like O'Brien and Fleming.

    It asks for the fractions up to the present look only, so the times of the looks need not be planned.
    """

    def critical_values(self, alpha: float, fractions: Sequence[float]) -> list[float]:
        """See `Boundary`."""
        critical: list[float] = []
        spent = 0.0
        for number, fraction in enumerate(fractions, start=1):
            target = 4 * float(ndtr(ndtri(alpha / 4) / math.sqrt(fraction)))
            critical.append(self._next(critical, fractions[:number], target - spent))
            spent = target
        return critical

    def p_value(self, statistic: float, look: int, fractions: Sequence[float]) -> float:
        """See `Boundary`."""

        def missing(log_alpha: float) -> float:
            return self.critical_values(math.exp(log_alpha), fractions[:look])[-1] - statistic

        low, high = math.log(_TINY), math.log(1 - 1e-12)
        if missing(high) >= 0:
            return 1.0
        return math.exp(brentq(missing, low, high, xtol=1e-10)) if missing(low) > 0 else 0.0

    @staticmethod
    def _next(before: Sequence[float], fractions: Sequence[float], share: float) -> float:
        """The critical value of the last look, at which it ends a comparison with probability `share`."""

        def excess(critical: float) -> float:
            return crossing_probabilities([*before, critical], fractions)[-1] - share

        if excess(40.0) >= 0:
            return 40.0
        return float(brentq(excess, 0.0, 40.0, xtol=1e-12)) if excess(0.0) > 0 else 0.0


BOUNDARIES: dict[str, Boundary] = {
    "obrien_fleming": ShapedBoundary(-0.5),
    "pocock": ShapedBoundary(0.0),
    "spending": SpendingBoundary(),
}


@lru_cache(maxsize=256)
def _critical_values(boundary: str, alpha: float, fractions: tuple[float, ...]) -> list[float]:
    return BOUNDARIES[boundary].critical_values(alpha, fractions)


@dataclass(frozen=True)
class Looks:
    """When a comparison is looked at, and which of these looks this one is.

    Attributes:
        number: of this look, from 1.
        fractions: share of the planned conversations that has come in at each look, rising to 1.
        boundary: a name in `BOUNDARIES`.
    """

    number: int = 1
    fractions: tuple[float, ...] = (1.0,)
    boundary: str = "obrien_fleming"

    def critical_value(self, alpha: float) -> float:
        """What |Z| must exceed now, so that all looks together are wrong with probability `alpha`."""
        return _critical_values(self.boundary, alpha, self.fractions)[self.number - 1]

    def nominal_level(self, alpha: float) -> float:
        """The level at which one test is made at this look."""
        if len(self.fractions) == 1:
            return alpha
        return float(2 * ndtr(-self.critical_value(alpha)))

    def p_value(self, nominal: float) -> float:
        """A test's own p-value, corrected for all looks: to be held against `alpha` itself."""
        if len(self.fractions) == 1:
            return nominal
        statistic = max(0.0, -float(ndtri(nominal / 2)))
        return BOUNDARIES[self.boundary].p_value(statistic, self.number, self.fractions)

    def inflation(self, alpha: float, power: float) -> float:
        """How many times the conversations of a comparison with one look are needed for the same power.

        Args:
            alpha: chance of a false alarm over all looks, in (0, 1).
            power: chance to see the difference that is there, in (alpha, 1).
        """
        if len(self.fractions) == 1:
            return 1.0
        critical = _critical_values(self.boundary, alpha, self.fractions)
        one_look = float(ndtri(power) - ndtri(alpha / 2))

        def excess(drift: float) -> float:
            return sum(crossing_probabilities(critical, self.fractions, drift)) - power

        return float((brentq(excess, 0.0, 10 * one_look, xtol=1e-10) / one_look) ** 2)
