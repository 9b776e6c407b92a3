"""An environment of your own: the agent guesses a number from 1 to 9, and is told higher or lower.

Nothing is registered; a configuration names the class by its import path. In this folder:

    python -m lightning_mtrl collect --config guess.yaml --output talks.jsonl

with `environment: {class_path: number_guess.NumberGuess}` in guess.yaml.
"""

import random

from lightning_mtrl import Observation, Transition


class NumberGuess:
    """Guess my number in a few turns."""

    def __init__(self, max_turns: int = 6) -> None:
        self.max_turns = max_turns

    def reset(self, seed: int) -> Observation:
        self.turn, self.number = 0, random.Random(seed).randint(1, 9)
        return Observation("I think of a number from 1 to 9. Which one is it?")

    def step(self, response: str | None) -> Transition:
        self.turn += 1
        if response == str(self.number):
            return Transition("Yes!", reward=1.0, terminated=True)
        known = response is not None and response.isdigit()
        hint = "A number, please." if not known else "Higher." if int(response) < self.number else "Lower."
        return Transition(hint, terminated=self.turn == self.max_turns)
