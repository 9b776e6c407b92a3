"""Making environments of the library `verifiers`, and refusing in words those that cannot be played here."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning_mtrl.errors import UserError

INSTALL = "pip install 'lightning_mtrl[verifiers]'"
_RELEASES = "verifiers>=0.2.1,<0.4"
_NEEDED = ("add_model_response", "env_response", "get_prompt_messages", "init_state", "setup_state")

# What the reward functions raised that are being asked; verifiers takes a failure for a reward of 0.
_FAULTS: ContextVar[list[Exception]] = ContextVar("faults of reward functions")


def library() -> Any:
    """The installed `verifiers`, with multi-turn environments.

    Raises:
        UserError: if it is not installed, or in a release without them.
    """
    try:
        import verifiers
    except ImportError as error:
        raise UserError(
            f"the environment Verifiers needs a package that is not installed ({error}). {INSTALL}"
        ) from error
    kind = getattr(verifiers, "MultiTurnEnv", None)
    if kind is None or not all(hasattr(kind, name) for name in _NEEDED):
        version = getattr(verifiers, "__version__", "of an unknown version")
        raise UserError(
            f"verifiers {version} is installed, but the MultiTurnEnv of releases 0.2.1 to 0.3 was expected. "
            f"pip install '{_RELEASES}'"
        )
    return verifiers


def loaded(env_id: str, options: Mapping[str, Any]) -> Any:
    """An environment that is known to be playable, and whose reward functions are watched.

    Args:
        env_id: of an installed environment, or "module:function".
        options: arguments of what makes it.

    Raises:
        UserError: if it cannot be made or played.
    """
    vf = library()
    try:
        with _own_signals():
            environment = _maker(vf, env_id)(**options)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
        raise UserError(
            f"env_id is {env_id!r} with options {dict(options)}, but it cannot be made: {str(error).strip()}"
        ) from error
    wrong = _what_is_wrong(vf, environment)
    if wrong is not None:
        raise UserError(f"env_id is {env_id!r}, {wrong}")
    for rubric in _parts(environment.rubric):
        pairs = zip(rubric.funcs, rubric.weights, strict=True)
        rubric.funcs = [_watched(function) if weight else function for function, weight in pairs]
    return environment


async def reward_of(rubric: Any, state: Any) -> float:
    """What a rubric says of a finished conversation.

    Raises:
        Exception: what a reward function raised.
        ValueError: if the reward is not finite.
    """
    faults: list[Exception] = []
    token = _FAULTS.set(faults)
    try:
        await rubric.score_rollout(state)
    finally:
        _FAULTS.reset(token)
        await rubric.cleanup(state)
    if faults:
        raise faults[0]
    reward = float(state["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"the rubric gave {reward}, but a finite number was expected")
    return reward


def absent_model() -> Any:
    """What stands in an environment's state for the model, which is not the environment's to ask."""
    client = library().Client

    async def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the environment asks the model that is trained by itself, which is not supported")

    names = {*client.__abstractmethods__, "get_response"}
    return type("AbsentModel", (client,), dict.fromkeys(names, refuse))(None)


def _maker(vf: Any, env_id: str) -> Callable[..., Any]:
    module, colon, name = env_id.partition(":")
    if not colon:
        return functools.partial(vf.load_environment, env_id)
    made: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return made


def _what_is_wrong(vf: Any, environment: Any) -> str | None:
    """Why an environment cannot be played, or None."""
    if not isinstance(environment, vf.MultiTurnEnv):
        kind = type(environment).__name__
        return f"which gives {kind}, but a MultiTurnEnv was expected. Name a single one that is multi-turn."
    if environment.tool_defs:
        names = ", ".join(tool.name for tool in environment.tool_defs)
        return f"which has tools ({names}), but a policy here has words only. Name an environment without."
    if environment.rubric.has_group_rewards:
        return (
            "whose rubric scores conversations of a group against each other, but each has an outcome of its "
            "own here. Give it reward functions of one conversation."
        )
    if not environment.score_rollouts or not _rewards(vf, environment.rubric):
        return (
            "which scores nothing, but the reward is the outcome. Give its rubric a reward function with a "
            "weight other than 0, and leave score_rollouts on."
        )
    return None


def _rewards(vf: Any, rubric: Any) -> bool:
    """Whether a reward can be other than 0: by a weight, or by a way of scoring of its own."""
    own = vf.Rubric.score_rollout
    return any(any(part.weights) or type(part).score_rollout is not own for part in _parts(rubric))


def _parts(rubric: Any) -> Iterator[Any]:
    """The rubrics that a rubric is made of."""
    if hasattr(rubric, "rubrics"):
        for part in rubric.rubrics:
            yield from _parts(part)
    else:
        yield rubric


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function whose failure is noted, and then raised as before."""

    async def awaited(waiting: Awaitable[Any]) -> float:
        with _noted():
            return float(await waiting)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with _noted():
            answer = function(*arguments, **named)
            return awaited(answer) if inspect.isawaitable(answer) else float(answer)

    return call


@contextmanager
def _noted() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _FAULTS.get([]).append(error)
        raise


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps what happens at Ctrl-C and at the end of the process, which verifiers' environments change."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
