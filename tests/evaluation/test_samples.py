from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import ttest_ind, ttest_rel

from lightning_mtrl.evaluation.rates import RateDifference
from lightning_mtrl.evaluation.samples import MeanDifference, Sample, difference


def test_graded_outcomes_are_compared_as_welch_does() -> None:
    one, other = [0.1, 0.4, 0.45, 0.9], [0.2, 0.25, 0.3, 0.35, 0.1, 0.6]
    found = difference(Sample.of(one), Sample.of(other))
    expected = ttest_ind(one, other, equal_var=False)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.interval(0.9) == pytest.approx(tuple(expected.confidence_interval(0.9)))


def test_rates_are_compared_by_their_counts() -> None:
    found = difference(Sample.of([1.0] * 56 + [0.0] * 14), Sample.of([1.0] * 48 + [0.0] * 32))
    assert found == RateDifference((56, 70), (48, 80))


def test_one_conversation_of_each_customer_on_both_sides_is_a_paired_test() -> None:
    one, other = [0.1, 0.4, 0.45, 0.9, 0.3], [0.2, 0.25, 0.3, 0.35, 0.1]
    names = ["a", "b", "c", "d", "e"]
    found = difference(Sample.of(one, names), Sample.of(other[::-1], names[::-1]))
    expected = ttest_rel(one, other)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.interval(0.95) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_copies_of_conversations_are_no_evidence() -> None:
    """Each conversation four times, as a cluster: interval and p-value of Welch's test on the originals."""
    one, other = [0.1, 0.4, 0.45, 0.9], [0.2, 0.25, 0.3, 0.35, 0.1, 0.6]
    copied = [
        Sample.of(
            list(np.repeat(values, 4)), [f"{side}{place}" for place in range(len(values)) for _ in range(4)]
        )
        for side, values in (("new", one), ("old", other))
    ]
    expected = ttest_ind(one, other, equal_var=False)
    assert difference(*copied).p_value == pytest.approx(expected.pvalue)
    # s^2 / 4 of the originals against (3 / 4 of it times 16 / 15) / 16 of the copies taken for independent.
    assert copied[0].design_effect() == pytest.approx(5.0)
    assert Sample.of(one).design_effect() == 1.0


def test_clusters_that_do_not_vary_count_once_each() -> None:
    new = Sample.of([1.0] * 12, ["a", "b", "c", "d"] * 3)
    old = Sample.of([0.0] * 10, ["v", "w", "x", "y", "z"] * 2)
    assert difference(new, old) == RateDifference((4, 4), (0, 5))


def test_too_little_to_tell_bounds_nothing() -> None:
    found = difference(Sample.of([0.3]), Sample.of([0.1, 0.2]))
    assert found.p_value == 1.0
    assert found.interval(0.95) == (-math.inf, math.inf)
    one_cluster = difference(Sample.of([1.0, 0.0], ["a", "a"]), Sample.of([0.0, 1.0, 1.0]))
    assert (one_cluster.p_value, one_cluster.interval(0.95)) == (1.0, (-math.inf, math.inf))


def test_equal_constants_do_not_differ() -> None:
    assert difference(Sample.of([0.5, 0.5]), Sample.of([0.5, 0.5])).p_value == 1.0
    assert MeanDifference(0.1, 0.0, 3.0, "").p_value == 0.0


def test_the_interval_of_one_mean_by_the_tables() -> None:
    # Wilson's for 8 of 10; Student's for 1 to 5: 3 +- 2.776445 sqrt(0.5).
    assert Sample.of([1.0] * 8 + [0.0] * 2).interval(0.95) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    half = 2.776445 * math.sqrt(0.5)
    assert Sample.of([1, 2, 3, 4, 5]).interval(0.95) == pytest.approx((3 - half, 3 + half), abs=1e-6)
