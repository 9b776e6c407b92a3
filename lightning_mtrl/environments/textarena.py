"""Text games of TextArena (extra `games`), played by one agent alone."""

from __future__ import annotations

import math
import random
import re
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

    Most games forgive one illegal move and end at the next one in a row, with "invalid_move" of the last
    transition True. What that costs differs: -1 in some games, in others as much as was reached by then.

    Args:
        env_id: name in TextArena's registry.
        options: arguments of the game in place of the registered ones, such as `max_turns`.
        partial_credit: False gives an outcome of 1 for a reward of 1 or more and else 0, where the game
            rewards being close, too.
        action_form: what is sent to the game, with {} for the response: "[{}]" for a game that reads moves in
            brackets, so that the agent can say them bare. A response that has the form already is sent as it
            is, and abstaining stays an empty move.
        rewrite: regular expressions, each with what takes the place of its matches (as in `re.sub`), one
            after the other in all that the game says: for what is too long for a small model.
        illegal_outcome: outcome of a game that ended by an illegal move; null leaves the game's own.

    Raises:
        UserError: if TextArena is not installed, has no such game, the game cannot be played alone,
            `action_form` has no place for the response, `rewrite` cannot be done or leaves no rules, or
            `illegal_outcome` is not finite.
    """

    def __init__(
        self,
        env_id: str = "GuessTheNumber-v0",
        options: Mapping[str, Any] | None = None,
        partial_credit: bool = True,
        action_form: str = "{}",
        rewrite: Mapping[str, str] | None = None,
        illegal_outcome: float | None = None,
    ) -> None:
        self.env_id, self.options, self.partial_credit = env_id, dict(options or {}), partial_credit
        if illegal_outcome is not None and not math.isfinite(illegal_outcome):
            raise UserError(f"illegal_outcome is {illegal_outcome}, but a number or null was expected.")
        self.illegal_outcome = illegal_outcome
        self._form = _split_form(action_form)
        self._rewrite = [_compiled(pattern, text) for pattern, text in (rewrite or {}).items()]
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
            text = self._rewritten(self._heard())
        if not text:
            raise UserError(
                f"rewrite leaves nothing of what {self.env_id} says first, but the agent needs a message to "
                f"respond to. Put something in the place of the rules, or take less away."
            )
        return Observation(text)

    def step(self, response: str | None) -> Transition:
        """Make a move; abstaining is an empty one, which the game may take for a mistake."""
        with self._own_luck():
            over, _ = self._game.step(action=self._move(response))
            heard = self._heard()
            if not over:
                return Transition(self._rewritten(heard))
            rewards, facts = self._game.close()
        reason, illegal = str(facts[0].get("reason") or ""), bool(facts[0].get("invalid_move"))
        outcome = self._outcome(float(rewards[0]), illegal)
        said = self._rewritten("\n".join(text for text in (heard, reason) if text))
        info = {"outcome": outcome, "reason": reason, "invalid_move": illegal}
        return Transition(said, reward=outcome, terminated=True, info=info)

    def _move(self, response: str | None) -> str:
        before, after = self._form
        if not response or (response.startswith(before) and response.endswith(after)):
            return response or ""
        return f"{before}{response}{after}"

    def _outcome(self, reward: float, illegal: bool) -> float:
        if illegal and self.illegal_outcome is not None:
            return self.illegal_outcome
        return reward if self.partial_credit else float(reward >= 1.0)

    def _rewritten(self, text: str) -> str:
        for pattern, replacement in self._rewrite:
            text = pattern.sub(replacement, text)
        return text

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


def _split_form(action_form: str) -> tuple[str, str]:
    """What stands before and after the response."""
    before, place, after = action_form.partition("{}")
    if not place or "{}" in after:
        raise UserError(
            f"action_form is {action_form!r}, but one {{}} was expected in it, where the response goes, as "
            f"in '[{{}}]'."
        )
    return before, after


def _compiled(pattern: str, replacement: str) -> tuple[re.Pattern[str], str]:
    """A regular expression with what takes the place of its matches, once both are known to work."""
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")  # which reads the replacement, whether something matches or not
    except (re.error, IndexError) as error:
        raise UserError(
            f"rewrite puts {replacement!r} in the place of {pattern!r}, but a regular expression and its "
            f"replacement were expected, as Python's re.sub takes them: {error}. Mend them; in YAML, single "
            f"quotes around both are best."
        ) from error
    return compiled, replacement
