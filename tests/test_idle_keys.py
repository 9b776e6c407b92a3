"""Keys that somebody gives, and that have no effect beside others, are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_mtrl import cli
from lightning_mtrl.idle_keys import idle_keys
from lightning_mtrl.loop import PolicyIterationLoop
from lightning_mtrl.parsing import build_algorithm, parse_run

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
WHOLE = sorted(CONFIGS.glob("*.yaml"))
ESTIMATORS = "lightning_mtrl.algorithms.conversation_estimators"
SETTINGS, PRM = "algorithm.init_args.settings", "algorithm.init_args.prm"


def told(*arguments: str) -> list[str]:
    parsed = parse_run("fit", "", arguments)
    return list(idle_keys(parsed.config.model, build_algorithm(parsed.config).idle(), arguments))


def test_each_key_that_was_changed_and_has_no_effect_is_told_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"""
model: {{fine_tuning: full, lora_rank: 8, lora_alpha: 32.0}}
data: {{group_size: 8}}
algorithm:
  class_path: ITPO
  init_args:
    credit: {{class_path: lightning_mtrl.credit.Outcome}}
    estimator: {{class_path: {ESTIMATORS}.RLOO}}
    settings: {{value_role: value, value_learning_rate: 1.0e-4, kl_coef: 0.5}}
    prm: {{beta: 0.5}}
"""
    )
    assert told(f"--config={file}") == [
        "model.lora_rank is 8, but it has no effect, since model.fine_tuning is 'full', which makes no "
        "adapters. Leave it out.",
        f"{SETTINGS}.value_role is 'value', but it has no effect, since RLOO needs no value head. "
        "Leave it out.",
        f"{PRM}.beta is 0.5, but it has no effect, since Outcome has no implicit PRM. Leave it out.",
    ]
    # What is at its default was not changed; the same keys count beside other ones.
    assert (
        told(
            f"--config={file}",
            "--model.fine_tuning=lora",
            "--algorithm.credit=lightning_mtrl.credit.PRIME",
            f"--algorithm.estimator={ESTIMATORS}.GAE",
        )
        == []
    )


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--algorithm.settings.value_role=value", f"{SETTINGS}.value_role"),
        ("--algorithm.init_args.settings.value_clip_range=9", f"{SETTINGS}.value_clip_range"),
        ("--algorithm.credit=lightning_mtrl.credit.Uniform", None),
        ("--model.lora_rank=3", None),
    ],
)
def test_of_files_that_are_put_together_only_options_are_told(option: str, key: str | None) -> None:
    files = [f"--config={CONFIGS / name}" for name in ("itpo.yaml", "advantage/rloo.yaml")]
    assert [line.partition(" ")[0] for line in told(*files, option)] == ([] if key is None else [key])


def test_the_estimators_of_single_responses_are_looked_at_too() -> None:
    given = "--algorithm.improvement.value_role=value"
    assert told(given) == []
    (line,) = told(given, "--algorithm.estimator=lightning_mtrl.algorithms.GRPO")
    assert line.startswith("algorithm.init_args.improvement.value_role is 'value', but it has no effect")


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_no_shipped_configuration_gives_a_key_without_effect(file: Path) -> None:
    assert len(WHOLE) >= 5
    assert told(f"--config={file}") == []


def test_put_together_the_shipped_parts_give_none_either() -> None:
    parts = ("itpo", "tasks/math_tutoring", "credit/outcome", "advantage/rloo", "size/tiny")
    assert told(*(f"--config={CONFIGS / f'{part}.yaml'}" for part in parts)) == []


def test_fit_says_it_once_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said_by_then: list[list[str]] = []

    def begin(*_: object) -> None:
        said_by_then.append(list(caplog.messages))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PolicyIterationLoop, "__init__", begin)
    monkeypatch.setattr(PolicyIterationLoop, "run", lambda _: None)
    given = [f"--config={CONFIGS / 'quickstart.yaml'}", "--algorithm.improvement.value_role=value"]
    assert cli.main(["fit", *given]) == 0
    (said,) = said_by_then
    assert [line for line in said if "has no effect" in line] == [
        "algorithm.init_args.improvement.value_role is 'value', but it has no effect, since RLOO needs no "
        "value head. Leave it out."
    ]
    assert sum("has no effect" in line for line in caplog.messages) == 1
