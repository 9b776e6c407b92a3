"""Whole runs with a language model as the user: one that misbehaves, and a real one over HTTP."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_llm import Answer, serving
from whole_runs import SECRET, end_with_the_test, texts_of, written

from lightning_mtrl import cli
from lightning_mtrl.rollouts.logs import read_conversations

pytest.importorskip("openai")
PAGE = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
CONFIG: dict[str, Any] = {
    "seed": 3,
    "fabric": {"accelerator": "cpu", "threads": 1},
    "model": {"name": "tiny", "lora_rank": 4, "context_length": 384},
    "environment": {
        "class_path": "lightning_mtrl.environments.LLMUser",
        "init_args": {
            "scenarios": {
                "class_path": "lightning_mtrl.environments.TaskScenarios",
                "init_args": {"task": "document_writing"},
            },
            "judge": {"class_path": "lightning_mtrl.environments.DocumentJudge"},
            "max_turns": 2,
            "system": "Write.",
        },
    },
    "data": {
        "conversations": 4,
        "group_size": 2,
        "rows": 2,
        "max_response_tokens": 6,
        "validation_share": 0.0,
        "file_format": "jsonl",
    },
    "algorithm": {
        "class_path": "lightning_mtrl.algorithms.ITPO",
        "init_args": {
            "credit": {"class_path": "lightning_mtrl.credit.NormITPO"},
            "estimator": {"class_path": "lightning_mtrl.algorithms.conversation_estimators.RLOO"},
        },
    },
    "loop": {"iterations": 1},
    "validation": {"conversations": 2, "sample_conversations": 1},
}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    end_with_the_test(monkeypatch)


def config(folder: Path, server: dict[str, Any]) -> str:
    made = json.loads(json.dumps(CONFIG))
    made["environment"]["init_args"]["server"] = {"model": "fake", "retries": 0, **server}
    return written(folder, made)


def llm_metrics(run: Path) -> dict[str, dict[str, float]]:
    """What a run logged of its language models, by iteration and name."""
    found: dict[str, dict[str, float]] = {}
    with (run / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["name"].startswith("llm/"):
                found.setdefault(row["iteration"], {})[row["name"]] = float(row["value"])
    return found


def test_what_language_models_were_asked_and_cost_is_logged_for_each_policy(tmp_path: Path) -> None:
    """The stand-in counts 100 prompt tokens and 10 of the reply; the first request is refused once."""
    busy = Answer(status=503, body="{}")
    with serving([busy, Answer("It is a party.")]) as fake:
        server = {"base_url": fake.base_url, "retries": 1, "backoff_seconds": 0.01}
        prices = {"input_price": 3.0, "output_price": 40.0, "record": str(tmp_path / "record.jsonl")}
        chosen = config(tmp_path, {**server, **prices})
        assert cli.main(["fit", chosen, f"--run_dir={tmp_path / 'run'}"]) == 0
        asked = len(fake.bodies)
        assert cli.main(["fit", chosen, f"--run_dir={tmp_path / 'again'}"]) == 0
        assert len(fake.bodies) == asked
    first = llm_metrics(tmp_path / "run")
    assert set(first) == {"0", "1"}
    # tests/test_metrics_page.py leaves it to this test that these names are logged.
    assert set(first["0"]) == set(first["1"]) == set(re.findall(r"`(llm/\w+)` \|", PAGE))
    # Two conversations validate pi_0, each with one request, of which one was made twice.
    assert first["0"]["llm/requests"] == 3
    assert first["0"]["llm/retries"] == 1
    assert first["0"]["llm/prompt_tokens"] == 200
    assert first["0"]["llm/sampled_tokens"] == 20
    assert first["0"]["llm/cost"] == pytest.approx(200 * 3e-6 + 20 * 40e-6)
    assert first["0"]["llm/requests"] + first["1"]["llm/requests"] == asked
    assert first["1"]["llm/failures"] == 0
    again = llm_metrics(tmp_path / "again")
    assert {again[number]["llm/requests"] for number in again} == {0.0}
    assert again["0"]["llm/recorded"] == 2
    assert again["0"]["llm/cost"] == 0.0


def test_an_iteration_completes_and_the_key_is_in_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving([Answer("It is a party.")]) as fake:
        server = {"base_url": fake.base_url, "record": str(tmp_path / "record.jsonl")}
        chosen = config(tmp_path, server)
        assert cli.main(["fit", chosen, f"--run_dir={tmp_path / 'run'}"]) == 0
        asked = len(fake.bodies)
        assert set(fake.keys) == {f"Bearer {SECRET}"}
        # The same run once more is answered from the record.
        assert cli.main(["fit", chosen, f"--run_dir={tmp_path / 'again'}"]) == 0
        # Validation may repeat itself, where the step has changed no response.
        assert 2 + 4 <= asked <= 2 + 4 + 2
        assert len(fake.bodies) == asked
    rollouts = read_conversations(tmp_path / "run" / "rollouts" / "iteration-0000.jsonl").conversations
    assert len(rollouts) == 4
    assert all(c.outcome is not None and c.turns[0].observation == "It is a party." for c in rollouts)
    printed = capsys.readouterr()
    assert SECRET not in texts_of(tmp_path) + printed.out + printed.err
    assert "OPENAI_API_KEY" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_server_that_dies_stops_the_run_which_keeps_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two conversations are validated, and two of the next four are answered before the server is down."""
    left = [4]

    def answer(body: dict[str, Any]) -> Answer:
        left[0] -= 1
        return Answer("It is a party.") if left[0] >= 0 else Answer(status=503, body="")

    with serving(answer) as fake:
        chosen = config(tmp_path, {"base_url": fake.base_url})
        arguments = [chosen, f"--run_dir={tmp_path / 'run'}", "--data.max_failure_share=0.25"]
        assert cli.main(["fit", *arguments]) == 2
    told = capsys.readouterr().err
    assert "2 conversations failed, so the collection was stopped" in told
    assert "LLMFailure: HTTP 503, 1 attempt (2 times)" in told
    assert SECRET not in told
    kept = read_conversations(tmp_path / "run" / "rollouts" / "iteration-0000.jsonl").conversations
    # Of two that go on side by side, one may be cut short.
    assert 1 <= len(kept) <= 2
    assert f"What had ended is kept ({len(kept)} conversation{'s' * (len(kept) > 1)})" in told
    assert all(c.outcome is not None for c in kept)


def test_a_wrong_key_ends_the_run_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving([Answer(status=401, body=json.dumps({"error": {"message": SECRET}}))]) as fake:
        chosen = config(tmp_path, {"base_url": fake.base_url})
        assert cli.main(["fit", chosen, f"--run_dir={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert "the key is missing or wrong" in told.splitlines()[-1]
    assert "environment variable OPENAI_API_KEY" in told
    assert SECRET not in told


def test_a_key_in_a_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = config(tmp_path, {"api_key_variable": SECRET})
    assert cli.main(["fit", chosen, f"--run_dir={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert "api_key_variable must be the name of an environment variable" in told
    assert SECRET not in told


@pytest.fixture(scope="module")
def smollm2_server(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`transformers serve` on a free port of the loopback."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("transformers"))
    options = ["--host=127.0.0.1", f"--port={port}", "--device=cpu", "--dtype=float32"]
    # Without a bound, continuous batching takes most of the memory for its cache.
    options += [
        "--continuous-batching",
        "--cb-num-blocks=128",
        "--cb-block-size=32",
        "--cb-max-batch-tokens=256",
    ]
    log = (tmp_path_factory.mktemp("server") / "log").open("wb")
    process = subprocess.Popen(
        [program, "serve", str(smollm2_folder), *options],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def _wait_for(address: str, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not come up within {seconds} seconds")


@pytest.mark.real_lm
@pytest.mark.timeout(1200)
def test_an_iteration_with_smollm2_as_the_user_completes(
    smollm2_server: str, smollm2_folder: Path, tmp_path: Path
) -> None:
    server = {
        "model": str(smollm2_folder),
        "base_url": smollm2_server,
        "max_tokens": 16,
        "keep_cut_replies": True,
        "timeout_seconds": 300,
        "retries": 1,
    }
    chosen = config(tmp_path, server)
    assert cli.main(["fit", chosen, f"--run_dir={tmp_path / 'run'}"]) == 0
    rollouts = read_conversations(tmp_path / "run" / "rollouts" / "iteration-0000.jsonl").conversations
    assert len(rollouts) == 4
    assert all(c.outcome is not None and c.turns[0].observation for c in rollouts)
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["iterations"]
    assert [row["dropped"] for row in rows] == [{}, {}]


@pytest.mark.real_lm
@pytest.mark.timeout(1200)
def test_four_requests_at_once_are_faster_than_one(smollm2_server: str, smollm2_folder: Path) -> None:
    import asyncio

    from lightning_mtrl.llm.client import ChatClient
    from lightning_mtrl.llm.server import Server

    async def requests(client: ChatClient, number: int) -> None:
        asked = [{"role": "user", "content": "Count from one to forty in words."}]
        await asyncio.gather(*(client.chat(asked, seed) for seed in range(number)))

    seconds = {1: 0.0, 4: 0.0}
    for _ in range(2):
        for limit in seconds:
            client = ChatClient(
                Server(
                    str(smollm2_folder),
                    smollm2_server,
                    concurrency=limit,
                    max_tokens=24,
                    keep_cut_replies=True,
                    timeout_seconds=300,
                )
            )
            started = time.perf_counter()
            asyncio.run(requests(client, 4))
            seconds[limit] += time.perf_counter() - started
            assert client.usage.failures == 0
    print(f"\n4 requests: {seconds[1] / 2:.1f} s one by one, {seconds[4] / 2:.1f} s at once")
    assert seconds[4] < seconds[1] / 1.3
