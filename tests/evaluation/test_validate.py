"""Figures of a policy: what counts as a success, and how sure they are."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_mtrl.conversation import Conversation, Turn
from lightning_mtrl.evaluation.intervals import mean_interval, success_interval
from lightning_mtrl.evaluation.logged import LogFit
from lightning_mtrl.evaluation.validate import figures_of


def _talk(
    number: int, outcome: float | None, customer: str | None = None, *, truncated: bool = False
) -> Conversation:
    about = {} if customer is None else {"customer": customer}
    turns = (Turn("a", reward=outcome or 0.0),)
    return Conversation(f"c-{number}", (), turns, outcome, not truncated, truncated, metadata=about)


def test_a_conversation_that_a_limit_cut_off_is_no_success_with_an_outcome_either() -> None:
    talks = [_talk(0, 1.0), _talk(1, 1.0, truncated=True), _talk(2, None, truncated=True), _talk(3, 0.0)]
    found = figures_of(talks, 1.0, 2, {})
    assert (found.success_rate, found.without_outcome, found.conversations) == (0.25, 1, 4)


def test_nothing_measured_is_bounded_by_nothing() -> None:
    found = figures_of([], 1.0, 0, {})
    assert (found.success_rate, found.success_rate_interval) == (0.0, (0.0, 1.0))
    assert found.mean_return_interval == (-np.inf, np.inf)


def test_conversations_for_themselves_have_wilsons_interval() -> None:
    found = figures_of([_talk(n, float(n < 8)) for n in range(10)], 1.0, 0, {})
    assert found.success_rate_interval == success_interval(8, 10)
    assert found.mean_return_interval == mean_interval([1.0] * 8 + [0.0] * 2)


def test_intervals_of_a_log_hold_the_truth_where_customers_come_back() -> None:
    """500 logs of 20 customers with 10 conversations each, whose rates are uniform.

    The share of intervals that hold 0.5 has a standard error of 0.0097 at 0.95; 0.91 is four of them away (by
    chance 3 in 10^5; the seed is fixed). Wilson's interval of 200 conversations, with half a width of 0.069
    beside a standard error of sqrt(1 / 12 / 20 + 1 / 6 / 200) = 0.071, holds it in 67%; 0.77 is five away.
    """
    rng = np.random.default_rng(0)
    held, plain = np.zeros(2), 0
    for _ in range(500):
        wins = rng.random((20, 10)) < rng.random((20, 1))
        talks = [_talk(10 * k + n, float(wins[k, n]), f"k{k}") for k in range(20) for n in range(10)]
        found = figures_of(talks, 1.0, 0, {})
        for kind, (low, high) in enumerate((found.success_rate_interval, found.mean_return_interval)):
            held[kind] += low <= 0.5 <= high
        low, high = success_interval(int(wins.sum()), 200)
        plain += low <= 0.5 <= high
    assert held.min() >= 455
    assert plain < 385


def test_responses_of_one_conversation_are_not_independent_samples_of_the_logs_policy() -> None:
    """Each conversation's five responses differ alike: the interval is that of the conversations alone."""
    gaps = [0.3, 0.1, 0.4, 0.2]
    logged, scored = (
        [
            Conversation(f"c-{n}", (), (Turn("a", response_ids=(1,), behaviour_logprobs=(value,)),) * 5)
            for n, value in enumerate(values)
        ]
        for values in ([gap - 1.0 for gap in gaps], [-1.0] * 4)
    )
    fit = LogFit.of(logged, scored)
    assert fit.difference == pytest.approx(0.25)
    assert fit.difference_interval == pytest.approx(mean_interval(gaps))
    alone = LogFit.of(logged[:1], scored[:1]).difference_interval
    assert alone == (-np.inf, np.inf)
