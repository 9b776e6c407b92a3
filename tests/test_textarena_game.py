"""The example that learns a game of TextArena."""

from __future__ import annotations

import json
import subprocess
import sys
from math import sqrt
from pathlib import Path
from types import ModuleType

import pytest

from lightning_mtrl.environments import Environment
from lightning_mtrl.parsing import build_environment, load_config

pytest.importorskip("textarena", reason="the extra `games` is not installed")
ROOT = Path(__file__).resolve().parent.parent
GAME = ROOT / "examples" / "textarena_game"


@pytest.fixture
def environment() -> Environment:
    return build_environment(load_config(GAME / "game.yaml"))


@pytest.fixture
def secretary(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _imported("secretary", monkeypatch)


@pytest.fixture
def warm_start(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _imported("warm_start", monkeypatch)


def _imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(GAME)
    __import__(name)
    return sys.modules.pop(name)


def test_the_policy_is_told_one_decimal_of_each_number_and_how_it_ended(environment: Environment) -> None:
    heard = [environment.reset(seed=3).text]
    for _ in range(5):
        answer = environment.step("continue")
        heard.append(answer.observation)
    # The numbers of this game are 0.2380, 0.5442, 0.3700, 0.6039 and 0.6257; who always goes on has the last.
    # The decimals at the end are those of the number that was taken and of the largest.
    assert heard == ["2", "5", "3", "6", "6", "6 6 won"]
    assert (answer.terminated, answer.reward) == (True, 1.0)
    environment.reset(seed=3)
    assert environment.step("accept").observation == "2 6 lost"


def test_an_illegal_move_is_answered_briefly_and_a_second_one_loses(
    environment: Environment,
) -> None:
    environment.reset(seed=3)
    answers = [environment.step("perhaps"), environment.step(None)]
    assert answers[0].observation == "accept or continue"
    assert (answers[1].terminated, answers[1].reward, answers[1].info["invalid_move"]) == (True, 0.0, True)


def test_the_best_chance_is_the_known_one(secretary: ModuleType) -> None:
    # Nothing to see: any of n numbers is the largest with 1 / n.
    assert [secretary.best_chance(n, levels=1) for n in (1, 2, 5)] == pytest.approx([1, 1 / 2, 1 / 5])
    # Two numbers, halves: take the first in the upper half, where 3 of 4 others are below, else the last.
    assert secretary.best_chance(2, levels=2) == pytest.approx(3 / 4)
    # All decimals: 0.6843 for three numbers and 0.6392 for five (Gilbert and Mosteller 1966).
    assert secretary.best_chance(3, levels=400) == pytest.approx(0.6843, abs=2e-4)
    assert secretary.best_chance(5, levels=400) == pytest.approx(0.6392, abs=2e-4)
    assert secretary.best_chance(5, levels=10) < secretary.best_chance(5, levels=100) < 0.6392


def test_the_hand_written_player_is_close_to_the_best(
    secretary: ModuleType, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secretary, "GAMES", 400)
    error = sqrt(0.25 / 400)
    won = secretary.share_won(environment, secretary.by_hand)
    assert 0.6 - 3 * error < won < secretary.best_chance() + 3 * error


def test_warm_up_games_are_legal_and_their_moves_know_nothing_of_the_numbers(
    warm_start: ModuleType, environment: Environment
) -> None:
    games = [warm_start.play(environment, ("accept", "continue"), seed) for seed in range(600)]
    assert {turn.response for game in games for turn in game.turns} == {"accept", "continue"}
    assert not any(turn.info.get("invalid_move") for game in games for turn in game.turns)
    # Taken at once as often where the first number is small as where it is large.
    taken: dict[bool, list[bool]] = {True: [], False: []}
    for game in games:
        taken[int(game.prompt[0].content) >= 5].append(game.turns[0].response == "accept")
    large, small = (sum(found) / len(found) for found in taken.values())
    assert abs(large - small) < 4 * sqrt(0.25 / len(taken[True]) + 0.25 / len(taken[False]))
    # A player who knows nothing wins one game in five.
    assert sum(game.outcome for game in games) / 600 == pytest.approx(0.2, abs=4 * sqrt(0.16 / 600))


def test_the_interval_over_seeds_is_students(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gains = _imported("gains", monkeypatch)
    for name, last in (("a", 0.3), ("b", 0.5)):
        (tmp_path / name).mkdir()
        rows = [{"success_rate": rate, "conversations": 10, "dropped": {}} for rate in (0.2, 0.9, last)]
        (tmp_path / name / "summary.json").write_text(json.dumps({"iterations": rows}))
    gains.main([str(tmp_path / "a"), str(tmp_path / "b")])
    # Gains 0.1 and 0.3: mean 0.2, standard error 0.1, and t(1) has 12.706 at 97.5%.
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "mean gain +0.200, 95% t interval over 2 seeds [-1.071, +1.471]"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_iterations_lead_from_random_legal_play_far_beyond_it(tmp_path: Path) -> None:
    """The example's commands with seed 0, two iterations in place of five, and fewer games to measure.

    On five seeds (0 to 4) the second policy won 0.580, 0.586, 0.466, 0.562 and 0.570 of 1,024 games. The
    bound of 0.35 is 5.3 standard errors of 512 games below the lowest, and 8.5 above random legal play, so
    chance in the measurement alone raises a false alarm less than once in 10^6, and lets a policy pass that
    learned nothing less than once in 10^16. The spread of learning itself is known from those seeds only
    (their standard deviation is 0.049); the seeds are the same on every machine.
    """
    start, run = tmp_path / "start", tmp_path / "run"
    config = f"--config={GAME / 'game.yaml'}"
    moves = ["--moves", "accept", "continue", "--seed=0"]
    _done([GAME / "warm_start.py", config, *moves, f"--output={start}"])
    fewer = ["--loop.iterations=2", "--validation.conversations=512"]
    fit = ["-m", "lightning_mtrl", "fit", config, f"--model.name={start}", f"--run_dir={run}", "--seed=0"]
    _done([*fit, *fewer])
    first, *_, last = json.loads((run / "summary.json").read_text())["iterations"]
    # Who knows nothing wins one game in five; that is left by 4 standard errors once in 15,000.
    assert abs(first["success_rate"] - 0.2) < 4 * sqrt(0.2 * 0.8 / 512)
    assert last["success_rate"] > 0.35
    assert last["dropped"] == {}


def _done(arguments: list[object]) -> None:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
