"""A client of vLLM: token ids in, token ids and log-probabilities out, and adapters that come and go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from lightning_mtrl.errors import UserError
from lightning_mtrl.llm.connection import Connection
from lightning_mtrl.llm.failures import Attempt, LLMFailure
from lightning_mtrl.llm.reaching import reach
from lightning_mtrl.llm.server import Server

# Whatever the server's own defaults are (vLLM takes them from the model's generation_config.json), the plain
# policy is asked for, with the ids of its tokens, and its end-of-turn token among them.
_PLAIN = {"repetition_penalty": 1.0, "ignore_eos": True, "min_tokens": 0}
_IDS = {"return_token_ids": True, "skip_special_tokens": False}


@dataclass(frozen=True)
class ServedModel:
    """A model or an adapter that a server has.

    Attributes:
        name: by which it is asked for.
        path: where its weights were loaded from, or None.
        context_length: tokens that prompt and response may have together; None for adapters.
        is_adapter: True for an adapter on another of the server's models.
    """

    name: str
    path: str | None
    context_length: int | None
    is_adapter: bool


@dataclass(frozen=True)
class TokenReply:
    """A response in tokens, as the server tells it.

    Attributes:
        model: that gave it.
        ids: sampled tokens, the one that ended it included; never empty.
        logprobs: in nats, finite, one for each id.
    """

    model: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class CompletionClient:
    """Asks a vLLM server for tokens, and changes its adapters.

    Args:
        server: where and how; of its fields those of requests count. Models are named request by request.

    Raises:
        UserError: if the extra "vllm" is not installed.
    """

    def __init__(self, server: Server) -> None:
        if find_spec("openai") is None:
            raise UserError(
                "data.server.base_url is set, but the package openai, which asks servers, is not installed. "
                "Run pip install 'lightning_mtrl[vllm]'."
            )
        self.connection = Connection(server)

    async def models(self) -> tuple[ServedModel, ...]:
        """What the server has.

        Raises:
            LLMFailure: if it does not answer.
            UserError: if key or address are wrong.
        """
        return await self.connection.ask(lambda library: library.get("/models", cast_to=object), _models)

    async def expect(self, place: str, check: Callable[[tuple[ServedModel, ...]], None]) -> None:
        """Find out whether the server answers, in a short time, and look at what it has; see `reach`.

        Args:
            place: key of the server in the configuration, to be told.
            check: raises what is wrong with the server's models; a server that is too busy to tell them is
                not checked.

        Raises:
            LLMFailure: if there is no connection, or no list of models.
            UserError: if the server is silent, or refuses the key.
        """
        await reach(self.connection.server, place, lambda listed: check(_models(listed)))

    async def load(self, name: str, path: str) -> None:
        """Let the server read an adapter.

        Args:
            name: new to the server.
            path: absolute, of a peft folder, as the server sees it.

        Raises:
            LLMFailure: if it does not.
            UserError: if the server cannot change adapters while it runs.
        """
        await self._change("load", {"lora_name": name, "lora_path": path})

    async def unload(self, name: str) -> None:
        """Let the server forget an adapter; raises as `load` does."""
        await self._change("unload", {"lora_name": name})

    async def complete(
        self,
        model: str,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        end_ids: Sequence[int],
        seed: int,
        draw: Mapping[str, float],
    ) -> TokenReply:
        """Sample what follows some tokens.

        Args:
            model: name of a model or adapter.
            prompt_ids: all that was said.
            max_tokens: longest response, its end included.
            end_ids: ids that end it, and nothing else does.
            seed: equal requests with equal seeds have equal replies where the server keeps to it.
            draw: temperature, top_p, top_k and min_p.

        Returns:
            The tokens with their log-probabilities: those of the plain model (temperature 1, nothing cut
            off) where the server runs with vLLM's default `--logprobs-mode raw_logprobs`.

        Raises:
            LLMFailure: if there is no usable reply after all attempts.
            UserError: if key, model or address are wrong.
        """
        usual = {name: value for name, value in draw.items() if name in ("temperature", "top_p")}
        extra = {name: value for name, value in draw.items() if name not in usual}
        request = {
            "model": model,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "logprobs": 0,  # of the sampled token alone
            "seed": seed,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **usual,
            "extra_body": {**extra, **_PLAIN, **_IDS, "stop_token_ids": sorted(end_ids)},
        }
        return await self.connection.ask(
            lambda library: library.completions.create(**request), _token_reply, model
        )

    async def _change(self, what: str, body: Mapping[str, str]) -> None:
        try:
            await self.connection.ask(
                lambda library: library.post(f"/{what}_lora_adapter", cast_to=str, body=body),
                lambda said: None,
                body["lora_name"],
            )
        except LLMFailure as failed:
            raise LLMFailure(f"cannot {what} an adapter: {failed}") from None
        except UserError as refused:
            raise UserError(
                f"{refused} A server changes its adapters only with --enable-lora, and with "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment."
            ) from None


def _models(reply: Any) -> tuple[ServedModel, ...]:
    try:
        return tuple(_served_model(card) for card in reply["data"])
    except (KeyError, TypeError):
        raise Attempt("no list of models in the reply") from None


def _served_model(card: Mapping[str, Any]) -> ServedModel:
    return ServedModel(
        str(card["id"]), card.get("root"), card.get("max_model_len"), card.get("parent") is not None
    )


def _token_reply(completion: Any) -> TokenReply:
    choices = getattr(completion, "choices", None)
    choice = choices[0] if isinstance(choices, list) and choices else None
    ids = getattr(choice, "token_ids", None)
    logprobs = getattr(getattr(choice, "logprobs", None), "token_logprobs", None)
    if not ids:
        raise Attempt("no token ids in the reply")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        raise Attempt("not one log-probability for each token id")
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise Attempt("token ids that are no whole numbers")
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in logprobs):
        raise Attempt("log-probabilities that are no finite numbers")
    return TokenReply(str(getattr(completion, "model", "")), tuple(ids), tuple(map(float, logprobs)))
