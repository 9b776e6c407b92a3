"""Steps from logs alone: the same as the loop's, without an environment; and what they leave and refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from small_models import PAD, small_backbone, small_context, some_talks
from whole_runs import end_with_the_test

from lightning_mtrl.assembly import Learner
from lightning_mtrl.batch_online import with_logprobs
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.logged import LogFit
from lightning_mtrl.rollouts.logs import read_conversations, write_conversations

# A minute of computing, but a busy machine can make several of it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "--data.conversations=640",
    "--data.validation_share=0.3",
    "--data.earlier_share=0",
    "--algorithm.improvement.rounds=2",
    "--algorithm.improvement.states=16",
    "--algorithm.improvement.certificate_states=16",
    "--algorithm.improvement.accept=always",
    "--loop.iterations=2",
    "--validation.conversations=16",
]
HIDDEN = "--environment=hidden_environment.Hidden"


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "tests" / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "lightning_mtrl", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def _done(*arguments: object) -> str:
    done = _run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of the loop, and steps from the conversations that it stored."""
    folder = tmp_path_factory.mktemp("steps")
    loop, first, second = (folder / name for name in ("loop", "first", "second"))
    _done("fit", "--config=configs/quickstart.yaml", *SMALL, f"--run_dir={loop}")
    logs = [loop / "rollouts" / f"iteration-000{number}.parquet" for number in range(2)]
    said = [
        _done("improve", f"--config={loop}/config.yaml", HIDDEN, f"--logs={logs[0]}", f"--run_dir={first}"),
        _done("improve", f"--run={first}", f"--logs={logs[1]}", f"--run_dir={second}"),
    ]
    return {"loop": loop, "steps": [first, second], "logs": logs, "said": said, "folder": folder}


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_steps_from_logs_are_those_of_the_loop_to_the_byte(runs: dict[str, Any]) -> None:
    for number, step in enumerate(runs["steps"], start=1):
        name = f"checkpoints/iteration-000{number}"
        for part in ("policy", "critic"):
            ours = (step / name / f"tensors-{part}.safetensors").read_bytes()
            assert ours == (runs["loop"] / name / f"tensors-{part}.safetensors").read_bytes(), (number, part)
    policies = [
        load_file(step / f"checkpoints/iteration-000{number}" / "tensors-policy.safetensors")
        for number, step in enumerate(runs["steps"], start=1)
    ]
    assert any(not torch.equal(policies[0][name], policies[1][name]) for name in policies[0])
    assert _json(runs["steps"][0] / "summary.json")["iterations"][1]["accepted"], "no step was taken"


def test_a_step_leaves_what_the_logs_say_and_the_estimated_gain_but_no_measured_success(
    runs: dict[str, Any],
) -> None:
    first, second = runs["steps"]
    logged, made = _json(first / "summary.json")["iterations"]
    stored = read_conversations(runs["logs"][0]).conversations
    own = [c.outcome for c in stored if not c.explored_turn]
    assert 100 < len(own) < len(stored)
    assert (logged["iteration"], logged["conversations"]) == (0, len(own))
    assert logged["success_rate"] == pytest.approx(sum(own) / len(own))
    assert logged["success_rate_interval"][0] < logged["success_rate"] < logged["success_rate_interval"][1]
    assert (made["iteration"], made["success_rate"], made["conversations"]) == (1, None, None)
    loops = _json(runs["loop"] / "summary.json")["iterations"][1]
    assert (made["gain"], made["accepted"], made["q_loss"]) == (
        loops["gain"], loops["accepted"], loops["q_loss"],
    )  # fmt: skip
    assert [row["iteration"] for row in _json(second / "summary.json")["iterations"]] == [1, 2]


def test_a_step_on_outcomes_leaves_out_what_is_not_the_policys_own(runs: dict[str, Any]) -> None:
    folder = runs["folder"] / "outcome"
    given = ["--config=configs/quickstart.yaml", "--algorithm=OutcomeOnly", HIDDEN, f"--run_dir={folder}"]
    said = _done("improve", *given, f"--logs={runs['logs'][0]}")
    stored = read_conversations(runs["logs"][0]).conversations
    own = [c.outcome for c in stored if not c.explored_turn and c.outcome is not None]
    assert re.search(r"\(\d+ drawn to be explored\); they are not learned from", said)
    report = _json(folder / "report.json")
    assert report["critic"]["outcome"] == pytest.approx(sum(own) / len(own))


def test_the_report_and_the_words_tell_calibration_gain_and_coverage(runs: dict[str, Any]) -> None:
    report = _json(runs["steps"][0] / "report.json")
    assert report["logs"]["read"] == 640
    assert report["logs"]["left_out"] == {}
    assert report["logs"]["fit"]["kl_to_behaviour"] == pytest.approx(0.0, abs=1e-5)
    assert report["critic"]["trusted"]
    assert 0.0 <= report["critic"]["calibration_error"] < 0.2
    step = report["step"]
    assert step["gain_low"] < step["gain"] < step["gain_high"]
    assert 0.8 < step["near_data"] <= 1.0
    assert 0.8 < step["said_before"] <= 1.0
    said = runs["said"][0]
    for words in ("calibration error", "95% interval", "lie near what Q was fitted to", "adapters/policy"):
        assert words in said
    assert "WARNING" not in said
    assert "own       yes: the log's own log-probabilities agree" in said
    assert re.search(
        r"without \d+ conversations that are not its own behaviour \(\d+ drawn to be explored", said
    )
    assert f"improve --run {runs['steps'][0]}" in said
    assert (runs["steps"][0] / "figures" / "calibration.png").is_file()


def test_the_policy_is_a_peft_folder_that_can_be_exported_and_scored_with(
    runs: dict[str, Any], tmp_path: Path
) -> None:
    first = runs["steps"][0]
    _done("export", f"--run={first}", f"--output={tmp_path}/out")
    exported = load_file(tmp_path / "out" / "adapter_model.safetensors")
    kept = load_file(first / "adapters" / "policy" / "adapter_model.safetensors")
    assert all(torch.equal(exported[name], kept[name]) for name in kept)


def _plain(conversation: Conversation) -> Conversation:
    """As a team logs it: words and an outcome, no ids."""
    turns = tuple(
        replace(turn, response_ids=(), observation_ids=(), behaviour_logprobs=())
        for turn in conversation.turns
    )
    return replace(conversation, prompt_ids=(), turns=turns)


def test_logs_without_ids_are_evaluated_with_outcomes_of_another_file_and_scored(
    runs: dict[str, Any], tmp_path: Path
) -> None:
    talks = [_plain(c) for c in read_conversations(runs["logs"][0]).conversations[:200]]
    logs, outcomes, run = tmp_path / "logs.jsonl", tmp_path / "outcomes.csv", tmp_path / "run"
    write_conversations(logs, [replace(c, outcome=None) for c in talks])
    with logs.open("a") as file:
        file.write("{broken\n")
    rows = "".join(f"{c.id},{c.outcome}\n" for c in talks[:190])
    outcomes.write_text("id,outcome\n" + rows)
    config = [
        f"--config={runs['loop']}/config.yaml",
        HIDDEN,
        f"--run_dir={run}",
        "--data.validation_share=0.3",
    ]
    said = _done("evaluate", *config, f"--logs={logs}", f"--outcomes={outcomes}")
    assert "190 conversations read, 11 left out (no outcome 10, not JSON 1)" in said
    assert "the log has none of its own" in said
    assert "own       not known: the log has no log-probabilities" in said
    assert re.search(r"critic    held-out loss [\d.]+, of a constant [\d.]+; calibration error [\d.]+", said)
    assert ("`improve` would take no step" in said) == (not _json(run / "report.json")["critic"]["trusted"])
    report = _json(run / "report.json")
    assert (report["logs"]["read"], report["logs"]["left_out"]) == (190, {"no outcome": 10, "not JSON": 1})
    assert report["logs"]["messages"][-1].startswith(f"{logs}, line 201: not JSON")
    assert "step" not in report
    (row,) = _json(run / "summary.json")["iterations"]
    assert row["dropped"] == {"no outcome": 10, "not JSON": 1}
    assert row["q_loss"] is not None
    strict = _run("evaluate", *config[:2], f"--logs={logs}", f"--outcomes={outcomes}", "--strict")
    assert strict.returncode == 2
    assert f"{logs}, line 191 (id '{talks[190].id}'): no outcome" in strict.stderr

    said = _done("score", f"--run={run}", f"--logs={logs}", f"--output={tmp_path}/scored.jsonl")
    assert "200 conversations read, 1 left out (not JSON 1), 200 without an outcome; values" in said
    scored = read_conversations(tmp_path / "scored.jsonl", strict=True).conversations
    assert [replace(c, metadata={}) for c in scored] == [replace(c, metadata={}, outcome=None) for c in talks]
    values = [c.metadata["turn_values"] for c in scored]
    assert [len(v) for v in values] == [len(c.turns) for c in talks]
    assert all(0.0 < q < 1.0 for v in values for q in v)
    assert len({q for v in values for q in v}) > 20
    # In another order, and so in other batches, the values are the same.
    write_conversations(logs, reversed(talks))
    _done("score", f"--run={run}", f"--logs={logs}", f"--output={tmp_path}/again.jsonl")
    again = [c.metadata["turn_values"] for c in read_conversations(tmp_path / "again.jsonl").conversations]
    assert [q for v in reversed(again) for q in v] == pytest.approx([q for v in values for q in v], abs=1e-5)


REFUSED = [
    (["improve", "--logs=none.jsonl"], r"none\.jsonl is not a file"),
    (["evaluate", "--logs=README.md"], r"README\.md ends with '\.md', but \.jsonl"),
    (["improve"], r"--logs must be given"),
    (["improve", "--logs="], r"--logs is ''"),
    (["improve", "--logs=LOGS", "--outcomes=none.csv"], r"none\.csv is not a file, but outcomes"),
    (
        ["improve", "--logs=LOGS", "--config=configs/itpo.yaml"],
        r"ITPO, which learns from fresh conversations",
    ),
    (["improve", "--logs=LOGS", "--run=nowhere"], r"nowhere is not a run"),
    (["improve", "--logs=LOGS", "--run=STEP", "--algorithm=OutcomeOnly"], r"made with .*IterativePPO"),
    (["improve", "--logs=LOGS", "--data.batch_size=0"], r"data\.batch_size is 0"),
    (["improve", "--logs=EMPTY", "--run_dir=RUN"], r"empty\.jsonl: 0 of 0 conversations .*a log with more"),
    (
        ["evaluate", "--logs=OPEN", "--run_dir=RUN"],
        r"open\.jsonl: 0 of 3 conversations ended with an outcome, but at least 2 are needed to hold one "
        r"out\. Left out: no outcome 2, not JSON 1\. .*pass --outcomes FILE",
    ),
    (
        ["improve", "--logs=OPEN", "--outcomes=OTHERS", "--run_dir=RUN"],
        r"outcome of no conversation 1.*The ids in .*others\.csv must be those of the log",
    ),
    (["improve", "--logs=OPEN", "--strict", "--run_dir=RUN"], r"open\.jsonl, line 1 \(id .a.\): no"),
    (
        ["improve", "--logs=LOGS", "--run=STEP", "--run_dir=STEP"],
        r"are both .*Pass --run_dir with a new folder",
    ),
    (["improve", "--logs=LOGS", "--run_dir=STEP"], r"is not empty\. .* pass --run \S+ too\.$"),
    (
        ["score", "--run=STEP", "--logs=LOGS", "--output=out.txt"],
        r"--output is 'out\.txt', but a file that ends",
    ),
    (
        ["score", "--run=STEP", "--logs=EMPTY", "--output=none.jsonl"],
        r"empty\.jsonl: 0 of 0 conversations could be read",
    ),
    (["score", "--run=STEP", "--logs=LOGS", "--output=LOGS"], r"the file that is read\. Pass another one"),
]


@pytest.mark.parametrize(("arguments", "expected"), REFUSED)
def test_a_mistake_is_one_readable_message(
    runs: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    from lightning_mtrl import cli

    monkeypatch.chdir(ROOT)
    (tmp_path / "empty.jsonl").write_text("\n")
    talk = json.dumps([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    (tmp_path / "open.jsonl").write_text(
        f'{{"id": "a", "messages": {talk}}}\n{{"id": "b", "messages": {talk}}}\n{{\n'
    )
    (tmp_path / "others.csv").write_text("id,outcome\nz,1\n")
    given = {"LOGS": runs["logs"][0], "STEP": runs["steps"][0], "EMPTY": tmp_path / "empty.jsonl"}
    given |= {"RUN": tmp_path / "run", "OPEN": tmp_path / "open.jsonl", "OTHERS": tmp_path / "others.csv"}
    end_with_the_test(monkeypatch)
    assert cli.main([re.sub(r"[A-Z]{3,}$", lambda m: str(given.get(m[0], m[0])), a) for a in arguments]) == 2
    printed = capsys.readouterr()
    told = printed.err
    assert re.search(expected, told), told
    assert "Traceback" not in told
    assert "Run folder" not in printed.out, "a folder was announced before the mistake was told"
    assert not (tmp_path / "run").exists(), "a run that could not begin left a folder"


def _learner() -> Learner:
    backbone = small_backbone(["policy"])
    return cast(Learner, SimpleNamespace(context=small_context(backbone)))


def _scored_alone(learner: Learner, conversation: Conversation) -> list[float]:
    """Log-probabilities of the sampled tokens by one plain forward pass; nothing of the product."""
    ids, sampled = list(conversation.prompt_ids), []
    for turn in conversation.turns:
        sampled += range(len(ids), len(ids) + len(turn.response_ids))
        ids += [*turn.response_ids, *turn.observation_ids]
    with learner.context.backbone.sampling("policy") as model, torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [logits[place - 1, ids[place]].item() for place in sampled]


def test_log_probabilities_that_a_log_lacks_are_the_policys_own() -> None:
    learner = _learner()
    talks = some_talks(7)
    bare = [
        replace(
            c, turns=tuple(replace(t, behaviour_logprobs=(), trained=k > 0) for k, t in enumerate(c.turns))
        )
        for c in talks
    ]
    filled = with_logprobs([*bare[:4], talks[4], *bare[5:]], learner)
    assert filled[4] == talks[4]
    for place in (0, 1, 2, 3, 5, 6):
        found = [value for turn in filled[place].turns for value in turn.behaviour_logprobs]
        assert found == pytest.approx(_scored_alone(learner, talks[place]), abs=1e-5)
        assert [t.trained for t in filled[place].turns] == [k > 0 for k in range(len(talks[place].turns))]
    assert PAD not in filled[0].token_ids()


def test_a_log_of_another_policy_is_told() -> None:
    learner = _learner()
    talks = with_logprobs([_bare(c) for c in some_talks(24)], learner)
    same = LogFit.of(talks, talks)
    assert (same.difference, same.differs, same.own) == (0.0, False, True)
    likelier = [
        replace(
            c,
            turns=tuple(
                replace(t, behaviour_logprobs=tuple(v + 0.2 for v in t.behaviour_logprobs)) for t in c.turns
            ),
        )
        for c in talks
    ]
    other = LogFit.of(likelier, talks)
    assert other.differs
    assert other.own is False
    assert other.difference == pytest.approx(
        0.2 * sum(len(t.response_ids) for c in talks for t in c.turns) / sum(len(c.turns) for c in talks)
    )
    unknown = LogFit.of([_bare(c) for c in talks], talks)
    assert (unknown.difference, unknown.differs, unknown.own) == (None, False, None)


def _bare(conversation: Conversation) -> Conversation:
    turns = tuple(replace(turn, behaviour_logprobs=()) for turn in conversation.turns)
    return replace(conversation, turns=turns)
