"""Configuration files as they were written: what a file says, before a parser gives it a meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from lightning_mtrl.config import RunConfig
from lightning_mtrl.errors import UserError

# Sections of a configuration, whose content is keys and never one value.
_SECTIONS = tuple(name for name, kind in get_type_hints(RunConfig).items() if is_dataclass(kind))
_NOT_OF_CLASS = re.compile(r"^(?P<key>\S+) is (?:not an argument of |'[^']*', which is no )")


def check_file(file: str) -> None:
    """Refuse a file that is no configuration, whatever its keys.

    Raises:
        UserError: if it is not there, is not UTF-8 or YAML, holds no keys, or one of them twice.
    """
    text = _text(file)
    try:
        content, root = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{file}: {_not_yaml(error)} Mend the file.") from error
    if not isinstance(content, dict) or not content:
        holds = "holds something else" if content else "is empty"
        raise UserError(f"{file}: it {holds}, but keys with values were expected, such as `seed: 1`.")
    for key, first, second in _twice(root):
        raise UserError(
            f"{file}: {key} stands in line {first} and again in line {second}, and only the last would "
            f"count. Make one of them."
        )
    for name in _SECTIONS:
        if not isinstance(content.get(name, {}), dict | str):
            shown = "null" if content[name] is None else repr(content[name])
            raise UserError(
                f"{file}: {name} is {shown}, but keys were expected in it. Add some, or leave it out."
            )


def _text(file: str) -> str:
    path = Path(file)
    if path.is_dir():
        inside = path / "config.yaml"
        raise UserError(
            f"--config {file}: this is a folder. Give {inside if inside.is_file() else 'a file in it'}."
        )
    if not path.is_file():
        raise UserError(f"--config {file}: there is no such file. Check the path.")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: this is not UTF-8 text (byte {error.start}: {error.reason}). Save it as UTF-8, or give "
            f"another file."
        ) from error


def _not_yaml(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    said = [getattr(error, name, None) for name in ("context", "problem")] if mark else [str(error)]
    place = f"line {mark.line + 1} is" if mark else "this is"
    return f"{place} not YAML ({' '.join(', '.join(filter(None, said)).split())})."


def _twice(root: yaml.Node) -> Iterator[tuple[str, int, int]]:
    """Keys that stand twice in one mapping, with their lines; YAML itself keeps the last of them."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))  # an alias may lead back
        if isinstance(node, yaml.MappingNode):
            yield from _twice_in([key for key, _ in node.value])
        waiting += [inner[1] if isinstance(inner, tuple) else inner for inner in node.value]


def _twice_in(keys: Sequence[yaml.Node]) -> Iterator[tuple[str, int, int]]:
    found: dict[str, int] = {}
    for key in keys:
        line = key.start_mark.line + 1
        if key.value in found and key.value != "<<":
            yield key.value, found[key.value], line
        found[key.value] = line


def advice_on_order(message: str, files: Sequence[str], wrong: int, before: Sequence[str]) -> str:
    """What to do about a key that does not fit the class so far, because files stand in a wrong order.

    Args:
        message: what is wrong with a file.
        files: all that were given, in order.
        wrong: index of that file.
        before: the command line before it.

    Returns:
        A sentence with a space before it; empty where the order is not to blame.
    """
    found = _NOT_OF_CLASS.match(message)
    key = found["key"] if found else ""
    # The key may be of a part, such as a credit, whose place only the class around it has.
    owners = [key[: place.start()] for place in re.finditer(r"\.init_args\.", key)]
    unnamed = [owner for owner in owners if not _names_class(files[wrong], owner)]
    for owner in unnamed:
        for later in files[wrong + 1 :]:
            if _names_class(later, owner):
                return f" A file goes over what stands before it: give {later}, which names a class, first."
    for owner in unnamed:
        named = any(_names_class(file, owner) for file in files)
        option = f"--{owner.partition('.')[0]}"
        if not named and not any(argument.startswith(option) for argument in before):
            return (
                f" It names no class of {owner}, and goes over what stands before it: give a file that "
                f"names one first."
            )
    return ""


def _names_class(file: str, owner: str) -> bool:
    """Whether a file says which class stands at a key; `init_args` may be left out in both."""
    found: Any = yaml.safe_load(Path(file).read_text("utf-8"))
    for part in owner.replace(".init_args", "").split("."):
        inside = found.get("init_args", found) if isinstance(found, dict) else {}
        found = inside.get(part) if isinstance(inside, dict) else None
    return isinstance(found, str) or (isinstance(found, dict) and "class_path" in found)
