"""The classes that a configuration can name: short names from exports, and what is wrong with a path."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import reduce
from operator import or_
from typing import Any, Protocol

from lightning_mtrl.errors import UserError
from lightning_mtrl.messages import with_choices

# Key of the configuration -> package whose exports have short names, and where its base class stands.
CLASS_KEYS = {
    "environment": ("lightning_mtrl.environments", "lightning_mtrl.environments.protocol", "Environment"),
    "algorithm": ("lightning_mtrl.algorithms", "lightning_mtrl.algorithms.base", "Algorithm"),
}
_FAILED_CLASS = re.compile(
    r'Parser key "(?P<key>\w+)":.*?'
    r"(?:dot import path string: |given class_path '|Import path (?=\w+\.))(?P<path>[\w.]+)",
    re.DOTALL,
)
# Where the errors of all types of a union leave the path out.
_GIVEN_CLASS = re.compile(
    r"""^Parser key "(?P<key>\w+)":.*\n\s*Given value: (?:\{.*?'class_path': ')?(?P<path>[\w.]+)""", re.DOTALL
)


class _AnyEnvironment(Protocol):
    """`Environment` for jsonargparse, which else refuses a class whose annotations are not the very same."""

    def reset(self, seed: Any) -> Any: ...

    def step(self, response: Any) -> Any: ...


def class_type(key: str) -> Any:
    """Type of a key for the parser: each exported class, or any other of the kind by its path."""
    # A class that implements a protocol has no link to it, so short names need the classes themselves.
    base, exported = _exports(key)
    return reduce(or_, [*exported.values(), _AnyEnvironment if key == "environment" else base])


def missing_class(error: str) -> str | None:
    """What is wrong with the class that a parser's error is about; None if it is about something else."""
    found = _FAILED_CLASS.search(error) or _GIVEN_CLASS.search(error)
    return cannot_find(found["key"], found["path"]) if found and found["key"] in CLASS_KEYS else None


def cannot_find(key: str, path: str) -> str | None:
    """Why there is no such class for a key, with those that there are; None if there is one."""
    base, exported = _exports(key)
    module_name, _, name = path.rpartition(".")
    said = f"{key}.class_path is {path!r}"
    if not module_name:
        return None if name in exported else with_choices(f"{said}, which names no class", name, exported)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return with_choices(f"{said}, which cannot be imported ({error})", name, exported)
    if not hasattr(module, name):
        return with_choices(f"{said}, but {module_name} has no {name}", name, exported)
    problem = _unfit(getattr(module, name), base)
    return with_choices(f"{said}, {problem}", name, exported) if problem else None


def class_named(key: str, path: str) -> type:
    """The class of a key, of which none is made.

    Raises:
        UserError: if there is no such class.
    """
    if problem := cannot_find(key, path):
        raise UserError(problem)
    module_name, _, name = path.rpartition(".")
    found: type = (
        getattr(importlib.import_module(module_name), name) if module_name else _exports(key)[1][name]
    )
    return found


def _unfit(found: object, base: type) -> str | None:
    """Why something that was found is no class of a kind; None if it is."""
    kind = f"{base.__module__}.{base.__name__}"
    if not inspect.isclass(found):
        return "which is no class"
    if found is base or inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        return f"which is only a base of others{f'; it lacks {missing}' if missing else ''}"
    if not getattr(base, "_is_protocol", False):
        return None if issubclass(found, base) else f"which does not inherit from {kind}"
    wanted = {name: inspect.signature(made) for name, made in vars(base).items() if inspect.isfunction(made)}
    for name, signature in wanted.items():
        given = ", ".join(list(signature.parameters)[1:])
        if name.startswith("_") or _takes(getattr(found, name, None), signature):
            continue
        problem = (
            f"whose {name} does not take ({given})"
            if hasattr(found, name)
            else f"which has no {name}({given})"
        )
        return f"{problem}, as {kind} asks for"
    return None


def _takes(method: object, wanted: inspect.Signature) -> bool:
    if not callable(method):
        return False
    try:
        own, *named = wanted.parameters
        inspect.signature(method).bind(own, **dict.fromkeys(named))  # by name, as the parser compares them
    except TypeError:
        return False
    return True


def _exports(key: str) -> tuple[type, dict[str, type]]:
    package_name, base_module, base_name = CLASS_KEYS[key]
    base: type = getattr(importlib.import_module(base_module), base_name)
    package = importlib.import_module(package_name)
    exported = {name: getattr(package, name) for name in package.__all__}
    chosen = {
        name: value
        for name, value in exported.items()
        if inspect.isclass(value) and value is not base and issubclass(value, base)
    }
    return base, chosen
