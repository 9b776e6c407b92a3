from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_verifiers
import guessing_games
import pytest

from lightning_mtrl.assembly import collectors
from lightning_mtrl.environments import Observation, Scored, Transition, Verifiers
from lightning_mtrl.environments.protocol import held_out
from lightning_mtrl.errors import UserError
from lightning_mtrl.models.tiny import load_tiny
from lightning_mtrl.parsing import build_environment, load_config
from lightning_mtrl.rollouts.environment_calls import Failure, ask
from lightning_mtrl.rollouts.tokens import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]
GAME = "guessing_games:load_environment"


def real() -> Any:
    """The library itself, in a release that can be played."""
    found = pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")
    if not hasattr(found, "MultiTurnEnv"):
        pytest.skip("this release of verifiers has no MultiTurnEnv")
    return found


@pytest.fixture(params=["stand-in", "verifiers"])
def vf(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What `import verifiers` gives: a stand-in, and the library itself where it is installed."""
    guessing_games.CLEANED.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if request.param == "stand-in":
        for name, module in fake_verifiers.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    yield sys.modules["verifiers"] if request.param == "stand-in" else real()
    # The library's environments take these for themselves, and a run has handlers of its own.
    assert {number: signal.getsignal(number) for number in before} == before


def begun(game: Verifiers, seed: int = 0) -> tuple[Verifiers, Observation]:
    game = deepcopy(game)  # as the collector does
    (first,) = ask([partial(game.reset, seed)], Observation)
    assert isinstance(first, Observation), first
    return game, first


def said(game: Verifiers, *responses: str | None) -> list[Any]:
    return [ask([partial(game.step, response)], Transition)[0] for response in responses]


def halving(game: Verifiers, low: int = 1, high: int = 20) -> list[Transition]:
    answers: list[Transition] = []
    while not answers or not answers[-1].terminated:
        guess = (low + high) // 2
        answers += said(game, str(guess))
        low, high = (guess + 1, high) if answers[-1].observation == "Higher." else (low, guess - 1)
    return answers


def test_the_rubric_scores_the_game_that_the_environment_ends(vf: Any) -> None:
    game = Verifiers(GAME)
    lengths = Counter()
    for seed in range(12):
        playing, _ = begun(game, seed)
        answers = halving(playing)
        last = answers[-1]
        # By hand: 1 for the number and half of one over the number of turns; 2^5 - 1 >= 20.
        expected = {1: 1.5, 2: 1.25, 3: 1 + 1 / 6, 4: 1.125, 5: 1.1}[len(answers)]
        assert last.info["outcome"] == last.reward == pytest.approx(expected)
        assert (last.terminated, last.truncated) == (True, False)
        assert last.info["metrics"]["found"] == 1.0
        assert [answer.reward for answer in answers[:-1]] == [0.0] * (len(answers) - 1)
        lengths[len(answers)] += 1
        if len(answers) < 5:
            assert (last.observation, last.info["stop_condition"]) == ("Right!", "has_final_env_response")
        else:  # the limit of turns is looked at before the environment would answer
            assert (last.observation, last.info["stop_condition"]) == ("", "max_turns_reached")
    assert len(lengths) > 1


def test_the_policy_gets_the_row_and_evaluators_get_the_facts(vf: Any) -> None:
    _, first = begun(Verifiers(GAME, {"numbers": [7, 7]}))
    assert (first.system, first.text) == (guessing_games.SYSTEM, "From 7 on?")
    assert first.info["answer"] == "7"
    assert set(first.info) == {"example_id", "answer"}


def test_a_condition_of_the_environment_ends_the_game_and_abstaining_is_an_empty_response(vf: Any) -> None:
    game, _ = begun(Verifiers(GAME, {"numbers": [7, 7]}))
    answers = said(game, "9", None, "I give up")
    assert [answer.observation for answer in answers] == ["Lower.", "Higher.", ""]
    assert answers[-1].info["stop_condition"] == "gave_up"
    assert answers[-1].info["outcome"] == pytest.approx(0.5 / 3)
    assert guessing_games.CLEANED == ["7"]


def test_games_side_by_side_do_not_mix(vf: Any) -> None:
    game = Verifiers(GAME)
    one, two = begun(game, 3), begun(game, 5)
    answers = [said(one[0], "10")[0], said(two[0], "10")[0], said(one[0], "11")[0], said(two[0], "11")[0]]
    alone = [said(begun(game, seed)[0], "10", "11") for seed in (3, 5)]
    assert [answers[0::2], answers[1::2]] == alone
    assert one[1] != two[1]


def _numbers(game: Any, seeds: int = 60) -> set[str]:
    return {begun(game, seed)[1].info["answer"] for seed in range(seeds)}


def test_validation_draws_rows_that_nothing_is_learnt_from(vf: Any) -> None:
    game = Verifiers(GAME, {"numbers": list(range(10))}, held_out_share=0.3)
    learnt, kept = _numbers(game), _numbers(held_out(Scored(game, len)))
    assert (len(learnt), len(kept)) == (7, 3)
    assert learnt.isdisjoint(kept)
    assert _numbers(held_out(Verifiers(GAME, {"numbers": list(range(10))}, held_out_share=0.3))) == kept
    both = Verifiers(GAME, {"numbers": [1, 2, 3]}, held_out_share=0)
    assert _numbers(both) == _numbers(held_out(both)) == {"1", "2", "3"}


def test_validation_draws_from_the_data_for_evaluation_where_there_are_any(vf: Any) -> None:
    game = Verifiers(GAME, {"numbers": [1, 2, 3], "evaluation": [8, 9]})
    assert (_numbers(game), _numbers(held_out(game))) == ({"1", "2", "3"}, {"8", "9"})
    assert begun(game, 5)[1] == begun(game, 5)[1]


@pytest.mark.parametrize("name", ["raises", "raises_later", "says_nothing", "endless"])
def test_a_rubric_that_fails_gives_no_outcome(vf: Any, name: str) -> None:
    game, _ = begun(Verifiers(GAME, {"numbers": [7, 7], "rewards": ["found", name]}))
    (answer,) = said(game, "I give up")
    assert isinstance(answer, Failure)


def test_a_metric_without_weight_may_fail(vf: Any) -> None:
    options = {"numbers": [7, 7], "rewards": ["found", "raises"], "weights": [1.0, 0.0]}
    game, _ = begun(Verifiers(GAME, options))
    assert said(game, "7")[0].info["outcome"] == 1.0


def test_an_environment_that_fails_costs_its_own_game_only_and_cleans_up(vf: Any) -> None:
    game = Verifiers(GAME, {"numbers": [7, 7]})
    games = [begun(game)[0] for _ in range(4)]
    words = ("crash", "tool", "forget", "7")
    answers = ask([partial(each.step, word) for each, word in zip(games, words, strict=True)], Transition)
    assert [isinstance(answer, Failure) for answer in answers] == [True, True, True, False]
    causes = [answer.cause for answer in answers if isinstance(answer, Failure)]
    assert causes[0] == "Error: the game fell over"
    assert "'tool'" in causes[1]
    assert "changed what was said" in causes[2]
    assert guessing_games.CLEANED == ["7"] * 4


def test_rewards_of_a_range_become_outcomes_from_0_to_1(vf: Any) -> None:
    options = {"numbers": [7, 7]}
    game, _ = begun(Verifiers(GAME, options, reward_range=(0.5, 1.5)))
    assert said(game, "9", "7")[-1].info["outcome"] == pytest.approx(0.75)  # 1.25 lies at three quarters
    rounded, _ = begun(Verifiers(GAME, {**options, "weights": [0.1, 0.2]}, reward_range=(0.0, 0.3)))
    assert said(rounded, "7")[0].info["outcome"] == 1.0  # 0.1 + 0.2 > 0.3
    beyond, _ = begun(Verifiers(GAME, options, reward_range=(0.0, 1.0)))
    (answer,) = said(beyond, "7")
    assert isinstance(answer.error, UserError)
    assert "gave 1.5" in str(answer.error)


@pytest.mark.parametrize(
    ("env_id", "settings", "told"),
    [
        ("guessing_games:nothing", {}, "nothing"),
        ("no_such_module:load", {}, "no_such_module"),
        ("no-such-game", {}, "no-such-game"),
        (GAME, {"options": {"colour": 3, "numbers": [1]}}, "colour|rows"),
        (GAME, {"options": {"numbers": [1]}}, "has 1 rows"),
        (GAME, {"options": {"rewards": ["ranks"]}}, "against each other"),
        (GAME, {"options": {"rewards": ["found"], "weights": [0.0]}}, "scores nothing"),
        (GAME, {"options": {"score_rollouts": False}}, "scores nothing"),
        (GAME, {"options": {"examples": True}}, "messages of assistant"),
        ("guessing_games:load_with_tools", {}, "tools \\(peek\\)"),
        ("guessing_games:load_no_game", {}, "which gives str"),
        (GAME, {"held_out_share": 1.0}, "held_out_share"),
        (GAME, {"reward_range": (1.0, 0.0)}, "reward_range"),
    ],
)
def test_what_cannot_be_played_is_told_when_it_is_made(
    vf: Any, env_id: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        Verifiers(env_id, **settings)


def test_a_row_with_tools_is_refused(vf: Any) -> None:
    game = deepcopy(Verifiers(GAME, {"row_tools": True}))
    (answer,) = ask([partial(game.reset, 0)], Observation)
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, UserError)


def test_an_installed_environment_is_loaded_by_its_name(vf: Any) -> None:
    _, first = begun(Verifiers("guessing-games", {"numbers": [4, 4]}))
    assert first.info["answer"] == "4"


def test_another_release_is_refused_in_one_line_and_a_missing_one_too(monkeypatch: Any) -> None:
    newer = ModuleType("verifiers")
    newer.__version__ = "0.4.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", newer)
    with pytest.raises(UserError, match=r"^verifiers 0\.4\.0 .*MultiTurnEnv.*pip install .*<0\.4'$") as error:
        Verifiers(GAME)
    assert len(str(error.value).splitlines()) == 1
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match="not installed"):
        Verifiers(GAME)


def test_it_is_played_as_the_library_plays_it_itself() -> None:
    vf = real()
    scripts = (["9", "3", "7"], ["", "I give up"], ["1"] * 5, ["7"])

    class Script(vf.Client):  # type: ignore[misc, name-defined]
        async def get_response(self, **asked: Any) -> Any:
            message = vf.ResponseMessage(content=next(self.left), finish_reason="stop", is_truncated=False)
            return vf.Response(id="1", created=0, model="script", message=message)

    Script.__abstractmethods__ = frozenset()

    async def own(script: list[str]) -> Any:
        environment = guessing_games.load_environment([7, 7])
        client = Script(None)
        client.left = iter(script)
        state = await environment.rollout(environment.get_dataset()[0], client, "script", {})
        await environment.rubric.score_rollout(state)
        return state

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    game = Verifiers(GAME, {"numbers": [7, 7]})
    for script in scripts:
        state = asyncio.run(own(script))
        answers = said(begun(game)[0], *script)
        heard = [message.content for message in state["completion"] if message.role == "user"]
        assert [answer.observation for answer in answers if answer.observation] == heard
        assert answers[-1].info["outcome"] == state["reward"]
        assert answers[-1].info["metrics"] == state["metrics"]
        assert answers[-1].info["stop_condition"] == state["stop_condition"]
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_embedded_model_plays_it_out_of_a_configuration(vf: Any) -> None:
    config = load_config(
        ROOT / "configs" / "quickstart.yaml",
        overrides=[
            "--environment=lightning_mtrl.environments.Verifiers",
            f"--environment.env_id={GAME}",
            "--environment.options={'numbers': [1, 2, 3, 4, 5, 6], 'max_turns': 3}",
            "--environment.held_out_share=0.5",
            "--environment.reward_range=[0, 1.5]",
            "--data.max_response_tokens=8",
        ],
    )
    environment = build_environment(config)
    model, tokenizer = load_tiny()
    both = collectors(config, environment, ChatTokenizer(tokenizer), 256, show_progress=False)
    numbers = []
    for collector in both:
        rollouts = collector.collect(model, conversations=24, seed=1, policy="pi")
        assert len(rollouts.conversations) == 24
        for talk in rollouts.conversations:
            number = talk.metadata["facts"]["answer"]
            found = [turn.response for turn in talk.turns].count(number)
            assert talk.terminated
            assert talk.outcome == pytest.approx((found + 0.5 / len(talk.turns)) / 1.5)
            assert {turn.observation for turn in talk.turns} <= {"Higher.", "Lower.", "Right!", ""}
        numbers.append({talk.metadata["facts"]["answer"] for talk in rollouts.conversations})
    assert numbers[0].isdisjoint(numbers[1])
    assert len(numbers[0] | numbers[1]) == 6
