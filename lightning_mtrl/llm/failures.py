"""What can go wrong with a server, in words that name no key."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING

from lightning_mtrl.errors import UserError

if TYPE_CHECKING:
    import openai

_PASSING = (408, 409, 425, 429)
_OF_THE_USER = {
    401: "the key is missing or wrong",
    403: "the key may not use this model",
    404: "there is no such model or address",
}


class LLMFailure(Exception):
    """A language model gave no usable reply, whatever was tried; the conversation has no outcome then.

    Its text is short and holds nothing of the request, so that failures can be counted by it.
    """


class Attempt(Exception):
    """One attempt that failed, and may be made again.

    Attributes:
        wait: seconds that the server asked for, or None.
    """

    def __init__(self, cause: str, wait: float | None = None) -> None:
        super().__init__(cause)
        self.wait = wait


def attempt_of(error: openai.OpenAIError | ValueError, model: str, base_url: str, variable: str) -> Attempt:
    """What an error of the client library means: another attempt, a failure, or a mistake of the user.

    Nothing of the server's own text is taken over, since servers repeat keys and prompts in it.

    Raises:
        UserError: for a wrong key, model or address, which no attempt mends.
        LLMFailure: for a request that the server refuses.
    """
    import openai

    if isinstance(error, openai.APITimeoutError):
        return Attempt("no reply in time")
    if isinstance(error, openai.APIConnectionError):
        return Attempt("no connection")
    if not isinstance(error, openai.APIStatusError):
        return Attempt("no JSON in the reply")
    status = error.status_code
    if status in _OF_THE_USER:
        raise UserError(
            f"{base_url} refused a request for the model {model!r} (HTTP {status}): {_OF_THE_USER[status]}. "
            f"Check model and base_url, and the key in the environment variable {variable}."
        ) from None
    if status in _PASSING or status >= 500:
        return Attempt(f"HTTP {status}", _asked_wait(error.response.headers.get("retry-after")))
    raise LLMFailure(f"request refused (HTTP {status})") from None


def _asked_wait(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds a number or a date; None where it holds neither."""
    if value is None:
        return None
    number = value.replace(".", "", 1).isdecimal()
    try:
        wait = float(value) if number else parsedate_to_datetime(value).timestamp() - time()
    except (ValueError, OverflowError):
        return None
    return max(0.0, wait)
