"""Checks how the package is built: sizes, names, docstrings, and which part may import which.

    python scripts/check_structure.py [PACKAGE] [--minimum-files N]

It reads the syntax tree only and imports nothing of the package. One line a finding, then one line of
figures; the exit code is 1 when there is a finding.

Directions count every import, also a late one inside a function and one for types only: whoever names
a part depends on it. Circles count what runs while modules load, since only that can fail.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

# From the top to the bottom; a part imports from its own layer and from those below it. The first is the
# package's own `__init__`, which only gathers the public names.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("",),
    ("__main__",),
    ("cli",),
    ("commands",),
    (
        *("loop", "recorder", "planning", "report", "assembly", "launching", "parsing"),
        *("command_paths", "batch_online", "restoring", "command_logs", "readiness", "watching"),
    ),
    ("algorithms", "credit"),
    ("modules", "rollouts", "evaluation", "runs"),
    ("models", "objectives", "environments"),
    ("llm",),
    (
        "addresses",
        "conversation",
        "counting",
        "batch",
        "config",
        "serving_config",
        "config_files",
        "idle_keys",
        "class_lookup",
        "class_options",
        "command_line",
        "messages",
        "processes",
        "ranges",
        "speaker",
        "errors",
        "well_formed",
    ),
)
RANKS = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

MAX_FILE_LINES = 299
MAX_FUNCTION_LINES = 59
MAX_LINES_WITHOUT_DOCSTRING = 12
MAX_BLOCK_DEPTH = 3
FORBIDDEN_NAMES = frozenset({"util", "utils", "helper", "helpers", "common", "core", "misc"})

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True)
class Source:
    """One file: `name` is the module's dotted name, package included."""

    path: Path
    name: str
    num_lines: int
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def part(self) -> str:
        """The room of the package it belongs to; empty for the package's own `__init__`."""
        return self.name.partition(".")[2].partition(".")[0]


@dataclass(frozen=True)
class Import:
    """A module of the package that a file imports; `at_start` when that happens while the file loads."""

    target: str
    line: int
    at_start: bool


def read_package(package: Path) -> list[Source]:
    """All files of the package, in order of their paths."""
    sources = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        sources.append(Source(path, name, len(text.splitlines()), ast.parse(text, str(path))))
    return sources


def functions_of(source: Source) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(source.tree) if isinstance(node, FUNCTIONS))


def lines_of(function: Function) -> int:
    """Length of a function in lines, docstring included, decorators not."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def check_sizes(sources: Sequence[Source]) -> Iterator[str]:
    """Long files, long functions, deeply nested blocks."""
    for source in sources:
        if source.num_lines > MAX_FILE_LINES:
            yield f"{source.path}: {source.num_lines} lines; a file has at most {MAX_FILE_LINES}"
        for function in functions_of(source):
            place, length, depth = _place(source, function), lines_of(function), _depth(function.body)
            if length > MAX_FUNCTION_LINES:
                yield f"{place} has {length} lines; a function has at most {MAX_FUNCTION_LINES}"
            if depth > MAX_BLOCK_DEPTH:
                yield f"{place} nests {depth} blocks; a function nests at most {MAX_BLOCK_DEPTH}"


def check_names(sources: Sequence[Source]) -> Iterator[str]:
    """Modules whose name says nothing about what is in them."""
    for source in sources:
        for name in source.name.split("."):
            if name in FORBIDDEN_NAMES:
                yield f"{source.path}: {name!r} says nothing; name a module after the noun that it serves"


def check_docstrings(sources: Sequence[Source]) -> Iterator[str]:
    """Public functions that are long enough to need a docstring and have none."""
    for source in sources:
        for function in _public_functions(source.tree.body):
            if lines_of(function) > MAX_LINES_WITHOUT_DOCSTRING and not ast.get_docstring(function):
                yield (
                    f"{_place(source, function)} is public, longer than {MAX_LINES_WITHOUT_DOCSTRING} lines "
                    f"and has no docstring"
                )


def check_directions(sources: Sequence[Source]) -> Iterator[str]:
    """Imports of a part that stands above the importing one, and parts that have no layer."""
    known = {source.name for source in sources}
    for part in sorted({source.part for source in sources} - set(RANKS)):
        yield f"{part!r} has no layer; give it one in LAYERS of {Path(__file__).name}"
    for source in sources:
        for found in imports_of(source, known):
            target = found.target.partition(".")[2].partition(".")[0]
            if _stands_above(target, source.part):
                yield (
                    f"{source.path}:{found.line}: {source.part!r} imports {found.target!r}, which stands "
                    f"above it; dependencies point down only"
                )


def check_circles(sources: Sequence[Source]) -> Iterator[str]:
    """A circle of modules that need each other while they load (the first one found)."""
    known = {source.name for source in sources}
    graph = {s.name: {i.target for i in imports_of(s, known) if i.at_start} for s in sources}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # graphlib lists each module before the one that needs it; read the other way it is "imports".
        yield f"import circle: {' -> '.join(reversed(error.args[1]))}"


def imports_of(source: Source, known: set[str]) -> Iterator[Import]:
    """Imports of modules of the package, wherever they stand in the file.

    Args:
        source: the file.
        known: names of all modules, to tell `from package import module` from `from package import name`.
    """
    root = source.name.partition(".")[0]
    for node, at_start in _statements(source.tree.body, at_start=True):
        for target in _targets(node, source, known):
            if target.partition(".")[0] == root:
                yield Import(target, node.lineno, at_start)


def _targets(node: ast.stmt, source: Source, known: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        above = source.name.split(".")[: None if source.is_package else -1]
        above = above[: len(above) - node.level + 1]
        base = ".".join([*above, *filter(None, [node.module])])
    names = [f"{base}.{alias.name}" for alias in node.names]
    return sorted({name if name in known else base for name in names})


def _statements(body: Sequence[ast.stmt], at_start: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, with whether it runs while the module loads."""
    for node in body:
        yield node, at_start
        for field, block in _blocks(node):
            typing_only = isinstance(node, ast.If) and field == "body" and _asks_type_checking(node.test)
            late = isinstance(node, FUNCTIONS) or typing_only
            yield from _statements(block, at_start and not late)


def _blocks(node: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    for field in ("body", "orelse", "finalbody"):
        yield field, getattr(node, field, [])
    for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield "body", part.body


def _asks_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _depth(body: Sequence[ast.stmt]) -> int:
    """How many blocks stand inside each other; a function inside starts anew, `elif` adds nothing."""
    deepest = 0
    for node in body:
        if not isinstance(node, BLOCKS):
            continue
        for field, block in _blocks(node):
            is_elif = field == "orelse" and len(block) == 1 and isinstance(block[0], ast.If)
            deepest = max(deepest, _depth(block) + (not is_elif) if block else 0)
    return deepest


def _public_functions(body: Sequence[ast.stmt]) -> Iterator[Function]:
    for node in body:
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            yield node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node.body)


def _stands_above(part: str, other: str) -> bool:
    """False where either has no layer, which is a finding by itself."""
    return part in RANKS and other in RANKS and RANKS[part] < RANKS[other]


def _place(source: Source, function: Function) -> str:
    return f"{source.path}:{function.lineno}: {function.name}"


def check_package(package: Path, minimum_files: int = 20) -> tuple[list[str], str]:
    """All findings, and one line of figures.

    Args:
        package: folder of the package.
        minimum_files: a smaller package is a finding by itself, since then the check looked at the
            wrong place and a clean result would say nothing.
    """
    sources = read_package(package)
    findings = []
    if len(sources) < minimum_files:
        findings.append(f"{package}: {len(sources)} Python files, but at least {minimum_files} were expected")
    for check in (check_sizes, check_names, check_docstrings, check_directions, check_circles):
        findings.extend(check(sources))
    return findings, _figures(sources)


def _figures(sources: Sequence[Source]) -> str:
    files = [source.num_lines for source in sources]
    functions = [lines_of(function) for source in sources for function in functions_of(source)]
    return (
        f"structure: {len(files)} files (longest {max(files, default=0)} lines), {len(functions)} functions "
        f"(median {median(functions or [0]):g}, longest {max(functions, default=0)} lines)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings and the figures; 0 when there is nothing to find."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "package", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent / "lightning_mtrl"
    )
    parser.add_argument("--minimum-files", type=int, default=20)
    options = parser.parse_args(arguments)
    findings, figures = check_package(options.package, options.minimum_files)
    for finding in findings:
        print(finding)
    print(f"{figures}: {f'{len(findings)} findings' if findings else 'ok'}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
