from __future__ import annotations

import pytest
from scipy.stats import binom

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.evaluation.arms import Arm
from lightning_mtrl.evaluation.comparison_report import _planned, as_json
from lightning_mtrl.evaluation.looks import Looks
from lightning_mtrl.evaluation.rates import RateDifference
from lightning_mtrl.evaluation.sample_size import mean_sample_size, plan_sample_size, rate_sample_size


def arm(outcomes: list[float | None], customers: list[str] | None = None) -> Arm:
    metadata = [{"customer": name} for name in customers] if customers else [{}] * len(outcomes)
    conversations = [
        Conversation(f"c-{place}", (), (), outcome=outcome, metadata=about)
        for place, (outcome, about) in enumerate(zip(outcomes, metadata, strict=True))
    ]
    return Arm("baseline", "a.jsonl", conversations)


def test_sizes_for_rates_are_the_textbooks() -> None:
    # Fleiss, Levin and Paik 2003, table A.4 less its continuity correction; 0.3 against 0.5 is worked out by
    # hand: (1.959964 sqrt(2 * 0.4 * 0.6) + 0.841621 sqrt(0.21 + 0.25))^2 / 0.04 = 92.999.
    assert rate_sample_size(0.3, 0.2, 0.05, 0.8) == pytest.approx(92.999, abs=2e-3)
    assert rate_sample_size(0.5, -0.2, 0.05, 0.8) == pytest.approx(92.999, abs=2e-3)


def test_sizes_for_means_are_cohens() -> None:
    # Cohen 1988, table 2.4.1, two-sided 0.05: effects of 0.2, 0.5 and 0.8 with power 0.8.
    for effect, expected in ((0.2, 393.4), (0.5, 63.8), (0.8, 25.5)):
        assert mean_sample_size(1.0, effect, 0.05, 0.8) == pytest.approx(expected, abs=0.1)


def test_the_planned_number_has_the_power() -> None:
    """Exact sum over all pairs of counts: the score test refuses with 80%, up to the steps of the counts."""
    number = plan_sample_size(arm([1.0] * 3 + [0.0] * 7), 0.3, 0.8).scored
    power = sum(
        binom.pmf(new, number, 0.6) * binom.pmf(old, number, 0.3)
        for new in range(number + 1)
        for old in range(number + 1)
        if RateDifference((new, number), (old, number)).p_value <= 0.05
    )
    assert power == pytest.approx(0.8, abs=0.02)


def test_missing_outcomes_clusters_and_looks_ask_for_more() -> None:
    alone = plan_sample_size(arm([1.0, 0.0] * 50), 0.1, 0.8)
    assert alone.conversations == alone.scored == pytest.approx(388, abs=1)
    missing = plan_sample_size(arm([1.0, 0.0] * 50 + [None] * 25), 0.1, 0.8)
    assert (missing.scored, missing.conversations) == (alone.scored, -(-alone.scored * 5 // 4))
    # Every conversation twice: the design effect is 2 but for the 99 / 98 of the variances.
    twice = plan_sample_size(arm([1.0, 0.0] * 50, [f"k{i % 50}" for i in range(100)]), 0.1, 0.8)
    assert twice.design_effect == pytest.approx(2 * 99 / 98)
    looks = plan_sample_size(arm([1.0, 0.0] * 50), 0.1, 0.8, looks=Looks(1, (1 / 3, 2 / 3, 1.0), "pocock"))
    assert looks.scored / alone.scored == pytest.approx(1.166, abs=0.003)
    assert looks.per_look[-1] == looks.conversations == pytest.approx(3 * looks.per_look[0], abs=2)


@pytest.mark.parametrize("outcomes", [[0.5], [0.1] * 30], ids=["one", "equal"])
def test_graded_outcomes_without_spread_plan_nothing(outcomes: list[float | None]) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl holds .* how much graded outcomes vary"):
        plan_sample_size(arm(outcomes), 0.1, 0.8)
    assert plan_sample_size(arm([*outcomes, 0.2]), 0.1, 0.8).scored >= 2
    # Rates need none; 1 and 0.5 by hand: (1.959964 sqrt(0.375) + 0.841621 sqrt(0.25))^2 / 0.25 = 10.5.
    assert plan_sample_size(arm([1.0]), -0.5, 0.8).scored == 11


def test_one_cluster_cannot_tell_what_clusters_cost() -> None:
    one = plan_sample_size(arm([1.0, 0.0] * 50, ["k"] * 100), 0.1, 0.8)
    assert one.design_effect is None
    assert one.scored == plan_sample_size(arm([1.0, 0.0] * 50), 0.1, 0.8).scored
    assert "what clusters cost is unknown with one alone" in _planned(one)
    assert as_json(None, one)["plan"]["design_effect"] is None


def test_no_rate_is_above_one() -> None:
    with pytest.raises(UserError, match=r"--detect is 0\.6, but the success rate of a\.jsonl is 0\.500"):
        plan_sample_size(arm([1.0, 0.0]), 0.6, 0.8)
    with pytest.raises(UserError, match="none with an outcome"):
        plan_sample_size(arm([None]), 0.1, 0.8)
