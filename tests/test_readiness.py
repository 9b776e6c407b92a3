"""Mistakes that show without weights are told before a run's folder is made or named."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_llm import Answer, serving
from gguf_files import write_gguf
from loopback import answering
from transformers import LlamaForCausalLM
from whole_runs import end_with_the_test

from lightning_mtrl import assembly, cli, loop
from lightning_mtrl.config import RunConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.llm import reaching
from lightning_mtrl.models.tiny import TINY_FOLDER
from lightning_mtrl.parsing import load_config, to_yaml
from lightning_mtrl.readiness import expect_ready
from lightning_mtrl.runs.checkpoint import CheckpointState, save_checkpoint
from lightning_mtrl.runs.folder import RunFolder

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
    end_with_the_test(monkeypatch)

    def run(command: str, *arguments: str) -> str:
        capsys.readouterr()  # what the test itself has printed
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


def test_a_key_that_is_refused(refused: Refused) -> None:
    with answering(401) as address:
        told = refused(
            "fit", *TINY_USER, f"--{SERVER}.base_url={address}", f"--{SERVER}.api_key_variable=KEY_1"
        )
        served = refused("fit", f"--data.server.base_url={address}", "--data.server.api_key_variable=KEY_2")
    said = "but the server there refused the key when it was asked for its models (HTTP 401)."
    assert f"{SERVER}.base_url is {address!r}, {said}" in told
    assert f"environment variable KEY_1 ({SERVER}.api_key_variable), which is not set" in told
    assert f"data.server.base_url is {address!r}, {said}" in served
    assert "environment variable KEY_2 (data.server.api_key_variable), which is not set" in served


def test_a_server_that_is_silent(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "REACH_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        told = refused("fit", *TINY_USER, f"--{SERVER}.base_url={address}")
        served = refused("fit", f"--data.server.base_url={address}")
    said = "but the server there accepted the connection and did not answer in 0.3 seconds"
    assert f"{SERVER}.base_url is {address!r}, {said}" in told
    assert f"data.server.base_url is {address!r}, {said}" in served


def test_a_policy_server_that_is_not_there(refused: Refused) -> None:
    address = _nobody()
    told = refused("fit", f"--data.server.base_url={address}", "--data.server.retries=0")
    assert (
        f"data.server.base_url is {address!r}, but the policy cannot be served there: no connection" in told
    )


def test_a_policy_server_with_too_many_requests_is_there() -> None:
    with answering(429) as address:
        expect_ready(load_config(overrides=[f"--data.server.base_url={address}"]), "fit")


def test_a_first_prompt_is_looked_at_for_a_gguf_file_too(refused: Refused, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    _write_tiny(tmp_path / "tiny.gguf")
    short = "--model.context_length=40"
    told = refused("fit", *TINY_USER, f"--model.name={tmp_path / 'tiny.gguf'}", short)
    assert told == refused("fit", *TINY_USER, short)
    assert "the first prompt of conversation iteration-0000" in told


def _write_tiny(path: Path) -> None:
    """The embedded model and its tokenizer as a GGUF file."""
    tokenizer = json.loads((TINY_FOLDER / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    write_gguf(
        path,
        LlamaForCausalLM.from_pretrained(TINY_FOLDER),
        sorted(vocabulary, key=vocabulary.get),
        [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        (TINY_FOLDER / "chat_template.jinja").read_text(),
        len(tokenizer["added_tokens"]),
    )


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights may be loaded."""

    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(assembly, "load_model", load)


COMMANDS = [
    ["validate", "--run=run"],
    ["collect", "--run=run", "--output=out.jsonl"],
    ["collect", "--config=run/config.yaml", "--output=out.jsonl"],
    ["fit", "--resume=run", "--loop.iterations=9"],
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", COMMANDS)
def test_whoever_talks_with_a_server_asks_it_before_weights_are_loaded(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    address = _nobody()
    folder = _run([*TINY_USER, f"--{SERVER}.base_url={address}", f"--{SERVER}.retries=0"])
    before = folder.config.read_text()
    assert cli.main(command) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"{SERVER}.base_url is {address!r}, but no server answers there (no connection" in told
    assert not Path("out.jsonl").exists()
    assert folder.config.read_text() == before, "a run that does not go on keeps its configuration"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", COMMANDS)
def test_whoever_holds_conversations_looks_at_the_first_prompt(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _run(["--model.context_length=40"])
    assert cli.main(command) == 2
    assert "model.context_length is 40, but the first prompt of" in capsys.readouterr().err


def _run(options: list[str]) -> RunFolder:
    """The folder "run" of a run that has not begun."""
    return RunFolder.create(to_yaml(load_config(overrides=options)), "run")


def _judged(tmp_path: Path, judge: str, policy: str) -> RunConfig:
    """A run whose algorithm asks a judge, and whose policy is on a server."""
    server = {"model": "m", "base_url": judge, "retries": 0}
    turn_judge = {"class_path": "lightning_mtrl.credit.TurnJudge", "init_args": {"server": server}}
    credit = {"class_path": "lightning_mtrl.credit.LLMJudge", "init_args": {"judge": turn_judge}}
    algorithm = {"class_path": "lightning_mtrl.algorithms.ITPO", "init_args": {"credit": credit}}
    data = {"group_size": 2, "server": {"base_url": policy, "retries": 0}}
    file = tmp_path / "judged.yaml"
    file.write_text(json.dumps({"algorithm": algorithm, "data": data}))
    return load_config(file)


def test_only_servers_that_a_command_talks_with_are_asked(tmp_path: Path) -> None:
    judge = "algorithm.init_args.credit.init_args.judge.init_args.server.base_url is 'http"
    nobody = _judged(tmp_path, _nobody(), _nobody())
    expect_ready(nobody, "validate")
    expect_ready(nobody, "collect")
    with pytest.raises(UserError, match=judge):
        expect_ready(nobody, "logs")
    with pytest.raises(UserError, match=r"^data\.server\.base_url is 'http"):
        expect_ready(nobody, "fit")
    with answering(429) as busy, pytest.raises(UserError, match=judge):
        expect_ready(_judged(tmp_path, _nobody(), busy), "fit")


@pytest.mark.usefixtures("no_weights")
def test_score_asks_the_judge_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(to_yaml(_judged(tmp_path, _nobody(), _nobody())), "run")
    folder.checkpoint(1).mkdir()
    Path("log.jsonl").write_text("{}\n")
    assert cli.main(["score", "--run=run", "--logs=log.jsonl", "--output=out.jsonl"]) == 2
    assert "judge.init_args.server.base_url is 'http" in capsys.readouterr().err


@pytest.mark.parametrize("converged", [False, True])
def test_a_run_with_nothing_left_to_do_needs_no_server(
    converged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [f"--{SERVER}.base_url={_nobody()}", f"--{SERVER}.retries=0"]
    folder = _run([*TINY_USER, *options, f"--loop.iterations={9 if converged else 2}"])
    save_checkpoint(folder.checkpoint(2), CheckpointState(2, loop={"converged": converged}))
    begun: list[RunFolder] = []

    class Loop:
        def __init__(self, config: RunConfig, folder: RunFolder) -> None:
            begun.append(folder)

        def run(self) -> None:
            return

    monkeypatch.setattr(loop, "PolicyIterationLoop", Loop)
    assert cli.main(["fit", "--resume=run"]) == 0
    assert len(begun) == 1
    assert cli.main(["fit", "--resume=run", "--loop.iterations=9", "--loop.stop_when_converged=false"]) == 2
    assert "no server answers there" in capsys.readouterr().err
    assert len(begun) == 1


def test_a_server_that_answers_anything_will_do_and_so_will_a_record_without_one(tmp_path: Path) -> None:
    with serving([Answer("hello")]) as fake:
        expect_ready(load_config(overrides=[*TINY_USER, f"--{SERVER}.base_url={fake.base_url}"]), "fit")
        assert fake.bodies == [], "nothing is asked that a provider would be paid for"
    record = tmp_path / "record.jsonl"
    quick = [f"--{SERVER}.base_url={_nobody()}", f"--{SERVER}.retries=0", f"--{SERVER}.record={record}"]
    with pytest.raises(UserError, match="no server answers there"):
        expect_ready(load_config(overrides=[*TINY_USER, *quick]), "fit")
    record.write_text("")
    expect_ready(load_config(overrides=[*TINY_USER, *quick]), "fit")
