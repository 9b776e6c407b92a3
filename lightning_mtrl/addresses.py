"""Addresses and keys of servers in a configuration; it is saved, so no secret may stand in it."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

EXAMPLE = "http://localhost:8000/v1"
# A host with or without a port and a path, and nothing else.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(:\d+)?(/[\w.~/-]*)?")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def check_address(base_url: str) -> None:
    """Refuse an address that is none, or holds what may be secret.

    Raises:
        ValueError: it begins with "base_url", and shows nothing that may be secret.
    """
    address = urlsplit(base_url)
    if address.scheme not in ("http", "https") or not address.hostname or not _has_a_port(address):
        raise ValueError(
            f"base_url is {_hidden(base_url)!r}, but an address that begins with http:// or https:// was "
            f"expected, such as {_completed(base_url)!r}"
        )
    if address.username or address.password or address.query:
        raise ValueError(
            f"base_url is {_hidden(base_url)!r}, but it must hold no user, password or query, since it is "
            f"saved with the run; put the key into the variable that api_key_variable names"
        )


def check_key_variable(api_key_variable: str) -> None:
    """Refuse what cannot be the name of an environment variable.

    Raises:
        ValueError: it begins with "api_key_variable".
    """
    if not _VARIABLE.fullmatch(api_key_variable):
        # Not shown, since it may be the key.
        raise ValueError(
            "api_key_variable must be the name of an environment variable in capitals, such as "
            "OPENAI_API_KEY, and never the key itself"
        )


def _has_a_port(address: SplitResult) -> bool:
    """Whether what stands in the place of a port, if anything does, is one."""
    try:
        return address.port is None or address.port > 0
    except ValueError:
        return False


def _completed(url: str) -> str:
    """What was probably meant by an address that lacks its beginning; else an example."""
    completed = f"http://{url}"
    whole = _PLAIN.fullmatch(url) and _has_a_port(urlsplit(completed))
    return completed if whole else EXAMPLE


def _hidden(url: str) -> str:
    """An address as it was given, without what may be secret: user, password, query."""
    start, separator, rest = url.partition("://")
    if not separator:
        start, rest = "", url
    rest = re.split(r"[?#]", rest, maxsplit=1)[0] + ("..." if re.search(r"[?#]", rest) else "")
    return f"{start}{separator}{'...@' + rest.rpartition('@')[2] if '@' in rest else rest}"
