from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import seeds_put_back, small_run

from lightning_mtrl import cli

Talk = Callable[..., list[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one iteration."""
    return small_run(tmp_path_factory.mktemp("chat"), "--loop.iterations=1")


@pytest.fixture
def talk(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Says lines to the run's policy, and gives what was printed, without the first line."""

    def said(lines: str, *options: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        with seeds_put_back():
            assert cli.main(["chat", f"--run={run}", *options]) == 0
        head, *rest = capsys.readouterr().out.splitlines()
        assert head.endswith("/reset begins a new conversation, /quit ends.")
        return rest

    return said


def test_each_line_gets_a_response_with_its_q(talk: Talk) -> None:
    answers = talk("Hello.\n\nI need a camera.\n", "--seed=1")
    assert len(answers) == 2, "an empty line is no message"
    assert all(re.fullmatch(r"policy: .+  \(Q \d\.\d\d\)", answer) for answer in answers)


def test_pi_0_has_no_q(talk: Talk) -> None:
    (answer,) = talk("Hello.\n", "--seed=1", "--iteration=0")
    assert answer.startswith("policy: ")
    assert "(Q" not in answer


def test_a_seed_repeats_a_chat_and_no_temperature_needs_none(talk: Talk) -> None:
    lines = "Hello.\nI need a camera.\nCheap, please.\n"
    first = talk(lines, "--seed=5")
    assert talk(lines, "--seed=5") == first
    assert any(talk(lines, f"--seed={seed}") != first for seed in (6, 7, 8))
    greedy = [talk(lines, "--temperature=0", *seed) for seed in ([], ["--seed=9"])]
    assert greedy[0] == greedy[1]


def test_reset_forgets_what_was_said_and_quit_ends(talk: Talk) -> None:
    greedy = "--temperature=0"
    lines = talk("Hello.\nMy budget is small.\n/reset\nHello.\n/what now\n/quit\nHello.\n", greedy)
    assert lines[0] == lines[3] == talk("Hello.\n", greedy)[0]
    assert lines[2] == "(A new conversation.)"
    assert lines[4:] == ["(/what is not known; there are /reset and /quit.)"]


def test_a_full_context_is_said_and_a_new_conversation_answers(talk: Talk, run: Path) -> None:
    long = "I need a camera and I need a laptop and I need a phone. " * 4
    lines = talk(f"{long}\n" * 6, "--temperature=0")
    full = "(The context of 384 tokens is full; a new conversation begins.)"
    assert full in lines
    after = lines[lines.index(full) + 1]
    assert after == lines[0], "the same message opens the new conversation"


def test_a_message_that_fits_no_context_leaves_the_conversation_as_it_was(talk: Talk) -> None:
    first, second = talk("Hello.\nMy budget is small.\n", "--temperature=0")
    lines = talk(f"Hello.\n{'camera ' * 400}\nMy budget is small.\n", "--temperature=0")
    told = "(Not read: with a response this does not fit the context of 384 tokens.)"
    assert lines == [first, told, second]


def test_responses_are_as_short_as_asked(talk: Talk) -> None:
    (answer,) = talk("Hello.\n", "--max_response_tokens=1", "--seed=0")
    assert "(cut off)" in answer


def test_a_pipe_with_bytes_that_are_no_text_is_answered(run: Path) -> None:
    plugins = str(Path(__file__).resolve().parents[1] / "plugins")
    path = os.pathsep.join([plugins, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "lightning_mtrl", "chat", f"--run={run}"],
        env={**os.environ, "PYTHONPATH": path},
        input=b"Hello \xff\xfe.\n/quit\nHello.\n",
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert [line[:8] for line in done.stdout.decode().splitlines()] == ["Policy 1", "policy: "]


def test_interrupting_ends_without_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    with seeds_put_back():
        assert cli.main(["chat", f"--run={run}"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--run must be given"),
        (["--run={run}", "--temperature=-1"], "--temperature is -1, but a number >= 0 or null"),
        (["--run={run}", "--max_response_tokens=0"], "--max_response_tokens is 0, but a whole number > 0"),
        (["--run={run}", "--iteration=9"], "has no checkpoint of it"),
        (["--run={run}", "--max_response_tokens=384"], "model.context_length is 384, which must hold"),
    ],
)
def test_mistakes_are_told(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    with seeds_put_back():
        assert cli.main(["chat", *(argument.format(run=run) for argument in arguments)]) == 2
    assert expected in capsys.readouterr().err
