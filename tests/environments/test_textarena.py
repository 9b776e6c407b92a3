from __future__ import annotations

import random
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from lightning_mtrl.environments import TextArena, Transition
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import build_environment, load_config
from lightning_mtrl.rollouts.environment_calls import Failure, ask

pytest.importorskip("textarena", reason="the extra `games` is not installed")
ROOT = Path(__file__).resolve().parents[2]


def halving(
    game: TextArena, seed: int, high: int = 20, words: tuple[str, str] = ("higher", "lower")
) -> list[Transition]:
    """Guess the middle of what is left until the game is over; `words` are what the game says."""
    game.reset(seed)
    low, answers = 1, []
    while not answers or not answers[-1].terminated:
        guess = (low + high) // 2
        answers.append(game.step(f"I take [{guess}]."))
        if words[0] in answers[-1].observation:
            low = guess + 1
        elif words[1] in answers[-1].observation:
            high = guess - 1
    return answers


def test_halving_finds_every_number_within_five_guesses() -> None:
    game = TextArena("GuessTheNumber-v0")
    found = [halving(game, seed) for seed in range(12)]
    assert all(len(answers) <= 5 for answers in found)  # 2^5 - 1 >= 20
    assert {len(answers) for answers in found} > {5}
    for answers in found:
        assert [answer.reward for answer in answers] == [0.0] * (len(answers) - 1) + [1.0]
        assert answers[-1].info["outcome"] == 1.0
        assert not any(answer.truncated for answer in answers)
        assert "Congratulations" in answers[-1].observation


def test_the_prompt_says_the_rules_and_observations_do_not_repeat_the_talk() -> None:
    game = TextArena("GuessTheNumber-v0")
    begun = game.reset(seed=1)
    assert "between 1 and 20" in begun.text
    said = game.step("[1]").observation
    assert re.fullmatch(r"The target number is higher\.", said) or "Congratulations" in said


def test_equal_seeds_give_equal_games_whatever_runs_beside_them() -> None:
    alone = [halving(TextArena(), seed) for seed in (3, 4)]
    first, second = TextArena(), TextArena()
    template = TextArena()
    mixed: list[list[Transition]] = []
    for seed, game in ((3, first), (4, second)):
        random.seed(99)  # another's luck, also as it stands between two moves
        mixed.append(halving(deepcopy(game), seed))
    assert mixed == alone
    before = random.getstate()
    template.reset(5)
    template.step("[7]")
    assert random.getstate() == before


def test_games_that_are_played_in_turns_do_not_share_their_luck() -> None:
    # Blackjack draws cards as it goes on.
    def played(games: list[TextArena]) -> list[str]:
        texts = [game.reset(seed=7).text for game in games]
        for _ in range(2):
            texts += [game.step("[Hit]").observation for game in games]
        return texts

    one = played([TextArena("Blackjack-v0")])
    two = played([TextArena("Blackjack-v0"), TextArena("Blackjack-v0")])
    assert two[0::2] == one == two[1::2]


def test_a_code_is_cracked_by_the_feedback_alone() -> None:
    from itertools import permutations

    game = TextArena("Mastermind-v0", options={"code_length": 3, "num_numbers": 5})
    game.reset(seed=2)
    left = list(permutations(range(1, 6), 3))
    for _ in range(20):
        guess = left[0]
        answer = game.step(f"[{' '.join(map(str, guess))}]")
        if answer.terminated:
            break
        black, white = map(int, re.findall(r"(\d+) (?:black|white) peg", answer.observation))
        left = [code for code in left if _pegs(guess, code) == (black, white)]
    assert (answer.info["outcome"], answer.truncated) == (1.0, False)


def _pegs(guess: tuple[int, ...], code: tuple[int, ...]) -> tuple[int, int]:
    black = sum(a == b for a, b in zip(guess, code, strict=True))
    return black, len(set(guess) & set(code)) - black


def test_a_second_mistake_in_a_row_ends_the_game_and_says_so() -> None:
    game = TextArena()
    game.reset(seed=1)
    first, second = game.step("seven"), game.step(None)
    assert not first.terminated
    assert "invalid move" in first.observation
    assert (second.terminated, second.info["invalid_move"], second.info["outcome"]) == (True, True, 0.0)


@pytest.mark.parametrize(("partial", "least", "most"), [(True, 0.01, 0.99), (False, 0.0, 0.0)])
def test_being_close_counts_only_if_it_is_wanted(partial: bool, least: float, most: float) -> None:
    game = TextArena(options={"max_turns": 1}, partial_credit=partial)
    game.reset(seed=1)
    number = game._game.state.game_state["game_number"]
    guesses = [guess for guess in (10, 11, 12) if guess != number]
    answer = game.step(f"[{guesses[0]}]")
    if not answer.terminated:
        answer = game.step(f"[{guesses[1]}]")
    assert answer.terminated
    assert least <= answer.info["outcome"] <= most


def test_a_bare_response_is_put_into_the_form_that_the_game_reads() -> None:
    bare, formed = TextArena("Blackjack-v0", action_form="[{}]"), TextArena("Blackjack-v0")
    assert bare.reset(seed=7) == formed.reset(seed=7)
    for said in ("Hit", "[Hit]", "stand", "[Stand]"):
        assert bare.step(said) == formed.step(said if said.startswith("[") else f"[{said}]")
    # Nothing is put around nothing: abstaining is an illegal move, also where "[]" would be a legal one.
    assert "invalid move" in bare.step(None).observation


def test_a_form_may_have_words_around_the_response() -> None:
    game = TextArena(action_form="I guess [{}].")
    game.reset(seed=1)
    number = game._game.state.game_state["game_number"]
    assert game.step(str(number)).info["outcome"] == 1.0


def test_what_the_game_says_is_rewritten_in_order_from_the_first_to_the_last_message() -> None:
    rewrite = {
        r"(?s)You are Player.*between (\d+) and (\d+).*guess\.": r"From \1 to \2?",
        r"The target number is (\w+)\.": r"<\1>",
        "<higher>": "up",
        "<lower>": "down",
        r"(?s).*Congratulations.*": "yes",
    }
    plain, short = TextArena(), TextArena(rewrite=rewrite)
    words = {"The target number is higher.": "up", "The target number is lower.": "down"}
    assert short.reset(seed=3).text == "From 1 to 20?"
    short_answers, plain_answers = halving(short, 3, words=("up", "down")), halving(plain, 3)
    assert [answer.observation for answer in short_answers] == [
        *(words[answer.observation] for answer in plain_answers[:-1]),
        "yes",
    ]
    assert short_answers[-1].info == plain_answers[-1].info  # what evaluators see is the game's own


@pytest.mark.parametrize(
    ("illegal_outcome", "first_game", "second_game"), [(None, -1.0, 0.0), (-0.5, -0.5, -0.5)]
)
def test_losing_by_an_illegal_move_can_be_given_one_outcome_in_every_game(
    illegal_outcome: float | None, first_game: float, second_game: float
) -> None:
    for env_id, outcome in (("Secretary-v0", first_game), ("GuessTheNumber-v0", second_game)):
        game = TextArena(env_id, illegal_outcome=illegal_outcome)
        game.reset(seed=1)
        answers = [game.step("what?"), game.step("what?")]
        assert [answer.terminated for answer in answers] == [False, True]
        assert (answers[-1].reward, answers[-1].info["outcome"]) == (outcome, outcome)
        assert answers[-1].info["invalid_move"] is True


def test_an_illegal_outcome_is_not_that_of_a_game_lost_by_the_rules() -> None:
    game = TextArena("Secretary-v0", illegal_outcome=-0.5)
    outcomes = set()
    for seed in range(20):
        game.reset(seed)
        answer = game.step("[accept]")
        assert (answer.terminated, answer.info["invalid_move"]) == (True, False)
        outcomes.add(answer.info["outcome"])
    assert outcomes == {0.0, 1.0}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"action_form": "[]"}, "action_form"),
        ({"action_form": "[{}{}]"}, "action_form"),
        ({"rewrite": {"(": ""}}, "rewrite"),
        ({"rewrite": {"target": r"\1"}}, "rewrite"),
        ({"rewrite": {"target": r"\g<no>"}}, "rewrite"),
        ({"rewrite": {"(?s).*": ""}}, "rewrite leaves nothing"),
        ({"illegal_outcome": float("nan")}, "illegal_outcome"),
    ],
)
def test_options_that_cannot_work_are_told_when_the_game_is_made(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        TextArena(**settings)


def test_a_game_that_raises_costs_its_own_conversation_only() -> None:
    games = [TextArena(), TextArena()]
    for game in games:
        game.reset(seed=1)
    games[0]._game.state = None
    broken, answer = ask([lambda game=game: game.step("[3]") for game in games], Transition)
    assert isinstance(broken, Failure)
    assert isinstance(answer, Transition)


@pytest.mark.parametrize(
    ("env_id", "options", "told"),
    [
        ("GuessTheNumbr-v0", {}, "GuessTheNumbr-v0"),
        ("GuessTheNumber-v0", {"colour": 3}, "colour"),
        ("TicTacToe-v0", {}, "one player alone"),
    ],
)
def test_what_cannot_be_played_is_told_when_it_is_made(
    env_id: str, options: dict[str, int], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        TextArena(env_id, options)


def test_the_example_is_a_game_that_can_be_played() -> None:
    environment = build_environment(load_config(ROOT / "examples" / "text_game.yaml"))
    assert isinstance(environment, TextArena)
    assert "within 6 turns" in environment.reset(seed=0).text
