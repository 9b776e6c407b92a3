from __future__ import annotations

import importlib
import inspect
import pkgutil

from lightning_mtrl import environments
from lightning_mtrl.class_lookup import cannot_find


def test_every_environment_of_the_package_has_a_short_name() -> None:
    names = [module.name for module in pkgutil.iter_modules(environments.__path__)]
    modules = [importlib.import_module(f"lightning_mtrl.environments.{name}") for name in names]
    found = {
        name
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
        if not inspect.isabstract(value) and value is not environments.Environment
        if issubclass(value, environments.Environment)
    }
    assert {"SuggestedResponse", "TabularDialogue", "MathTutoring"} <= found
    assert {name: cannot_find("environment", name) for name in found} == dict.fromkeys(found)
