"""What a run needs from outside of itself, looked at before its folder is made and its weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_mtrl.assembly import collectors, context_length
from lightning_mtrl.class_lookup import class_named
from lightning_mtrl.config import RunConfig
from lightning_mtrl.environments.protocol import Environment
from lightning_mtrl.errors import UserError
from lightning_mtrl.llm.connection import Connection
from lightning_mtrl.llm.failures import LLMFailure
from lightning_mtrl.llm.server import Server
from lightning_mtrl.models.load import describe_model
from lightning_mtrl.models.sources import expect_adapter
from lightning_mtrl.models.tiny import tiny_model_of
from lightning_mtrl.parsing import build_environment
from lightning_mtrl.rollouts.environment_calls import Failure, ask
from lightning_mtrl.rollouts.policy_server import expect_server
from lightning_mtrl.rollouts.tokens import ChatTokenizer
from lightning_mtrl.runs.folder import version_name

_SERVER_KEYS = {field.name for field in fields(Server)}


def expect_ready(config: RunConfig) -> None:
    """Refuse a run of the loop that cannot begin.

    Raises:
        UserError: if the model is not there or has no chat template, its context is too short for the first
            prompt, or a server that is to be asked does not answer.
    """
    environment = build_environment(config)
    known = _described(config, environment)
    if known is not None:
        chat, length = known
        _, validator = collectors(config, environment, chat, length)
        validator.expect_room(seed=config.validation.seed, policy=version_name(0))
        if config.data.server.base_url is not None:
            expect_server(config.data.server, length)
    for key in ("environment", "algorithm"):
        for place, server in _servers(f"{key}.init_args", getattr(config, key).init_args):
            _expect_answer(place, server)


def expect_model(config: RunConfig) -> None:
    """Refuse a model that is not there, has no chat template, or was made for shorter conversations.

    Raises:
        UserError: if it is so.
    """
    _described(config, class_named("environment", config.environment.class_path))


def _described(config: RunConfig, environment: Environment | type[Any]) -> tuple[ChatTokenizer, int] | None:
    """The model's tokenizer and the length of conversations; None where that takes all of it to be read."""
    model = config.model
    if model.adapter is not None:
        expect_adapter(model.adapter)
    found = describe_model(
        model.name,
        gguf_file=model.gguf_file,
        trust_remote_code=model.trust_remote_code,
        tiny=tiny_model_of(environment) if model.name == "tiny" else "sales",
    )
    if found is None:
        return None
    return ChatTokenizer(found[0]), context_length(model, found[1])


def _servers(key: str, value: object) -> Iterator[tuple[str, Server]]:
    """The language models among the arguments of a class, with their keys."""
    if isinstance(value, Mapping):
        if value.keys() == _SERVER_KEYS:
            yield key, Server(**value)
        for name, inner in value.items():
            yield from _servers(f"{key}.{name}", inner)


def _expect_answer(key: str, server: Server) -> None:
    if server.record is not None and Path(server.record).is_file():
        return  # it may answer everything by itself
    (answer,) = ask([Connection(server).reach], type(None))
    if not isinstance(answer, Failure):
        return
    if not isinstance(answer.error, LLMFailure):
        raise answer.error
    raise UserError(
        f"{key}.base_url is {server.base_url!r}, but no server answers there ({answer.error}). Start it, or "
        f"mend the address."
    )
