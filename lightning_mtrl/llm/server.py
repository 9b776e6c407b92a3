"""Where a language model is served, and how it is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_mtrl.addresses import check_address, check_key_variable


@dataclass(frozen=True)
class Server:
    """A model behind an OpenAI-compatible server (vLLM, `transformers serve`, a provider).

    The key comes from the environment variable that `api_key_variable` names, and from nowhere else; it is
    written nowhere. Servers of one's own mostly want none.

    Attributes:
        model: name of the model at the server.
        base_url: address up to and with its version, such as "http://localhost:8000/v1".
        api_key_variable: environment variable that holds the key.
        concurrency: requests under way at once in one process.
        timeout_seconds: for one attempt, until the whole reply is there.
        retries: attempts after the first one, for a server that is down, slow, busy or broken.
        backoff_seconds: wait before the first of them; it doubles each time. A Retry-After of the server can
            make a wait longer, not shorter.
        longest_wait_seconds: bound of both; a server that asks for more is given up.
        temperature: of the model's sampling.
        max_tokens: longest reply.
        keep_cut_replies: take the words of a reply that `max_tokens` cut off as they are. By default such a
            reply is a failure, since who breaks off in the middle says something else.
        record: a .jsonl file that takes every request with its reply. A request that stands in it already is
            answered from it, so that a repeated run asks (and pays) nothing. None: nothing is kept.
        input_price: of a million prompt tokens, in any currency.
        output_price: of a million tokens of replies.
    """

    model: str
    base_url: str = "http://localhost:8000/v1"
    api_key_variable: str = "OPENAI_API_KEY"
    concurrency: int = 16
    timeout_seconds: float = 60.0
    retries: int = 4
    backoff_seconds: float = 0.5
    longest_wait_seconds: float = 30.0
    temperature: float = 0.7
    max_tokens: int = 256
    keep_cut_replies: bool = False
    record: str | None = None
    input_price: float = 0.0
    output_price: float = 0.0

    def __post_init__(self) -> None:
        check_address(self.base_url)
        check_key_variable(self.api_key_variable)
        if self.record is not None and not self.record.endswith(".jsonl"):
            raise ValueError(f"record must end with .jsonl, got {self.record!r}")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name, least in (("concurrency", 1), ("max_tokens", 1), ("retries", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("backoff_seconds", "longest_wait_seconds", "temperature", "input_price", "output_price"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number of at least 0, got {value}")
        if not (math.isfinite(self.timeout_seconds) and self.timeout_seconds > 0):
            raise ValueError(f"timeout_seconds must be a number > 0, got {self.timeout_seconds}")
