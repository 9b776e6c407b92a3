"""What a command needs from outside of itself, looked at before a folder is made or weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_mtrl.assembly import collectors, context_length
from lightning_mtrl.class_lookup import class_named
from lightning_mtrl.config import RunConfig
from lightning_mtrl.environments.protocol import Environment
from lightning_mtrl.errors import UserError
from lightning_mtrl.llm.failures import LLMFailure
from lightning_mtrl.llm.reaching import reach
from lightning_mtrl.llm.server import Server
from lightning_mtrl.models.load import describe_model
from lightning_mtrl.models.sources import expect_adapter
from lightning_mtrl.models.tiny import tiny_model_of
from lightning_mtrl.parsing import build_environment
from lightning_mtrl.rollouts.environment_calls import Failure, ask
from lightning_mtrl.rollouts.policy_server import expect_server
from lightning_mtrl.rollouts.tokens import ChatTokenizer
from lightning_mtrl.runs.folder import version_name

# What a command does: it runs the loop, holds conversations of the one kind or the other, reads logs, or lets
# a person talk with the policy.
Work = Literal["fit", "validate", "collect", "logs", "chat"]

_SERVER_KEYS = {field.name for field in fields(Server)}
# Logs are learned from without an environment, and conversations are held without an algorithm.
_ENVIRONMENT_WORK, _ALGORITHM_WORK = ("fit", "validate", "collect"), ("fit", "logs")


def expect_ready(config: RunConfig, work: Work, seed: int | None = None) -> None:
    """Refuse work that cannot begin.

    Args:
        config: of the run.
        work: what is to be done; only the servers that it talks with are asked.
        seed: of the first conversation; None: that of the configuration.

    Raises:
        UserError: if the model is not there or has no chat template, its context is too short for the first
            prompt, or a server that is to be asked does not answer.
    """
    servers: list[tuple[str, Server]] = []
    if work in _ENVIRONMENT_WORK:
        environment = build_environment(config)
        length = _expect_room(config, environment, work, seed)
        if work == "fit" and config.data.server.base_url is not None:
            expect_server(config.data.server, length)
        servers += _servers("environment.init_args", config.environment.init_args)
    else:
        _described(config, class_named("environment", config.environment.class_path))
    if work in _ALGORITHM_WORK:
        servers += _servers("algorithm.init_args", config.algorithm.init_args)
    _expect_answers(servers)


def _expect_room(config: RunConfig, environment: Environment, work: Work, seed: int | None) -> int:
    """Refuse a model that is not there or is too short for the first prompt; the length of conversations."""
    chat, length = _described(config, environment)
    collector, validator = collectors(config, environment, chat, length)
    if work == "collect":
        first, configured = collector, config.seed
    else:
        first, configured = validator, config.validation.seed
    first.expect_room(seed=configured if seed is None else seed, policy=version_name(0))
    return length


def _described(config: RunConfig, environment: Environment | type[Any]) -> tuple[ChatTokenizer, int]:
    """The model's tokenizer and the length of conversations."""
    model = config.model
    if model.adapter is not None:
        expect_adapter(model.adapter)
    tokenizer, limit = describe_model(
        model.name,
        gguf_file=model.gguf_file,
        trust_remote_code=model.trust_remote_code,
        tiny=tiny_model_of(environment) if model.name == "tiny" else "sales",
    )
    return ChatTokenizer(tokenizer), context_length(model, limit)


def _servers(key: str, value: object) -> Iterator[tuple[str, Server]]:
    """The language models among the arguments of a class, with their keys."""
    if isinstance(value, Mapping):
        if value.keys() == _SERVER_KEYS:
            yield key, Server(**value)
        for name, inner in value.items():
            yield from _servers(f"{key}.{name}", inner)


def _expect_answers(servers: list[tuple[str, Server]]) -> None:
    """Ask all servers at once, but for those whose record is there, which may answer everything by itself."""
    asked = [(k, s) for k, s in servers if s.record is None or not Path(s.record).is_file()]
    answers = ask([partial(reach, server, key) for key, server in asked], type(None))
    for (key, server), answer in zip(asked, answers, strict=True):
        if isinstance(answer, Failure):
            raise _told(key, server, answer.error)


def _told(key: str, server: Server, error: BaseException) -> BaseException:
    if not isinstance(error, LLMFailure):
        return error
    return UserError(
        f"{key}.base_url is {server.base_url!r}, but no server answers there ({error}). Start it, or mend "
        f"the address."
    )
