from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fake_algorithms
import pytest
from jsonargparse import ArgumentParser

from lightning_mtrl.config import ClassSpec, RunConfig
from lightning_mtrl.environments.suggested_response import SuggestedResponse
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import build_algorithm, build_environment, load_config, parse_run, to_yaml


@pytest.fixture(autouse=True)
def quick_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_algorithms.install(monkeypatch)


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def mistake(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_run("fit", "", arguments)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


BASE = """
seed: 3
environment:
  class_path: SuggestedResponse
  init_args: {max_turns: 9}
algorithm:
  class_path: IterativePPO
  init_args:
    improvement: {kl_coef: 0.3}
data: {conversations: 64, batch_size: 8}
"""
OVER = """
algorithm:
  class_path: IterativePPO
  init_args:
    improvement: {steps: 7}
data: {batch_size: 16}
"""


def test_later_files_override_earlier_ones_and_options_override_files(tmp_path: Path) -> None:
    files = [written(tmp_path, "base.yaml", BASE), written(tmp_path, "over.yaml", OVER)]
    options = [
        "--seed",
        "5",
        "--environment.init_args.max_turns=11",
        "--algorithm.init_args.estimator",
        "rloo",
    ]
    config = load_config(*files, overrides=options)
    assert (config.seed, config.data.conversations, config.data.batch_size) == (5, 64, 16)
    assert config.environment.init_args["max_turns"] == 11
    algorithm = build_algorithm(config)
    assert isinstance(algorithm, fake_algorithms.IterativePPO)
    assert algorithm.estimator == "rloo"
    assert algorithm.improvement.steps == 7


def test_a_later_file_changes_one_argument_and_keeps_the_others(tmp_path: Path) -> None:
    over = "algorithm: {init_args: {improvement: {steps: 7}}}"
    config = load_config(written(tmp_path, "a.yaml", BASE), written(tmp_path, "b.yaml", over))
    assert config.algorithm.init_args["improvement"] == {
        "kl_coef": 0.3,
        "steps": 7,
        "kl_ceiling": 1.5,
    }


def test_another_class_does_not_inherit_arguments_it_does_not_have(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "a.yaml", BASE), overrides=["--algorithm", "Uniform"])
    algorithm = build_algorithm(config)
    assert isinstance(algorithm, fake_algorithms.Uniform)
    assert config.algorithm == ClassSpec("fake_algorithms.Uniform", {"share": 0.5, "remark": ""})


def test_a_resolved_configuration_is_read_back_equal(tmp_path: Path) -> None:
    first = load_config(
        written(tmp_path, "a.yaml", BASE), overrides=["--model.lora_targets", "[q_proj, v_proj]"]
    )
    assert first.model.lora_targets == ["q_proj", "v_proj"]
    assert load_config(written(tmp_path, "resolved.yaml", to_yaml(first))) == first


def test_no_options_at_all_give_the_defaults() -> None:
    config = load_config()
    assert config.data == RunConfig().data
    assert config.environment.class_path.endswith(".SuggestedResponse")
    assert isinstance(build_environment(config), SuggestedResponse)


NULLABLE = "algorithm.init_args.improvement.kl_ceiling"


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ([f"--{NULLABLE}", "null"], None),
        ([f"--{NULLABLE}=null"], None),
        (["--algorithm.improvement.kl_ceiling=null"], None),
        (["--algorithm.improvement={kl_ceiling: null}"], None),
        (["--algorithm={init_args: {improvement: {kl_ceiling: null}}}"], None),
        ([f"--{NULLABLE}=null", f"--{NULLABLE}", "2.5"], 2.5),
    ],
)
def test_null_is_null_in_the_arguments_of_a_class_however_it_is_given(
    tmp_path: Path, options: list[str], read: float | None
) -> None:
    config = load_config(written(tmp_path, "base.yaml", BASE), overrides=options)
    algorithm = build_algorithm(config)
    assert isinstance(algorithm, fake_algorithms.IterativePPO)
    assert algorithm.improvement == fake_algorithms.ImprovementConfig(kl_coef=0.3, kl_ceiling=read)
    assert load_config(written(tmp_path, "resolved.yaml", to_yaml(config))) == config


def test_null_in_a_file_does_not_take_the_default_of_the_class(tmp_path: Path) -> None:
    text = "algorithm: {class_path: IterativePPO, init_args: {improvement: {kl_ceiling: null}}}"
    algorithm = build_algorithm(load_config(written(tmp_path, "null.yaml", text)))
    assert isinstance(algorithm, fake_algorithms.IterativePPO)
    assert algorithm.improvement.kl_ceiling is None


@pytest.mark.parametrize("text", ["Note: be kind", "007", "[VIP] customer, please", "- none -", "{a: b"])
def test_a_text_for_an_argument_of_a_class_arrives_as_it_was_typed(text: str) -> None:
    config = load_config(overrides=["--algorithm=Uniform", "--algorithm.init_args.remark", text])
    assert config.algorithm.init_args["remark"] == text


def test_a_configuration_made_in_python_builds_the_same_things() -> None:
    spec = ClassSpec("IterativePPO", {"improvement": {"steps": 2}})
    algorithm = build_algorithm(RunConfig(algorithm=spec))
    assert isinstance(algorithm, fake_algorithms.IterativePPO)
    assert algorithm.improvement == fake_algorithms.ImprovementConfig(steps=2)


def test_a_class_outside_the_package_is_given_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(
        tmp_path,
        "my_shop.py",
        "from lightning_mtrl.environments.protocol import Observation, Transition\n"
        "class Shop:\n"
        "    def __init__(self, size: int = 1):\n"
        "        self.size = size\n"
        "    def reset(self, seed):\n"
        "        return Observation('hello')\n"
        "    async def step(self, response: str) -> 'Transition':\n"
        "        return Transition('bye', terminated=True)\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(overrides=["--environment", "my_shop.Shop", "--environment.size", "3"])
    assert config.environment == ClassSpec("my_shop.Shop", {"size": 3})
    assert vars(build_environment(config)) == {"size": 3}
    assert "size" in mistake("--environment=my_shop.Shop", "--environment.init_args.size=big")


SHOPS = """
from lightning_mtrl.environments.protocol import Observation, Transition

class Shop:
    def __init__(self, size: int): ...
    def reset(self, seed: int): ...
    def step(self, response): ...

class Untyped(Shop):
    def __init__(self, size): ...

class Silent:
    def reset(self, seed: int): ...

class Other(Silent):
    def step(self, text): ...

class Deaf(Silent):
    def step(self): ...

class Shut(Shop):
    def __init__(self):
        raise OSError("no menu")

class Closed(Shop):
    def __init__(self, size: int = 1):
        raise RuntimeError("no staff")

def make(): ...
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "Shop",
            "environment.init_args.size must be given; shops.Shop has no default for it. Pass --env",
        ),
        (
            "Untyped",
            "environment.init_args.size has no type in shops.Untyped, so it cannot be read. ",
        ),
        (
            "Silent",
            "environment.class_path is 'shops.Silent', which has no step(response), as light",
        ),
        ("Other", "environment.class_path is 'shops.Other', whose step does not take (response), as "),
        ("Deaf", "environment.class_path is 'shops.Deaf', whose step does not take (response), as "),
        ("make", "environment.class_path is 'shops.make', which is no class. There are: "),
        ("Shut", "environment shops.Shut could not be made: OSError: no menu. --debug shows where."),
        ("Closed", "environment shops.Closed could not be made: RuntimeError: no staff. --debug shows "),
    ],
)
def test_what_a_class_of_your_own_lacks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    written(tmp_path, "shops.py", SHOPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shops", raising=False)
    assert mistake("--environment", f"shops.{name}").startswith(told)
    spec = written(tmp_path, "c.yaml", f"environment: {{class_path: shops.{name}}}")
    # A class that fails when it is made is no mistake of the file.
    place = "" if name in ("Shut", "Closed") else f"{spec}: "
    assert mistake("--config", str(spec)).startswith(f"{place}{told}") or name == "Shop"


def test_a_run_is_named_after_its_last_file_or_its_classes(tmp_path: Path) -> None:
    base, over = written(tmp_path, "base.yaml", BASE), written(tmp_path, "shop.yaml", OVER)
    assert parse_run("fit", "", [f"--config={base}", "--config", str(over)]).name == "shop"
    repeated = tmp_path / "quickstart-3"
    repeated.mkdir()
    assert (
        parse_run("fit", "", ["--config", str(written(repeated, "config.yaml", BASE))]).name == "quickstart-3"
    )
    assert parse_run("fit", "", []).name == "IterativePPO-SuggestedResponse"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data.batch_size", "0"], ["data.batch_size is 0", "at least 1"]),
        (["--data.batch_size", "x"], ["data.batch_size is 'x'", "a whole number"]),
        (["--seed", "1.5"], ["seed is 1.5, but a whole number was expected."]),
        (
            ["--data.conversations", "1e12"],
            ["conversations is 1000000000000.0, but a whole number (written 1000000000000) was expected."],
        ),
        (["--data.conversations", "1e400"], ["data.conversations is inf, but a whole number was expected."]),
        (["--data.conversations", "nan"], ["data.conversations is nan, but a whole number was expected."]),
        (["--data.conversations", "-1"], ["data.conversations is -1, but it must be a whole number of at"]),
        (
            ["--data.conversations", "9" * 20],
            [f"data.conversations is {'9' * 20}, but it", "at most 2147483647"],
        ),
        (["--data.conversations", ""], ["data.conversations is '', but a whole number was expected."]),
        (["--data.conversations", "true"], ["data.conversations is true, but a whole number was expected."]),
        (["--validation.conversations", "9" * 20], [f"is {'9' * 20}, but it", "at most 2147483647"]),
        (["--model.context_length", "1e3"], ["is 1e3, but a whole number or null (written 1000) was"]),
        (["--model.context_length", "x"], ["model.context_length is 'x'", "a whole number or null"]),
        (["--model.fine_tuning", "loro"], ["model.fine_tuning is 'loro'", "one of 'lora', 'full'"]),
        (["--model.lora_targets", "most"], ["model.lora_targets is 'most'", "'all-linear' or a list"]),
        (["--loggers", "[csv, wandb]"], ["loggers is 'wandb'", "one of 'tensorboard', 'csv'"]),
        (["--data.batchsize", "3"], ["data.batchsize is not a known key", "Did you mean data.batch_size?"]),
        (["--lop.iterations=3"], ["lop.iterations is not a known key", "Did you mean loop.iterations?"]),
        (["--data.batch", "3"], ["data.batch is not a known key"]),
        (["--data.file_format"], ["--data.file_format", "expected one argument"]),
        (["--config"], ["--config", "expected one argument"]),
        (
            ["--environment", "Sugested"],
            ["environment.class_path is 'Sugested'", "There are: SuggestedResponse"],
        ),
        (
            ["--algorithm", "IteratvePPO"],
            ["algorithm.class_path is 'IteratvePPO'", "Did you mean IterativePPO?"],
        ),
        (["--algorithm", "fake_algorithms.PPO"], ["fake_algorithms has no PPO", "There are: IterativePPO"]),
        (["--algorithm", "no_such.PPO"], ["cannot be imported", "no_such"]),
        (
            ["--algorithm", "fake_algorithms.NoAlgorithm"],
            ["algorithm.class_path is 'fake_algorithms.NoAlgorithm', which does not inherit from fake_alg"],
        ),
        (
            ["--environment", "{class_path: fake_algorithms.NoAlgorithm}"],
            ["has no reset(seed), as lightning_mtrl."],
        ),
        (["--algorithm.init_args.estimatr", "gae"], ["algorithm.init_args.estimatr is not an argument of"]),
        (
            ["--algorithm.init_args.estimator", "grpo"],
            ["algorithm.init_args.estimator is 'grpo'", "'gae', 'rloo'"],
        ),
        (
            ["--algorithm.init_args.improvement.kl_coef", "much"],
            ["algorithm.init_args.improvement.kl_coef is 'much'", "a number"],
        ),
        (
            ["--algorithm.init_args.improvement.kl_ceiling", "much"],
            ["algorithm.init_args.improvement.kl_ceiling is 'much'", "a number or null"],
        ),
        (
            ["--algorithm.init_args.improvement.steps", "null"],
            ["algorithm.init_args.improvement.steps is null", "a whole number"],
        ),
        (["--algorithm.init_args.improvement.steps", "0"], ["improvement.steps is 0"]),
        (["--algorithm=Uniform", "--algorithm.share=2"], ["algorithm.init_args.share is 2.0, above 1"]),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_key_value_and_choices(
    arguments: list[str], expected: list[str]
) -> None:
    message = mistake(*arguments)
    assert [part for part in expected if part not in message] == [], message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fabric: {devics: 2}", ["fabric.devics is not a known key", "Did you mean fabric.devices?"]),
        ("sed: 3", ["sed is not a known key", "Did you mean seed?"]),
        ("seed: many", ["seed is 'many'", "a whole number"]),
        (
            "algorithm: {class_path: IterativePPO, init_args: {improvement: {kl: 1}}}",
            ["improvement.kl is not"],
        ),
        ("algorithm: {class_path: Iterative}", ["algorithm.class_path is 'Iterative'", "IterativePPO"]),
        ("data: {batch_size: [3]}", ["data.batch_size", "a whole number"]),
    ],
)
def test_a_mistake_in_a_file_is_told_with_the_name_of_the_file(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    good, bad = written(tmp_path, "good.yaml", BASE), written(tmp_path, "bad.yaml", text)
    message = mistake("--config", str(good), "--config", str(bad), "--seed", "1")
    assert message.startswith(f"{bad}: ")
    assert [part for part in expected if part not in message] == [], message


def test_files_that_are_missing_or_folders_are_named(tmp_path: Path) -> None:
    assert "nowhere.yaml: there is no such file" in mistake("--config", "nowhere.yaml")
    assert mistake(f"--config={tmp_path}") == f"--config {tmp_path}: this is a folder. Give a file in it."
    inside = written(tmp_path, "config.yaml", BASE)
    assert mistake(f"--config={tmp_path}") == f"--config {tmp_path}: this is a folder. Give {inside}."


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe\x00", "this is not UTF-8 text (byte 0: invalid start byte). Save it as UTF-8"),
        (b"seed: 1 # caf\xe9", "this is not UTF-8 text (byte 13: "),
        (b"", "it is empty, but keys with values were expected, such as `seed: 1`."),
        (b"# nothing yet\n", "it is empty"),
        (b"seed: 1\ndata: [1\n", "line 3 is not YAML (while parsing a flow sequence, "),
        (b"a: b: c", "line 1 is not YAML (mapping values are not allowed here). Mend the file."),
        (b"seed: 1\n---\nseed: 2", "line 2 is not YAML (expected a single document in the stream, "),
        (b"a: \x01", "this is not YAML (unacceptable character #x0001"),
        (b"a: !!python/name:os.getcwd", "line 1 is not YAML (could not determine a constructor"),
        (b"- 1", "it holds something else, but keys with values"),
        (b"seed", "it holds something else, but keys with values"),
        (b"data: {rows: 4}\nseed: 1\ndata: {rows: 5}", "data stands in line 1 and again in line 3, and only"),
        (b"a: [{b: {x: 1,\n x: 1}}]", "x stands in line 1 and again in line 2"),
        (b"seed: 1\ndata:", "data is null, but keys were expected in it. Add some, or leave it out."),
        (b"model: [1]", "model is [1], but keys were expected in it."),
        (b"loop: 3", "loop is 3, but keys were expected in it."),
        (b"loop: text", "loop: "),
        (b"environment:", "environment is null, "),
        (b"3: x", "Key must be a string, got: 3."),
    ],
)
def test_a_file_that_is_no_configuration_is_told_in_one_line(
    tmp_path: Path, content: bytes, told: str
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(content)
    good = written(tmp_path, "good.yaml", BASE)
    assert mistake(f"--config={good}", "--config", str(bad), "--seed=1").startswith(f"{bad}: {told}")


def test_a_file_may_merge_and_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufeffdata: {<<: {rows: 4}, <<: {batch_size: 2}}"
    assert load_config(written(tmp_path, "merged.yaml", text)).data.batch_size == 2


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("data.nothing.x", "data.nothing.x is not a known key. data has: batch_size, conversations, "),
        ("data.nothing", "data.nothing is not a known key. data has: batch_size, conversations, "),
        ("nothing", "nothing is not a known key. There are: algorithm, config, data, "),
        ("rows", "rows is not a known key. Did you mean data.rows? There are: algorithm, "),
        (
            "algorithm.improvement.stepz",
            "algorithm.init_args.improvement.stepz is not an argument of fake_algorithms.IterativePPO. "
            "Did you mean algorithm.init_args.improvement.steps? "
            "algorithm.init_args.improvement has: kl_ceiling, kl_coef, steps.",
        ),
        (
            "algorithm.init_args.improvemnt.steps",
            "Did you mean algorithm.init_args.improvement.steps? "
            "algorithm.init_args has: estimator, improvement.",
        ),
    ],
)
def test_an_unknown_key_is_told_with_the_keys_of_its_place(key: str, expected: str) -> None:
    assert expected in mistake(f"--{key}=3")


def test_printed_configuration_holds_no_options_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(command: str, *arguments: str) -> str:
        def add(parser: ArgumentParser) -> None:
            parser.add_argument(f"--option_of_{command}", type=str, required=command == "collect")

        with pytest.raises(SystemExit) as ended:
            parse_run(command, "", [*arguments, "--print_config"], add)
        assert ended.value.code in (0, None)
        return capsys.readouterr().out

    text = printed("fit", "--seed=7", "--option_of_fit=x")
    assert "option_of" not in text
    assert printed("collect", f"--config={written(tmp_path, 'printed.yaml', text)}") == text


def test_printed_configuration_holds_every_key_and_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_run("fit", "", ["--seed=7", "--print_config"])
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    for key in ("run_dir: null", "max_turns: 8", "kl_coef: 0.1", "checkpoint_keep: null", "estimator: gae"):
        assert key in printed
    assert load_config(written(tmp_path, "p.yaml", printed)) == load_config(overrides=["--seed=7"])


def test_a_mistake_is_told_of_the_file_or_option_that_makes_it_and_not_of_a_file_before_it(
    tmp_path: Path,
) -> None:
    shop = written(tmp_path, "shop.yaml", "algorithm: {class_path: Uniform}")
    # Right only over the first: the default class has no argument of that name.
    half = written(tmp_path, "half.yaml", "algorithm: {init_args: {share: 0.5}}")
    typo = written(tmp_path, "typo.yaml", "algorithm: {init_args: {shar: 0.5}}")
    given = ["--config", str(shop), f"--config={half}"]
    expected = "algorithm.init_args.shar is not an argument of fake_algorithms.Uniform. Did you mean"
    assert mistake(*given, "--algorithm.shar=1").startswith(expected)
    assert mistake("--algorithm.shar=1", *given).startswith("algorithm.init_args.shar is not an argument of")
    assert mistake(*given, f"--config={typo}", "--seed=1").startswith(f"{typo}: {expected}")
    assert mistake(*given, "--print_config", f"--config={typo}").startswith(f"{typo}: {expected}")
    assert mistake("--algorithm=Uniform", f"--config={half}", "--sed=1").startswith("sed is not a known key")
    with pytest.raises(UserError, match=r"^seed is 'x'"):
        parse_run(
            "collect", "", [*given, "--seed=x"], lambda p: p.add_argument("--output", type=str, required=True)
        )


def test_files_in_the_wrong_order_are_told_in_which_to_give_them(tmp_path: Path) -> None:
    shop = written(tmp_path, "shop.yaml", "algorithm: {class_path: Uniform}")
    half = written(tmp_path, "half.yaml", "algorithm: {share: 0.5}")
    part = written(tmp_path, "part.yaml", "algorithm: {init_args: {credit: {init_args: {eta: 1}}}}")
    whole = written(tmp_path, "whole.yaml", PARTS)
    tokens = written(
        tmp_path, "tokens.yaml", "algorithm: {init_args: {credit: {class_path: fake_algorithms.Tokens}}}"
    )
    wrong = mistake(f"--config={half}", f"--config={shop}")
    assert wrong.startswith(f"{half}: algorithm.init_args.share is not an argument of fake_algorithms.I")
    assert f"give {shop}, which names a class, first" in wrong
    assert "give a file that names one first" in mistake(f"--config={half}")
    named = mistake(f"--config={whole}", f"--config={tokens}", f"--config={part}")
    assert "algorithm.init_args.credit.init_args.eta is not an argument of fake_algorithms.Tokens" in named
    assert "first" not in named
    assert "first" not in mistake("--algorithm=IterativePPO", f"--config={half}")


PARTS = """
algorithm:
  class_path: fake_algorithms.Composed
  init_args:
    credit: {class_path: fake_algorithms.Shares, init_args: {eta: 0.7}}
    settings: {kl_coef: 0.3}
"""


def test_files_for_parts_of_an_algorithm_compose_in_any_order(tmp_path: Path) -> None:
    base = written(tmp_path, "base.yaml", PARTS)
    credit = written(
        tmp_path,
        "credit.yaml",
        "algorithm: {init_args: {credit: {class_path: fake_algorithms.Tokens}, settings: {steps: 2}}}",
    )
    advantage = written(
        tmp_path,
        "advantage.yaml",
        "algorithm: {init_args: {estimator: {class_path: fake_algorithms.Group, init_args: {std: false}}}}",
    )
    eta = written(tmp_path, "eta.yaml", "algorithm: {init_args: {credit: {init_args: {eta: 0.1}}}}")
    for files in ((base, credit, advantage), (base, advantage, credit)):
        algorithm: Any = build_algorithm(load_config(*files))
        assert isinstance(algorithm.credit, fake_algorithms.Tokens)
        assert algorithm.estimator.std is False
        assert algorithm.settings == fake_algorithms.ImprovementConfig(kl_coef=0.3, steps=2)
    kept: Any = build_algorithm(load_config(base, eta))
    assert kept.credit.eta == 0.1
    assert kept.settings.kl_coef == 0.3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("Share", "credit is 'Share', which is no Credit. Did you mean Shares? "),
        ("{class_path: Share}", "credit.class_path is 'Share', which is no Credit. Did you mean Shares? "),
        ("fake_algorithms.Shars", "credit is 'fake_algorithms.Shars', which cannot be found (module "),
        ("no_such.Shares", "credit is 'no_such.Shares', which cannot be found (No module named 'no_such')"),
        ("fake_algorithms.Group", "credit is 'fake_algorithms.Group', which is no Credit. "),
        ("3", "credit is '3', which is no Credit. "),
    ],
)
def test_a_part_that_is_not_there_is_told_with_those_that_are(tmp_path: Path, given: str, told: str) -> None:
    message = mistake(f"--config={written(tmp_path, 'base.yaml', PARTS)}", f"--algorithm.credit={given}")
    assert message.startswith(f"algorithm.init_args.{told}")
    assert "There are: Credit, Shares, Tokens." in message


def test_what_a_part_refuses_is_told_as_it_said_it(tmp_path: Path) -> None:
    base = written(tmp_path, "base.yaml", PARTS)
    said = "credit.init_args.eta is 0.0, but it must be above 0."
    assert mistake(f"--config={base}", "--algorithm.credit.eta=0") == said


@pytest.mark.parametrize("later", ["fake_algorithms.Tokens", "null", "{class_path: fake_algorithms.Tokens}"])
def test_an_option_for_a_class_that_a_later_one_replaces_is_refused(tmp_path: Path, later: str) -> None:
    base = written(tmp_path, "base.yaml", PARTS)
    told = mistake(f"--config={base}", "--algorithm.credit.eta", "0.2", f"--algorithm.credit={later}")
    assert told.startswith(
        "--algorithm.credit.eta is given, but the class that has this argument is replaced"
    )
    kept = ["--algorithm.init_args.credit=fake_algorithms.Shares", "--algorithm.credit.eta=0.2"]
    algorithm: Any = build_algorithm(load_config(base, overrides=kept))
    assert algorithm.credit.eta == 0.2


def test_what_a_part_refuses_names_its_class_once(tmp_path: Path) -> None:
    base = written(tmp_path, "base.yaml", PARTS)
    told = mistake(f"--config={base}", "--algorithm.credit.eta=much")
    assert told.endswith("a number was expected. (an argument of fake_algorithms.Shares)")
    assert told.count("an argument of") == 1
