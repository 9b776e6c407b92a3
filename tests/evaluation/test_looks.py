from __future__ import annotations

import numpy as np
import pytest

from lightning_mtrl.evaluation.looks import BOUNDARIES, Looks, crossing_probabilities

THIRDS = (1 / 3, 2 / 3, 1.0)
FIFTHS = (0.2, 0.4, 0.6, 0.8, 1.0)


@pytest.mark.parametrize(
    ("boundary", "fractions", "expected"),
    [
        # Jennison and Turnbull 2000, tables 2.1 (Pocock) and 2.3 (O'Brien and Fleming), two-sided 0.05.
        ("obrien_fleming", THIRDS, [3.471, 2.454, 2.004]),
        ("obrien_fleming", FIFTHS, [4.562, 3.226, 2.634, 2.281, 2.040]),
        ("pocock", THIRDS, [2.289] * 3),
        ("pocock", FIFTHS, [2.413] * 5),
        # Lan and DeMets' spending, as in the table of the ldbounds package for three looks, and for two.
        ("spending", THIRDS, [3.7103, 2.5114, 1.9930]),
        ("spending", (0.5, 1.0), [2.9626, 1.9686]),
        ("obrien_fleming", (1.0,), [1.9600]),
        ("spending", (1.0,), [1.9600]),
    ],
)
def test_boundaries_are_those_of_the_tables(
    boundary: str, fractions: tuple[float, ...], expected: list[float]
) -> None:
    found = BOUNDARIES[boundary].critical_values(0.05, fractions)
    assert found == pytest.approx(expected, abs=5.1e-4)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("fractions", [THIRDS, (0.1, 0.35, 0.36, 1.0)])
def test_all_looks_together_err_with_alpha(boundary: str, fractions: tuple[float, ...]) -> None:
    """Sums of a million steps; the share of false alarms is within 4.5 standard errors, which fails once in
    100,000 runs (and never for this seed)."""
    draws = np.random.default_rng(0).standard_normal((1_000_000, len(fractions)))
    statistics = np.cumsum(draws * np.sqrt(np.diff(fractions, prepend=0.0)), axis=1) / np.sqrt(fractions)
    critical = BOUNDARIES[boundary].critical_values(0.05, fractions)
    alarms = (np.abs(statistics) > critical).any(1).mean()
    assert alarms == pytest.approx(0.05, abs=4.5 * (0.05 * 0.95 / 1e6) ** 0.5)


def test_the_chance_to_end_is_that_of_one_normal_at_one_look() -> None:
    assert crossing_probabilities([1.959964], [1.0]) == pytest.approx([0.05], abs=1e-6)
    # Power 0.8 at a drift of 1.959964 + 0.841621.
    assert crossing_probabilities([1.959964], [1.0], 2.801585) == pytest.approx([0.8], abs=1e-6)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_statistic_on_the_boundary_has_the_p_value_alpha(boundary: str, number: int) -> None:
    looks = Looks(number, THIRDS, boundary)
    assert looks.p_value(looks.nominal_level(0.01)) == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_looks_only_ever_raise_a_p_value(boundary: str) -> None:
    for number in (1, 2, 3):
        corrected = [Looks(number, THIRDS, boundary).p_value(p) for p in (0.0, 1e-12, 0.001, 0.2, 1.0)]
        assert corrected == sorted(corrected)
        assert all(c >= p * (1 - 1e-6) for c, p in zip(corrected, (0.0, 1e-12, 0.001, 0.2, 1.0), strict=True))
        assert corrected[0] == 0.0
        assert corrected[-1] == 1.0


def test_one_look_changes_nothing() -> None:
    looks = Looks()
    assert looks.p_value(0.0312) == 0.0312
    assert looks.nominal_level(0.05) == 0.05
    assert looks.inflation(0.05, 0.8) == 1.0


@pytest.mark.parametrize(
    ("boundary", "power", "expected"),
    [
        # Jennison and Turnbull 2000, tables 2.2 (Pocock) and 2.4 (O'Brien and Fleming), alpha 0.05.
        ("obrien_fleming", 0.8, 1.017),
        ("obrien_fleming", 0.9, 1.016),
        ("pocock", 0.8, 1.166),
        ("pocock", 0.9, 1.151),
    ],
)
def test_inflation_is_that_of_the_tables(boundary: str, power: float, expected: float) -> None:
    assert Looks(3, THIRDS, boundary).inflation(0.05, power) == pytest.approx(expected, abs=5.1e-4)
