from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_mtrl import cli
from lightning_mtrl.conversation import Conversation, Message, Turn


def write(path: Path, outcomes: list[float | None], **about: Any) -> None:
    records = [
        {
            "id": f"c-{place}",
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
            "outcome": outcome,
            "metadata": {"kind": "odd" if place % 2 else "even"},
            **about,
        }
        for place, outcome in enumerate(outcomes)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcombe's first contrast: 48 of 80 against 56 of 70."""
    monkeypatch.chdir(tmp_path)
    write(Path("a.jsonl"), [1.0] * 48 + [0.0] * 32 + [None] * 2, policy="iteration-0000")
    write(Path("b.jsonl"), [1.0] * 56 + [0.0] * 14, policy="iteration-0001")
    Path("empty.jsonl").write_text("")


def test_two_logs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--baseline=a.jsonl", "--candidate=b.jsonl", "--output=new/out.json", "--seed=1"]
    assert cli.main(["compare", *arguments, "--run_dir=run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Difference +0.200 [+0.053, +0.338], p = 0.0083: candidate better" in said
    assert "baseline a.jsonl 82 2 0 0.600 [0.490, 0.700]" in said
    found = json.loads(Path("new/out.json").read_text())
    assert found == json.loads(Path("run/comparison.json").read_text())
    assert found["interval"] == pytest.approx([0.0528, 0.3382], abs=5.1e-5)
    assert found["difference"] == pytest.approx(0.2)
    assert found["verdict"] == "candidate better"
    expected = {
        "file": "a.jsonl",
        "conversations": 82,
        "scored": 80,
        "missing": 2,
        "truncated": 0,
        "left_out": {},
    }
    assert expected.items() <= found["baseline"].items()
    assert found["candidate"]["policies"] == ["iteration-0001"]


def test_an_early_look_asks_for_more(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--baseline=a.jsonl", "--candidate=b.jsonl", "--looks=3", "--look=1", "--output=out.json"]
    assert cli.main(["compare", *arguments]) == 0
    assert "Look 1 of 3, obrien_fleming: the comparison ends if |z| is above 3.471" in capsys.readouterr().out
    found = json.loads(Path("out.json").read_text())
    assert found["verdict"] == "no difference shown"
    assert found["looks"]["critical_value"] == pytest.approx(3.471, abs=5e-4)
    assert found["nominal_p_value"] == pytest.approx(0.00826, abs=5e-6)
    assert found["p_value"] > 0.05
    assert found["interval"][0] < 0


def test_segments_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--baseline=a.jsonl", "--candidate=b.jsonl", "--segment=kind"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "even 0.600 of 40 0.800 of 35 +0.200" in said
    assert "odd 0.600 of 40 0.800 of 35 +0.200" in said
    assert "p is corrected by Holm's procedure" in said


def test_a_segment_is_shown_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        records = [json.loads(line) for line in Path(name).read_text().splitlines()]
        for record in records:
            record["metadata"] = {"kind": "[red]x[/red]" if record["id"][-1] in "02468" else "[/red]"}
        Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert cli.main(["compare", "--baseline=a.jsonl", "--candidate=b.jsonl", "--segment=kind"]) == 0
    said = capsys.readouterr().out
    assert "\n[red]x[/red] " in said
    assert "\n[/red] " in said


def test_the_baseline_alone_is_enough_to_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["compare", "--baseline=a.jsonl", "--detect=0.1", "--power=0.8", "--output=out.json"]) == 0
    )
    # (1.959964 sqrt(2 * 0.65 * 0.35) + 0.841621 sqrt(0.24 + 0.21))^2 / 0.01 = 355.99, and 82 / 80 of it.
    assert "365 conversations of each policy are needed, of which 356 have" in " ".join(
        capsys.readouterr().out.split()
    )
    assert json.loads(Path("out.json").read_text()).keys() == {"plan"}


def test_bad_lines_are_counted_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("a.jsonl").open("a") as file:
        file.write("{broken\n" * 6 + '{"id": ')
    arguments = ["compare", "--baseline=a.jsonl", "--candidate=b.jsonl", "--output=out.json"]
    assert cli.main(arguments) == 0
    assert sum(json.loads(Path("out.json").read_text())["baseline"]["left_out"].values()) == 7
    said = " ".join(capsys.readouterr().out.split())
    assert "Note: baseline: 7 records left out (not JSON 6, cut off 1)." in said
    assert cli.main([*arguments, "--strict"]) == 2
    assert "a.jsonl, line 83" in capsys.readouterr().err


def test_a_log_of_which_nothing_could_be_read_is_refused_with_the_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("broken.jsonl").write_text("{broken\n" * 3 + "[1]\n")
    assert cli.main(["compare", "--baseline=a.jsonl", "--candidate=broken.jsonl"]) == 2
    assert "Left out: not JSON 3, not an object 1." in capsys.readouterr().err


def led_for_coverage(file: str, explored: int, personas: int) -> None:
    """Append conversations that are not the policy's own, all without success."""
    prompt = (Message("system", "Be brief."), Message("user", "hi"))
    made = [Conversation(f"e-{n}", prompt, (Turn("yes", explored=True),), 0.0) for n in range(explored)]
    led = {"kind": "odd", "persona": "Be brief."}
    made += [Conversation(f"p-{n}", prompt, (Turn("yes"),), 0.0, metadata=led) for n in range(personas)]
    with Path(file).open("a") as log:
        log.writelines(json.dumps(c.to_json()) + "\n" for c in made)


@pytest.mark.parametrize("chosen", ["", "leave_out", "count"])
def test_what_is_not_the_policys_own_is_left_out_or_counted_and_told(
    capsys: pytest.CaptureFixture[str], chosen: str
) -> None:
    led_for_coverage("a.jsonl", explored=3, personas=4)
    options = [f"--coverage={chosen}"] if chosen else []
    arguments = ["--baseline=a.jsonl", "--candidate=b.jsonl", "--output=out.json", *options]
    assert cli.main(["compare", *arguments]) == 0
    found, said = json.loads(Path("out.json").read_text()), " ".join(capsys.readouterr().out.split())
    assert found["coverage"] == (chosen or "leave_out")
    assert found["baseline"]["coverage"] == {"explored": 3, "persona": 4}
    assert found["candidate"]["coverage"] == {}
    assert found["baseline"]["scored"] == (87 if chosen == "count" else 80)
    assert found["baseline"]["mean"] == pytest.approx(48 / (87 if chosen == "count" else 80))
    words = "3 drawn to be explored and 4 under a persona"
    told = ", not the policy's own, are counted" if chosen == "count" else " left out: not the policy's own"
    assert f"Note: baseline: {words}{told}" in said
    assert "Note: candidate" not in said


def test_a_log_of_nothing_but_coverage_is_refused_unless_it_is_to_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.jsonl").write_text("")
    led_for_coverage("a.jsonl", explored=2, personas=0)
    arguments = ["compare", "--baseline=a.jsonl", "--candidate=b.jsonl"]
    assert cli.main(arguments) == 2
    assert "2 drawn to be explored. Pass --coverage count" in capsys.readouterr().err
    assert cli.main([*arguments, "--coverage=count"]) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--baseline must be given"),
        (["--baseline=a.jsonl"], "--candidate must be given, or --detect"),
        (["--baseline=x.jsonl", "--candidate=b.jsonl"], "x.jsonl is not a file"),
        (["--baseline=a.jsonl", "--candidate="], "--candidate is '', but a path was expected"),
        (
            ["--baseline=a.jsonl", "--candidate=empty.jsonl"],
            "holds 0 conversations, but none with an outcome",
        ),
        (["--baseline=a.jsonl", "--candidate=b.jsonl", "--segment=x"], "There are: kind."),
        (["--baseline=a.jsonl", "--detect=0.1", "--segment=kind"], "no --candidate to compare"),
        (["--baseline=a.jsonl", "--detect=0"], "--detect is 0.0, but a difference other than 0"),
        (["--baseline=a.jsonl", "--detect=0.5"], "no rate is 1.100"),
        (
            ["--baseline=a.jsonl", "--candidate=b.jsonl", "--confidence=95"],
            "--confidence is 95.0, but a number",
        ),
        (["--baseline=a.jsonl", "--detect=0.1", "--power=1"], "--power is 1.0, but a number between 0 and 1"),
        (["--baseline=a.jsonl", "--detect=0.1", "--power=0.01"], "--power is 0.01, but more than"),
        (["--baseline=a.jsonl", "--candidate=b.jsonl", "--looks=3"], "Pass --look 1 to 3"),
        (["--baseline=a.jsonl", "--candidate=b.jsonl", "--looks=3", "--look=4"], "--look is 4, but at most"),
        (["--baseline=a.jsonl", "--candidate=b.jsonl", "--looks=x"], "--looks is 'x', but a whole number"),
        (
            ["--baseline=a.jsonl", "--candidate=b.jsonl", "--boundary=none"],
            "--boundary is 'none', but one of",
        ),
        (
            ["--baseline=a.jsonl", "--candidate=b.jsonl", "--looks=2", "--look=1", "--fractions=[0.5,0.9]"],
            "2 rising numbers (as many as --looks)",
        ),
        (
            ["--baseline=a.jsonl", "--detect=0.1", "--looks=3", "--fractions", "0.3", "0.6", "1.0"],
            "--fractions is 0.3 0.6 1.0, but one list was expected. Write it as --fractions [0.3,0.6,1].",
        ),
        (["--baseline=a.jsonl", "--candidate=b.jsonl", "--output=x.txt"], "ends with .json was expected"),
        (["--baseline=a.jsonl", "--candidate=b.jsonl", "--output=a.jsonl/x.json"], "is no folder"),
    ],
)
def test_mistakes_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(["compare", *arguments]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert len(message.splitlines()) == 1
