"""A client of a language model that many conversations ask at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Self

from lightning_mtrl.errors import UserError
from lightning_mtrl.llm.connection import Connection
from lightning_mtrl.llm.failures import Attempt, LLMFailure
from lightning_mtrl.llm.json_replies import complaint_about, kind_of_misfit, object_in
from lightning_mtrl.llm.record import RequestRecord
from lightning_mtrl.llm.server import Server
from lightning_mtrl.llm.usage import METER

Messages = Sequence[Mapping[str, str]]


class ChatClient:
    """Asks a `Server`, at most `concurrency` requests at a time, with time-outs and retries.

    A copy (`copy.deepcopy`, as for every conversation) is the same client, so limits and counts are shared.

    Args:
        server: where and how.

    Raises:
        UserError: if the extra "llm" is not installed.
    """

    def __init__(self, server: Server) -> None:
        if find_spec("openai") is None or find_spec("jsonschema") is None:
            raise UserError(
                "A language model shall be asked, but the package openai or jsonschema is not installed. Run "
                "pip install 'lightning_mtrl[llm]'."
            )
        self.server = server
        self._connection = Connection(server)
        self.usage = self._connection.usage
        self.usage.priced = server.input_price + server.output_price > 0
        METER.add(self.usage)
        self._record = RequestRecord(server.record)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    async def chat(self, messages: Messages, seed: int = 0) -> str:
        """The reply to some messages.

        Args:
            messages: with "role" and "content".
            seed: equal requests with equal seeds have equal replies where there is a record (and with servers
                that look at it).

        Raises:
            LLMFailure: if there is no usable reply after all attempts, or one that `max_tokens` cut off.
            UserError: if key, model or address are wrong.
        """
        reply = await self._reply(messages, seed)
        if reply.get("cut") and not self.server.keep_cut_replies:
            self.usage.failures += 1
            raise LLMFailure(f"a reply was cut off at max_tokens ({self.server.max_tokens})")
        return str(reply["content"])

    async def _reply(self, messages: Messages, seed: int) -> Mapping[str, Any]:
        """The reply with its counts of tokens, and "cut" where it was cut off."""
        request = {
            "base_url": self.server.base_url,
            "model": self.server.model,
            "messages": [dict(message) for message in messages],
            "temperature": self.server.temperature,
            "max_tokens": self.server.max_tokens,
            "seed": seed,
        }
        async with self._record.alone(request):
            if (known := self._record.find(request)) is not None:
                self.usage.recorded += 1
                return known
            try:
                reply = await self._asked(request)
            except LLMFailure:
                self.usage.failures += 1
                raise
            return self._record.add(request, reply)

    async def chat_json(self, messages: Messages, schema: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
        """The JSON object in the reply to some messages.

        One that does not fit is shown to the model once, with what is wrong with it, to be mended.

        Args:
            messages: which ask for JSON.
            schema: a JSON Schema that the object must fit.
            seed: as in `chat`.

        Raises:
            LLMFailure: also if the mended reply does not fit.
            UserError: as in `chat`.
        """
        # An object that is there in full is one, whatever was cut off behind it.
        said = str((await self._reply(messages, seed))["content"])
        found = object_in(said)
        if (wrong := complaint_about(found, schema)) is None:
            return dict(found or {})
        mend = (
            f"That cannot be used: {wrong}. Answer once more, with one JSON object and nothing else. It must "
            f"fit this schema: {json.dumps(schema)}"
        )
        again = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": mend}]
        found = object_in(str((await self._reply(again, seed))["content"]))
        if (cause := kind_of_misfit(found, schema)) is not None:
            self.usage.failures += 1
            raise LLMFailure(cause)
        return dict(found or {})

    async def _asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
        sent = {key: value for key, value in request.items() if key != "base_url"}
        return await self._connection.ask(
            lambda library: library.chat.completions.create(**sent), self._counted
        )

    def _counted(self, completion: Any) -> dict[str, Any]:
        choices = getattr(completion, "choices", None)
        choice = choices[0] if isinstance(choices, list) and choices else None
        content = getattr(getattr(choice, "message", None), "content", None)
        if not isinstance(content, str) or not content.strip():
            raise Attempt("empty reply")
        used = getattr(completion, "usage", None)
        asked, said = (int(getattr(used, name, 0) or 0) for name in ("prompt_tokens", "completion_tokens"))
        self.usage.prompt_tokens += asked
        self.usage.sampled_tokens += said
        self.usage.cost += (asked * self.server.input_price + said * self.server.output_price) / 1e6
        counts = {"prompt_tokens": asked, "completion_tokens": said}
        cut = {"cut": True} if getattr(choice, "finish_reason", None) == "length" else {}
        return {"content": content, **counts, **cut}
