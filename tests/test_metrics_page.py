from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A minute of computing, but a busy machine can make several of it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "metrics.md").read_text()
# Large enough for a critic that beats a constant by far, since no step is tried without one.
ITERATIVE_PPO = [
    "--data.conversations=640",
    "--data.validation_share=0.3",
    "--algorithm.improvement.kl_estimator=k3",
    "--algorithm.improvement.rounds=2",
    "--algorithm.improvement.states=8",
    "--algorithm.improvement.certificate_states=8",
    "--algorithm.estimator=GAE",
]
PERSONAS = [
    "--data.conversations=96",
    '--data.personas=["Be brief."]',
    "--data.persona_share=0.5",
    "--algorithm.evaluation.target=retrace",
    "--algorithm.evaluation.loss=mse",
    "--algorithm.evaluation.next_samples=2",
    "--algorithm.evaluation.epochs=2",
    "--algorithm.improvement.certificate_states=8",
]
ITPO = ["--data.conversations=48", "--algorithm.settings.minibatch_groups=2"]
# Of runs with a server; tests/test_served_runs.py has one.
SERVED = {"rollouts/server_difference_max", "rollouts/server_difference_mean", "rollouts/server_kl"}
# Of runs with a language model as the user; tests/test_llm_runs.py has one.
LLM = {
    *("llm/requests", "llm/recorded", "llm/retries", "llm/failures"),
    *("llm/prompt_tokens", "llm/sampled_tokens", "llm/cost"),
}
OUTCOME_ONLY = ["--algorithm=OutcomeOnly", "--algorithm.settings.epochs=1", "--data.conversations=48"]
OUTCOME_ONLY += ["--data.explore_share=0"]


def names_on_the_page(text: str) -> list[str]:
    """First cells of the tables' rows."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs through the command line, which log every name between them."""
    folders = []
    for config, options in (
        ("quickstart", ITERATIVE_PPO),
        ("quickstart", PERSONAS),
        ("quickstart", OUTCOME_ONLY),
        ("itpo", ITPO),
    ):
        folders.append(tmp_path_factory.mktemp(config) / "run")
        sizes = ["--loop.iterations=1", "--validation.conversations=16", f"--run_dir={folders[-1]}"]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "lightning_mtrl",
                "fit",
                f"--config=configs/{config}.yaml",
                *sizes,
                *options,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    return folders


def logged_names(folder: Path) -> set[str]:
    with (folder / "metrics.csv").open(newline="") as file:
        return {row["name"] for row in csv.DictReader(file)}


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_the_page_names_what_is_logged_and_nothing_else(runs: list[Path]) -> None:
    logged = set().union(*map(logged_names, runs))
    on_the_page = {name for name in names_on_the_page(PAGE) if "/" in name}
    assert len(logged) > 40
    # The names that every tool around may rely on, whatever the algorithm.
    assert {"policy/loss", "policy/kl", "critic/q_loss", "rollouts/success_rate", "time/collect"} <= logged
    assert {name.partition("/")[0] for name in logged} == {
        *("policy", "critic", "value", "prm", "rollouts", "validation", "time")
    }
    assert logged - on_the_page == set(), "logged, but not on the page"
    assert on_the_page - logged == SERVED | LLM, "on the page, but not logged"


def test_the_page_names_the_fields_of_the_summary_and_nothing_else(runs: list[Path]) -> None:
    whole, row = PAGE.partition("## summary.json")[2].split("A row of `iterations`:")
    for folder in runs:
        found = summary(folder)
        assert set(names_on_the_page(whole)) == set(found)
        for measured in found["iterations"]:
            assert set(names_on_the_page(row)) == set(measured)


def test_a_step_was_tried(runs: list[Path]) -> None:
    assert "policy/gain" in logged_names(runs[0])
