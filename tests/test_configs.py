from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mtrl import cli
from lightning_mtrl.algorithms import Algorithm
from lightning_mtrl.config import RunConfig
from lightning_mtrl.environments import Environment
from lightning_mtrl.parsing import build_algorithm, build_environment, load_config

# Seconds of computing, but a busy machine can make minutes of them.
pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
# A file of such a folder holds some keys only, and goes over others.
ITPO_FILE, MATH_FILE = ROOT / "configs" / "itpo.yaml", ROOT / "configs" / "tasks" / "math_tutoring.yaml"
UNDER = {"size": [ITPO_FILE, MATH_FILE], **{each: [ITPO_FILE] for each in ("tasks", "credit", "advantage")}}
FULL = ROOT / "configs" / "full.yaml"
# Those whose model is in the package; the others need a download, or a GPU.
RUN_HERE = ["quickstart", "full"]
SMALL = [
    "--data.conversations=48",
    "--data.rows=32",
    "--loop.iterations=1",
    "--validation.conversations=32",
    "--algorithm.evaluation.epochs=1",
    "--algorithm.improvement.rounds=1",
    "--algorithm.improvement.states=4",
    "--algorithm.improvement.certificate_states=4",
]
ROW = {
    "iteration", "success_rate", "success_rate_interval", "mean_return", "mean_return_interval", "turns",
    "tokens", "conversations", "truncated", "dropped", "kl", "q_loss", "prm_loss", "calibration_error",
    "accepted", "gain", "seconds",
}  # fmt: skip


def test_the_shipped_configurations_are_found() -> None:
    assert len(CONFIGS) >= 4
    assert set(RUN_HERE) <= {path.stem for path in CONFIGS}


def test_the_server_of_a_language_model_is_bounded_alike_wherever_its_command_stands() -> None:
    told = [(ROOT / file).read_text("utf-8") for file in ("README.md", "configs/llm_user.yaml")]
    readme, config = (re.findall(r"--cb-[\w-]+=\d+", text) for text in told)
    assert len(readme) == 3
    assert config == readme


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_builds_its_environment_and_its_algorithm(path: Path) -> None:
    config = load_config(*UNDER.get(path.parent.name, []), path)
    assert isinstance(config, RunConfig)
    assert isinstance(build_environment(config), Environment)
    assert isinstance(build_algorithm(config), Algorithm)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_short_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 40 or path == FULL


def test_what_was_never_run_says_so_first() -> None:
    assert (ROOT / "configs" / "qwen2.5_3b_4bit.yaml").read_text().startswith("# NOT RUN.")


def test_the_full_configuration_names_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["fit", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert yaml.safe_load(FULL.read_text()) == printed
    assert load_config(FULL) == load_config()


def test_every_key_of_the_full_configuration_has_a_comment_above_it() -> None:
    lines = FULL.read_text().splitlines()
    keys = [i for i, line in enumerate(lines) if re.match(r"\s*\w+:", line) and "init_args:" not in line]
    assert len(keys) > 80
    assert [lines[i] for i in keys if not lines[i - 1].lstrip().startswith("#")] == []


@dataclass(frozen=True)
class Finished:
    """A run of a shipped configuration, at a small size."""

    name: str
    folder: Path
    printed: str

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found


@pytest.fixture(scope="module", params=RUN_HERE)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    command = [sys.executable, "-m", "lightning_mtrl", "fit", f"--config=configs/{request.param}.yaml"]
    done = subprocess.run([*command, *SMALL, f"--run_dir={folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Finished(request.param, folder, done.stdout)


def test_a_run_leaves_every_artefact(run: Finished) -> None:
    assert len(list(run.folder.glob("events.out.tfevents.*"))) == 1
    assert [path.name for path in (run.folder / "rollouts").iterdir()] == ["iteration-0000.parquet"]
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["iteration-0001"]
    kinds = {path.suffix for path in (run.folder / "checkpoints" / "iteration-0001").iterdir()}
    assert kinds == {".safetensors", ".pt", ".json"}


def test_the_configuration_in_the_folder_repeats_the_run(run: Finished) -> None:
    given = load_config(ROOT / "configs" / f"{run.name}.yaml", overrides=SMALL)
    assert load_config(run.folder / "config.yaml") == given


def test_the_summary_has_a_full_row_for_each_policy(run: Finished) -> None:
    summary = run.summary
    assert {"python", "torch", "lightning_mtrl"} <= set(summary["versions"])
    assert summary["seconds"] > 0
    assert 0 < summary["optimum_return"] < summary["optimum_success_rate"] < 1
    assert [row["iteration"] for row in summary["iterations"]] == [0, 1]
    for row in summary["iterations"]:
        assert set(row) == ROW
        for figure in ("success_rate", "mean_return"):
            low, high = row[f"{figure}_interval"]
            assert low <= row[figure] <= high
        assert row["conversations"] == 32
        assert row["turns"] >= 1
        assert row["dropped"] == {}
    first, last = summary["iterations"]
    assert (first["kl"], first["q_loss"], first["accepted"]) == (0.0, None, None)
    assert last["q_loss"] > 0
    assert set(last["seconds"]) == {"collect", "evaluate", "improve", "validate"}


def test_the_metrics_hold_the_figures_of_the_summary(run: Finished) -> None:
    with (run.folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = {row["name"]: float(row["value"]) for row in rows}
    row = run.summary["iterations"][1]
    for name in ("success_rate", "mean_return", "turns", "tokens"):
        assert math.isclose(last[f"validation/{name}"], row[name])
    assert math.isclose(last["critic/calibration_error"], row["calibration_error"])
    assert {"rollouts/outcome", "time/collect"} <= set(last)


def test_validate_repeats_the_figures_of_the_run(run: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--run", str(run.folder)]) == 0
    measured = json.loads(capsys.readouterr().out)
    row = run.summary["iterations"][1]
    assert {name: row[name] for name in measured} == measured
    assert cli.main(["validate", "--run", str(run.folder), "--conversations=3", "--iteration=0"]) == 0
    assert json.loads(capsys.readouterr().out)["conversations"] == 3


def test_collect_writes_conversations_that_are_read_back(run: Finished, tmp_path: Path) -> None:
    from lightning_mtrl.rollouts.logs import read_conversations

    file = tmp_path / "talks.jsonl"
    assert cli.main(["collect", "--run", str(run.folder), "--output", str(file), "--conversations=5"]) == 0
    loaded = read_conversations(file, strict=True)
    assert len(loaded.conversations) == 5
    assert {c.policy for c in loaded.conversations} == {"iteration-0001"}
    assert all(c.has_tokens for c in loaded.conversations)


def test_an_exported_policy_answers_in_other_programs_as_it_does_here(run: Finished, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lightning_mtrl.models.tiny import TINY_FOLDER

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert cli.main(["export", "--run", str(run.folder), "--output", str(adapter)]) == 0
    assert cli.main(["export", "--run", str(run.folder), "--output", str(merged), "--merge"]) == 0
    prompts, ours = greedy_responses_here(run.folder)
    base = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype="float32")
    assert len({tuple(ids) for ids in ours}) > 5
    assert greedy(base, prompts) != ours, "the adapter makes no difference, so nothing was compared"
    assert greedy(PeftModel.from_pretrained(base, adapter), prompts) == ours
    assert greedy(AutoModelForCausalLM.from_pretrained(merged, dtype="float32"), prompts) == ours
    bare = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype="float32")
    latest = PeftModel.from_pretrained(bare, run.folder / "adapters" / "policy")
    assert greedy(latest, prompts) == ours
    for folder in (adapter, merged):
        assert AutoTokenizer.from_pretrained(folder).chat_template
    expect_what_servers_read(adapter, merged)


def expect_what_servers_read(adapter: Path, merged: Path) -> None:
    """What vLLM and TGI take from the folders by name; neither has been started here."""
    from safetensors import safe_open
    from transformers import AutoTokenizer, GenerationConfig

    # vLLM 0.33, lora/peft_helper.py: three fields that it needs, and what it refuses or leaves out.
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    assert {"q_proj", "down_proj"} <= set(config["target_modules"])
    assert not config["modules_to_save"]
    assert config["bias"] == "none"
    assert not any(config[key] for key in ("use_dora", "rank_pattern", "alpha_pattern"))
    with safe_open(adapter / "adapter_model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    assert len(names) == 2 * 7 * 3  # A and B of seven matrices in each of three layers
    layer = r"base_model\.model\.model\.layers\.\d\.(self_attn|mlp)\.\w+\.lora_[AB]\.weight"
    assert all(re.fullmatch(layer, name) for name in names)
    model = json.loads((merged / "config.json").read_text())
    assert model["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in model
    assert (merged / "model.safetensors").is_file()
    # A server ends a response where the model's generation_config says, which is where ours end.
    end = GenerationConfig.from_pretrained(merged).eos_token_id
    assert end == AutoTokenizer.from_pretrained(merged).eos_token_id == 4


def greedy_responses_here(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Beginnings of the run's conversations, cut at any token, and how our own engine goes on with them."""
    from lightning_mtrl import load_run
    from lightning_mtrl.rollouts.engine import sample_groups
    from lightning_mtrl.rollouts.logs import read_conversations
    from lightning_mtrl.rollouts.sampling import SamplingConfig

    talks = read_conversations(folder / "rollouts" / "iteration-0000.parquet", strict=True).conversations
    parts = load_run(folder).parts
    prompts = [talk.token_ids()[: 6 + 3 * place] for place, talk in enumerate(talks[:16])]
    chat = parts.context.chat
    with parts.backbone.sampling("policy") as model:
        groups = sample_groups(
            model,
            prompts,
            1,
            sampling=SamplingConfig(temperature=0.0, max_response_tokens=16),
            end_ids=chat.end_ids,
            pad_id=chat.pad_id,
            seed=0,
        )
    return prompts, [list(group[0].ids) for group in groups]


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    import torch

    model.eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
        )
        found.append(out[0, len(prompt) :].tolist())
    return found
