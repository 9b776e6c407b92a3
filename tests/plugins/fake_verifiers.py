"""A stand-in with the API of verifiers 0.3.1 that an adapter meets, for where it is not installed."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Message:
    role: str
    content: Any


@dataclass
class ResponseMessage:
    content: str
    finish_reason: str
    is_truncated: bool


@dataclass
class Response:
    id: str
    created: int
    model: str
    message: ResponseMessage


@dataclass
class Tool:
    name: str
    description: str
    parameters: dict[str, object]


class Error(Exception):
    pass


class Client(ABC):
    def __init__(self, client: object) -> None:
        self.client = client

    @abstractmethod
    async def get_native_response(self, prompt: Any) -> Any: ...

    async def get_response(self, **asked: Any) -> Any:
        return await self.get_native_response(asked["prompt"])


def normalize_messages(value: Any, field_name: str = "messages") -> list[Any]:
    if isinstance(value, str):
        return [Message("text", value)]
    return [Message(each["role"], each["content"]) if isinstance(each, Mapping) else each for each in value]


class Rubric:
    def __init__(
        self, funcs: Sequence[Callable[..., Any]] = (), weights: Sequence[float] | None = None
    ) -> None:
        self.funcs = list(funcs)
        self.weights = [1.0] * len(self.funcs) if weights is None else list(weights)

    @property
    def has_group_rewards(self) -> bool:
        return any("completions" in inspect.signature(each).parameters for each in self.funcs)

    async def score_rollout(self, state: Any) -> None:
        scores = {each.__name__: await self._score(each, state) for each in self.funcs}
        state["metrics"] = scores
        state["reward"] = sum(w * s for w, s in zip(self.weights, scores.values(), strict=True))

    async def _score(self, function: Callable[..., Any], state: Any) -> float:
        known = {**state, "state": state}
        wanted = {key: known[key] for key in inspect.signature(function).parameters}
        try:
            answer = function(**wanted)
            return float(await answer if inspect.isawaitable(answer) else answer)
        except Exception:  # as the library does
            return 0.0

    async def cleanup(self, state: Any) -> None:
        state["rubric_cleaned"] = True


class RubricGroup(Rubric):
    def __init__(self, rubrics: list[Rubric]) -> None:
        super().__init__()
        self.rubrics = rubrics

    @property
    def has_group_rewards(self) -> bool:
        return any(each.has_group_rewards for each in self.rubrics)

    async def score_rollout(self, state: Any) -> None:
        reward, metrics = 0.0, {}
        for each in self.rubrics:
            await each.score_rollout(state)
            reward, metrics = reward + state["reward"], {**metrics, **state["metrics"]}
        state.update(reward=reward, metrics=metrics)


def stop(condition: Callable[..., Any]) -> Callable[..., Any]:
    condition.stop = True  # type: ignore[attr-defined]
    return condition


def num_turns(trajectory: Sequence[Any]) -> int:
    return len(trajectory)


class MultiTurnEnv:
    def __init__(
        self,
        dataset: Any = None,
        eval_dataset: Any = None,
        system_prompt: str | None = None,
        rubric: Rubric | None = None,
        tool_defs: Sequence[Tool] | None = None,
        max_turns: int = -1,
        score_rollouts: bool = True,
    ) -> None:
        self._data, self._kept, self.system_prompt = dataset, eval_dataset, system_prompt
        self.tool_defs, self.max_turns, self.score_rollouts = tool_defs, max_turns, score_rollouts
        self.rubric = RubricGroup([rubric or Rubric(), Rubric([num_turns], [0.0])])

    def build_dataset(self) -> Any:
        return None if self._data is None else [self._row(*each) for each in enumerate(self._data)]

    def build_eval_dataset(self) -> Any:
        return None if self._kept is None else [self._row(*each) for each in enumerate(self._kept)]

    def _row(self, place: int, row: Mapping[str, Any]) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        prompt = row.get("prompt") or [*system, {"role": "user", "content": row["question"]}]
        return {"example_id": place, **row, "prompt": prompt}

    async def init_state(self, row: Mapping[str, Any], client: Client, model: str, sampling: Any) -> Any:
        assert isinstance(client, Client)
        fresh: dict[str, Any] = {"trajectory": [], "error": None, "final_env_response": None}
        tools = (row.get("info") or {}).get("tool_defs", [])
        return {**row, **fresh, "prompt": normalize_messages(row["prompt"]), "tool_defs": tools}

    async def setup_state(self, state: Any) -> Any:
        return state

    async def has_error(self, state: Any) -> bool:
        return state["error"] is not None

    async def max_turns_reached(self, state: Any) -> bool:
        return 0 < self.max_turns <= len(state["trajectory"])

    async def has_final_env_response(self, state: Any) -> bool:
        return state["final_env_response"] is not None

    async def is_completed(self, state: Any) -> bool:
        own = [each for _, each in inspect.getmembers(self, inspect.ismethod) if hasattr(each, "stop")]
        for condition in (self.has_error, self.max_turns_reached, self.has_final_env_response, *own):
            if await condition(state):
                state["stop_condition"] = condition.__name__
                return True
        return False

    async def get_prompt_messages(self, state: Any) -> list[Any]:
        if not state["trajectory"]:
            prompt: list[Any] = state["prompt"]
            return prompt
        last = state["trajectory"][-1]
        said = [*last["prompt"], *last["completion"]]
        return [*said, *normalize_messages(await self.env_response(said, state))]

    async def env_response(self, messages: list[Any], state: Any) -> Any:
        raise AssertionError("a game says what it answers")

    async def add_model_response(self, state: Any, prompt: list[Any], response: Response) -> None:
        said = [Message("assistant", response.message.content)]
        state["trajectory"].append({"prompt": prompt, "completion": said})

    async def cleanup(self, state: Any) -> None:
        state["completion"] = []
        if state["trajectory"]:
            last = state["trajectory"][-1]
            whole = [*last["prompt"], *last["completion"]]
            state["completion"] = whole[len(state["prompt"]) :]


def load_environment(env_id: str, **options: Any) -> Any:
    try:
        module = importlib.import_module(env_id.replace("-", "_"))
    except ImportError as error:
        raise ValueError(f"Could not import '{env_id}' environment.") from error
    return module.load_environment(**options)


def modules() -> dict[str, ModuleType]:
    """The modules by their names, for `sys.modules`."""
    root, inner = ModuleType("verifiers"), ModuleType("verifiers.utils")
    messages = ModuleType("verifiers.utils.message_utils")
    public = (Client, Error, MultiTurnEnv, Response, ResponseMessage, Rubric, Tool, load_environment, stop)
    vars(root).update({each.__name__: each for each in public}, __version__="0.3.1", __path__=[])
    vars(inner).update(__path__=[])
    vars(messages).update(normalize_messages=normalize_messages)
    return {each.__name__: each for each in (root, inner, messages)}
