"""Environments of Gymnasium that can be told in text (extra `games`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.errors import UserError


class GymnasiumText:
    """An environment of Gymnasium whose observations are text, or whose rendering is.

    Observations are the environment's own where they are text, and else its rendering with the render mode
    "ansi". Actions are the agent's words where the action space is of text; a choice among actions needs
    their names. Terminated and truncated are Gymnasium's.

    Args:
        env_id: name in Gymnasium's registry; "module:name" imports the module that registers it.
        options: arguments of `gymnasium.make`, such as `render_mode: ansi`, or the environment's own.
        actions: the names of the actions 0, 1, ...; null where the agent's own words are the action.
        task: the first lines of the conversation, which say what is to be done.
        max_mistakes: responses in a row that name no action after which the conversation ends.

    Raises:
        UserError: if Gymnasium is not installed, has no such environment, or it cannot be told in text.
    """

    def __init__(
        self,
        env_id: str,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        task: str = "",
        max_mistakes: int = 3,
    ) -> None:
        self.env_id, self.options, self.task = env_id, dict(options or {}), task
        self.actions = None if actions is None else [name.strip().lower() for name in actions]
        self.max_mistakes = max_mistakes
        self._env: Any = None
        self.reset(seed=0)
        self._check_actions()

    def reset(self, seed: int) -> Observation:
        """Start an episode; equal seeds give equal episodes."""
        if self._env is None:
            self._env = self._made()
        observed, _ = self._env.reset(seed=seed)
        self._mistakes = 0
        return Observation("\n".join(text for text in (self.task, self._told(observed)) if text))

    def step(self, response: str | None) -> Transition:
        """Take the action that the response names; one that names none changes nothing."""
        said = (response or "").strip()
        action: Any = said
        if self.actions is not None:
            if said.lower() not in self.actions:
                return self._not_understood()
            action = self.actions.index(said.lower())
        self._mistakes = 0
        observed, reward, terminated, truncated, _ = self._env.step(action)
        return Transition(self._told(observed), float(reward), bool(terminated), bool(truncated))

    def close(self) -> None:
        """Let Gymnasium's environment go."""
        self._env.close()

    def _not_understood(self) -> Transition:
        self._mistakes += 1
        over = self._mistakes >= self.max_mistakes
        return Transition(f"Say one of: {', '.join(self.actions or ())}.", terminated=over)

    def _told(self, observed: Any) -> str:
        if isinstance(observed, str):
            return observed
        if self._env.render_mode == "ansi":
            return str(self._env.render()).strip("\n")
        raise UserError(
            f"env_id is {self.env_id!r}, whose observations are {type(observed).__name__} and no text. If it "
            f'can be rendered as text, set options to {{"render_mode": "ansi"}}; else write an environment '
            f"of your own around it."
        )

    def _check_actions(self) -> None:
        from gymnasium import spaces

        space = self._env.action_space
        if isinstance(space, spaces.Text) and self.actions is None:
            return
        number = int(space.n) if isinstance(space, spaces.Discrete) else None
        if number is None or self.actions is None or len(self.actions) != number:
            wanted = "actions of text" if number is None else f"names for {number} actions"
            raise UserError(
                f"env_id is {self.env_id!r}, whose actions are {space}, and actions is {self.actions!r}, but "
                f"{wanted} were expected. List the names of its actions in order, or leave them out where "
                f"actions are text."
            )

    def _made(self) -> Any:
        try:
            import gymnasium
        except ImportError as error:
            raise UserError(
                f"the environment GymnasiumText needs a package that is not installed ({error}). "
                f"pip install 'lightning_mtrl[games]'"
            ) from error
        try:
            return gymnasium.make(self.env_id, **self.options)
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            raise UserError(
                f"env_id is {self.env_id!r} with options {self.options}, but Gymnasium cannot make it: "
                f"{str(error).strip()}"
            ) from error
