"""What players of Secretary reach: two that are played, and the best possible one, exactly.

    python examples/textarena_game/secretary.py

Five uniform random numbers come one after the other; a player takes one as it passes, and wins if it is the
largest of all. In full sight of the numbers it is the full-information problem of Gilbert and Mosteller 1966
("Recognizing the Maximum of a Sequence", section 3); in the example a player sees each one's first decimal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from math import comb
from pathlib import Path

from lightning_mtrl import Environment, load_config
from lightning_mtrl.parsing import build_environment

GAMES = 5000
ENOUGH = (8, 8, 7, 6, 0)  # the hand-written player takes the k-th number from this decimal on

Player = Callable[[int, str], str]


def best_chance(numbers: int = 5, levels: int = 10) -> float:
    """Chance of winning of the best player who sees in which of `levels` equal parts of [0, 1] a number is.

    Dynamic programming over how many numbers have passed, the highest part so far, how many of them are in
    it, and whether the last one is.
    """

    @cache
    def wins(highest: int, among: int, left: int) -> float:
        """The last one is among so many in the highest part: chance that it is the largest of all."""
        # Each of them is the largest of these with equal chances. It is then x deep in its part, with x
        # from Beta(among, 1), and those to come are all below it with E[((highest + x) / levels)^left].
        terms = (comb(left, j) * highest ** (left - j) * among / (among + j) for j in range(left + 1))
        return sum(terms) / levels**left / among

    @cache
    def value(passed: int, highest: int, among: int, last_is_highest: bool) -> float:
        left = numbers - passed
        taken = wins(highest, among, left) if last_is_highest else 0.0
        return max(taken, later(passed, highest, among)) if left else taken

    @cache
    def later(passed: int, highest: int, among: int) -> float:
        higher = sum(value(passed + 1, part, 1, True) for part in range(highest + 1, levels))
        equal = value(passed + 1, highest, among + 1, True) if highest >= 0 else 0.0
        lower = highest * value(passed + 1, highest, among, False) if highest > 0 else 0.0
        return (higher + equal + lower) / levels

    return later(0, -1, 0)


def by_hand(turn: int, heard: str) -> str:
    """Take what is large, and be content with less towards the end."""
    return "accept" if heard.isdigit() and int(heard) >= ENOUGH[turn - 1] else "continue"


def share_won(environment: Environment, player: Player) -> float:
    """Mean outcome of `GAMES` games."""
    won = 0.0
    for seed in range(GAMES):
        heard, turn, over = environment.reset(seed).text, 0, False
        while not over:
            turn += 1
            answer = environment.step(player(turn, heard))
            heard, over = answer.observation, answer.terminated
        won += answer.reward
    return won / GAMES


def main() -> None:
    """Print them."""
    environment, rng = build_environment(load_config(Path(__file__).with_name("game.yaml"))), random.Random(0)
    players: dict[str, Player] = {
        "random legal play": lambda turn, heard: rng.choice(("accept", "continue")),
        f"the first of at least {ENOUGH}": by_hand,
    }
    for name, player in players.items():
        print(f"{name}: wins {share_won(environment, player):.3f} of {GAMES} games")
    print(f"the best possible player of first decimals: wins {best_chance():.4f}, exactly")
    print(f"the best possible player of all decimals: wins {best_chance(levels=400):.3f}, to three decimals")


if __name__ == "__main__":
    main()
