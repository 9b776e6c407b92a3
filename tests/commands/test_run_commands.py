from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_algorithms
import pytest

from lightning_mtrl import cli
from lightning_mtrl.config import RunConfig
from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.parsing import to_yaml
from lightning_mtrl.runs.folder import RunFolder

ASKED = Message("user", "x")
LED = (Message("system", "Be brief."), ASKED)
TALKS = [
    Conversation("own", (ASKED,), (Turn("y"),), 1.0),
    Conversation("explored", (ASKED,), (Turn("y"), Turn("z", explored=True)), 0.0),
    Conversation("led", LED, (Turn("y"),), 1.0, metadata={"persona": "Be brief."}),
    Conversation("named", (ASKED,), (Turn("y"),), 1.0, metadata={"persona": "a busy parent"}),
]
Calls = list[tuple[str, dict[str, Any]]]


class FakeParts:
    def __init__(self, config: RunConfig, calls: Calls) -> None:
        self.config, self.calls, self.gamma = config, calls, 0.9
        self.backbone = self.collector = self
        self.validator, self.environment = "validator", object()
        self.context = SimpleNamespace(chat=SimpleNamespace(tokenizer=self))

    @contextmanager
    def speaker(self, backbone: FakeParts) -> Iterator[str]:
        assert backbone is self
        yield "policy"

    def collect(self, model: str, **arguments: Any) -> SimpleNamespace:
        self.calls.append((f"collect {model}", arguments))
        return SimpleNamespace(conversations=TALKS, dropped={"simulator failed": 3})

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the commands asked of the rest, in a folder that holds one run, `run`, with three policies."""
    fake_algorithms.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(to_yaml(RunConfig(seed=5)), "run")
    for number in (1, 2):
        folder.checkpoint(number).mkdir()
    asked: Calls = []

    def module(name: str, **content: Any) -> None:
        made = ModuleType(f"lightning_mtrl.{name}")
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, made.__name__, made)

    def load_run(folder: RunFolder, iteration: int | None = None) -> SimpleNamespace:
        config = RunConfig(seed=5)
        number = 2 if iteration is None else iteration
        rows = [{"iteration": 2, "success_rate": 0.75, "conversations": 256}]
        parts, summary = FakeParts(config, asked), SimpleNamespace(iterations=rows)
        return SimpleNamespace(config=config, iteration=number, parts=parts, summary=summary)

    def validate(validator: str, backbone: FakeParts, **arguments: Any) -> SimpleNamespace:
        asked.append(("validate", arguments))
        row: dict[str, Any] = {"success_rate": 0.5}
        if arguments["conversations"] == 1:
            row |= {"mean_return_interval": [-math.inf, math.inf], "mean_return": math.nan}
        return SimpleNamespace(row=lambda: row)

    def write_conversations(path: Path, conversations: list[Conversation]) -> None:
        path.write_text("\n".join(c.id for c in conversations))

    def save_role(backbone: FakeParts, role: str, folder: Path) -> None:
        (folder / f"adapter-{role}").write_text("weights")
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/package/tiny", "r": 4}')

    def save_merged(backbone: FakeParts, role: str, folder: Path) -> float:
        (folder / f"merged-{role}").write_text("weights")
        return 0.83

    def expect_ready(config: RunConfig, work: str, seed: int | None = None) -> None:
        asked.append((f"ready to {work}", {"seed": seed}))

    module("readiness", expect_ready=expect_ready)
    module("recorder", load_run=load_run, load_learner=load_run)
    module("assembly", assemble=lambda config: FakeParts(config, asked))
    module("evaluation.validate", validate=validate)
    module("rollouts.logs", write_conversations=write_conversations)
    module("models.saving", save_role=save_role, save_merged=save_merged)
    return asked


def test_validate_measures_the_newest_policy_as_the_run_did(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", "--run", "run"]) == 0
    assert json.loads(capsys.readouterr().out) == {"iteration": 2, "success_rate": 0.5}
    expected = {"conversations": 256, "seed": 1_000_000, "gamma": 0.9, "policy": "iteration-0002"}
    assert calls == [("ready to validate", {"seed": None}), ("validate", expected)]


def test_what_is_not_finite_is_null_in_what_validate_prints(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", "--run=run", "--conversations=1"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["mean_return_interval"] == [None, None]
    assert json.loads(printed)["mean_return"] is None
    assert not {"Infinity", "NaN"} & set(printed.replace("-", " ").replace(",", " ").split())


def test_validate_takes_another_policy_seed_and_number(calls: Calls) -> None:
    options = ["--conversations=7", "--seed=0", "--iteration=0"]
    assert cli.main(["validate", "--run_dir=run", *options]) == 0
    expected = {"conversations": 7, "seed": 0, "gamma": 0.9, "policy": "iteration-0000"}
    assert calls == [("ready to validate", {"seed": 0}), ("validate", expected)]


def test_collect_takes_the_policy_of_a_run(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["collect", "--run=run", "--output=new/out.jsonl", "--conversations=2", "--seed=1"]) == 0
    expected = {"conversations": 2, "seed": 1, "policy": "iteration-0002"}
    assert calls == [("ready to collect", {"seed": 1}), ("collect policy", expected)]
    assert Path("new/out.jsonl").read_text() == "own\nexplored\nled\nnamed"
    said = capsys.readouterr().out
    assert "4 conversations of iteration-0002 in new/out.jsonl" in said
    assert "Of these 1 drawn to be explored and 1 under a persona, by data.explore_share and" in said
    assert "3 dropped: simulator failed" in said


def test_collect_takes_pi_0_of_a_configuration(calls: Calls) -> None:
    Path("c.yaml").write_text("data: {conversations: 12}\n")
    assert cli.main(["collect", "--config=c.yaml", "--output", "out.parquet", "--seed", "8"]) == 0
    expected = {"conversations": 12, "seed": 8, "policy": "iteration-0000"}
    assert calls == [("ready to collect", {"seed": None}), ("collect policy", expected)]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="the system has no /proc")
@pytest.mark.parametrize(
    "arguments",
    [
        ["collect", "--run=run", "--output=/proc/x.jsonl"],
        ["export", "--run=run", "--output=/proc/x/y"],
        ["compare", "--baseline=a.jsonl", "--detect=0.1", "--output=/proc/x.json"],
    ],
)
def test_a_place_where_even_root_can_make_nothing_is_named_with_its_option(
    calls: Calls, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err
    option, _, given = arguments[-1].partition("=")
    assert message.startswith(f"error: {option} is {given!r}, but /proc may not be written to (")
    assert len(message.splitlines()) == 1
    assert calls == []


def test_pi_0_is_listed_once_where_it_has_a_checkpoint_too(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run/checkpoints/iteration-0000").mkdir(parents=True)
    assert cli.main(["export", "--run=run", "--output=o", "--iteration=7"]) == 2
    assert "There are: 0 (pi_0), 1, 2." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["validate"], "--run must be given"),
        (
            ["validate", "--run=run", "--conversations=0"],
            "error: --conversations is 0, but a whole number",
        ),
        (["validate", "--run=run", "--iteration=-1"], "error: --iteration is -1"),
        (["collect", "--run=run", "--output=x.jsonl", "--conversations=x"], "error: --conversations is 'x'"),
        (["collect", "--config=run/config.yaml", "--output=x.jsonl", "--conversations=x"], "error: --conve"),
        (["validate", "--run=run", f"--seed={2**32}"], "a whole number from 0 to 4294967295 or null was"),
        (["collect", "--run=run", "--output=x.jsonl", f"--seed={2**32}"], "from 0 to 4294967295"),
        (["fit", f"--validation.seed={2**32}"], "validation.seed is 4294967296, but it must be a whole"),
        (["collect", "--run=run"], "--output must be given"),
        (["collect", "--output=x.jsonl"], "--run must be given"),
        (["collect", "--run=run", "--output=x.txt"], "ends with .jsonl or .parquet"),
        (
            ["collect", "--run=run", "--config=c.yaml", "--output=x.jsonl"],
            "--run and --config are both given",
        ),
        (["export", "--run=run"], "--output must be given"),
        (["export", "--run=run", "--output=run"], "not an empty folder"),
        (["export", "--run=run", "--output=run/config.yaml"], "not an empty folder"),
        (["export", "--run=run", "--output=run/config.yaml/a/b"], "run/config.yaml is no folder, so"),
        (["collect", "--run=run", "--output=run/config.yaml/b.jsonl"], "run/config.yaml is no folder, so"),
        (["fit", "--run_dir=run/config.yaml/b"], "run_dir is 'run/config.yaml/b', but "),
        (["validate", "--run=run", "--iteration=9"], "--iteration is 9, but run has no checkpoint of it"),
        (["export", "--run=run", "--output=o", "--iteration=3"], "There are: 0 (pi_0), 1, 2."),
        (["collect", "--run=run", "--output=o.jsonl", "--iteration=3"], "There are: 0 (pi_0), 1, 2."),
    ],
)
def test_mistakes_end_before_any_work(
    calls: Calls, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert len(message.splitlines()) == 1
    assert calls == []


def test_collect_takes_whole_groups_only(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    Path("groups.yaml").write_text("data: {group_size: 4}\n")
    assert cli.main(["collect", "--config=groups.yaml", "--output=x.jsonl", "--conversations=6"]) == 2
    told = "--conversations is 6, but it must be a multiple of data.group_size, 4. Pass --conversations 8."
    assert told in capsys.readouterr().err
    assert calls == []


def test_export_does_not_replace_the_folder_it_runs_in(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("here").mkdir()
    monkeypatch.chdir("here")
    assert cli.main(["export", "--run=../run", "--output=."]) == 2
    assert "--output is '.', the folder you are in." in capsys.readouterr().err
    assert calls == []


def test_export_writes_an_adapter_or_a_whole_model_and_the_tokenizer(calls: Calls) -> None:
    assert cli.main(["export", "--run=run", "--output=out/adapter"]) == 0
    assert cli.main(["export", "--run=run", "--output=out/merged", "--merge", "--iteration=1"]) == 0
    assert {path.name for path in Path("out/merged").iterdir()} == {
        "merged-policy",
        "tokenizer.json",
        "README.md",
    }
    assert {path.name for path in Path("out/adapter").iterdir()} == {
        "adapter-policy",
        "adapter_config.json",
        "base",
        "tokenizer.json",
        "README.md",
    }


def test_an_exported_adapter_brings_the_embedded_base_and_says_what_it_is(calls: Calls) -> None:
    assert cli.main(["export", "--run=run", "--output=out"]) == 0
    config = json.loads(Path("out/adapter_config.json").read_text())
    assert config == {"base_model_name_or_path": str(Path("out/base").resolve()), "r": 4}
    assert {"config.json", "model.safetensors"} <= {path.name for path in Path("out/base").iterdir()}
    card = Path("out/README.md").read_text()
    for said in ("# Policy 2 of run", "| base model | tiny |", "0.750 in 256 conversations", "IterativePPO"):
        assert said in card
    assert str(Path.cwd()) not in card, "the folder must be loadable wherever it is"


def test_a_merged_policy_that_rounding_changed_is_said_to_be_another_one(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", "--run=run", "--output=out", "--merge"]) == 0
    assert "an error of 83% of the adapter's size" in capsys.readouterr().out
    assert cli.main(["export", "--run=run", "--output=apart"]) == 0
    assert "error" not in capsys.readouterr().out


def test_a_merged_policy_says_how_it_is_loaded_without_peft(calls: Calls) -> None:
    assert cli.main(["export", "--run=run", "--output=out", "--merge"]) == 0
    card = Path("out/README.md").read_text()
    assert "AutoModelForCausalLM.from_pretrained(folder)" in card
    assert "peft" not in card
