"""Is a candidate better than a baseline? Two logs, one answer, also by segment and before all has come in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_mtrl.counting import by_cause, counted
from lightning_mtrl.errors import UserError
from lightning_mtrl.evaluation.arms import Arm
from lightning_mtrl.evaluation.looks import Looks
from lightning_mtrl.evaluation.rates import RateDifference
from lightning_mtrl.evaluation.samples import Difference, Sample, difference

MAX_SEGMENTS = 100
FEW_CLUSTERS = 20


@dataclass(frozen=True)
class Finding:
    """What two samples say.

    Attributes:
        segment: value of the segment's key; None for all conversations.
        sizes: conversations with an outcome of baseline and candidate.
        means: success rates or mean outcomes of the two; NaN where there is nothing.
        difference: candidate minus baseline; None where one side has nothing.
        interval: of it, corrected for looks and for the number of segments.
        nominal_p_value: of the test by itself.
        p_value: corrected for looks and segments; 1 where nothing could be compared.
    """

    segment: str | None
    sizes: tuple[int, int]
    means: tuple[float, float]
    difference: Difference | None
    interval: tuple[float, float]
    nominal_p_value: float
    p_value: float

    def verdict(self, alpha: float) -> str:
        """In words, at level `alpha`."""
        if self.difference is None:
            return "not compared"
        if self.p_value > alpha or self.difference.estimate == 0:
            return "no difference shown"
        return "candidate better" if self.difference.estimate > 0 else "candidate worse"


@dataclass(frozen=True)
class Comparison:
    """The answer.

    Attributes:
        baseline: one side.
        candidate: the other.
        alpha: chance to find a difference where there is none, over all looks.
        looks: when it is looked at.
        whole: all conversations.
        segments: one for each value of the key, in order.
        intervals: of the means of baseline and candidate, at confidence 1 - alpha.
        binary: True when all outcomes are 0 or 1, so that means are rates.
        clusters: number of clusters of the two sides.
        notes: what a reader should know before believing it.
    """

    baseline: Arm
    candidate: Arm
    alpha: float
    looks: Looks
    whole: Finding
    segments: tuple[Finding, ...]
    intervals: tuple[tuple[float, float], tuple[float, float]]
    binary: bool
    clusters: tuple[int, int]
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> str:
        """In words."""
        return self.whole.verdict(self.alpha)


def compare(
    baseline: Arm,
    candidate: Arm,
    *,
    alpha: float = 0.05,
    looks: Looks = Looks(),  # noqa: B008  # frozen, so it can be shared
    cluster: str | None = None,
    segment: str | None = None,
) -> Comparison:
    """Compare two logs.

    Args:
        baseline: the policy that is there.
        candidate: the policy that may replace it.
        alpha: chance to find a difference where there is none, over all looks (and, by Holm's procedure, over
            all segments).
        looks: when it is looked at.
        cluster: key of the metadata whose conversations belong together; None: customers and groups.
        segment: key of the metadata by whose values it is compared once more.

    Raises:
        UserError: if a side has no outcome, a key is nowhere, or a segment's key has too many values.
    """
    for arm in (baseline, candidate):
        arm.expect_outcomes()
        for option, key in (("--cluster", cluster), ("--segment", segment)):
            if key is not None:
                arm.expect_key(option, key)
    old, new = baseline.sample(cluster, candidate), candidate.sample(cluster, baseline)
    whole = _find(None, new, old, looks, looks.nominal_level(alpha))
    return Comparison(
        baseline=baseline,
        candidate=candidate,
        alpha=alpha,
        looks=looks,
        whole=whole,
        segments=_by_segment(baseline, candidate, segment, cluster, alpha, looks),
        intervals=(old.interval(1 - alpha), new.interval(1 - alpha)),
        binary=old.is_binary and new.is_binary,
        clusters=(old.num_clusters, new.num_clusters),
        notes=tuple(_notes(baseline, candidate, old, new, whole)),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of several tests, corrected so that the chance of any false alarm is kept.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.

    >>> [round(p, 2) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def _find(segment: str | None, new: Sample, old: Sample, looks: Looks, level: float) -> Finding:
    sizes = (len(old), len(new))
    means = (old.mean if len(old) else math.nan, new.mean if len(new) else math.nan)
    if not min(sizes):
        return Finding(segment, sizes, means, None, (-math.inf, math.inf), 1.0, 1.0)
    found = difference(new, old)
    nominal = found.p_value
    return Finding(segment, sizes, means, found, found.interval(1 - level), nominal, looks.p_value(nominal))


def _by_segment(
    baseline: Arm, candidate: Arm, segment: str | None, cluster: str | None, alpha: float, looks: Looks
) -> tuple[Finding, ...]:
    if segment is None:
        return ()
    old, new = baseline.segments(segment), candidate.segments(segment)
    values = sorted({*old, *new})
    if len(values) > MAX_SEGMENTS:
        raise UserError(
            f"--segment is {segment!r}, which has {len(values)} different values, but at most {MAX_SEGMENTS} "
            f"can be compared: with so many, no segment's difference can be told from chance. Name a coarser "
            f"key."
        )
    empty = Sample.of([])

    def sample(arms: dict[str, Arm], others: dict[str, Arm], value: str) -> Sample:
        return arms[value].sample(cluster, others.get(value)) if value in arms else empty

    pairs = [(value, sample(new, old, value), sample(old, new, value)) for value in values]
    compared = max(1, sum(min(len(one), len(other)) > 0 for _, one, other in pairs))
    # Intervals that hold all together: each at the level that Holm asks of the smallest p-value.
    level = looks.nominal_level(alpha / compared)
    findings = [_find(value, one, other, looks, level) for value, one, other in pairs]
    told = [finding for finding in findings if finding.difference is not None]
    corrected = dict(zip((f.segment for f in told), holm([f.p_value for f in told]), strict=True))
    return tuple(replace(finding, p_value=corrected.get(finding.segment, 1.0)) for finding in findings)


def _notes(baseline: Arm, candidate: Arm, old: Sample, new: Sample, whole: Finding) -> list[str]:
    notes = []
    if math.isinf(whole.interval[1]):
        notes.append(
            "Nothing bounds the difference: outcomes do not vary, or are all of one conversation or cluster."
        )
    gaps = [(arm.missing, len(arm.conversations)) for arm in (candidate, baseline)]
    if RateDifference(*gaps).p_value < 0.05:
        shares = " and ".join(f"{missing / number:.1%}" for missing, number in reversed(gaps))
        notes.append(
            f"The shares without an outcome differ ({shares} of baseline and candidate); if what is missing "
            f"went otherwise than the rest, so does the comparison."
        )
    for (arm, sample), other in (((baseline, old), new), ((candidate, new), old)):
        if sample.is_binary and other.outcomes.max() > 1:
            notes.append(
                f"Outcomes of the {arm.role} are 0 and 1, those of the other log go up to "
                f"{other.outcomes.max():g}: the two look like different scales."
            )
        if arm.left_out:
            number = counted(sum(arm.left_out.values()), "record")
            notes.append(f"{arm.role}: {number} left out ({by_cause(arm.left_out)}).")
        if arm.coverage_told:
            notes.append(f"{arm.role}: {_covered(arm)}")
        kept = sum(c.truncated for c in arm.scored)
        if kept:
            truncated = counted(kept, "truncated conversation")
            notes.append(f"{arm.role}: {truncated} with an outcome, which counts.")
        if sample.num_clusters < min(len(sample), FEW_CLUSTERS):
            notes.append(
                f"{arm.role}: {sample.num_clusters} clusters are few; intervals and p-values are rough."
            )
        if len(arm.policies) > 1:
            notes.append(f"{arm.role}: the log mixes the policies {', '.join(arm.policies)}.")
    if baseline.file == candidate.file:
        notes.append("Baseline and candidate are the same file.")
    return notes


def _covered(arm: Arm) -> str:
    """What became of conversations that are not the policy's own."""
    if arm.coverage_counts:
        return f"{arm.coverage_told}, not the policy's own, are counted (--coverage count)."
    return f"{arm.coverage_told} left out: not the policy's own. --coverage count counts them."
