"""Multi-turn environments of the library `verifiers` (extra `verifiers`), with their data and rubrics."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.environments.verifiers_loading import absent_model, library, loaded, reward_of
from lightning_mtrl.errors import UserError

_ROUNDING = 1e-9  # a sum of weighted scores may leave its range by so much, as a share of it
_FACTS = ("example_id", "answer", "info")  # of a row; evaluators may see them


@dataclass(frozen=True)
class _Rows:
    """Situations: the rows of a data set at some places."""

    data: Any
    places: Sequence[int]

    def draw(self, seed: int) -> dict[str, Any]:
        """One row, each as likely."""
        return dict(self.data[random.Random(seed).choice(self.places)])


class Verifiers:
    """A `MultiTurnEnv` of verifiers, releases 0.2.1 to 0.3: its rows, its answers, its rubric.

    A row of its data set is the situation that a conversation begins with, and equal seeds give equal rows;
    what luck an environment takes beside its row is its own. The system message and the first user messages
    are the row's; `env_response` and the stop conditions, its limit of turns among them, answer each
    response; abstaining is an empty one. When a condition ends the conversation, the rubric scores it, so
    its end is `terminated`. "stop_condition" and "metrics" of the last transition are the environment's own.

    A reward function that raises costs that conversation, which is counted; verifiers would take it for 0.

    Not supported, and refused in words: tools, rubrics that score the conversations of a group against each
    other, first messages of an assistant (few-shot examples), and images. An environment that takes back
    what was said, or that asks the model by itself, loses its conversations. `timeout_seconds` has no effect.

    Args:
        env_id: name of an installed environment, as `verifiers.load_environment` takes it, or
            "module:function" for a function of yours that returns one.
        options: arguments of the environment.
        held_out_share: share of the rows that only validation draws, in [0, 1), where the environment has no
            data set for evaluation; where it has one, validation draws from that. 0 lets both draw from all.
        reward_range: the lowest and the highest reward of the rubric, which become the outcomes 0 and 1;
            null takes rewards as they are. Success counts from 0.5.

    Raises:
        UserError: if verifiers is not installed, or in another release, the environment cannot be made or
            played, or a number is out of its range.

    Source: https://github.com/PrimeIntellect-ai/verifiers, `MultiTurnEnv.rollout` of release 0.3.1.
    """

    def __init__(
        self,
        env_id: str,
        options: Mapping[str, Any] | None = None,
        held_out_share: float = 0.1,
        reward_range: tuple[float, float] | None = None,
    ) -> None:
        if not 0 <= held_out_share < 1:
            raise UserError(f"held_out_share is {held_out_share}, but a share in [0, 1) was expected.")
        if reward_range is not None and not -math.inf < reward_range[0] < reward_range[1] < math.inf:
            raise UserError(f"reward_range is {reward_range}, but a lower and a higher number were expected.")
        self.env_id, self.options, self.reward_range = env_id, dict(options or {}), reward_range
        self._environment = loaded(env_id, self.options)
        self._model = absent_model()
        self._rows, self._held_out = self._sides(held_out_share)
        self._state: Any = None
        self._is_open = False  # set up, and not cleaned up behind
        self._prompt: list[Any] = []
        for rows in (self._rows, self._held_out):  # so that what is wrong is told before a model is loaded
            _opening(_normal(rows.draw(0)["prompt"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A conversation of its own with the same environment, which is made to hold many at once."""
        made = copy.copy(self)
        made._state, made._prompt = copy.deepcopy((self._state, self._prompt), memo)
        return made

    def held_out(self) -> Self:
        """The same environment, with the rows that nothing is learnt from."""
        made = copy.copy(self)
        made._rows = self._held_out
        return made

    async def reset(self, seed: int) -> Observation:
        """Draw a row and set the environment up for it.

        Raises:
            UserError: if the row has tools, or first messages that a policy here cannot be given.
            ValueError: if the environment ends the conversation before it begins.
        """
        row, environment = self._rows.draw(seed), self._environment
        self._state = await environment.init_state(row, self._model, "policy", {})
        self._is_open = True
        async with self._tidied():
            made = await environment.setup_state(self._state)
            self._state = self._state if made is None else made
            if self._state["tool_defs"]:
                raise UserError(f"env_id is {self.env_id!r}, a row has tools, but a policy has words only.")
            if await environment.is_completed(self._state):
                failed = self._state.get("error")
                raise failed or ValueError("the environment ended the conversation before a response")
            self._prompt = _normal(await environment.get_prompt_messages(self._state))
            system, text = _opening(self._prompt)
        return Observation(text, system, info={key: row[key] for key in _FACTS if row.get(key) is not None})

    async def step(self, response: str | None) -> Transition:
        """Let the environment answer, or let its rubric score the conversation where it is over.

        Raises:
            Exception: what the environment or a reward function raised.
            UserError: if the reward is outside of `reward_range`.
            ValueError: if the reward is not finite, or the answer cannot be given to a policy.
        """
        async with self._tidied():
            heard = await self._heard(response)
        return await self._ended() if heard is None else Transition(heard)

    async def close(self) -> None:
        """Let the environment clean up behind a conversation that was given up; behind others, it has."""
        if self._is_open:
            self._is_open = False
            await self._environment.cleanup(self._state)

    async def _heard(self, response: str | None) -> str | None:
        """What the environment says to a response; None where the conversation is over."""
        environment, state = self._environment, self._state
        await environment.add_model_response(state, self._prompt, _said(response))
        known = [*self._prompt, *_normal(state["trajectory"][-1]["completion"])]
        if await environment.is_completed(state):
            return None
        self._prompt = _normal(await environment.get_prompt_messages(state))
        if state.get("final_env_response") is not None:
            await environment.is_completed(state)  # which writes down why
            return None
        return _news(known, self._prompt)

    async def _ended(self) -> Transition:
        environment, state = self._environment, self._state
        await self.close()
        if state.get("error") is not None:
            raise state["error"]
        outcome = self._outcome(await reward_of(environment.rubric, state))
        parting = _normal(state.get("final_env_response") or [])
        info = {
            "outcome": outcome,
            "stop_condition": state.get("stop_condition"),
            "metrics": dict(state.get("metrics") or {}),
        }
        return Transition(_texts(parting), reward=outcome, terminated=True, info=info)

    def _outcome(self, reward: float) -> float:
        if self.reward_range is None:
            return reward
        low, high = self.reward_range
        outcome = (reward - low) / (high - low)
        if not -_ROUNDING <= outcome <= 1 + _ROUNDING:
            raise UserError(
                f"reward_range is {self.reward_range}, but the rubric of {self.env_id!r} gave {reward:g}. "
                f"Name the lowest and the highest reward that it can give, or null to take them as they are."
            )
        return min(max(outcome, 0.0), 1.0)

    def _sides(self, share: float) -> tuple[_Rows, _Rows]:
        """The rows to learn from and those to validate on."""
        data, kept = self._environment.build_dataset(), self._environment.build_eval_dataset()
        if data is not None and kept is not None and len(data) and len(kept):
            return _Rows(data, range(len(data))), _Rows(kept, range(len(kept)))
        data = kept if data is None else data
        if data is None or len(data) < (2 if share else 1):
            raise UserError(
                f"env_id is {self.env_id!r}, which has {len(data or ())} rows, and held_out_share is "
                f"{share}, but a row to learn from and one to validate on were expected. Give it more rows, "
                f"or set held_out_share to 0 to draw from all for both."
            )
        if not share:
            return _Rows(data, range(len(data))), _Rows(data, range(len(data)))
        number = min(max(round(share * len(data)), 1), len(data) - 1)
        apart = set(random.Random(0).sample(range(len(data)), number))
        rest = [place for place in range(len(data)) if place not in apart]
        return _Rows(data, rest), _Rows(data, sorted(apart))

    @asynccontextmanager
    async def _tidied(self) -> AsyncIterator[None]:
        """Lets the environment clean up behind a conversation that fails."""
        try:
            yield
        except Exception:
            await self.close()
            raise


def _normal(messages: Any) -> list[Any]:
    from verifiers.utils.message_utils import normalize_messages

    normal: list[Any] = normalize_messages(messages)
    return normal


def _said(response: str | None) -> Any:
    """A response as a model of verifiers would give it."""
    vf = library()
    message = vf.ResponseMessage(content=response or "", finish_reason="stop", is_truncated=False)
    return vf.Response(id="response", created=0, model="policy", message=message)


def _opening(messages: Sequence[Any]) -> tuple[str | None, str]:
    """The system message, and the text of the first user messages."""
    system = _text(messages[0]) if messages and messages[0].role == "system" else None
    first = messages[0 if system is None else 1 :]
    strange = sorted({message.role for message in first} - {"user", "text"})
    text = _texts(first) if not strange else ""
    if strange or not text:
        found = f"messages of {', '.join(strange)}" if strange else "no text"
        raise UserError(
            f"a row of the environment's data has {found} before the first response, but a system message "
            f"and then a user's were expected. Change its prompts; examples fit in the system message."
        )
    return system, text


def _news(known: Sequence[Any], messages: Sequence[Any]) -> str:
    """What was said since the messages that are known."""
    before = [(message.role, message.content) for message in known]
    if [(message.role, message.content) for message in messages[: len(known)]] != before:
        raise ValueError("the environment changed what was said before, which a policy cannot unsee")
    strange = {message.role for message in messages[len(known) :]} - {"user", "text"}
    if strange:
        raise ValueError(f"the environment answered with messages of {sorted(strange)}, not of a user")
    return _texts(messages[len(known) :])


def _texts(messages: Sequence[Any]) -> str:
    return "\n\n".join(text for text in map(_text, messages) if text)


def _text(message: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(message.content, str):
        return message.content
    parts = [dict(part) for part in message.content or ()]
    if any(part.get("type") != "text" for part in parts):
        raise UserError("the environment shows what is no text, such as an image, to a policy of words only.")
    return "\n".join(str(part["text"]) for part in parts)
