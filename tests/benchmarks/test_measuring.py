"""Engines of the benchmarks take turns, and what is kept of them is what they said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import measuring

SCRIPT = """
import sys
sys.path.insert(0, {home!r})
import measuring
print("a library's own words")
measuring.report(engine=sys.argv[1])
for number in measuring.turns():
    with open({log!r}, "a") as log:
        log.write(sys.argv[1])
    measuring.report(seconds=float(number), peak_mib=100.0)
"""


@pytest.fixture
def start(tmp_path: Path) -> list[str]:
    script = tmp_path / "engine.py"
    home = str(Path(measuring.__file__).parent)
    script.write_text(SCRIPT.format(home=home, log=str(tmp_path / "log")))
    return [sys.executable, str(script)]


@pytest.mark.timeout(300)
def test_engines_warm_up_once_and_then_take_turns(start: list[str], tmp_path: Path) -> None:
    ours, peer = measuring.take_turns([[*start, "a"], [*start, "b"]], rounds=3)
    assert (tmp_path / "log").read_text() == "ab" + "ababab"
    assert (ours.facts, peer.facts) == ({"engine": "a"}, {"engine": "b"})
    # The turn to warm up is number 0, and is not counted.
    assert [row["seconds"] for row in ours.taken] == [1.0, 2.0, 3.0]
    assert ours.summary()["median"] == {"seconds": 2.0, "peak_mib": 100.0}


@pytest.mark.timeout(300)
def test_an_engine_that_ends_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended with status 3"):
        measuring.Engine([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_peak_of_memory_is_that_since_the_count_began() -> None:
    measuring.give_back()
    before = measuring.peak_mib()
    held = bytearray(64 * 2**20)
    assert measuring.peak_mib() >= before + 60
    del held
    measuring.give_back()
    assert measuring.peak_mib() < before + 30


def test_a_table_is_markdown() -> None:
    assert measuring.table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
