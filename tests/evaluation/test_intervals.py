from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mtrl.evaluation.intervals import (
    difference_interval,
    difference_p_value,
    mean_interval,
    paired_interval,
    paired_p_value,
    success_interval,
)


def test_wilson_intervals_of_known_shares() -> None:
    # Worked out from Wilson's formula with z = 1.959964.
    assert success_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert success_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert success_interval(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_nothing_observed_excludes_nothing() -> None:
    assert success_interval(0, 0) == (0.0, 1.0)
    assert mean_interval([]) == mean_interval([3.0]) == (-math.inf, math.inf)
    assert paired_interval([1.0], [0.0]) == (-math.inf, math.inf)
    assert difference_interval([1.0, 2.0], [0.0]) == (-math.inf, math.inf)
    assert paired_p_value([1.0], [0.0]) == difference_p_value([1.0], [0.0, 0.1]) == 1.0


@pytest.mark.parametrize(("successes", "conversations"), [(3, 2), (-1, 5), (0, -1)])
def test_shares_that_cannot_be_are_refused(successes: int, conversations: int) -> None:
    with pytest.raises(ValueError, match=f"{successes} successes in {conversations} conversations"):
        success_interval(successes, conversations)


@given(st.integers(1, 500), st.data())
def test_a_success_interval_holds_the_share_and_narrows_with_confidence(
    number: int, data: st.DataObject
) -> None:
    successes = data.draw(st.integers(0, number))
    low, high = success_interval(successes, number)
    assert 0 <= low <= successes / number + 1e-12
    assert successes / number - 1e-12 <= high <= 1
    assert high - low > (narrow := success_interval(successes, number, 0.8))[1] - narrow[0]


def test_the_interval_of_a_mean_by_the_table() -> None:
    # Mean 3, standard error sqrt(2.5 / 5), t with 4 degrees of freedom at 97.5%: 2.776445.
    half = 2.776445 * math.sqrt(0.5)
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - half, 3 + half), abs=1e-6)
    # At 90% the table says 2.131847.
    half = 2.131847 * math.sqrt(0.5)
    assert mean_interval([1, 2, 3, 4, 5], 0.9) == pytest.approx((3 - half, 3 + half), abs=1e-6)
    assert mean_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_pairs_are_compared_one_by_one() -> None:
    candidate, baseline = [11.0, 2.0, 33.0, 4.0, 55.0], [10.0, 0.0, 30.0, 0.0, 50.0]
    half = 2.776445 * math.sqrt(0.5)
    assert paired_interval(candidate, baseline) == pytest.approx((3 - half, 3 + half), abs=1e-6)
    # t = 3 / sqrt(0.5) = 4.2426 with 4 degrees of freedom: 0.0066 above it.
    assert paired_p_value(candidate, baseline) == pytest.approx(0.00662, abs=1e-5)
    assert paired_p_value(baseline, candidate) == pytest.approx(1 - 0.00662, abs=1e-5)
    with pytest.raises(ValueError, match="equal lengths, got 2 and 1"):
        paired_interval([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="equal lengths, got 2 and 1"):
        paired_p_value([1.0, 2.0], [1.0])


def test_welch_allows_for_unequal_spread() -> None:
    # Means 3 and 6; errors 0.5 and 1.0 squared are 2.5 / 5 and 5 / 5 of the sum 1.5: t = 2.449490 with
    # 1.5^2 / (0.5^2 / 4 + 1.0^2 / 4) = 7.2 degrees of freedom.
    one = [1.0, 2.0, 3.0, 4.0, 5.0]
    other = [6 + math.sqrt(2) * (x - 3) for x in one]
    low, high = difference_interval(other, one)
    assert (low + high) / 2 == pytest.approx(3)
    assert (high - low) / 2 == pytest.approx(2.3514 * math.sqrt(1.5), abs=1e-3)
    # The density of t above 2.449490, added up in 200,000 strips.
    assert difference_p_value(other, one) == pytest.approx(0.02160293, abs=1e-7)


def test_values_without_spread_are_certain() -> None:
    assert difference_interval([1.0, 1.0], [0.0, 0.0]) == (1.0, 1.0)
    assert difference_p_value([1.0, 1.0], [0.0, 0.0]) == 0.0
    assert difference_p_value([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert paired_interval([2.0, 3.0], [1.0, 2.0]) == (1.0, 1.0)
    assert paired_p_value([2.0, 3.0], [1.0, 2.0]) == 0.0
    assert paired_p_value([1.0, 2.0], [1.0, 2.0]) == 1.0


numbers = st.lists(st.floats(-100, 100), min_size=3, max_size=12)


@given(numbers, numbers)
def test_interval_and_p_value_agree(candidate: list[float], baseline: list[float]) -> None:
    """The lower end of a 90% interval is above 0 exactly where the one-sided p-value is below 5%."""
    low, _ = difference_interval(candidate, baseline, 0.9)
    p_value = difference_p_value(candidate, baseline)
    if abs(p_value - 0.05) > 1e-6:
        assert (low > 0) == (p_value < 0.05)
