"""A simulator or judge that fails gives no outcome: its conversation is dropped and counted, never a zero."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from fake_llm import Answer, FakeServer, serving
from small_models import small_chat, small_llama

from lightning_mtrl.environments import DiagnosisJudge, LLMUser
from lightning_mtrl.environments.scenarios import Scenario
from lightning_mtrl.llm.server import Server
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.results import Rollouts, TooManyFailures
from lightning_mtrl.rollouts.sampling import SamplingConfig

pytest.importorskip("openai")
TIMEOUT, HINT, RETRIES = 3.0, 0.2, 2


def _score(value: str) -> str:
    return f'{{"diagnosis": "d", "score": {value}}}'


GOOD, BAD = Answer(_score("10")), Answer(_score("0"))
BUSY = Answer(status=429, headers=(("retry-after", str(HINT)),), body="{}")
# What the server says to each attempt of each conversation; the last answer for ever.
SCRIPT = {
    1: [GOOD],
    2: [BAD],
    3: [Answer(seconds=2 * TIMEOUT)],
    4: [BUSY, BUSY, GOOD],
    5: [Answer(status=500, body="{}")],
    6: [Answer('{"diagnosis": "d", "score"')],
    7: [Answer("")],
    8: [Answer(_score('"NaN"'))],
    9: [Answer(_score("95"))],
    10: [Answer(_score("0"), cut=True), BAD],
}


class _Numbered:
    """Users whose goal and reference say which conversation they are of, in the order of their beginning."""

    def __init__(self) -> None:
        self.drawn = 0

    def __deepcopy__(self, memo: object) -> _Numbered:
        return self

    def draw(self, seed: int) -> Scenario:
        self.drawn += 1
        return Scenario("x", f"You are case {self.drawn}.", f"case {self.drawn}")


def _case_of(body: dict[str, Any]) -> int:
    found = re.search(r"case (\d+)", str(body["messages"]))
    assert found is not None
    return int(found[1])


def _is_judged(body: dict[str, Any]) -> bool:
    return "You grade diagnoses" in body["messages"][0]["content"]


def _server(judges_fail: bool) -> Callable[[dict[str, Any]], Answer]:
    """One side follows the script; the other one always does its part."""
    scripts = {number: list(answers) for number, answers in SCRIPT.items()}

    def answer(body: dict[str, Any]) -> Answer:
        if _is_judged(body) != judges_fail:
            return GOOD if _is_judged(body) else Answer("y")
        left = scripts[_case_of(body)]
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


def _collected(fake: FakeServer, max_turns: int, max_failure_share: float = 0.6) -> Rollouts:
    server = Server("fake", fake.base_url, timeout_seconds=TIMEOUT, retries=RETRIES, backoff_seconds=0.01)
    environment = LLMUser(server, _Numbered(), DiagnosisJudge(server), max_turns=max_turns)
    collector = Collector(
        environment,
        small_chat(),
        sampling=SamplingConfig(max_response_tokens=3),
        rows=10,
        context_length=96,
        max_turns=4,
        show_progress=False,
        max_failure_share=max_failure_share,
    )
    return collector.collect(small_llama(), conversations=10, seed=0, policy="pi")


def _numbers(rollouts: Rollouts) -> list[int]:
    return [int(c.id.rpartition("-")[2]) + 1 for c in rollouts.conversations]


def _times(fake: FakeServer, case: int) -> list[float]:
    return [time for body, time in zip(fake.bodies, fake.times, strict=True) if _case_of(body) == case]


def test_a_judge_that_fails_gives_no_outcome() -> None:
    with serving(_server(judges_fail=True)) as fake:
        rollouts = _collected(fake, max_turns=1)
    assert _numbers(rollouts) == [1, 2, 4, 10]
    assert [c.outcome for c in rollouts.conversations] == [1.0, 0.0, 1.0, 0.0]
    assert sum(float(c.outcome or 0.0) for c in rollouts.conversations) / len(rollouts.conversations) == 0.5
    assert all(c.terminated and not c.truncated for c in rollouts.conversations)
    counts = {
        kind: sum(number for cause, number in rollouts.dropped.items() if kind in cause)
        for kind in ("in time", "HTTP 500", "empty", "no JSON object", "does not fit", "out of range")
    }
    assert counts == {
        "in time": 1, "HTTP 500": 1, "empty": 1, "no JSON object": 1, "does not fit": 1, "out of range": 1,
    }  # fmt: skip
    assert sum(rollouts.dropped.values()) == 6
    waits = [after - before for before, after in pairwise(_times(fake, 4))]
    assert len(waits) == 2
    assert min(waits) >= HINT
    assert len(_times(fake, 5)) == 1 + RETRIES


def test_a_simulator_that_fails_gives_no_outcome() -> None:
    """Its replies are texts, so that broken JSON and numbers are something to say; the rest is the same."""
    with serving(_server(judges_fail=False)) as fake:
        rollouts = _collected(fake, max_turns=2)
    assert _numbers(rollouts) == [1, 2, 4, 6, 8, 9, 10]
    assert {c.outcome for c in rollouts.conversations} == {1.0}
    assert sum(rollouts.dropped.values()) == 3
    for kind in ("in time", "HTTP 500", "empty"):
        assert sum(number for cause, number in rollouts.dropped.items() if kind in cause) == 1


def test_half_a_character_of_a_simulator_gives_no_outcome() -> None:
    """Its text is valid JSON and no tokens; all other conversations go on."""

    def answer(body: dict[str, Any]) -> Answer:
        said = "y \ud83d" if _case_of(body) == 3 else "y"
        return GOOD if _is_judged(body) else Answer(said)

    with serving(answer) as fake:
        rollouts = _collected(fake, max_turns=2)
    assert _numbers(rollouts) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    cause = "ValueError: Transition.observation holds half of a character (a lone surrogate)"
    assert rollouts.dropped == {cause: 1}


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-1", "null", "true", "[1]", "1e999"])
def test_a_score_that_is_no_number_in_range_is_no_outcome(score: str) -> None:
    script = {1: GOOD, 2: Answer(_score(score))}
    with serving(lambda body: script.get(_case_of(body), BAD)) as fake:
        rollouts = _collected(fake, max_turns=1)
    assert _numbers(rollouts) == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert [c.outcome for c in rollouts.conversations] == [1.0, *[0.0] * 8]
    assert sum(rollouts.dropped.values()) == 1


def test_more_failures_than_the_share_stop_the_collection_which_keeps_what_it_has() -> None:
    with serving(_server(judges_fail=True)) as fake, pytest.raises(TooManyFailures) as stopped:
        _collected(fake, max_turns=1, max_failure_share=0.5)
    assert _numbers(stopped.value.rollouts) == [1, 2, 4, 10]
    assert "6 conversations failed" in str(stopped.value)
    assert "data.max_failure_share" in str(stopped.value)
