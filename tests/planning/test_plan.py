from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mtrl import cli
from lightning_mtrl.algorithms.base import Algorithm, Context, Improvement, Signal
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.assembly import assemble
from lightning_mtrl.config import ClassSpec, DataConfig, FabricConfig, ModelConfig, RunConfig
from lightning_mtrl.modules.policy import Policy
from lightning_mtrl.planning.devices import Device
from lightning_mtrl.planning.memory_plan import MemoryPlan, Part, Step
from lightning_mtrl.planning.plan import plan_memory
from lightning_mtrl.planning.pretend import Pretence
from lightning_mtrl.planning.record import as_json
from lightning_mtrl.planning.weights import optimizer_bytes


class OneModule(Algorithm):
    """An algorithm that says nothing of its memory."""

    def setup(self, context: Context) -> None:
        self.policy = Policy(context.backbone)
        self.optimizer = self.policy.configure_optimizers()

    def evaluate(self, rollouts: list[Any]) -> Signal:
        return Signal({})

    def improve(self, rollouts: list[Any], signal: Signal) -> Improvement:
        return Improvement({})

    def converged(self, signal: Signal) -> bool:
        return False

    def modules(self) -> dict[str, Any]:
        return {"policy": (self.policy, self.optimizer)}


def _config(algorithm: str = "IterativePPO", **arguments: Any) -> RunConfig:
    return RunConfig(
        algorithm=ClassSpec(f"lightning_mtrl.algorithms.{algorithm}", arguments),
        model=ModelConfig(context_length=128),
        data=DataConfig(conversations=64, rows=16, max_turns=4, max_response_tokens=8, group_size=4),
    )


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    return plan_memory(_config())


def _sizes(parts: tuple[Part, ...]) -> dict[str, int]:
    return {part.name: part.size for part in parts}


def test_every_role_of_iterative_ppo_is_named_with_its_bytes(plan: MemoryPlan) -> None:
    held = _sizes(plan.held)
    adapters = {name: size for name, size in held.items() if name.endswith(": adapter")}
    assert adapters.keys() == {"policy: adapter", "reference: adapter", "critic: adapter"}
    assert adapters["policy: adapter"] == adapters["reference: adapter"]
    assert held["libraries"] > 100 * 2**20
    # AdamW keeps two numbers a weight, and how many steps it took.
    state = held["critic: optimizer state"] - 2 * (held["critic: adapter"] + held["critic: head"])
    assert 0 < state < 1024


@pytest.mark.parametrize(
    ("arguments", "roles"),
    [
        ({}, {"policy", "initial", "prm"}),
        ({"credit": {"class_path": "lightning_mtrl.credit.Uniform"}}, {"policy", "initial"}),
    ],
)
def test_roles_are_those_that_the_algorithm_makes(arguments: dict[str, Any], roles: set[str]) -> None:
    held = _sizes(plan_memory(_config("ITPO", **arguments)).held)
    assert {name.partition(":")[0] for name in held if name.endswith(": adapter")} == roles


def test_full_fine_tuning_holds_a_copy_of_all_weights_for_each_role() -> None:
    config = _config()
    held = _sizes(plan_memory(replace(config, model=ModelConfig(fine_tuning="full"))).held)
    # A copy has the same weights, but not the buffers of the rotary positions.
    assert {held[f"{role}: copy"] for role in ("policy", "reference", "critic")} == {held["policy: copy"]}
    assert 0 <= held["base weights"] - held["policy: copy"] < 1024


def test_an_algorithm_that_says_nothing_is_planned_by_its_modules() -> None:
    config = replace(_config(), algorithm=ClassSpec(f"{__name__}.OneModule"))
    config = replace(config, data=replace(config.data, batch_size=4))
    found = plan_memory(config)
    trained = [step for step in found.steps if step.phase == "improve"]
    assert [(step.name, step.shape) for step in trained] == [("train policy", "4 x 128")]
    assert found.total("evaluate") < found.total("improve")


def test_keys_and_values_are_counted_to_the_byte(plan: MemoryPlan) -> None:
    # 3 layers of keys and values, 8 heads of 16 numbers in fp32, 16 rows of 128 slots and one for padding;
    # one layer more for the moment in which it grows.
    cache = _sizes(plan.largest("collect").parts)["keys and values"]
    assert cache == 4 * (2 * 16 * (128 + 1) * 8 * 16 * 4)


def test_checkpointing_needs_less_and_twice_the_rows_need_twice_as_much(plan: MemoryPlan) -> None:
    def trained(found: MemoryPlan) -> Step:
        return next(step for step in found.steps if step.name == "train critic")

    small = _config(evaluation={"micro_batch_size": 8})
    large = _config(evaluation={"micro_batch_size": 16})
    without, with_it = trained(plan_memory(small)).activations or (0, 0)
    assert 0 < with_it < 0.7 * without
    assert (trained(plan_memory(large)).activations or (0, 0))[0] == pytest.approx(2 * without, rel=0.02)


@pytest.mark.parametrize(
    ("model", "precision", "twice"),
    [
        ({}, "32-true", {"collect": True, "evaluate": True}),
        # Passes are under autocast, where nothing is merged; sampling is not.
        ({}, "bf16-mixed", {"collect": True, "evaluate": False}),
        ({"dtype": "bfloat16"}, "32-true", {"collect": False, "evaluate": False}),
        # Written out in full on a CPU, merged or not.
        ({"quantization": "nf4", "dtype": "bfloat16"}, "32-true", {"collect": True, "evaluate": True}),
    ],
)
def test_the_base_is_there_twice_where_it_is_merged_or_written_out(
    model: dict[str, Any], precision: Any, twice: dict[str, bool]
) -> None:
    config = replace(_config("ITPO"), fabric=FabricConfig(accelerator="cpu", precision=precision))
    found = plan_memory(replace(config, model=ModelConfig(context_length=128, **model)))
    steps = {step.phase: step for step in found.steps if step.name in ("sample", "score initial")}
    sizes = {phase: _sizes(steps[phase].parts)["merged weights"] for phase in twice}
    assert {phase: size > 0 for phase, size in sizes.items()} == twice
    # In each of 3 layers: queries, keys, values and output of 128 x 128, and three maps of 128 x 320.
    bytes_each = 2 if "dtype" in model else 4
    assert set(sizes.values()) <= {0, bytes_each * 3 * (4 * 128**2 + 3 * 128 * 320)}


def test_copies_to_go_back_to_are_counted_where_they_lie() -> None:
    config = replace(_config(), fabric=FabricConfig(accelerator="cpu"))
    algorithm: Any = assemble(config, show_progress=False).algorithm
    truth = {
        "critic": _copied_bytes(algorithm.critic_stepper),
        "policy": _copied_bytes(algorithm.policy_stepper),
        "value": _copied_bytes(algorithm.value_stepper),
    }
    found = plan_memory(config)
    for phase, names in (("evaluate", {"critic"}), ("improve", {"policy", "value"})):
        wanted = {f"{name}: copy to go back to": truth[name] for name in names}
        for step in (step for step in found.steps if step.phase == phase):
            assert _sizes(step.parts).items() >= wanted.items(), step.name
    assert found.beside == 0
    # There are two of one module while it is copied anew.
    apart = plan_memory(replace(config, fabric=FabricConfig(accelerator="cuda")))
    improved = (truth["policy"], truth["value"])
    assert apart.beside == max(2 * truth["critic"], sum(improved) + max(improved))
    assert not any("copy" in part.name for step in apart.steps for part in step.parts)


def _copied_bytes(stepper: Stepper) -> int:
    """Bytes of what a stepper really copies once its optimizer has stepped."""
    for parameter in stepper.parameters:
        parameter.grad = torch.zeros_like(parameter)
    stepper.optimizer.step()
    learned = stepper.learned()
    moments = [value for state in learned.optimizer["state"].values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in (*learned.weights.values(), *moments))


def test_a_pretended_layer_keeps_what_it_would_keep() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8))
    pretence = Pretence(layers)
    with pretence.counting() as counted:
        read = torch.zeros(100, 256)
        out = layers(read)
        # The input, the output of the ReLU that the next layer keeps, and the result; that of the first layer
        # is needed by none once the ReLU has its own.
        assert counted.now == 4 * 100 * (256 + 1024 + 8)
        assert counted.peak >= 4 * 100 * (256 + 2 * 1024)
        out.sum().backward()
        del read, out
    kept = sum(parameter.numel() for parameter in layers.parameters()) * 4
    assert counted.now == kept  # gradients
    assert all(parameter.grad is not None for parameter in layers.parameters())


@pytest.mark.parametrize(("make", "numbers"), [(torch.optim.AdamW, 2), (torch.optim.SGD, 0)])
def test_optimizer_state_is_found_by_a_step_without_numbers(
    make: Callable[..., torch.optim.Optimizer], numbers: int
) -> None:
    weights = nn.Linear(10, 20)
    for parameter in weights.parameters():
        parameter.grad = torch.zeros_like(parameter)
    real = make(weights.parameters(), lr=0.1)
    real.step()
    kept = [value for state in real.state.values() for value in state.values() if value is not None]
    truth = sum(value.numel() * value.element_size() for value in kept)
    with torch.device("meta"):
        blank = make(nn.Linear(10, 20).parameters(), lr=0.1)
    assert optimizer_bytes(blank) == truth
    assert truth >= numbers * 220 * 4


def test_what_does_not_fit_names_the_settings_of_the_largest_parts() -> None:
    parts = (Part("activations", 700, "data.batch_size"), Part("gradients", 50))
    held = (Part("libraries", 100), Part("base weights", 200, "model.quantization"))
    step = Step("improve", "train policy", "1 x 1", parts)
    small = MemoryPlan(Device("cpu", "this machine", 1000), 1, held, (step,))
    assert (small.peak, small.peak_phase, small.fits) == (1050, "improve", False)
    assert [part.key for part in small.advice] == ["data.batch_size", "model.quantization"]
    assert replace(small, device=Device("cuda", "a GPU", None)).fits is None


def test_the_record_says_what_the_plan_says(plan: MemoryPlan) -> None:
    record = json.loads(json.dumps(as_json(plan)))
    assert record["peak_bytes"] == max(record["phases"].values()) == plan.peak
    assert sum(part["bytes"] for part in record["held"]) == sum(part.size for part in plan.held)


@pytest.fixture
def only_a_configuration(tmp_path: Path) -> Path:
    """Two layers of TinyLlama, of which there is nothing but config.json."""
    folder = tmp_path / "large"
    folder.mkdir()
    settings = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 2, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_plan_reads_nothing_but_the_configuration_and_leaves_nothing(
    only_a_configuration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [f"--model.name={only_a_configuration}", "--fabric.accelerator=cuda", "--model.dtype=bfloat16"]
    options.append("--algorithm=lightning_mtrl.algorithms.OutcomeOnly")
    assert cli.main(["fit", "--plan", "json", "--plan_tokens", "512", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    # TinyLlama has 1,100,048,384 weights in 22 layers: 44,044,288 in each, 131,072,000 in embeddings and
    # head, and 2,048 in the last norm. The rotary positions are a buffer of 32 numbers, twice.
    base = next(part["bytes"] for part in record["held"] if part["name"] == "base weights")
    assert 0 <= base - 2 * (2 * 44_044_288 + 131_072_000 + 2_048) <= 2 * 32 * 4
    assert record["tokens"] == 512
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_the_table_names_phases_roles_and_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--data.rows=8", "--model.context_length=64", "--fabric.accelerator=cpu"]
    assert cli.main(["fit", "--plan", *small]) == 0
    shown = capsys.readouterr().out
    for word in (
        "collect",
        "evaluate",
        "improve",
        "validate",
        "reference: adapter",
        "so it fits",
        "checkpointed",
    ):
        assert word in shown, word
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_told_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "--plan", "--model.name", "./nowhere"]) == 2
    assert "'./nowhere'" in capsys.readouterr().err
    assert cli.main(["fit", "--plan", "maybe"]) == 2
    assert "--plan" in capsys.readouterr().err


def test_a_model_whose_passes_need_numbers_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 1000, "max_position_embeddings": 512, "num_local_experts": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert cli.main(["fit", "--plan", f"--model.name={tmp_path}"]) == 2
    assert "MixtralForCausalLM, whose passes cannot be pretended" in capsys.readouterr().err
