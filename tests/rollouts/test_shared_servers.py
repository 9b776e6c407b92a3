"""Runs that share a server and a folder for their adapters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_mtrl.llm.completions import ServedModel
from lightning_mtrl.llm.failures import LLMFailure
from lightning_mtrl.processes import Processes
from lightning_mtrl.rollouts import policy_server
from lightning_mtrl.rollouts.policy_server import PolicyServer
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.serving_config import ServingConfig

pytest.importorskip("openai")


class Client:
    """A server's adapters, by name, with their paths."""

    def __init__(self) -> None:
        self.adapters = {"another's": "/another/place"}
        self.is_down = False

    async def models(self) -> tuple[ServedModel, ...]:
        adapters = [ServedModel(name, path, None, True) for name, path in self.adapters.items()]
        return (ServedModel("base", None, None, False), *adapters)

    async def load(self, name: str, path: str) -> None:
        assert name not in self.adapters
        assert (Path(path) / "adapter_model.safetensors").is_file()
        self.adapters[name] = path

    async def unload(self, name: str) -> None:
        if self.is_down:
            raise LLMFailure("no connection")
        del self.adapters[name]


@pytest.fixture(autouse=True)
def weights_are_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(backbone: Any, role: str, folder: Path) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text(backbone)

    monkeypatch.setattr(policy_server, "save_role", save)


def _serving(weights: Any, folder: Path, client: Any) -> PolicyServer:
    server = PolicyServer(ServingConfig(base_url="http://localhost:1/v1"), weights, folder, Processes())
    server.client = client
    return server


def _run(path: Path) -> RunFolder:
    return RunFolder.create("seed: 0\n", path)


def test_runs_that_share_a_folder_leave_each_other_and_all_else_alone(tmp_path: Path) -> None:
    shared, client = tmp_path / "shared", Client()
    (shared / "my_other_model").mkdir(parents=True)
    precious = [shared / "my_other_model" / "weights.safetensors", shared / "README.txt"]
    for file in precious:
        file.write_text("precious")
    # Equal names, and equal weights at the start.
    folders = [_run(tmp_path / parent / "run").served(str(shared)) for parent in ("a", "b")]
    first, second = (_serving("pi_0", folder, client) for folder in folders)
    names = [server.serve("iteration-0000", 64) for server in (first, second)]
    assert len({*names}) == len({*folders}) == 2
    assert {folder.parent for folder in folders} == {shared}
    assert client.adapters.keys() == {"another's", *names}
    beside = folders[0] / "notes.txt"
    beside.write_text("precious")
    first._backbone = "pi_1"  # type: ignore[assignment]
    later = first.serve("iteration-0001", 64)
    assert client.adapters.keys() == {"another's", later, names[1]}
    assert Path(client.adapters[names[1]]).is_dir()
    assert sorted(path.name for path in folders[0].iterdir()) == sorted([later, "notes.txt"])
    for server in (first, second, second):
        server.close()
    assert client.adapters == {"another's": "/another/place"}
    assert [file.read_text() for file in (*precious, beside)] == ["precious"] * 3
    assert not folders[1].exists()


def test_a_resumed_run_takes_away_what_it_left_when_it_was_killed(tmp_path: Path) -> None:
    run, client = _run(tmp_path / "run"), Client()
    for shared in (None, str(tmp_path / "shared")):
        folder = run.served(shared)
        _serving("pi_0", folder, client).serve("iteration-0000", 64)
        again = _serving("pi_1", RunFolder(tmp_path / "run").served(shared), client)
        name = again.serve("iteration-0001", 64)
        assert client.adapters.keys() == {"another's", name}
        assert [path.name for path in folder.iterdir()] == [name]
        again.close()


def test_a_server_that_cannot_be_reached_at_the_end_is_logged_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client()
    server = _serving("pi_0", tmp_path / "served", client)
    server.close()  # nothing is there yet
    name = server.serve("iteration-0000", 64)
    client.is_down = True
    server.close()
    assert f"keeps the adapter {tmp_path / 'served' / name}: LLMFailure: no connection" in caplog.text
    assert (tmp_path / "served" / name).is_dir()  # the server may still read it


def test_equal_paths_on_two_machines_are_two_folders(tmp_path: Path) -> None:
    first = _run(tmp_path / "run").served("/shared")
    (tmp_path / "run").rename(tmp_path / "kept")  # so that its place on the disk is not given again
    assert _run(tmp_path / "run").served("/shared") != first
    shutil.rmtree(tmp_path / "run")
