from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.evaluation.arms import Arm, outcome_only
from lightning_mtrl.evaluation.compare import Comparison, compare, holm
from lightning_mtrl.evaluation.looks import Looks

THIRDS = (1 / 3, 2 / 3, 1.0)


def arm(
    role: str,
    outcomes: Sequence[float | None],
    metadata: Sequence[dict[str, Any]] | None = None,
    **about: Any,
) -> Arm:
    conversations = [
        Conversation(
            f"c-{place}", (), (), outcome=outcome, metadata=metadata[place] if metadata else {}, **about
        )
        for place, outcome in enumerate(outcomes)
    ]
    return Arm(role, f"{role}.jsonl", conversations)


def drawn(role: str, rate: float, number: int, seed: list[int]) -> Arm:
    draws = np.random.default_rng(seed).random(number) < rate
    return arm(role, [float(draw) for draw in draws])


def first(one: Arm, share: float) -> Arm:
    return Arm(one.role, one.file, one.conversations[: round(share * len(one.conversations))])


def alarm(found: Comparison) -> bool:
    return found.verdict != "no difference shown"


def test_identical_policies_are_found_different_in_5_percent() -> None:
    """200 repetitions of 500 against 500. The number of alarms is binomial with 0.05: other seeds would leave
    5% +- 3% once in 30 runs."""
    alarms = sum(
        alarm(compare(drawn("baseline", 0.3, 500, [0, i]), drawn("candidate", 0.3, 500, [1, i])))
        for i in range(200)
    )
    assert 0.02 <= alarms / 200 <= 0.08


@pytest.mark.parametrize("boundary", ["obrien_fleming", pytest.param("pocock", marks=pytest.mark.slow)])
def test_three_looks_find_them_different_in_5_percent_too(boundary: str) -> None:
    """The same with a look after each third; a comparison is wrong if any look is. Uncorrected it would be in
    10.7% (Armitage, McPherson and Rowe 1969, table 2)."""
    alarms = 0
    for i in range(200):
        old, new = drawn("baseline", 0.3, 500, [0, i]), drawn("candidate", 0.3, 500, [1, i])
        looks = [Looks(number, THIRDS, boundary) for number in (1, 2, 3)]
        alarms += any(
            alarm(
                compare(
                    first(old, at.fractions[at.number - 1]), first(new, at.fractions[at.number - 1]), looks=at
                )
            )
            for at in looks
        )
    assert 0.02 <= alarms / 200 <= 0.08


def test_customers_with_many_conversations_raise_no_false_alarms() -> None:
    """100 customers a side, each with five alike conversations: 200 repetitions find one in 5% +- 3.5%,
    which other seeds would leave once in 70 runs. Taken for independent they would in more than a quarter."""
    alarms = naive = 0
    for i in range(200):
        rng = np.random.default_rng([2, i])
        sides = []
        for role in ("baseline", "candidate"):
            rates = np.repeat(rng.beta(0.3, 0.7, 100), 5)
            about = [{"customer": f"{role}-{place // 5}", "each": place} for place in range(500)]
            sides.append(arm(role, [float(x) for x in rng.random(500) < rates], about))
        alarms += alarm(compare(*sides))
        naive += alarm(compare(*sides, cluster="each")) if i < 40 else 0
    assert 0.015 <= alarms / 200 <= 0.085
    assert naive >= 8


def test_what_has_no_outcome_is_counted_and_no_zero() -> None:
    found = compare(arm("baseline", [1.0, 0.0, None, None]), arm("candidate", [1.0, 1.0, 0.0, 0.0]))
    assert (found.baseline.missing, found.candidate.missing) == (2, 0)
    assert found.whole.sizes == (2, 4)
    assert found.whole.means == (0.5, 0.5)
    assert found.whole.difference is not None
    assert found.whole.difference.estimate == 0.0
    with pytest.raises(
        UserError, match=r"--candidate: candidate\.jsonl holds 2 conversations, but none with an"
    ):
        compare(arm("baseline", [1.0]), arm("candidate", [None, None]))


def test_unequal_shares_without_an_outcome_are_told() -> None:
    found = compare(arm("baseline", [1.0] * 100), arm("candidate", [1.0] * 80 + [None] * 20))
    assert any("0.0% and 20.0% of baseline and candidate" in note for note in found.notes)
    assert compare(arm("baseline", [1.0] * 100), arm("candidate", [1.0] * 99 + [None])).notes == ()


def test_truncated_conversations_are_told() -> None:
    cut = arm("candidate", [0.0, None], terminated=False, truncated=True)
    found = compare(arm("baseline", [1.0]), cut)
    assert found.candidate.truncated == 2
    assert "candidate: 1 truncated conversation with an outcome, which counts." in found.notes


def test_outcomes_on_two_scales_are_told() -> None:
    rates, graded = [1.0, 0.0] * 20, [float(place % 11) for place in range(40)]
    told = "Outcomes of the baseline are 0 and 1, those of the other log go up to 10: the two look like"
    assert any(told in note for note in compare(arm("baseline", rates), arm("candidate", graded)).notes)
    turned = compare(arm("baseline", graded), arm("candidate", rates)).notes
    assert any("Outcomes of the candidate are 0 and 1" in note for note in turned)
    shares = [outcome / 10 for outcome in graded]
    for one, other in ((graded, graded), (rates, rates), (rates, shares)):
        assert compare(arm("baseline", one), arm("candidate", other)).notes == ()


def test_half_a_character_in_a_segments_name_is_shown_as_an_escape() -> None:
    kinds: list[dict[str, Any]] = [{"kind": "a \ud83d"}] * 4
    sides = [arm(role, [1.0, 0.0, 1.0, 0.0], kinds) for role in ("baseline", "candidate")]
    assert [s.segment for s in compare(*sides, segment="kind").segments] == [r"a \ud83d"]


def test_segments_are_compared_by_themselves_and_corrected() -> None:
    about = [{"facts": {"kind": "new" if i % 2 else "old"}} for i in range(400)]
    old = arm("baseline", [float(i % 4 == 0) for i in range(400)], about)
    new = arm("candidate", [float(i % 4 in (0, 1)) for i in range(400)], [*about[:399], {}])
    none, kind_new, kind_old = compare(old, new, segment="facts.kind").segments
    assert (none.segment, none.sizes, none.verdict(0.05)) == ("(none)", (0, 1), "not compared")
    assert (kind_new.segment, kind_new.verdict(0.05)) == ("new", "candidate better")
    assert (kind_old.segment, kind_old.verdict(0.05)) == ("old", "no difference shown")
    assert kind_new.p_value == pytest.approx(2 * kind_new.nominal_p_value)
    low, high = compare(
        old.segments("facts.kind")["old"], new.segments("facts.kind")["old"], alpha=0.025
    ).whole.interval
    assert kind_old.interval == pytest.approx((low, high))


def test_holms_procedure_by_hand() -> None:
    # 4 * 0.01, 3 * 0.02, then 2 * 0.03 and 0.03 are raised to what came before.
    assert holm([0.03, 0.01, 0.02, 0.03]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


def test_keys_that_nobody_has_and_keys_without_end_are_refused() -> None:
    about = [{"id": i} for i in range(150)]
    one, other = arm("baseline", [1.0] * 150, about), arm("candidate", [1.0] * 150, about)
    with pytest.raises(UserError, match=r"--segment is 'kind'.*There are: id"):
        compare(one, other, segment="kind")
    with pytest.raises(UserError, match=r"--cluster is 'kind'"):
        compare(one, other, cluster="kind")
    with pytest.raises(UserError, match="150 different values, but at most 100"):
        compare(one, other, segment="id")


@pytest.mark.parametrize("segment", [None, "all"])
def test_customers_whom_one_log_links_are_linked_in_the_other_too(segment: str | None) -> None:
    """Two customers of each group, the second of whom alone comes back: a paired test of the groups."""
    before, after = [0.1, 0.4, 0.45, 0.9, 0.3], [0.3, 0.35, 0.7, 0.85, 0.6]

    def talk(number: int, member: str, outcome: float, **about: Any) -> Conversation:
        metadata = {"customer": f"{member}{number}", "all": 1}
        return Conversation(f"{member}{number}", (), (), outcome=outcome, metadata=metadata, **about)

    old = [talk(k, m, before[k], group=k, seed=7, policy="p") for k in range(5) for m in ("a", "b")]
    new = [talk(k, "b", after[k]) for k in range(5)]
    found = compare(Arm("baseline", "a", old), Arm("candidate", "b", new), segment=segment)
    expected = ttest_rel(after, before)
    for finding in (found.whole, *found.segments):
        assert finding.p_value == pytest.approx(expected.pvalue)
        assert finding.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.clusters == (5, 5)


def test_outcomes_that_bound_no_difference_are_told() -> None:
    told = "Nothing bounds the difference"
    assert compare(arm("baseline", [0.5] * 30), arm("candidate", [0.7] * 30)).notes[0].startswith(told)
    assert compare(arm("baseline", [0.5]), arm("candidate", [0.7, 0.8])).notes[0].startswith(told)
    varied = compare(arm("baseline", [0.5] * 30), arm("candidate", [0.7] * 29 + [0.8]))
    assert not any(told in note for note in varied.notes)


def test_equal_ids_in_two_logs_are_chance_but_equal_customers_are_not() -> None:
    apart = compare(arm("baseline", [1.0, 0.0, 0.0]), arm("candidate", [1.0, 1.0, 0.0])).whole.difference
    about = [{"customer": name} for name in "abc"]
    paired = compare(
        arm("baseline", [1.0, 0.0, 0.0], about), arm("candidate", [1.0, 1.0, 0.0], about)
    ).whole.difference
    assert apart is not None
    assert paired is not None
    assert "score" in apart.method
    assert "cluster" in paired.method


def test_what_is_kept_of_a_conversation_is_all_that_is_compared() -> None:
    about = {"customer": "k", "facts": {"kind": "new", "x": 1}, "long": "text" * 100}
    slim = outcome_only(Conversation("c", (), (), outcome=1.0, metadata=about), ("facts.kind", None))
    assert slim.metadata == {"customer": "k", "facts": about["facts"], "long": None}
    assert slim.outcome == 1.0
