from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mtrl.evaluation.rates import RateDifference

# Newcombe 1998, Statistics in Medicine 17, 873-890, table II: eight contrasts, limits of method 6.
NEWCOMBE = {
    (56, 70, 48, 80): (0.0528, 0.3382),
    (9, 10, 3, 10): (0.1700, 0.8406),
    (6, 7, 2, 7): (0.0342, 0.8534),
    (5, 56, 0, 29): (-0.0326, 0.1933),
    (0, 10, 0, 20): (-0.1658, 0.2844),
    (0, 10, 0, 10): (-0.2879, 0.2879),
    (10, 10, 0, 20): (0.7156, 1.0000),
    (10, 10, 0, 10): (0.6636, 1.0000),
}


@pytest.mark.parametrize(("counts", "limits"), NEWCOMBE.items())
def test_intervals_are_those_of_newcombes_table(
    counts: tuple[int, int, int, int], limits: tuple[float, float]
) -> None:
    found = RateDifference(counts[:2], counts[2:])
    assert found.interval(0.95) == pytest.approx(limits, abs=5.1e-5)


def test_the_test_is_the_pooled_one() -> None:
    # 104 of 150 successes: 0.2 / sqrt(0.69333 * 0.30667 * (1 / 70 + 1 / 80) * 150 / 149) = 2.6413; the table
    # of the normal distribution has 0.00826 beyond it on both sides.
    assert RateDifference((56, 70), (48, 80)).p_value == pytest.approx(0.00826, abs=5e-6)
    assert RateDifference((0, 10), (0, 20)).p_value == 1.0
    assert RateDifference((10, 10), (10, 10)).p_value == 1.0


sizes = st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@settings(max_examples=60, deadline=None)
@given(sizes, sizes)
def test_interval_and_test_agree(candidate: tuple[int, int], baseline: tuple[int, int]) -> None:
    found = RateDifference(candidate, baseline)
    low, high = found.interval(0.95)
    assert -1 <= low <= found.estimate <= high <= 1
    if abs(found.p_value - 0.05) > 1e-6:
        assert (low > 0 or high < 0) == (found.p_value < 0.05)


@settings(max_examples=30, deadline=None)
@given(sizes, sizes)
def test_neither_side_is_favoured(one: tuple[int, int], other: tuple[int, int]) -> None:
    low, high = RateDifference(one, other).interval(0.9)
    assert RateDifference(other, one).interval(0.9) == pytest.approx((-high, -low), abs=1e-7)
    failures = [(n - x, n) for x, n in (one, other)]
    assert RateDifference(*failures).interval(0.9) == pytest.approx((-high, -low), abs=1e-7)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_intervals_hold_the_true_difference(rate: float) -> None:
    """1000 repetitions at 95%: binomial with 0.95, outside of 0.95 +- 0.03 once in 70,000 runs."""
    rng = np.random.default_rng(0)
    counts = zip(rng.binomial(200, rate + 0.08, 1000), rng.binomial(150, rate, 1000), strict=True)
    intervals = [RateDifference((int(new), 200), (int(old), 150)).interval(0.95) for new, old in counts]
    held = sum(low <= 0.08 <= high for low, high in intervals)
    assert held / 1000 == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize("counts", [(3, 2), (-1, 5), (0, 0)])
def test_shares_that_cannot_be_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        RateDifference(counts, (1, 2))
