"""The configuration of a run as rows: what differs from the defaults, and the arguments of its classes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_mtrl.class_lookup import CLASS_KEYS
from lightning_mtrl.config import RunConfig

_ELSEWHERE = {"run_dir", *CLASS_KEYS}


@dataclass(frozen=True)
class Setting:
    """One key.

    Attributes:
        key: with dots.
        value: as text.
        default: as text; empty for a key that this version does not know, and for arguments of classes.
    """

    key: str
    value: str
    default: str = ""


def differing(config: Mapping[str, Any]) -> list[Setting]:
    """The keys whose value is not the default, without the environment and the algorithm.

    >>> differing({"seed": 3, "data": {"rows": 256}})
    [Setting(key='seed', value='3', default='0')]
    """
    defaults = dict(_leaves(asdict(RunConfig())))
    return [
        Setting(key, _text(value), _text(defaults[key]) if key in defaults else "")
        for key, value in _leaves(config)
        if key.partition(".")[0] not in _ELSEWHERE and not (key in defaults and value == defaults[key])
    ]


def class_name(config: Mapping[str, Any], key: str) -> str:
    """The environment's or the algorithm's name without its path.

    >>> class_name({"algorithm": {"class_path": "lightning_mtrl.algorithms.ITPO"}}, "algorithm")
    'ITPO'
    """
    return str(config.get(key, {}).get("class_path", "")).rpartition(".")[2]


def arguments(config: Mapping[str, Any], key: str) -> list[Setting]:
    """The arguments of the environment or the algorithm, those of classes among them included."""
    given = config.get(key, {}).get("init_args") or {}
    return [Setting(name, _text(value)) for name, value in _leaves(given)]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Single values with their keys; a class is its name, and its arguments follow."""
    if not isinstance(value, Mapping) or not value:
        yield key, value
        return
    if "class_path" in value:
        yield key, str(value["class_path"]).rpartition(".")[2]
        value = value.get("init_args") or {}
        if not value:
            return
    for name, inner in value.items():
        yield from _leaves(inner, f"{key}.{name}" if key else str(name))


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.strip() else json.dumps(value, ensure_ascii=False)
