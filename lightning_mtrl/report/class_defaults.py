"""Defaults of the package's own classes, read from their source: importing them would import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]


def class_defaults(path: str) -> dict[str, Any] | None:
    """Defaults of the arguments of a class, those of dataclasses among them as mappings.

    Args:
        path: import path, such as "lightning_mtrl.algorithms.ITPO".

    Returns:
        By argument; one whose default is not written out as a plain value is left out. None for a class that
        is not of this package, or is not found.
    """
    module, _, name = path.rpartition(".")
    found = _class(module, name)
    if found is None:
        return None
    module, node = found
    return {key: value for key, default in _arguments(module, node) for value in _values(module, default)}


def _arguments(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Arguments with a default: of the constructor, or of a dataclass its fields and those of its bases."""
    made = next(
        (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None
    )
    if made is not None:
        listed = made.args
        plain = [*listed.posonlyargs, *listed.args][-len(listed.defaults) :] if listed.defaults else []
        yield from ((one.arg, default) for one, default in zip(plain, listed.defaults, strict=True))
        pairs = zip(listed.kwonlyargs, listed.kw_defaults, strict=True)
        yield from ((one.arg, default) for one, default in pairs if default is not None)
        return
    for base in node.bases:
        found = _class(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None:
            yield from _arguments(*found)
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
            yield one.target.id, one.value


def _values(module: str, default: ast.expr) -> list[Any]:
    """The value that is written there; empty where that is no plain one."""
    if isinstance(default, ast.Call):
        return _made(module, default)
    try:
        return [ast.literal_eval(default)]
    except ValueError:
        return []


def _made(module: str, call: ast.Call) -> list[Any]:
    """The arguments of a dataclass that is made there, or the list of a field."""
    given = {one.arg: one.value for one in call.keywords}
    if not isinstance(call.func, ast.Name) or call.args:
        return []
    if call.func.id == "field":
        factory = given.get("default_factory")
        return [[]] if isinstance(factory, ast.Name) and factory.id == "list" else []
    if (found := _class(module, call.func.id)) is None:
        return []
    usual = class_defaults(f"{found[0]}.{found[1].name}") or {}
    changed = {name: value for name, node in given.items() if name for value in _values(module, node)}
    return [
        {name: value for name, value in (usual | changed).items() if name not in given or name in changed}
    ]


def _class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """A class and the module that it stands in, wherever another one imports it from."""
    tree = _tree(module)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and any(one.name == name for one in node.names):
            return _class(node.module, name)
    return None


@cache
def _tree(module: str) -> ast.Module | None:
    """The source of a module of the package; None for others."""
    first, *parts = module.split(".")
    if first != _PACKAGE.name:
        return None
    place = _PACKAGE.joinpath(*parts)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(file.read_text("utf-8")) if file.is_file() else None
