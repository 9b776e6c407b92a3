"""Each mistake of a user ends before any long work: one message with key, value and expectation, exit 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from whole_runs import end_with_the_test

from lightning_mtrl import cli
from lightning_mtrl.algorithms import GRPO, RLOO, AdvantageEstimator
from lightning_mtrl.models.tiny import TINY_ADAPTER, TINY_FOLDER

Mistake = Callable[..., str]


@pytest.fixture
def mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Mistake:
    """Runs a command that must fail in an empty folder, and returns its message."""
    monkeypatch.chdir(tmp_path)
    end_with_the_test(monkeypatch)

    def run(*arguments: str) -> str:
        assert cli.main([str(argument) for argument in arguments]) == 2
        printed = capsys.readouterr()
        told = printed.err[printed.err.index("error: ") :]
        assert "Traceback" not in printed.err
        assert len(told.splitlines()) == 1, told
        assert "policy 0" not in printed.out, "a policy was measured before the mistake was told"
        return told

    return run


CONFIGS = Path(__file__).parents[1] / "configs"
ALGORITHM = "algorithm.init_args"
VALUES = [
    ("seed", "-1", "a whole number from 0"),
    ("data.batch_size", "0", "at least 1"),
    ("data.conversations", "0", "at least 1"),
    ("data.rows", "0", "at least 1"),
    ("data.max_turns", "0", "at least 1"),
    ("data.temperature", "0.0", "a number > 0"),
    ("data.validation_share", "1.0", "below 1"),
    ("data.top_p", "0.0", "in (0, 1]"),
    ("data.min_p", "1.0", "in [0, 1)"),
    ("loop.iterations", "0", "at least 1"),
    ("validation.conversations", "0", "at least 1"),
    ("model.lora_rank", "0", "at least 1"),
    ("model.lora_dropout", "1.0", "in [0, 1)"),
    ("model.context_length", "1", "at least 2"),
    (f"{ALGORITHM}.evaluation.gamma", "1.5", "in (0, 1]"),
    (f"{ALGORITHM}.evaluation.gamma", "0.0", "in (0, 1]"),
    (f"{ALGORITHM}.evaluation.td_lambda", "-0.1", "in [0, 1]"),
    (f"{ALGORITHM}.evaluation.next_samples", "0", "at least 1"),
    (f"{ALGORITHM}.evaluation.target_refresh", "0", "at least 1"),
    (f"{ALGORITHM}.evaluation.importance_clip", "0.0", "a number > 0"),
    (f"{ALGORITHM}.evaluation.expectile", "1.0", "in (0, 1)"),
    (f"{ALGORITHM}.evaluation.layer", "0", "at least 1"),
    (f"{ALGORITHM}.evaluation.epochs", "0", "at least 1"),
    (f"{ALGORITHM}.evaluation.patience", "0", "at least 1"),
    (f"{ALGORITHM}.evaluation.micro_batch_size", "0", "at least 1"),
    (f"{ALGORITHM}.evaluation.learning_rate", "-1.0", "at least 0"),
    (f"{ALGORITHM}.evaluation.max_norm", "0.0", "a number > 0"),
    (f"{ALGORITHM}.improvement.rounds", "0", "at least 1"),
    (f"{ALGORITHM}.improvement.states", "0", "at least 1"),
    (f"{ALGORITHM}.improvement.samples", "0", "at least 1"),
    (f"{ALGORITHM}.improvement.minibatch_states", "0", "at least 1"),
    (f"{ALGORITHM}.improvement.certificate_states", "1", "at least 2"),
    (f"{ALGORITHM}.improvement.learning_rate", "-0.1", "at least 0"),
    (f"{ALGORITHM}.improvement.clip_range", "1.0", "in (0, 1)"),
    (f"{ALGORITHM}.improvement.kl_coef", "-0.5", "at least 0"),
    (f"{ALGORITHM}.improvement.kl_target", "0.0", "a number > 0"),
    (f"{ALGORITHM}.improvement.kl_ceiling", "0.0", "a number > 0"),
    (f"{ALGORITHM}.evaluation.layer", "99", "at most 3, the number of the model's layers"),
    ("data.validation_share", "0.0", "above 0, to measure the Q-critic"),
    (f"{ALGORITHM}.improvement.value_role", "critic", "one of value, policy"),
]


@pytest.mark.parametrize(("key", "value", "expected"), VALUES)
def test_a_number_out_of_its_range(mistake: Mistake, key: str, value: str, expected: str) -> None:
    told = mistake("fit", f"--{key}={value}")
    assert f"{key} is {value}" in told or f"{key} is {value!r}" in told
    assert expected in told
    assert f"--{key} " in told


def test_numbers_inside_an_argument_of_the_algorithm(mistake: Mistake) -> None:
    told = mistake("fit", f"--{ALGORITHM}.estimator=GAE", f"--{ALGORITHM}.estimator.gae_lambda=2")
    assert f"{ALGORITHM}.estimator.init_args.gae_lambda is 2.0, but it must be in [0, 1]" in told


def test_an_estimator_of_kl_that_has_no_forward_direction(mistake: Mistake) -> None:
    chosen = f"--{ALGORITHM}.improvement={{kl_direction: forward, kl_estimator: k3+}}"
    assert f"{ALGORITHM}.improvement.kl_estimator is 'k3+', but it must be one of k1, k2, k3" in mistake(
        "fit", chosen
    )


def test_a_kl_in_the_reward_that_has_no_forward_direction(mistake: Mistake) -> None:
    told = mistake("fit", f"--{ALGORITHM}.improvement={{kl_in: reward, kl_direction: forward}}")
    assert f"{ALGORITHM}.improvement.kl_direction is 'forward', but it must be reverse with kl_in" in told


LLM_USER = f"--config={CONFIGS / 'llm_user.yaml'}"
JUDGE = "{class_path: lightning_mtrl.credit.TurnJudge, init_args: {server: {model: m, base_url: 'HERE'}}}"
ADDRESSES = {
    "environment.init_args.server.base_url": [LLM_USER, "--environment.init_args.server.base_url=HERE"],
    "environment.init_args.judge.init_args.server.base_url": [
        LLM_USER,
        "--environment.init_args.judge.init_args.server={model: m, base_url: 'HERE'}",
    ],
    "algorithm.init_args.credit.init_args.judge.init_args.server.base_url": [
        f"--config={CONFIGS / 'itpo.yaml'}",
        "--algorithm.credit=LLMJudge",
        f"--algorithm.credit.judge={JUDGE}",
    ],
    "data.server.base_url": ["--data.server.base_url=HERE"],
}


@pytest.mark.parametrize("key", ADDRESSES)
@pytest.mark.parametrize("value", ["localhost:8000/v1", "my-host.net/v1", "10.0.0.7:8000"])
def test_an_address_without_http_is_shown_as_it_is_with_its_key_and_the_right_form(
    mistake: Mistake, key: str, value: str
) -> None:
    pytest.importorskip("openai")
    told = mistake("fit", *(option.replace("HERE", value) for option in ADDRESSES[key]))
    assert told.startswith(f"error: {key} is {value!r}, but an address that begins with http:// or https://")
    assert f"such as 'http://{value}'" in told


@pytest.mark.parametrize(
    ("key", "value"),
    [("strategy", "ddq"), ("accelerator", "abacus"), ("accelerator", "tpu")],
)
def test_what_fabric_does_not_know_or_have(mistake: Mistake, key: str, value: str) -> None:
    told = mistake("fit", f"--fabric.{key}={value}")
    assert told.startswith("error: fabric: ")
    assert f"fabric.{key} {value}" in told


def test_a_precision_in_which_nothing_can_be_trained(mistake: Mistake) -> None:
    told = mistake("fit", "--fabric.precision=bf16-true")
    assert told.startswith("error: fabric.precision is 'bf16-true', but it must be 32-true or bf16-mixed")


def test_layers_for_adapters_that_the_model_does_not_have(mistake: Mistake) -> None:
    told = mistake("fit", "--model.lora_targets=[nope]")
    assert "model.lora_targets is ['nope'], but adapters cannot stand there" in told
    assert "q_proj" in told


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("gamma", "0.0", "in (0, 1]"),
        ("epochs", "0", "at least 1"),
        ("micro_batch_size", "0", "at least 1"),
        ("learning_rate", "-1.0", "at least 0"),
        ("clip_range", "0.0", "in (0, 1)"),
        ("max_norm", "0.0", "a number > 0"),
    ],
)
def test_the_baseline_refuses_numbers_too(mistake: Mistake, key: str, value: str, expected: str) -> None:
    told = mistake("fit", "--algorithm=OutcomeOnly", f"--{ALGORITHM}.settings.{key}={value}")
    assert f"{ALGORITHM}.settings.{key} is {value}, but it must be {expected}" in told


@pytest.mark.parametrize("estimator", [RLOO, GRPO])
def test_one_response_a_state_cannot_be_compared_with_others(
    mistake: Mistake, estimator: type[AdvantageEstimator]
) -> None:
    name = estimator.__name__
    told = mistake("fit", f"--{ALGORITHM}.improvement.samples=1", f"--{ALGORITHM}.estimator={name}")
    assert f"{ALGORITHM}.improvement.samples is 1, but it must be at least 2 with {name}" in told


@pytest.mark.parametrize("algorithm", ["OutcomeOnly", "ITPO"])
@pytest.mark.parametrize("name", ["explore_share", "persona_share"])
def test_coverage_is_refused_where_only_the_policys_own_responses_are_learned_from(
    mistake: Mistake, algorithm: str, name: str
) -> None:
    shares = [f"--data.{name}=0.25", '--data.personas=["Be brief."]', "--data.group_size=2"]
    told = mistake("fit", f"--algorithm={algorithm}", "--data.conversations=8", *shares)
    assert f"data.{name} is 0.25, but it must be 0 with {algorithm}" in told


def test_a_logit_of_q_is_refused_where_q_is_no_probability(mistake: Mistake) -> None:
    told = mistake("fit", f"--{ALGORITHM}.improvement.reward=logit", f"--{ALGORITHM}.evaluation.loss=mse")
    assert f"{ALGORITHM}.improvement.reward is 'logit', but it must be q with evaluation.loss mse" in told


def test_groups_of_one_are_refused_before_there_is_a_run(mistake: Mistake, tmp_path: Path) -> None:
    told = mistake("fit", f"--config={CONFIGS / 'itpo.yaml'}", "--data.group_size=1")
    assert "data.group_size is 1, but it must be at least 2 with RLOO" in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data.batchsize=8"], "data.batchsize is not a known key. Did you mean data.batch_size?"),
        (["--datas.batch_size=8"], "datas.batch_size"),
        (["--environment.init_args.turns=8"], "turns"),
        ([f"--{ALGORITHM}.improvement.steps=8"], "improvement.steps"),
        (["--environment=Shop"], "environment.class_path is 'Shop'"),
        (["--algorithm=IterativePP"], "Did you mean IterativePPO?"),
    ],
)
def test_an_unknown_key_or_class(mistake: Mistake, arguments: list[str], named: str) -> None:
    assert named in mistake("fit", *arguments)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("algorithm.credit", "PRIM", "credit is 'PRIM', which is no CreditAssigner. Did you mean PRIME? "),
        ("algorithm.credit", "lightning_mtrl.credit.NormITP", "Did you mean NormITPO? There are: Dirichlet"),
        ("algorithm.estimator", "RLO", "no ConversationEstimator. Did you mean RLOO? There are: GAE, "),
        ("algorithm.settings.learning_rat", "1", "mean algorithm.init_args.settings.learning_rate?"),
        ("algorithm.credit.et", "1", "Did you mean algorithm.init_args.credit.init_args.eta?"),
        ("environment.siz", "tiny", "Did you mean environment.init_args.size?"),
    ],
)
def test_a_misspelt_option_after_three_files_is_told_of_no_file(
    mistake: Mistake, key: str, value: str, told: str
) -> None:
    files = [f"--config={CONFIGS / name}.yaml" for name in ("itpo", "tasks/math_tutoring", "size/tiny")]
    message = mistake("fit", *files, f"--{key}={value}")
    assert message.startswith(f"error: {key.partition('.')[0]}.init_args.{key.partition('.')[2][:3]}")
    assert told in message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("data.conversations", "many", "a whole number"),
        ("data.temperature", "hot", "a number"),
        ("model.trust_remote_code", "perhaps", "true or false"),
        ("model.quantization", "int3", "one of 'none', 'nf4'"),
        ("loggers", "[wandb]", "'tensorboard', 'csv'"),
        (f"{ALGORITHM}.evaluation.epochs", "few", "a whole number"),
        (f"{ALGORITHM}.improvement.accept", "maybe", "one of 'improved_only', 'always'"),
    ],
)
def test_a_wrong_type_or_choice(mistake: Mistake, key: str, value: str, expected: str) -> None:
    told = mistake("fit", f"--{key}={value}")
    assert key in told
    assert value.strip("[]") in told
    assert expected in told


def test_a_configuration_that_is_missing_or_broken(mistake: Mistake, tmp_path: Path) -> None:
    assert "missing.yaml: there is no such file" in mistake("fit", "--config=missing.yaml")
    (tmp_path / "c.yaml").write_text("data: {conversation: 8}\n")
    told = mistake("fit", "--config=c.yaml")
    assert told.startswith("error: c.yaml: data.conversation is not a known key")


@pytest.mark.parametrize("name", ["./no/such", "models/none", "no-such-model.gguf", "nobody/none"])
def test_a_model_that_is_not_there(mistake: Mistake, tmp_path: Path, name: str) -> None:
    told = mistake("fit", f"--model.name={name}")
    assert not (tmp_path / "runs").exists(), "a run that never began made a folder"
    assert f"model.name is {name!r}" in told
    assert "a folder with config.json" in told


def test_the_small_model_that_was_not_fetched_is_told_with_what_fetches_it(
    mistake: Mistake,
) -> None:
    name = "models/SmolLM2-135M-Instruct"
    told = mistake("fit", f"--model.name={name}")
    assert f"model.name is {name!r}, but that path does not exist. " in told
    assert told.endswith(f"To get it: python scripts/fetch_smollm2.py {name}\n")


def test_the_estimators_are_listed_where_one_is_misspelt(mistake: Mistake) -> None:
    told = mistake("fit", f"--config={CONFIGS / 'quickstart.yaml'}", f"--{ALGORITHM}.estimator=RLO")
    assert "estimator is 'RLO', which is no AdvantageEstimator. Did you mean RLOO? There are: GAE, G" in told


def test_a_class_that_is_no_algorithm(mistake: Mistake) -> None:
    told = mistake("fit", "--algorithm=torch.nn.Linear")
    assert "'torch.nn.Linear', which does not inherit from lightning_mtrl.algorithms.base.Algorithm." in told
    assert "which is only a base of others; it lacks converged" in mistake(
        "fit", "--algorithm=lightning_mtrl.algorithms.Algorithm"
    )


def test_a_folder_without_a_model(mistake: Mistake, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "model.name is 'empty'" in mistake("fit", "--model.name=empty")


def test_a_tokenizer_without_a_chat_template(mistake: Mistake, tmp_path: Path) -> None:
    shutil.copytree(TINY_FOLDER, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    told = mistake("fit", "--model.name=plain")
    assert "model.name is 'plain', but its tokenizer has no chat template" in told


@pytest.mark.parametrize("command", [["fit"], ["collect", "--config=c.yaml", "--output=talks.jsonl"]])
def test_a_context_shorter_than_the_first_prompt(
    mistake: Mistake, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "c.yaml").write_text("seed: 1\n")
    told = mistake(*command, "--model.context_length=30")
    assert told.startswith("error: model.context_length is 30, but the first prompt of conversation")
    assert "was expected. Raise model.context_length, or lower data.max_response_tokens." in told
    assert list(tmp_path.glob("runs/*")) == [], "a run that measured nothing left a folder"


def test_a_context_longer_than_the_model_was_made_for(mistake: Mistake) -> None:
    assert "model.context_length is 9999, but 'tiny' was made for 512" in mistake(
        "fit", "--model.context_length=9999"
    )


def test_a_run_folder_that_is_taken(mistake: Mistake, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    told = mistake("fit", "--run_dir=mine")
    assert "run_dir is 'mine', which is not empty" in told
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    "command",
    [
        ["fit", "--resume=notes"],
        ["validate", "--run=notes"],
        ["collect", "--run=notes", "--output=talks.jsonl"],
        ["export", "--run=notes", "--output=policy"],
    ],
)
def test_a_folder_that_is_no_run(mistake: Mistake, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "notes").mkdir()
    assert "notes is not a run: it has no config.yaml" in mistake(*command)
    assert not (tmp_path / "talks.jsonl").exists()


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["fit"], "--resume"),
        (["fit"], "--run_dir"),
        (["fit"], "--config"),
        (["validate"], "--run"),
        (["validate"], "--run_dir"),
        (["collect", "--output=talks.jsonl"], "--run"),
        (["collect", "--output=talks.jsonl"], "--config"),
        (["collect", "--run=."], "--output"),
        (["export", "--output=policy"], "--run"),
        (["export", "--run=."], "--output"),
    ],
)
def test_a_path_from_a_variable_that_is_not_set(
    mistake: Mistake, tmp_path: Path, command: list[str], option: str
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")  # an empty path must not mean this folder
    for given in ([f"{option}="], [option, ""], [f"{option}= "]):
        assert mistake(*command, *given).startswith(f"error: {option} is '', but a path was expected.")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("key", ["run_dir", "model.adapter", "model.gguf_file"])
def test_an_empty_text_is_not_null(mistake: Mistake, tmp_path: Path, key: str) -> None:
    section, _, name = key.rpartition(".")
    (tmp_path / "c.yaml").write_text(f"{section}: {{{name}: ''}}\n" if section else f"{name}: ''\n")
    assert f"{key} is '', but it must be a name, or null" in mistake("fit", "--config=c.yaml")
    assert not (tmp_path / "runs").exists()


def test_an_adapter_for_another_base(mistake: Mistake, tmp_path: Path) -> None:
    config = json.loads((TINY_FOLDER / "config.json").read_text())
    shutil.copytree(TINY_FOLDER, tmp_path / "wide", ignore=shutil.ignore_patterns("pi_0", "model*"))
    config |= {"hidden_size": 64, "head_dim": 8}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "wide")).save_pretrained(tmp_path / "wide")
    told = mistake("fit", "--model.name=wide", f"--model.adapter={TINY_ADAPTER}")
    assert "do not fit this model" in told
    assert "made for another base model" in told


def test_an_adapter_that_is_not_there(mistake: Mistake) -> None:
    told = mistake("fit", "--model.adapter=no/adapter")
    assert "model.adapter is 'no/adapter', but no peft adapter is there" in told
