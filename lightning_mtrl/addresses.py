"""Addresses and keys of servers in a configuration; it is saved, so no secret may stand in it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def check_address(base_url: str) -> None:
    """Refuse an address that is none, or holds what may be secret.

    Raises:
        ValueError: it begins with "base_url", and shows nothing that may be secret.
    """
    address = urlsplit(base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(
            f"base_url must be an address such as 'http://localhost:8000/v1', got {_hidden(base_url)!r}"
        )
    if address.username or address.password or address.query:
        raise ValueError(
            f"base_url must hold no user, password or query, since it is saved with the run, got "
            f"{_hidden(base_url)!r}; put the key into the variable that api_key_variable names"
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


def _hidden(url: str) -> str:
    """An address without what may be secret in it."""
    address = urlsplit(url)
    return f"{address.scheme}://{address.hostname or ''}..." if address.scheme else "..."
