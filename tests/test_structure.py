from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from check_structure import LAYERS, check_package, main

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_mtrl"


def write_package(folder: Path, **files: str) -> Path:
    """A made-up package: `errors="x = 1"` is errors.py, `runs__folder=...` is runs/folder.py."""
    package = folder / "made_up"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in files.items():
        path = package.joinpath(*re.split(r"(?<=\w)__(?=\w)", name)).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return package


def findings_of(folder: Path, **files: str) -> list[str]:
    findings, _ = check_package(write_package(folder, **files), minimum_files=1)
    return findings


def function_of(num_lines: int, name: str = "work", indent: str = "") -> str:
    body = [f"{indent}    x = {i}" for i in range(num_lines - 1)]
    return "\n".join([f"{indent}def {name}():", *body]) + "\n"


def test_the_package_has_no_finding() -> None:
    findings, figures = check_package(PACKAGE)
    assert not findings, "\n".join(findings)
    assert "median" in figures


def test_a_clean_package_has_no_finding_and_figures_that_count(tmp_path: Path) -> None:
    package = write_package(
        tmp_path, errors="x = 1\n", loop="from made_up.runs import folder\n", runs__folder=function_of(4)
    )
    findings, figures = check_package(package, minimum_files=5)
    assert findings == []
    assert figures == "structure: 5 files (longest 4 lines), 1 functions (median 4, longest 4 lines)"


def test_a_package_that_is_too_small_to_be_the_right_one_is_a_finding(tmp_path: Path) -> None:
    findings, _ = check_package(write_package(tmp_path, errors="x = 1\n"))
    assert len(findings) == 1
    assert "2 Python files, but at least 20 were expected" in findings[0]


@pytest.mark.parametrize(("num_lines", "expected"), [(299, 0), (300, 1)])
def test_a_file_has_fewer_than_300_lines(tmp_path: Path, num_lines: int, expected: int) -> None:
    assert len(findings_of(tmp_path, errors="x = 1\n" * num_lines)) == expected


@pytest.mark.parametrize(("num_lines", "expected"), [(59, 0), (60, 1)])
@pytest.mark.parametrize("header", ["", "class Public:\n", "if True:\n"])
def test_a_function_has_fewer_than_60_lines(
    tmp_path: Path, header: str, num_lines: int, expected: int
) -> None:
    text = header + function_of(num_lines, "_work", indent="    " if header else "")
    assert len(findings_of(tmp_path, errors=text)) == expected


def test_a_function_inside_a_function_counts_for_both(tmp_path: Path) -> None:
    findings = findings_of(tmp_path, errors="def _outer():\n" + function_of(60, "_inner", indent="    "))
    assert ["_outer has 61 lines" in findings[0], "_inner has 60 lines" in findings[1]] == [True, True]


def test_blocks_stand_at_most_three_deep_and_elif_adds_nothing(tmp_path: Path) -> None:
    shallow = "def f():\n for a in b:\n  if a:\n   pass\n  elif b:\n   while c:\n    pass\n"
    assert findings_of(tmp_path, errors=shallow) == []
    deep = shallow.replace("    pass", "    with d:\n     pass")
    (tmp_path / "deep").mkdir()
    assert "nests 4 blocks" in findings_of(tmp_path / "deep", errors=deep)[0]


def test_a_function_inside_a_function_counts_its_blocks_anew(tmp_path: Path) -> None:
    text = "def f():\n if a:\n  if b:\n   def g():\n    if c:\n     if d:\n      pass\n"
    assert findings_of(tmp_path, errors=text) == []


@pytest.mark.parametrize("name", ["utils", "runs__helpers", "common__folder"])
def test_a_module_with_a_name_that_says_nothing_is_a_finding(tmp_path: Path, name: str) -> None:
    findings = findings_of(tmp_path, **{name: "x = 1\n"})
    assert any("says nothing" in finding for finding in findings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (function_of(13), 1),
        ("class Public:\n" + function_of(13, indent="    "), 1),
        (function_of(12), 0),
        (function_of(13, name="_private"), 0),
        ("class _Private:\n" + function_of(13, indent="    "), 0),
        ("def _outer():\n" + function_of(13, indent="    "), 0),
        (function_of(13).replace("x = 0", '"""What it does."""'), 0),
    ],
)
def test_a_long_public_function_needs_a_docstring(tmp_path: Path, text: str, expected: int) -> None:
    assert len(findings_of(tmp_path, errors=text)) == expected


UPWARD = [
    "import made_up.loop",
    "from made_up.loop import x",
    "from made_up import loop",
    "from ..loop import x",
    "from .. import loop",
    "def late():\n    from made_up.loop import x",
    "class A:\n    def late(self):\n        if x:\n            from made_up.loop import x",
    "try:\n    pass\nexcept ImportError:\n    from made_up.loop import x",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made_up.loop import x",
]


@pytest.mark.parametrize("text", UPWARD)
def test_an_import_of_a_higher_part_is_a_finding_wherever_it_stands(tmp_path: Path, text: str) -> None:
    findings = findings_of(tmp_path, loop="x = 1\n", objectives__kl=text + "\n")
    assert len(findings) == 1
    assert "'objectives' imports 'made_up.loop', which stands above it" in findings[0]


def test_an_import_of_the_package_itself_is_an_upward_one(tmp_path: Path) -> None:
    assert "stands above it" in findings_of(tmp_path, loop="from made_up import __version__\n")[0]


def test_every_layer_reads_those_below_it_and_none_above_it(tmp_path: Path) -> None:
    parts = [layer[0] for layer in LAYERS if layer != ("",)]
    assert len(parts) == 9
    downward = {
        part: "".join(f"import made_up.{p}\n" for p in parts[i + 1 :]) for i, part in enumerate(parts)
    }
    assert findings_of(tmp_path, **downward) == []
    (tmp_path / "upward").mkdir()
    upward = {
        part: "def f():\n" + "".join(f"    import made_up.{p}\n" for p in [*parts[:i], part])
        for i, part in enumerate(parts)
    }
    assert len(findings_of(tmp_path / "upward", **upward)) == 9 * 8 / 2


def test_a_part_without_a_layer_is_a_finding(tmp_path: Path) -> None:
    findings = findings_of(tmp_path, novelty="import made_up.runs\n", runs__a="import made_up.novelty\n")
    assert len(findings) == 1
    assert "'novelty' has no layer" in findings[0]


def test_a_circle_of_imports_is_shown_in_the_order_of_the_imports(tmp_path: Path) -> None:
    findings = findings_of(
        tmp_path,
        runs__a="import made_up.runs.b\n",
        runs__b="from .c import x\n",
        runs__c="if True:\n    from made_up.runs import a\n",
    )
    assert len(findings) == 1
    modules = findings[0].removeprefix("import circle: ").split(" -> ")
    assert modules[0] == modules[-1]
    assert set(pairwise(modules)) == {
        ("made_up.runs.a", "made_up.runs.b"),
        ("made_up.runs.b", "made_up.runs.c"),
        ("made_up.runs.c", "made_up.runs.a"),
    }


@pytest.mark.parametrize(
    "back",
    [
        "def late():\n    import made_up.runs.a\n",
        "import typing\nif typing.TYPE_CHECKING:\n    import made_up.runs.a\n",
    ],
)
def test_a_late_or_typing_import_closes_no_circle(tmp_path: Path, back: str) -> None:
    assert findings_of(tmp_path, runs__a="import made_up.runs.b\n", runs__b=back) == []


def test_the_command_prints_the_findings_and_its_exit_code_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = write_package(tmp_path, runs__utils="x = 1\n")
    assert main([str(package), "--minimum-files", "1"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "says nothing" in printed[0]
    assert printed[-1].endswith("1 findings")
    (package / "runs" / "utils.py").unlink()
    assert main([str(package), "--minimum-files", "1"]) == 0
    assert capsys.readouterr().out.endswith(": ok\n")


def test_every_package_can_be_the_first_that_is_imported() -> None:
    """Two packages that import from each other would work in one order only."""
    packages = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert len(packages) > 6
    script = f"""
import importlib, sys
for name in {packages}:
    for loaded in [each for each in sys.modules if each.split(".")[0] == "lightning_mtrl"]:
        del sys.modules[loaded]
    importlib.import_module(f"lightning_mtrl.{{name}}")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
