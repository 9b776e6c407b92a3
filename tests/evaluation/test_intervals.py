from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mtrl.evaluation.intervals import mean_interval, success_interval


def test_wilson_intervals_of_known_shares() -> None:
    # Worked out from Wilson's formula with z = 1.959964.
    assert success_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert success_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert success_interval(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_nothing_observed_excludes_nothing() -> None:
    assert success_interval(0, 0) == (0.0, 1.0)
    assert mean_interval([]) == mean_interval([3.0]) == (-math.inf, math.inf)


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


def test_values_of_a_cluster_that_are_equal_count_once() -> None:
    """Each of five values three times: the interval of the five, and not that of fifteen."""
    copied, names = [1, 2, 3, 4, 5] * 3, list("abcde") * 3
    assert mean_interval(copied, clusters=names) == pytest.approx(mean_interval([1, 2, 3, 4, 5]), abs=1e-12)
    assert mean_interval(copied)[0] > mean_interval(copied, clusters=names)[0] + 0.5


def test_one_value_a_cluster_is_no_cluster() -> None:
    values = [0.3, -0.1, 0.45, 0.2, 0.2]
    assert mean_interval(values, 0.9, clusters=list("vwxyz")) == mean_interval(values, 0.9)
    with pytest.raises(ValueError, match="length"):
        mean_interval(values, clusters=["v"])


def test_the_interval_of_uneven_clusters_by_hand() -> None:
    # (1, 2) and (3, 2, 2) have the mean 2 and move it by -1 / 5 and 1 / 5, so the squared error is
    # 2 / 1 * (1 + 1) / 25 = 0.16; t with one degree of freedom at 97.5% is 12.706205.
    half = 12.706205 * 0.4
    found = mean_interval([1.0, 2.0, 3.0, 2.0, 2.0], clusters=["a", "a", "b", "b", "b"])
    assert found == pytest.approx((2 - half, 2 + half), abs=1e-5)
    assert mean_interval([1.0, 2.0], clusters=["a", "a"]) == (-math.inf, math.inf)


def test_intervals_of_clusters_hold_the_truth_as_often_as_they_say() -> None:
    """1,000 samples of 25 conversations with 1 to 6 states each, whose gains share 0.5 of their variance.

    The share of intervals with the truth has a standard error of 0.0069 at 0.95, so being outside of 0.92 to
    0.98 by chance has a probability below 2 in 10^5; the seed is fixed. Those above 0 keep a step without a
    gain: 2.5% should, and more than 4.5% would with a probability below 10^-4. With states taken as
    independent, 23% miss the truth and 12% keep such a step.
    """
    rng = np.random.default_rng(0)
    held, kept = np.zeros(2), np.zeros(2)
    for _ in range(1000):
        owner = np.repeat(np.arange(25), rng.integers(1, 7, 25))
        gains = (rng.normal(size=25)[owner] + rng.normal(size=len(owner))).tolist()
        for kind, clusters in enumerate((owner.astype(str).tolist(), None)):
            low, high = mean_interval(gains, clusters=clusters)
            held[kind] += low <= 0 <= high
            kept[kind] += low > 0
    assert 920 <= held[0] <= 980
    assert kept[0] <= 45
    assert held[1] < 800
    assert kept[1] > 90
