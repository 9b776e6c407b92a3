"""Configuration files as they were written: what a file says, before a parser gives it a meaning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

_NOT_OF_CLASS = re.compile(r"^(?P<owner>\S+)\.init_args\.\S+ is not an argument of ")


def advice_on_order(message: str, files: Sequence[str], wrong: int, before: Sequence[str]) -> str:
    """What to do about a key that is no argument of the class so far, because files stand in a wrong order.

    Args:
        message: what is wrong with a file.
        files: all that were given, in order.
        wrong: index of that file.
        before: the command line before it.

    Returns:
        A sentence with a space before it; empty where the order is not to blame.
    """
    found = _NOT_OF_CLASS.match(message)
    if not found or _names_class(files[wrong], found["owner"]):
        return ""
    naming = [number for number, file in enumerate(files) if _names_class(file, found["owner"])]
    if later := [files[number] for number in naming if number > wrong]:
        return f" A file goes over what stands before it: give {later[0]}, which names a class, first."
    option = f"--{found['owner'].partition('.')[0]}"
    if naming or any(argument.startswith(option) for argument in before):
        return ""
    return " It names no class, and goes over what stands before it: give a file that names one first."


def _names_class(file: str, owner: str) -> bool:
    """Whether a file says which class stands at a key; `init_args` may be left out in both."""
    found: Any = yaml.safe_load(Path(file).read_text("utf-8")) if Path(file).is_file() else None
    for part in owner.replace(".init_args", "").split("."):
        inside = found.get("init_args", found) if isinstance(found, dict) else {}
        found = inside.get(part) if isinstance(inside, dict) else None
    return isinstance(found, str) or (isinstance(found, dict) and "class_path" in found)
