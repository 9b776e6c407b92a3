"""Mistakes that show without weights are told before a run's folder is made or named."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_llm import Answer, serving
from loopback import QuietHandler, listening

from lightning_mtrl import cli
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import load_config
from lightning_mtrl.readiness import expect_ready

pytest.importorskip("openai")
CONFIGS = Path(__file__).parents[1] / "configs"
TINY_USER = [
    f"--config={CONFIGS / 'llm_user.yaml'}",
    "--model.name=tiny",
    "--model.quantization=none",
    "--model.context_length=384",
    "--environment.system=Write.",
]
SERVER = "environment.init_args.server"
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must fail before it makes or names a folder, and returns its one line."""
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # set by a run, and put back after it

    def run(command: str, *arguments: str) -> str:
        assert cli.main([command, *arguments, "--run_dir=run"]) == 2
        printed = capsys.readouterr()
        assert "Run folder" not in printed.out
        assert not Path("run").exists()
        (line,) = printed.err.splitlines()
        return line

    return run


def _nobody() -> str:
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


@pytest.mark.parametrize("length", [40, 80])
def test_a_first_prompt_that_does_not_fit(refused: Refused, length: int) -> None:
    told = refused("fit", *TINY_USER, f"--model.context_length={length}")
    assert f"model.context_length is {length}, but the first prompt of conversation iteration-0000" in told
    assert "Raise model.context_length" in told


def test_a_context_longer_than_the_model_was_made_for(refused: Refused) -> None:
    told = refused("fit", "--model.context_length=4096")
    assert "model.context_length is 4096, but 'tiny' was made for 512 tokens" in told


@pytest.mark.parametrize("command", ["fit", "evaluate", "improve"])
def test_a_model_that_is_not_there(refused: Refused, command: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("{\n")
    logs = [] if command == "fit" else [f"--logs={log}"]
    assert "model.name is './nowhere', but that path does not exist" in refused(
        command, *logs, "--model.name=./nowhere"
    )


def test_a_language_model_that_is_not_served(refused: Refused) -> None:
    address = _nobody()
    options = [f"--{SERVER}.base_url={address}", f"--{SERVER}.retries=1", f"--{SERVER}.backoff_seconds=0.01"]
    told = refused("fit", *TINY_USER, *options)
    assert f"{SERVER}.base_url is {address!r}, but no server answers there (no connection, 2 att" in told
    judge = {"model": "m", "base_url": address, "retries": 0}
    with serving([Answer("hello")]) as fake:
        given = [f"--{SERVER}.base_url={fake.base_url}", f"--environment.judge.server={json.dumps(judge)}"]
        told = refused("fit", *TINY_USER, *given)
        assert fake.bodies == []
    assert f"environment.init_args.judge.init_args.server.base_url is {address!r}, but no server" in told


def test_a_key_that_is_wrong(refused: Refused) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

    with listening(Handler) as address:
        told = refused("fit", *TINY_USER, f"--{SERVER}.base_url={address}/v1")
    assert "the key is missing or wrong" in told


def test_a_policy_server_that_is_not_there(refused: Refused) -> None:
    address = _nobody()
    told = refused("fit", f"--data.server.base_url={address}", "--data.server.retries=0")
    assert (
        f"data.server.base_url is {address!r}, but the policy cannot be served there: no connection" in told
    )


def test_a_server_that_answers_anything_will_do_and_so_will_a_record_without_one(tmp_path: Path) -> None:
    with serving([Answer("hello")]) as fake:
        expect_ready(load_config(overrides=[*TINY_USER, f"--{SERVER}.base_url={fake.base_url}"]))
        assert fake.bodies == [], "nothing is asked that a provider would be paid for"
    record = tmp_path / "record.jsonl"
    quick = [f"--{SERVER}.base_url={_nobody()}", f"--{SERVER}.retries=0", f"--{SERVER}.record={record}"]
    with pytest.raises(UserError, match="no server answers there"):
        expect_ready(load_config(overrides=[*TINY_USER, *quick]))
    record.write_text("")
    expect_ready(load_config(overrides=[*TINY_USER, *quick]))
