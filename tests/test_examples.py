from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_mtrl.environments.scored import Talk
from lightning_mtrl.rollouts.logs import read_conversations

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "--data.conversations=24",
    "--data.max_response_tokens=8",
    "--data.validation_share=0.3",
    "--algorithm.evaluation.epochs=1",
    "--algorithm.improvement.rounds=1",
    "--algorithm.improvement.states=4",
    "--algorithm.improvement.samples=2",
    "--algorithm.improvement.certificate_states=4",
    "--loop.iterations=1",
    "--validation.conversations=4",
]


def test_an_environment_outside_the_package_is_plugged_in_by_its_class_path(tmp_path: Path) -> None:
    config, output = tmp_path / "guess.yaml", tmp_path / "talks.jsonl"
    config.write_text("environment: {class_path: number_guess.NumberGuess, init_args: {max_turns: 3}}\n")
    command = [sys.executable, "-m", "lightning_mtrl", "collect", f"--config={config}", f"--output={output}"]
    done = subprocess.run(
        # The folder is on the path as a user's own folder would be; python -m adds the working one itself.
        [*command, "--conversations=6", "--data.max_response_tokens=8"],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "6 conversations of iteration-0000" in done.stdout
    talks = read_conversations(output, strict=True).conversations
    assert {talk.prompt[0].content for talk in talks} == {"I think of a number from 1 to 9. Which one is it?"}
    assert all(talk.terminated and 1 <= len(talk.turns) <= 3 for talk in talks)


def test_the_example_plays_by_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    from number_guess import NumberGuess

    game = NumberGuess(max_turns=4)
    game.reset(seed=1)
    game.number = 5
    assert [game.step(said).observation for said in ("3", "7", None)] == [
        "Higher.",
        "Lower.",
        "A number, please.",
    ]
    found = game.step("5")
    assert (found.reward, found.terminated) == (1.0, True)
    game.reset(seed=1)
    assert [game.step("nothing").terminated for _ in range(4)] == [False, False, False, True]


def test_the_readmes_environment_runs_with_the_quickstart_configuration(tmp_path: Path) -> None:
    """The class in the README, which has no constructor, in place of one whose init_args are set."""
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    start = lines.index("    # my_shop.py")
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("    python -m lightning_mtrl fit"))
    (tmp_path / "my_shop.py").write_text("\n".join(line[4:] for line in lines[start:end]) + "\n")
    named = lines[end].split("--environment ")[1]
    config = ROOT / "configs" / "quickstart.yaml"
    command = [sys.executable, "-m", "lightning_mtrl", "collect", f"--config={config}"]
    options = [f"--environment={named}", "--output=talks.jsonl", "--conversations=6"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    talks = read_conversations(tmp_path / "talks.jsonl", strict=True).conversations
    assert {talk.prompt[0].content for talk in talks} == {"I think of a digit. Guess it."}


def test_an_outcome_of_ones_own_trains_as_its_docstring_prints_it(tmp_path: Path) -> None:
    lines = (ROOT / "examples" / "few_turns.py").read_text("utf-8").splitlines()
    start = lines.index("    environment:")
    config, run = tmp_path / "scored.yaml", tmp_path / "run"
    config.write_text("\n".join(line[4:] for line in lines[start : start + 5]) + "\n")
    (printed,) = [line.split() for line in lines if line.startswith("    python -m lightning_mtrl")]
    command = [sys.executable, *printed[1:-1], str(config), f"--run_dir={run}", *TINY]
    done = subprocess.run(command, cwd=ROOT / "examples", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (stored,) = (run / "rollouts").iterdir()
    talks = read_conversations(stored, strict=True).conversations
    assert {talk.prompt[0].content for talk in talks} == {"I think of a number from 1 to 9. Which one is it?"}
    for talk in talks:
        guessed = talk.turns[-1].observation == "Yes!"
        # 1, 0.9, 0.81 and so on for a guess in the first turn, the second, the third
        assert talk.outcome == pytest.approx(0.9 ** (len(talk.turns) - 1) if guessed else 0.0)


def test_a_score_of_few_turns_is_never_outside_of_what_a_loss_of_0_to_1_learns_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    from few_turns import score

    def talk(outcome: float, turns: int) -> Talk:
        return Talk("?", ("x",) * turns, ("y",) * turns, {}, outcome)

    assert [score(talk(1.0, turns)) for turns in (1, 2, 3)] == pytest.approx([1.0, 0.9, 0.81])
    assert score(talk(0.0, 30)) == 0.0
    assert 0.0 < score(talk(1.0, 30)) < score(talk(1.0, 29))
