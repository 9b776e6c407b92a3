from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torchmetrics.text import BLEUScore, CharErrorRate

from lightning_mtrl.environments import MetricScore, Observation, Scored, Transition
from lightning_mtrl.environments.scored import Talk
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import build_environment, load_config
from lightning_mtrl.rollouts.environment_calls import Failure, ask


class Writer:
    """Two turns; a reward for each, and a hidden text to be written."""

    tiny_model = "tasks"

    def __init__(self, truncates: bool = False) -> None:
        self.truncates = truncates

    def reset(self, seed: int) -> Observation:
        self.turns = 0
        return Observation("Write it.", info={"text": "the cat sat on the mat"})

    def step(self, response: str | None) -> Transition:
        self.turns += 1
        over = self.turns == 2
        cut = over and self.truncates
        return Transition(f"heard {self.turns}", 1.0, over and not cut, cut, {"turns": self.turns})


class SlowWriter(Writer):
    async def step(self, response: str | None) -> Transition:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(response)


def words(talk: Talk) -> float:
    """How many words the agent said, of ten."""
    return sum(len((text or "").split()) for text in talk.responses) / 10


def _play(environment: Any, *said: str | None) -> list[Any]:
    environment.reset(0)
    return [ask([lambda text=text: environment.step(text)], Transition)[0] for text in said]


@pytest.mark.parametrize("inner", [Writer(), SlowWriter()])
def test_a_function_of_the_conversation_takes_the_place_of_rewards(inner: Any) -> None:
    first, last = _play(Scored(inner, words), "one two", "three four five")
    assert (first.reward, first.terminated) == (0.0, False)
    assert (last.reward, last.info["outcome"], last.terminated) == (0.5, 0.5, True)


def test_a_score_sees_what_was_said_and_what_is_hidden() -> None:
    seen: list[Talk] = []
    _play(Scored(Writer(), lambda talk: seen.append(talk) or 1.0), "a", None)
    (talk,) = seen
    assert (talk.prompt, talk.responses) == ("Write it.", ("a", None))
    assert talk.observations == ("heard 1", "heard 2")
    assert talk.facts == {"text": "the cat sat on the mat", "turns": 2}
    assert talk.outcome == 2.0


def test_a_conversation_that_a_limit_cut_off_has_no_score() -> None:
    last = _play(Scored(Writer(truncates=True), words), "a", "b")[-1]
    assert (last.truncated, last.reward) == (True, 0.0)
    assert "outcome" not in last.info


@pytest.mark.parametrize(
    ("metric", "said", "outcome"),
    [
        (MetricScore(BLEUScore(), "text", listed=True), "the cat sat on the mat", 1.0),
        (MetricScore(BLEUScore(), "text", listed=True), "dogs run", 0.0),
        # 22 letters and spaces, of which one is wrong.
        (MetricScore(CharErrorRate(), "text", sign=-1.0), "the cat sat on the hat", -1 / 22),
    ],
)
def test_a_metric_compares_the_last_response_with_a_fact(metric: Any, said: str, outcome: float) -> None:
    scored = Scored(Writer(), metric)
    for _ in range(2):  # the metric does not remember the conversation before
        assert _play(scored, "first", said)[-1].info["outcome"] == pytest.approx(outcome)


@pytest.mark.parametrize(
    "score", [lambda talk: float("nan"), lambda talk: 1 / 0, MetricScore(BLEUScore(), "none")]
)
def test_a_score_that_fails_costs_that_conversation(score: Any) -> None:
    assert isinstance(_play(Scored(Writer(), score), "a", "b")[-1], Failure)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(UserError, match="score is 3"):
        Scored(Writer(), 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="torchmetrics"):
        MetricScore("bleu", "text")


def test_a_configuration_names_environment_and_score(tmp_path: Path) -> None:
    (tmp_path / "scored.yaml").write_text(
        """
environment:
  class_path: lightning_mtrl.environments.Scored
  init_args:
    environment: {class_path: lightning_mtrl.environments.DocumentWriting}
    score:
      class_path: lightning_mtrl.environments.MetricScore
      init_args: {metric: {class_path: torchmetrics.text.BLEUScore}, target: document, listed: true}
"""
    )
    config = load_config(tmp_path / "scored.yaml")
    environment: Any = build_environment(config)
    assert isinstance(environment.score.metric, BLEUScore)
    assert environment.tiny_model == "tasks"


def test_a_configuration_names_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_score.py").write_text(
        "def brief(talk):\n    return 1.0 if len(talk.responses) < 3 else 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scored.yaml").write_text(
        "environment:\n  class_path: Scored\n  init_args:\n"
        "    environment: {class_path: lightning_mtrl.environments.SuggestedResponse}\n"
        "    score: my_score.brief\n"
    )
    environment: Any = build_environment(load_config(tmp_path / "scored.yaml"))
    assert environment.score.__name__ == "brief"
