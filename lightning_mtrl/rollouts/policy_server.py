"""The policy on a server: each version is written as an adapter and loaded there under a name of its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_mtrl.errors import UserError
from lightning_mtrl.llm.completions import CompletionClient, ServedModel
from lightning_mtrl.llm.failures import LLMFailure
from lightning_mtrl.llm.server import Server
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.saving import save_role
from lightning_mtrl.processes import Processes
from lightning_mtrl.rollouts.environment_calls import Failure, ask
from lightning_mtrl.serving_config import ServingConfig

_logger = logging.getLogger(__name__)

_UNFINISHED = "unfinished"
_ADAPTER = re.compile(r".+-[0-9a-f]{12}")
_PARTING_SECONDS = 20.0
_FILES = ("adapter_config.json", "adapter_model.safetensors")
Answer = TypeVar("Answer")


class PolicyServer:
    """Keeps a vLLM server at the policy as it is now.

    An adapter's name has the policy's (and so the iteration) and a digest of its weights and folder, so that
    neither an answer nor a remembered prefix of other weights can come back under it: not of an earlier
    iteration, not of the same one before a run was killed, and not of another run at the same server.

    Args:
        config: where the server is, and how it is asked.
        backbone: its role "policy" is served.
        folder: for the adapters, of this run alone; the server must see it under the same path. Only adapters
            that were written into it are ever removed from it, or from the server.
        processes: the first one alone changes the server's adapters.

    Attributes:
        client: asks the server.
        address: of the server.
    """

    def __init__(self, config: ServingConfig, backbone: Backbone, folder: Path, processes: Processes) -> None:
        self.client, self.address = _client(config), str(config.base_url)
        self._backbone, self._folder, self._processes = backbone, folder.resolve(), processes
        self._serving: Path | None = None  # in the first process alone

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self._backbone.config.get_text_config().vocab_size)

    def serve(self, policy: str, context_length: int) -> str:
        """Let the server have the policy as it is now, and no earlier one.

        Args:
            policy: name of the policy version.
            context_length: of the longest conversation.

        Returns:
            The name by which the server knows it.

        Raises:
            UserError: if the server cannot be reached, cannot change adapters, or holds shorter
                conversations.
        """
        return self._processes.first(lambda: self._serve(policy, context_length))

    def _serve(self, policy: str, context_length: int) -> str:
        served = self._ask(self.client.models, tuple)
        _expect_length(served, self.address, context_length)
        path = self._write(policy)
        if not any(model.name == path.name for model in served):
            self._load(path)
        for model in served:
            if self._is_ours(model) and model.name != path.name:
                self._ask(partial(self.client.unload, model.name), type(None))
        for old in self._folder.iterdir():
            if old != path and old.is_dir() and _ADAPTER.fullmatch(old.name):
                shutil.rmtree(old)
        self._serving = path
        return path.name

    def close(self) -> None:
        """Take the policy off the server; one that does not do it soon keeps it, which is logged.

        No process waits for another here, so it may also be called where one of them failed.
        """
        path, self._serving = self._serving, None
        if path is None:
            return
        (answer,) = ask([partial(self._part_with, path.name)], type(None))
        if isinstance(answer, Failure):
            _logger.warning("The server at %s keeps the adapter %s: %s", self.address, path, answer.cause)
            return
        shutil.rmtree(path)
        with suppress(OSError):  # where something of others lies beside it
            self._folder.rmdir()

    async def _part_with(self, name: str) -> None:
        async with asyncio.timeout(_PARTING_SECONDS):
            await self.client.unload(name)

    def _write(self, policy: str) -> Path:
        """The policy's adapter as a peft folder whose name depends on what is in it."""
        unfinished = self._folder / _UNFINISHED
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_role(self._backbone, "policy", unfinished)
        parts = (str(self._folder).encode(), *((unfinished / name).read_bytes() for name in _FILES))
        path = self._folder / f"{policy}-{hashlib.sha256(b''.join(parts)).hexdigest()[:12]}"
        if path.exists():  # of this very policy
            shutil.rmtree(unfinished)
        else:
            unfinished.rename(path)
        return path

    def _load(self, path: Path) -> None:
        (answer,) = ask([partial(self.client.load, path.name, str(path))], type(None))
        if not isinstance(answer, Failure):
            return
        # A first attempt may have loaded it and come back too late.
        if path.name not in {model.name for model in self._ask(self.client.models, tuple)}:
            raise self._told(answer)

    def _is_ours(self, model: ServedModel) -> bool:
        return model.is_adapter and model.path is not None and Path(model.path).parent == self._folder

    def _ask(self, call: Callable[[], Coroutine[Any, Any, Answer]], expected: type[Answer]) -> Answer:
        (answer,) = ask([call], expected)
        if isinstance(answer, Failure):
            raise self._told(answer)
        return answer

    def _told(self, failure: Failure[Any]) -> BaseException:
        return _told(failure, self.address, str(self._folder))


def expect_server(config: ServingConfig, context_length: int) -> None:
    """Refuse a server that does not answer soon, or holds shorter conversations; nothing is changed there.

    Args:
        config: where it is.
        context_length: of the longest conversation.

    Raises:
        UserError: if it does.
    """
    address = str(config.base_url)

    def check(served: tuple[ServedModel, ...]) -> None:
        _expect_length(served, address, context_length)

    (answer,) = ask([partial(_client(config).expect, "data.server", check)], type(None))
    if isinstance(answer, Failure):
        folder = config.adapter_folder or "the run's folder"
        raise _told(answer, address, folder) from None


def _client(config: ServingConfig) -> CompletionClient:
    if config.base_url is None:
        raise ValueError("data.server.base_url is null: there is no server")
    return CompletionClient(
        Server(
            "the base model",
            config.base_url,
            api_key_variable=config.api_key_variable,
            concurrency=config.concurrency,
            timeout_seconds=config.timeout_seconds,
            retries=config.retries,
        )
    )


def _expect_length(served: tuple[ServedModel, ...], address: str, wanted: int) -> None:
    known = [model.context_length for model in served if model.context_length is not None]
    if known and max(known) < wanted:
        raise UserError(
            f"model.context_length is {wanted}, but the server at {address} holds conversations of "
            f"{max(known)} tokens. Start it with --max-model-len {wanted}, or pass "
            f"--model.context_length {max(known)}."
        )


def _told(failure: Failure[Any], address: str, folder: str) -> BaseException:
    error = failure.error
    if not isinstance(error, LLMFailure):
        return error
    return UserError(
        f"data.server.base_url is {address!r}, but the policy cannot be served there: {error}. "
        f"vLLM must run there with --enable-lora, a --max-lora-rank of at least the adapter's rank "
        f"(model.lora_rank) and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, and must be "
        f"able to read {folder!r} (data.server.adapter_folder). Its own log says more."
    )
