from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, ttest_ind, ttest_rel

from lightning_mtrl.evaluation.rates import RateDifference
from lightning_mtrl.evaluation.samples import Sample, difference


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


@pytest.mark.parametrize("constant", [0.1, 1 / 3, 0.7, 1e6 + 0.1])
@pytest.mark.parametrize("numbers", [(100, 33), (7, 1001), (30, 30)])
def test_outcomes_that_do_not_vary_show_no_difference(constant: float, numbers: tuple[int, int]) -> None:
    """What rounding leaves of a spread or of a difference of 0 is none: 100 times 0.1 is 33 times 0.1."""
    sizes = [[f"k{place // 3}" for place in range(number)] for number in numbers]
    for clusters in ([None, None], [[f"{n}{k}" for k in names] for n, names in enumerate(sizes)], sizes):
        new, old = (Sample.of([constant] * n, c) for n, c in zip(numbers, clusters, strict=True))
        found = difference(new, old)
        assert (found.estimate, found.p_value, new.spread, new.variance()) == (0.0, 1.0, 0.0, 0.0)
        assert found.interval(0.95) == (-math.inf, math.inf)


def test_graded_outcomes_without_spread_bound_no_difference() -> None:
    customers = [f"k{place}" for place in range(30)]
    drawn = np.random.default_rng(0).random(30)
    for new, old, names in (([0.7] * 30, [0.5] * 30, None), (list(drawn + 0.1), list(drawn), customers)):
        found = difference(Sample.of(new, names), Sample.of(old, names))
        assert found.estimate == pytest.approx(new[0] - old[0])
        assert (found.p_value, found.interval(0.95)) == (1.0, (-math.inf, math.inf))


def test_equal_shares_in_all_clusters_are_compared_as_one_conversation_each() -> None:
    """0.25 of 3 and 0.5 of 3: z^2 = 0.25^2 / (0.375 * 0.625 * (2 / 3) * (6 / 5)) = 1 / 3 by hand."""
    old = Sample.of([1.0, 0.0, 0.0, 0.0] * 3, list("aaaabbbbcccc"))
    new = Sample.of([1.0, 1.0, 0.0, 0.0] * 3, list("uuuuvvvvwwww"))
    found = difference(new, old)
    assert found.estimate == pytest.approx(0.25)
    assert found.p_value == pytest.approx(math.erfc(math.sqrt(1 / 6)))
    # Wilson's for 0.75 of 3 by hand, with z^2 = 3.841459:
    # (0.75 + 1.920729 -+ sqrt(3.841459 (0.75 * 2.25 / 3 + 0.960365))) / 6.841459.
    assert old.interval(0.95) == pytest.approx((0.036841, 0.743908), abs=2e-6)


def test_clusters_that_all_succeed_leave_their_interval_a_width() -> None:
    # Wilson's for n of n begins at n / (n + 3.841459).
    five = Sample.of([1.0] * 10, list("aabbccddee"))
    assert five.interval(0.95) == pytest.approx((5 / 8.841459, 1.0), abs=1e-6)
    assert Sample.of([1.0, 1.0], ["a", "a"]).interval(0.95) == pytest.approx((1 / 4.841459, 1.0), abs=1e-6)


def test_intervals_of_few_clusters_hold_a_rate_as_often_as_they_say() -> None:
    """Exact: ten customers with two equal outcomes each. With a width of 0 where all succeed, 0.9 is held
    in 65% only."""
    held = 0.0
    for successes in range(11):
        outcomes = np.repeat([1.0] * successes + [0.0] * (10 - successes), 2)
        low, high = Sample.of(list(outcomes), [f"k{place // 2}" for place in range(20)]).interval(0.95)
        assert 0 <= low < high <= 1
        held += float(binom.pmf(successes, 10, 0.9)) * (low <= 0.9 <= high)
    assert held > 0.92


def test_the_interval_of_one_mean_by_the_tables() -> None:
    # Wilson's for 8 of 10; Student's for 1 to 5: 3 +- 2.776445 sqrt(0.5).
    assert Sample.of([1.0] * 8 + [0.0] * 2).interval(0.95) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    half = 2.776445 * math.sqrt(0.5)
    assert Sample.of([1, 2, 3, 4, 5]).interval(0.95) == pytest.approx((3 - half, 3 + half), abs=1e-6)
