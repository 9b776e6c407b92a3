from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from lightning_mtrl import cli, commands
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.logs import read_conversations
from lightning_mtrl.runs.folder import RunFolder

COMMANDS = sorted(module.name for module in pkgutil.iter_modules(commands.__path__))
# Runs the command line in a fresh process, and says which heavy libraries it took along.
PROBE = """
import sys
from lightning_mtrl.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
heavy = [name for name in ("torch", "transformers", "peft", "lightning", "datasets") if name in sys.modules]
print("heavy:", heavy)
sys.exit(code)
"""


def probe(*arguments: str, folder: Path | None = None) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, cwd=folder
    )
    return done, time.perf_counter() - start


def command(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    def main(arguments: list[str]) -> None:
        assert arguments == ["--seed", "1"]
        if error is not None:
            raise error

    fake = ModuleType("lightning_mtrl.commands.fit")
    fake.__dict__["main"] = main
    monkeypatch.setitem(sys.modules, "lightning_mtrl.commands.fit", fake)


def test_all_commands_are_there() -> None:
    assert {"fit", "validate", "collect", "export"} <= set(COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_takes_no_model_library_and_little_time(arguments: list[str]) -> None:
    done, seconds = probe(*arguments)
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout
    # Measured 0.2 s; the promise is 2 s on an idle machine.
    assert seconds < 10


def test_the_help_lists_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in COMMANDS:
        first_line = (importlib.import_module(f"lightning_mtrl.commands.{name}").__doc__ or "").splitlines()[
            0
        ]
        assert f"  {name}" in listed
        assert first_line in listed


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_begins_with_its_description(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code in (0, None)
    first_line = (importlib.import_module(f"lightning_mtrl.commands.{name}").__doc__ or "").splitlines()[0]
    assert first_line in " ".join(capsys.readouterr().out.split())


def test_the_help_of_fit_describes_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["fit", "--help"])
    text = capsys.readouterr().out
    for key in ("--seed", "--run_dir", "--environment", "--algorithm", "--loop.iterations", "--print_config"):
        assert key in text
    assert "longest response in tokens, its end-of-turn token" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fit", "--data.batch_size", "0"], "data.batch_size is 0"),
        (["fit", "--loop.iteration", "3"], "Did you mean loop.iterations?"),
        (["fit", "--config", "missing.yaml"], "missing.yaml"),
        (["fit", "--resume", "missing"], "missing is not a run"),
        (["fti"], "Did you mean fit?"),
        (["validate", "--run", "missing"], "missing is not a run"),
        (["export", "--run", "missing", "--output", "out"], "missing is not a run"),
        (["collect", "--run", "missing", "--output", "out.jsonl"], "missing is not a run"),
    ],
)
def test_a_mistake_is_told_before_a_model_library_is_imported(
    arguments: list[str], expected: str, tmp_path: Path
) -> None:
    done, _ = probe(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert "heavy: []" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "--run=run", "--iteration=9"],
        ["export", "--run=run", "--output=out", "--iteration=9"],
        ["export", "--run=run", "--output=run/config.yaml/out"],
        ["collect", "--run=run", "--output=run/config.yaml/out.jsonl"],
    ],
)
def test_a_missing_checkpoint_or_place_is_told_before_a_model_library_is_imported(
    arguments: list[str], tmp_path: Path
) -> None:
    RunFolder.create("seed: 1\n", tmp_path / "run")
    done, _ = probe(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert "heavy: []" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_records_that_a_command_leaves_out_are_shown_with_their_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    talk = (
        '{"id": "%s", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
    )
    logs = tmp_path / "talks.jsonl"
    logs.write_text("\n".join([talk % "a", "{", talk % "a", talk % "b", "["]))
    reads = ModuleType("lightning_mtrl.commands.fit")
    reads.__dict__["main"] = lambda arguments: read_conversations(logs)
    monkeypatch.setitem(sys.modules, "lightning_mtrl.commands.fit", reads)
    for _ in range(2):
        assert cli.main(["fit"]) == 0
        told = capsys.readouterr().err
        assert told.count(f"left out: {logs}, line 2: not JSON") == 1
        assert f"{logs}, line 3 (id 'a'): line 1 has the same id; one of its own was expected." in told
        assert f"{logs}: 2 conversations read, 3 left out (not JSON 1, id twice 1, cut off 1)" in told


def test_success_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, None)
    assert cli.main(["fit", "--seed", "1"]) == 0


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (UserError("seed is odd"), 2, "error: seed is odd\n"),
        (FileNotFoundError(2, "No such file or directory", "x.yaml"), 2, "x.yaml: No such file or directory"),
        (PermissionError(13, "Permission denied", "runs"), 2, "runs: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_users_mistake_is_one_line_and_debug_shows_where(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    expected: str,
) -> None:
    command(monkeypatch, error)
    assert cli.main(["fit", "--seed", "1"]) == code
    plain = capsys.readouterr().err
    assert expected in plain
    assert len(plain.splitlines()) == 1
    assert cli.main(["fit", "--debug", "--seed", "1"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_a_programmers_mistake_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, ValueError("shapes differ"))
    with pytest.raises(ValueError, match="shapes differ"):
        cli.main(["fit", "--seed", "1"])


def test_the_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_mtrl", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.strip()


def test_importing_the_package_imports_no_model_library() -> None:
    code = "import sys, lightning_mtrl; lightning_mtrl.Conversation; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import lightning_mtrl

    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        getattr(lightning_mtrl, "Trainer")  # noqa: B009  # mypy knows that it is not there
    assert "load_run" in dir(lightning_mtrl)
