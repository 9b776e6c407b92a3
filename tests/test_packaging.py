from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def plain(requirement: str) -> str:
    """The normalised name in a requirement such as `jsonargparse[signatures]>=4.53`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def declared(*extras: str) -> set[str]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return {plain(requirement) for requirements in lists for requirement in requirements}


def imported_by(folder: Path) -> set[str]:
    files = sorted(folder.rglob("*.py"))
    assert len(files) >= 20
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {plain(name.partition(".")[0]) for name in names if name}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9a-z.]+", entry) for entry in entries)
    return {plain(entry): entry.partition("==")[2] for entry in entries}


def test_the_package_imports_only_what_it_declares() -> None:
    standard = {plain(name) for name in sys.stdlib_module_names}
    known = standard | declared("games", "gguf", "llm", "math", "verifiers", "vllm") | {"lightning-mtrl"}
    if "pyyaml" in known:
        known.add("yaml")
    assert not imported_by(ROOT / "lightning_mtrl") - known


EXTRAS = ("benchmarks", "dev", "games", "gguf", "llm", "math", "notebooks", "verifiers", "vllm")


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_declared_is_pinned(extra: str) -> None:
    assert len(pins()) > 50
    assert not declared(extra) - pins().keys()


def test_the_development_extra_contains_what_the_tests_of_other_extras_need() -> None:
    assert declared("games", "gguf", "llm", "math", "notebooks", "vllm") <= declared("dev")


@pytest.mark.parametrize("command", ["quickstart", "test", "scripts/install.sh", ".ci/run"])
def test_a_command_can_be_run_as_it_lies_there(command: str) -> None:
    assert os.access(ROOT / command, os.X_OK)
