"""Models of a Hub: a stand-in on loopback that serves one, no Hub that answers, and what the cache has."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import QuietHandler, listening

from lightning_mtrl.models.tiny import TINY_FOLDER

NOBODY = "http://127.0.0.1:9"  # the port of a service that nobody runs
COMMIT = "0" * 39 + "1"
LOAD = "from lightning_mtrl.models.load import load_model; print(load_model({!r}).model.config.model_type)"
BLANK = "from lightning_mtrl.models.load import blank_model; print(blank_model({!r}).config.model_type)"


def _python(folder: Path, endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hub"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def served_hub() -> Iterator[tuple[str, list[str]]]:
    """A Hub with the embedded model as "team/tiny"; its address, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(QuietHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            asked.append(self.path)
            wanted = re.fullmatch(r"/team/tiny/resolve/\w+/(.+)", self.path)
            file = TINY_FOLDER / wanted[1] if wanted else None
            if self.path.startswith("/api/models/team/tiny") and "/tree/" not in self.path:
                self._send(json.dumps({"id": "team/tiny", "sha": COMMIT, "siblings": []}).encode(), body)
            elif file is not None and file.is_file():
                self._send(file.read_bytes(), body)
            else:
                self._send(b"", body, status=404)

        def _send(self, content: bytes, body: bool, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            if status == 404:
                missing = "EntryNotFound" if "team/tiny" in self.path else "RepoNotFound"
                self.send_header("X-Error-Code", missing)
            self.end_headers()
            if body:
                self.wfile.write(content)

    with listening(Handler) as address:
        yield address, asked


@pytest.mark.parametrize("name", ["nobody/nothing", "tinny"])
def test_a_name_that_nothing_here_has_ends_in_seconds_in_one_line_where_no_hub_answers(
    tmp_path: Path, name: str
) -> None:
    for command in (["fit", "--plan"], ["fit"]):
        started = time.monotonic()
        done = _python(tmp_path, NOBODY, "-m", "lightning_mtrl", *command, f"--model.name={name}")
        assert time.monotonic() - started < 60, "importing the libraries takes most of it"
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(
            f"error: model.name is {name!r}, which is nothing on this machine, and the Hub"
        )
        assert NOBODY in line
        assert "Run folder" not in done.stdout


def test_an_adapter_that_is_nowhere_ends_as_soon(tmp_path: Path) -> None:
    options = ["-m", "lightning_mtrl", "fit", "--model.adapter=nobody/adapter", f"--run_dir={tmp_path}/run"]
    done = _python(tmp_path, NOBODY, *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: model.adapter is 'nobody/adapter', but no peft adapter is there (http")
    assert "Run folder" not in done.stdout


def test_a_model_is_downloaded_from_a_hub_and_then_read_from_its_cache_without_one(
    tmp_path: Path, served_hub: tuple[str, list[str]]
) -> None:
    address, asked = served_hub
    done = _python(tmp_path, address, "-c", LOAD.format("team/tiny"))
    assert done.stdout.strip() == "llama", done.stderr
    assert any(path.endswith("/model.safetensors") for path in asked)
    for program in (LOAD, BLANK):
        done = _python(tmp_path, NOBODY, "-c", program.format("team/tiny"))
        assert done.stdout.strip() == "llama", done.stderr


def test_a_model_that_a_hub_does_not_have_is_told_by_its_own_answer(
    tmp_path: Path, served_hub: tuple[str, list[str]]
) -> None:
    address, _ = served_hub
    done = _python(tmp_path, address, "-c", LOAD.format("team/other"))
    assert "UserError: model.name is 'team/other', but its tokenizer could not be loaded" in done.stderr
