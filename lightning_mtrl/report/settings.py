"""The configuration of a run as rows: what differs from the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_mtrl.config import RunConfig
from lightning_mtrl.report.class_defaults import class_defaults

_UNKNOWN = object()  # in the place of a default


@dataclass(frozen=True)
class Setting:
    """One key.

    Attributes:
        key: with dots.
        value: as text.
        default: as text; empty where it is not known, as of a class that is not of this package.
    """

    key: str
    value: str
    default: str = ""


def differing(config: Mapping[str, Any]) -> list[Setting]:
    """The keys whose value is not the default; of an argument of a class, that of its own constructor.

    >>> differing({"seed": 3, "data": {"rows": 256}})
    [Setting(key='seed', value='3', default='0')]
    """
    given = {key: value for key, value in config.items() if key != "run_dir"}
    return list(_compared(given, asdict(RunConfig()), ""))


def class_name(config: Mapping[str, Any], key: str) -> str:
    """The environment's or the algorithm's name without its path.

    >>> class_name({"algorithm": {"class_path": "lightning_mtrl.algorithms.ITPO"}}, "algorithm")
    'ITPO'
    """
    return _named(config.get(key))


def _compared(given: Any, default: Any, key: str) -> Iterator[Setting]:
    if isinstance(given, Mapping) and "class_path" in given:
        usual = default if default is _UNKNOWN or default is None else _named(default)
        yield from _compared(_named(given), usual, key)
        path = str(given["class_path"])
        yield from _compared(given.get("init_args") or {}, class_defaults(path), key)
    elif isinstance(given, Mapping):
        known = default if isinstance(default, Mapping) else {}
        for name, inner in given.items():
            yield from _compared(inner, known.get(name, _UNKNOWN), f"{key}.{name}" if key else str(name))
    elif default is _UNKNOWN:
        yield Setting(key, _text(given))
    elif given != default:
        yield Setting(key, _text(given), _text(default))


def _named(part: Any) -> str:
    """Name of the class of a part, without its path."""
    return str(part.get("class_path", "")).rpartition(".")[2] if isinstance(part, Mapping) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.strip() else json.dumps(value, ensure_ascii=False)
