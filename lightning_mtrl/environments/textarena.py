"""Text games of TextArena (extra `games`), played by one agent alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.errors import UserError

_GAME = -1  # TextArena's name for the game itself, among players


class TextArena:
    """A game of TextArena, such as "GuessTheNumber-v0" or "Mastermind-v0".

    The game is taken without TextArena's wrappers: they repeat the history in every observation, and a
    conversation keeps that itself. What the agent said is left out of observations for the same reason.

    A game ends by its own rules, its limit of turns among them, so its end is `terminated`; the game's reward
    is the outcome, and "reason" of the last transition says why. TextArena's luck is Python's global one;
    here every game has its own, so that games that are played side by side, or others' random numbers,
    change nothing.

    Args:
        env_id: name in TextArena's registry.
        options: arguments of the game in place of the registered ones, such as `max_turns`.
        partial_credit: False gives an outcome of 1 for a reward of 1 or more and else 0, where the game
            rewards being close, too.

    Raises:
        UserError: if TextArena is not installed, has no such game, or the game cannot be played alone.
    """

    def __init__(
        self,
        env_id: str = "GuessTheNumber-v0",
        options: Mapping[str, Any] | None = None,
        partial_credit: bool = True,
    ) -> None:
        self.env_id, self.options, self.partial_credit = env_id, dict(options or {}), partial_credit
        self._luck: Any = None
        self._game: Any = None
        try:
            self.reset(seed=0)  # so that what is wrong is told before a model is loaded
        except AssertionError as error:
            raise UserError(
                f"env_id is {env_id!r}, but that game cannot be played by one player alone ({error}). Name a "
                f"game for one player, such as GuessTheNumber-v0, Mastermind-v0 or TowerOfHanoi-v0."
            ) from error

    def reset(self, seed: int) -> Observation:
        """Start a game; equal seeds give equal games."""
        self._luck = random.Random(seed).getstate()
        with self._own_luck():
            self._game = self._made()
            self._game.reset(num_players=1, seed=seed)
            return Observation(self._heard())

    def step(self, response: str | None) -> Transition:
        """Make a move; abstaining is an empty one, which the game may take for a mistake."""
        with self._own_luck():
            over, _ = self._game.step(action=response or "")
            heard = self._heard()
            if not over:
                return Transition(heard)
            rewards, facts = self._game.close()
        reward = float(rewards[0])
        outcome = reward if self.partial_credit else float(reward >= 1.0)
        reason = str(facts[0].get("reason") or "")
        said = "\n".join(text for text in (heard, reason) if text)
        info = {"outcome": outcome, "reason": reason, "invalid_move": bool(facts[0].get("invalid_move"))}
        return Transition(said, reward=outcome, terminated=True, info=info)

    def _made(self) -> Any:
        try:
            import textarena
        except ImportError as error:
            raise UserError(
                f"the environment TextArena needs a package that is not installed ({error}). "
                f"pip install 'lightning_mtrl[games]'"
            ) from error
        try:
            return textarena.make(f"{self.env_id}-raw", **self.options)
        except (ValueError, TypeError, ImportError, LookupError) as error:
            raise UserError(
                f"env_id is {self.env_id!r} with options {self.options}, but TextArena cannot make it: "
                f"{str(error).strip()}"
            ) from error

    def _heard(self) -> str:
        """What the game has said since the last move."""
        _, messages = self._game.get_observation()
        return "\n".join(str(text) for sender, text, _ in messages if sender == _GAME)

    @contextmanager
    def _own_luck(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._luck)
        try:
            yield
        finally:
            self._luck = random.getstate()
            random.setstate(others)
