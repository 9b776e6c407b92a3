from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from inspect import Parameter, isabstract, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from small_runs import small_run

from lightning_mtrl import cli
from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.report.panels import groups_in
from lightning_mtrl.report.reading import Curve
from lightning_mtrl.report.samples import chosen
from lightning_mtrl.report.settings import differing
from lightning_mtrl.report.wording import result
from lightning_mtrl.rollouts.logs import write_conversations
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.writer import only_writer

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</p></style><script>alert(1)</script><img src=//evil.example/x onerror=alert(2)>\"'{{ 7*7 }}&amp;"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations."""
    return small_run(tmp_path_factory.mktemp("report"))


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


class Page(HTMLParser):
    """What a page is made of: its elements with their attributes, and the text of each kind of element."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(file.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def all_of(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


def page_of(run: Path) -> Page:
    assert cli.main(["report", f"--run={run}"]) == 0
    return Page(run / "report.html")


def change_summary(run: Path, **changes: Any) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | changes))


def test_the_page_of_a_run_is_made_without_a_model_library(finished: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_mtrl import cli; code = cli.main(sys.argv[1:]);"
        "print(code, sorted({'torch', 'transformers', 'lightning', 'peft'} & set(sys.modules)))"
    )
    output = tmp_path / "new" / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", f"--run={finished}", f"--output={output}"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [f"Report of {finished} in {output}", "0 []"], done.stderr
    assert not (finished / "report.html").exists()


def test_the_table_has_every_policy_with_the_numbers_of_the_summary(run: Path) -> None:
    change_summary(
        run,
        optimum_success_rate=0.8349,
        iterations=[
            {
                **json.loads((run / "summary.json").read_text())["iterations"][number],
                "success_rate": 0.25 + number / 4,
                "success_rate_interval": [0.2 + number / 4, 0.3 + number / 4],
                "conversations": 8,
                "turns": 2.5,
                "dropped": {"simulator failed": number},
            }
            for number in range(3)
        ],
    )
    page = page_of(run)
    assert [row for row in page.texts if re.fullmatch(r"\[0\.[267]\d*, 0\.\d+\]", row)][:1] == [
        "[0.200, 0.300]"
    ]
    for cell in ("0.250", "0.500", "0.750", "[0.700, 0.800]", "2.50", "simulator failed 2", "taken"):
        assert cell in page.texts
    told = "The success rate rose from 0.250 [0.200, 0.300] to 0.750 [0.700, 0.800], of 0.835 possible."
    assert told in page.texts
    assert "all 2 iterations done" in page.texts


def measured(rate: float, mean: float, half: float = 0.02) -> dict[str, Any]:
    return {
        "success_rate": rate,
        "success_rate_interval": [rate - half, rate + half],
        "mean_return": mean,
        "mean_return_interval": [mean - half, mean + half],
    }


def test_the_sentence_tells_the_return_where_the_success_rate_has_not_moved_by_more_than_chance() -> None:
    first, better = {"iteration": 0, **measured(0.5, 0.3)}, {"iteration": 1, **measured(0.7, 0.2)}
    assert (
        result([first, better], None)
        == "The success rate rose from 0.500 [0.480, 0.520] to 0.700 [0.680, 0.720]."
    )
    assert result([better, first], None).startswith("The success rate fell from 0.700")
    near = {"iteration": 1, **measured(0.51, 0.4)}
    told = "The success rate went from 0.500 [0.480, 0.520] to 0.510 [0.490, 0.530], of 0.600 possible. "
    more = "The mean return rose from 0.300 [0.280, 0.320] to 0.400 [0.380, 0.420]."
    unmeasured = {"iteration": 2, "success_rate": None}
    assert result([first, near, unmeasured], 0.6) == told + more
    assert result([unmeasured], 0.6) == "No policy has been measured yet."


def test_numbers_that_did_not_change_are_not_drawn() -> None:
    def drawn(*values: float) -> bool:
        return bool(list(groups_in({"policy/kl": Curve(list(range(len(values))), list(values))})))

    assert drawn(0.5, 0.6)
    assert drawn(0.5)
    assert not drawn(0.0)
    assert not drawn(1.0, 1.0 - 1e-7)


def test_what_is_not_known_is_a_dash(run: Path) -> None:
    rows = json.loads((run / "summary.json").read_text())["iterations"][:1]
    rows[0] |= {"mean_return_interval": [None, None], "q_loss": None, "calibration_error": None}
    change_summary(run, iterations=rows, optimum_success_rate=None, optimum_return=None)
    page = page_of(run)
    # The interval, the loss, the error of calibration and the step of pi_0.
    assert page.texts.count("—") >= 4
    assert not {"None", "nan", "null", "inf"} & {text for text in page.texts if len(text) < 6} - {"null"}


def test_the_page_needs_nothing_from_outside_itself(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert cli.main(["report", f"--run={finished}", f"--output={output}"]) == 0
    text, page = output.read_text(), Page(output)
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link", text)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert all(source.startswith("data:image/png;base64,") for source in page.all_of("src"))
    assert all(link.startswith("#") for link in page.all_of("href") + page.all_of("xlink:href"))
    assert "default-src 'none'" in page.all_of("content")[1]


def test_figures_take_the_colours_of_the_page_and_share_no_names(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert cli.main(["report", f"--run={finished}", f"--output={output}"]) == 0
    page = Page(output)
    drawn = [style for style in page.all_of("style") if "stroke:" in style or "fill:" in style]
    assert len(drawn) > 100
    assert not [style for style in drawn if re.search(r"#[0-9a-f]{3,6}", style)]
    assert max(Counter(page.all_of("id")).values()) == 1
    figures = [attributes for tag, attributes in page.elements if attributes.get("role") == "img"]
    assert len(figures) > 10
    assert all(re.search(r": \S+ at (policy|optimizer step) \d", figure["aria-label"]) for figure in figures)


def test_no_text_of_a_run_becomes_markup(run: Path, tmp_path: Path) -> None:
    for file in RunFolder(run).all_rollouts():
        file.unlink()
    turn = Turn(HOSTILE, HOSTILE, 1.0, disposition="edited", sent=HOSTILE, reply=HOSTILE)
    prompt = (Message("system", HOSTILE), Message("user", HOSTILE))
    talk = Conversation(HOSTILE, prompt, (turn,), 1.0, metadata={"facts": {HOSTILE: HOSTILE}})
    write_conversations(run / "rollouts" / "iteration-0000.jsonl", [talk])
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("name: tiny", f"name: {json.dumps(HOSTILE)}"))
    change_summary(run, versions={HOSTILE: HOSTILE})
    hostile = tmp_path / "<b>run"
    run.rename(hostile)
    page = page_of(hostile)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "b", "iframe", "object"}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.texts.count(HOSTILE) >= 4  # the prompt, the response, the observation, the model's name
    assert "<b>run" in page.texts


def test_a_text_with_half_a_character_can_be_shown(run: Path) -> None:
    for file in RunFolder(run).all_rollouts():
        file.unlink()
    line = {"id": "c", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    record = {**line, "outcome": 1, "metadata": {"facts": {"half": "\ud83d"}}}
    (run / "rollouts" / "iteration-0000.jsonl").write_text(json.dumps(record) + "\n")
    assert any("half: \\ud83d" in text for text in page_of(run).texts)


def test_a_run_that_is_going_on_is_told_and_not_touched(run: Path) -> None:
    rows = json.loads((run / "summary.json").read_text())["iterations"][:2]
    change_summary(run, iterations=rows)
    unfinished = run / "checkpoints" / ".iteration-0002.unfinished"
    unfinished.mkdir()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    with only_writer(run):
        page = page_of(run)
    assert (
        "The run is still going: 1 of 2 iterations done. This page shows it as it stands now." in page.texts
    )
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {run / "report.html"}
    assert {path: after[path] for path in before} == before
    assert unfinished.is_dir()


def test_a_run_that_was_killed_is_told_with_what_continues_it(run: Path) -> None:
    rows = json.loads((run / "summary.json").read_text())["iterations"][:2]
    change_summary(run, iterations=rows)
    told = "The run is not finished: 1 of 2 iterations done, and no process is at work in its folder."
    assert f"{told} fit --resume {run} continues it." in page_of(run).texts


def test_a_run_that_converged_early_is_finished(run: Path) -> None:
    change_summary(run, iterations=json.loads((run / "summary.json").read_text())["iterations"][:2])
    for file in run.glob("checkpoints/iteration-*/loop.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"converged": True}))
    assert "converged after 1 of 2 iterations" in page_of(run).texts


def test_a_run_of_which_only_the_configuration_is_there_has_a_page(finished: Path, tmp_path: Path) -> None:
    folder = RunFolder.create((finished / "config.yaml").read_text(), tmp_path / "new")
    page = page_of(folder.path)
    assert "No policy has been measured yet." in page.texts
    assert "No metrics.csv is there, so there are no curves of what was logged." in page.texts
    assert "No conversation with an outcome is stored in the run's folder." in page.texts
    assert folder.is_new, "a run that begins there later must not take the page for work of its own"


def test_a_row_of_metrics_that_is_half_written_is_left_out(run: Path) -> None:
    with (run / "metrics.csv").open("a", newline="") as file:
        csv.writer(file).writerow([2, 9, "policy/kl", 0.5])
        csv.writer(file).writerow([2, 9, "critic/auc", "nan"])
        file.write("3,9,policy/kl,9")
    labels = [label for label in page_of(run).all_of("aria-label") if label.startswith("KL:")]
    assert labels[0].endswith("and 0.5 at policy 2.")


def test_metrics_that_cannot_be_read_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.csv").write_text("iteration,step,name,value\n1,2,policy/kl,much\n")
    assert cli.main(["report", f"--run={run}"]) == 2
    assert "metrics.csv cannot be read" in capsys.readouterr().err


def test_only_keys_that_differ_come_first(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert cli.main(["report", f"--run={finished}", f"--output={output}"]) == 0
    texts = Page(output).texts
    place = texts.index("data.conversations")
    assert [text for text in texts[place + 1 :] if text][:2] == ["32", "512"]
    assert "data.temperature" not in texts
    assert any("temperature: 1.0" in text for text in texts), "the whole configuration folds out"
    place = texts.index("algorithm.improvement.accept")
    assert [text for text in texts[place + 1 :] if text][:2] == ["always", "—"], "of a class of the tests"


def exported(package: ModuleType) -> list[type]:
    """The classes of a package that a configuration can name, and that need no argument."""
    found = [getattr(package, name) for name in package.__all__]
    classes = [one for one in found if isinstance(one, type) and not isabstract(one)]
    plain = [one for one in classes if Parameter.empty not in defaults_of(one)]
    return [one for one in plain if hasattr(one, "reset") or not hasattr(one, "step")]


def defaults_of(found: type) -> list[Any]:
    kinds = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    return [one.default for one in signature(found).parameters.values() if one.kind not in kinds]


@pytest.mark.parametrize("package", ["algorithms", "credit", "environments"])
def test_a_class_with_the_defaults_of_its_constructor_differs_in_nothing(package: str) -> None:
    classes = exported(importlib.import_module(f"lightning_mtrl.{package}"))
    assert len(classes) >= 3
    for found in classes:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(found, "made", fail_untyped=False)
        defaults = json.loads(parser.dump(parser.get_defaults(), format="json", skip_unset=False))
        part = {
            "class_path": f"{found.__module__}.{found.__qualname__}",
            "init_args": defaults.get("made", {}),
        }
        assert [setting.key for setting in differing({"part": part})] == ["part"], found


def test_of_a_class_among_the_arguments_its_own_defaults_count() -> None:
    credit = {"class_path": "lightning_mtrl.credit.NormITPO", "init_args": {"eta": 0.4, "aggregate": "mean"}}
    given = {"credit": credit, "estimator": {"class_path": "lightning_mtrl.algorithms.RLOO"}}
    part = {"class_path": "lightning_mtrl.algorithms.ITPO", "init_args": given}
    assert [(one.key, one.value, one.default) for one in differing({"algorithm": part})] == [
        ("algorithm", "ITPO", "IterativePPO"),
        ("algorithm.credit", "NormITPO", "null"),
        ("algorithm.credit.aggregate", "mean", "sum"),
        ("algorithm.estimator", "RLOO", "null"),
    ]


def test_a_class_of_somebody_else_shows_all_its_arguments() -> None:
    part = {"class_path": "my.Own", "init_args": {"speed": 1, "inner": {"class_path": "my.Inner"}}}
    assert [(one.key, one.value, one.default) for one in differing({"environment": part})] == [
        ("environment", "Own", "SuggestedResponse"),
        ("environment.speed", "1", ""),
        ("environment.inner", "Inner", ""),
    ]


def talk(name: str, outcome: float | None, turns: int = 1, explored: bool = False) -> Conversation:
    said = tuple(Turn("y", explored=explored) for _ in range(turns))
    return Conversation(name, (Message("user", "x"),), said, outcome)


def test_best_median_and_worst_are_chosen_by_outcome() -> None:
    own = [talk("low", 0.1), talk("none", None), talk("high", 0.9), talk("middle", 0.4)]
    explored = talk("explored", 1.0, explored=True)

    def names(talks: list[Conversation]) -> dict[str, str]:
        return {rank: conversation.id for rank, conversation in chosen(talks).items()}

    assert names([*own, explored]) == {"best": "high", "median": "middle", "worst": "low"}
    assert names(own[:3]) == {"best": "high", "worst": "low"}
    assert names([explored]) == {"best": "explored"}
    assert names([talk("none", None)]) == {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--run must be given"),
        (["--run=nowhere"], "nowhere is not a run: there is no such folder."),
        (["--run={run}", "--output=page.pdf"], "--output is 'page.pdf', but a file that ends with .html"),
        (["--run={run}", "--output={run}/config.yaml/x.html"], "config.yaml is no folder, so nothing"),
        (["--run={run}", "--iteration=1"], "iteration"),
    ],
)
def test_mistakes_are_told(
    finished: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(["report", *(argument.format(run=finished) for argument in arguments)]) == 2
    assert expected in capsys.readouterr().err
