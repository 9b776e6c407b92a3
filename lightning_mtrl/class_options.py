"""Options such as --algorithm.init_args.gamma 0.9, which reach into the arguments of a class."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any


def as_mappings(arguments: Sequence[str], keys: Collection[str]) -> list[str]:
    """Write options that reach into a class as mappings: `--key.a text` becomes `--key={"a": "text"}`.

    The parser reads the value of such an option, and hands it on as the `str()` of what it read: null becomes
    the text "None", and a text with a colon a mapping. In a mapping a value stays what was typed until the
    argument's own type reads it, at any depth, as for every other key.

    Args:
        arguments: a command line.
        keys: of the classes.

    >>> as_mappings(["--seed", "1", "--algorithm.gamma", "null"], ["algorithm"])
    ['--seed', '1', '--algorithm={"gamma": "null"}']
    """
    written: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        option, given, value = argument.partition("=")
        key, _, place = option.removeprefix("--").partition(".")
        if not option.startswith("--") or key not in keys or place in ("", "help") or not (given or waiting):
            written.append(argument)
            continue
        inner: object = value if given else waiting.pop()
        mapping = reduce(lambda content, part: {part: content}, reversed(place.split(".")), inner)
        written.append(f"--{key}={json.dumps(mapping, ensure_ascii=False)}")
    return written


def lost_option(arguments: Sequence[str], keys: Collection[str], resolved: Mapping[str, Any]) -> str | None:
    """What is wrong with an option that counts for nothing, because a later one names another class.

    Args:
        arguments: a command line.
        keys: of the classes.
        resolved: what was read, every argument of every class with its value.

    Returns:
        None if all of them count.
    """
    for argument in arguments:
        option = argument.partition("=")[0]
        key, *places = option.removeprefix("--").split(".")
        if not option.startswith("--") or key not in keys or places in ([], ["help"]):
            continue
        found: Any = resolved[key]
        for place in (place for place in places if place != "init_args"):
            if isinstance(found, Mapping) and place != "class_path":
                found = found.get("init_args", found)
            if not isinstance(found, Mapping) or place not in found:
                return (
                    f"{option} is given, but the class that has this argument is replaced by a later option. "
                    f"Leave it out, or name the class first."
                )
            found = found[place]
    return None
