"""What a run is made of: one dataclass for each part, every key typed, documented and checked.

Plain data; nothing here imports a model or reads a file. `lightning_mtrl.parsing` turns YAML files and
command-line options into a `RunConfig`, and back into the `config.yaml` of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_mtrl.errors import UserError
from lightning_mtrl.ranges import (
    COUNT,
    HEAT,
    MIN_P,
    PART,
    SEED,
    SHARE,
    TOP_K,
    TOP_P,
    expect,
    expect_above_zero,
    expect_at_least,
    expect_in,
)
from lightning_mtrl.serving_config import ServingConfig

_DATA_RANGES = {
    COUNT: ("conversations", "group_size", "max_turns", "rows", "max_response_tokens", "batch_size"),
    PART: ("validation_share", "earlier_share"),
    SHARE: ("explore_share", "persona_share", "max_failure_share"),
    MIN_P: ("min_p", "explore_min_p"),
    HEAT: ("temperature", "explore_temperature"),
    TOP_K: ("top_k",),
    TOP_P: ("top_p",),
}


@dataclass(frozen=True)
class FabricConfig:
    """Where and how the run computes (Lightning Fabric).

    Attributes:
        accelerator: "cpu", "cuda", "mps" (not tried), or "auto" for the best one that is there.
        devices: processes on each node, one a device; or "auto" for all devices. `fit` runs several.
        num_nodes: machines.
        strategy: "auto" or "ddp": every process has all weights. "fsdp", for `model.fine_tuning` "full":
            every role's weights, gradients and optimizer state are shared out among the processes, and only
            the role that is in use is whole on each.
        precision: "32-true"; or "bf16-mixed": products in bfloat16, and heads, losses and Q in float32.
        threads: threads of one process on the CPU; null leaves PyTorch's own choice.
    """

    accelerator: str = "auto"
    devices: int | str = 1
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "32-true"
    threads: int | None = None

    def __post_init__(self) -> None:
        counted = self.devices == "auto" or (isinstance(self.devices, int) and self.devices >= 1)
        expect(counted, "fabric.devices", self.devices, 'a whole number of at least 1, or "auto"', 1)
        expect_at_least("fabric.num_nodes", self.num_nodes, 1, 1)
        expect_at_least("fabric.threads", self.threads, 1, 2)
        known = self.precision in ("32-true", "bf16-mixed")
        kind = "32-true or bf16-mixed (for weights in half precision, set model.dtype bfloat16 instead)"
        expect(known, "fabric.precision", self.precision, kind, "bf16-mixed")


@dataclass(frozen=True)
class ModelConfig:
    """The language model under all roles: policy, critic, reference.

    Attributes:
        name: "tiny" (ships with the package), a Hub id, a local folder, or a GGUF file.
        fine_tuning: "lora" trains an adapter for each role on one frozen base; "full" trains a separate
            copy of all weights for each role.
        quantization: "nf4" keeps the frozen base in 4 bits (NF4 with double quantization).
        lora_rank: rank of new adapters; a policy that starts from one (`adapter`, or "tiny") keeps its own.
        lora_alpha: scale of the adapters; their output is multiplied by lora_alpha / lora_rank.
        lora_dropout: dropout before the adapters, in [0, 1).
        lora_targets: "all-linear", or the names of the layers that get a new adapter.
        dtype: type of the base's weights: "float32", "bfloat16" or "float16".
        gguf_file: file name inside the folder or repository `name`, where the weights are GGUF.
        trust_remote_code: run code that comes with the model. Only for sources that you trust.
        context_length: longest conversation in tokens; null takes the model's own limit.
        gradient_checkpointing: compute activations again in the backward pass to save memory.
        adapter: folder of a peft adapter that is the initial policy pi_0; null starts from the base.
    """

    name: str = "tiny"
    fine_tuning: Literal["lora", "full"] = "lora"
    quantization: Literal["none", "nf4"] = "none"
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_targets: Literal["all-linear"] | list[str] = "all-linear"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    gguf_file: str | None = None
    trust_remote_code: bool = False
    context_length: int | None = None
    gradient_checkpointing: bool = False
    adapter: str | None = None

    def __post_init__(self) -> None:
        expect(bool(self.name.strip()), "model.name", self.name, 'a model, such as "tiny"', "tiny")
        _expect_text_or_null("model.gguf_file", self.gguf_file, "model.gguf")
        _expect_text_or_null("model.adapter", self.adapter, "my/adapter")
        expect_at_least("model.lora_rank", self.lora_rank, 1, 16)
        expect_above_zero("model.lora_alpha", self.lora_alpha, 1.0)
        expect(0.0 <= self.lora_dropout < 1.0, "model.lora_dropout", self.lora_dropout, "in [0, 1)", 0.0)
        expect_at_least("model.context_length", self.context_length, 2, 2048)
        possible = self.fine_tuning == "lora" or self.quantization == "none"
        kind = "none (or model.fine_tuning lora), since weights in 4 bits cannot be trained"
        expect(possible, "model.quantization", self.quantization, kind, "none")


@dataclass(frozen=True)
class DataConfig:
    """The conversations of each iteration: how many, how they are sampled, how they are read.

    Attributes:
        conversations: conversations collected in each iteration.
        group_size: conversations that start from the same state; `conversations` is a multiple of it.
        max_turns: responses after which a conversation is truncated.
        rows: conversations that are sampled together; more is faster and takes more memory.
        temperature: of the policy's sampling.
        top_k: sample from the k likeliest tokens only; 0 means all.
        top_p: sample from the smallest set of tokens with this probability; 1 means all.
        min_p: leave out tokens less likely than this share of the likeliest one; 0 means none.
        max_response_tokens: longest response in tokens, its end-of-turn token included.
        validation_share: share of the conversations held out from the critic, to measure it.
        earlier_share: share of the critic's conversations that come from earlier policies.
        explore_share: share of conversations with one response drawn at `explore_temperature`.
        explore_temperature: temperature of those responses.
        explore_min_p: they leave out tokens less likely than this share of the likeliest one.
        personas: texts that vary the policy's manner, for coverage; one of them is added to the system
            message. Training takes them out of the prompts again. A critic that is fitted by Monte Carlo to
            such conversations has the Q of the policy mixed with its personas, not that of the policy: its
            later responses are the persona's too. With `evaluation.target` "expected_sarsa" or "retrace" it
            has that of the policy alone.
        persona_share: share of conversations that are led under one of the `personas`.
        max_failure_share: a collection stops once more of it failed, over all processes; the rest is kept.
        file_format: how rollouts are stored.
        batch_size: conversations in a batch, for evaluation of the policy.
        server: a vLLM server that samples them.
    """

    conversations: int = 512
    group_size: int = 1
    max_turns: int = 20
    rows: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_response_tokens: int = 64
    validation_share: float = 0.2
    earlier_share: float = 0.0
    explore_share: float = 0.0
    explore_temperature: float = 2.0
    explore_min_p: float = 0.001
    personas: list[str] = field(default_factory=list)
    persona_share: float = 0.0
    max_failure_share: float = 0.5
    file_format: Literal["jsonl", "parquet"] = "parquet"
    batch_size: int = 32
    server: ServingConfig = field(default_factory=ServingConfig)

    def __post_init__(self) -> None:
        for allowed, names in _DATA_RANGES.items():
            for name in names:
                expect_in(allowed, f"data.{name}", getattr(self, name))
        self._check_groups()

    def _check_groups(self) -> None:
        if self.conversations % self.group_size:
            raise UserError(
                f"data.conversations is {self.conversations}, but it must be a multiple of data.group_size, "
                f"{self.group_size}. Pass --data.conversations "
                f"{-(-self.conversations // self.group_size) * self.group_size}."
            )
        if self.validation_share > 0.0 and self.conversations < 2 * self.group_size:
            raise UserError(
                f"data.conversations is {self.conversations}, but one group of {self.group_size} is to be "
                f"held out and one to be learned from. Pass --data.conversations {2 * self.group_size}, or "
                f"--data.validation_share 0."
            )
        if self.persona_share > 0.0 and not self.personas:
            raise UserError(
                f"data.persona_share is {self.persona_share}, but data.personas is empty. "
                "List system prompts there, or pass --data.persona_share 0."
            )


@dataclass(frozen=True)
class LoopConfig:
    """How often the steps repeat, and when they stop.

    Attributes:
        iterations: policy iterations; the last policy is pi_{iterations}.
        checkpoint_keep: newest checkpoints that are kept; null keeps all.
        stop_when_converged: stop early when the algorithm says that Q has converged.
        max_skipped_steps: optimizer steps with a non-finite loss or gradient, in a row, before the run stops.
    """

    iterations: int = 5
    checkpoint_keep: int | None = None
    stop_when_converged: bool = True
    max_skipped_steps: int = 10

    def __post_init__(self) -> None:
        expect_at_least("loop.iterations", self.iterations, 1, 5)
        expect_at_least("loop.checkpoint_keep", self.checkpoint_keep, 1, 2)
        expect_at_least("loop.max_skipped_steps", self.max_skipped_steps, 1, 10)


@dataclass(frozen=True)
class ValidationConfig:
    """How each policy is measured: the same seeds for all, so that they meet the same situations.

    Attributes:
        conversations: conversations for each policy.
        seed: first seed of these conversations; apart from those that the policy learns from.
        temperature: of the policy's sampling.
        sample_conversations: conversations whose text goes to TensorBoard.
    """

    conversations: int = 256
    seed: int = 1_000_000
    temperature: float = 1.0
    sample_conversations: int = 4

    def __post_init__(self) -> None:
        expect_in(COUNT, "validation.conversations", self.conversations)
        expect_in(SEED, "validation.seed", self.seed)
        expect_in(HEAT, "validation.temperature", self.temperature)
        expect_at_least("validation.sample_conversations", self.sample_conversations, 0, 4)


@dataclass(frozen=True)
class ClassSpec:
    """A class by its import path, with the arguments that it gets.

    Attributes:
        class_path: such as "lightning_mtrl.environments.SuggestedResponse", or "my_package.MyEnvironment".
        init_args: arguments of its constructor; what is left out has the constructor's own default.
    """

    class_path: str
    init_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run needs.

    Attributes:
        seed: of all randomness of the run.
        run_dir: folder of the run; null means runs/NAME, made unique.
        fabric: devices, nodes, precision.
        model: the language model.
        environment: the other side of the conversation.
        data: the conversations of each iteration.
        algorithm: how the policy is evaluated and improved.
        loop: number of iterations, stopping, checkpoints.
        validation: how policies are measured.
        loggers: where metrics go, besides summary.json.
    """

    seed: int = 0
    run_dir: str | None = None
    fabric: FabricConfig = field(default_factory=FabricConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    environment: ClassSpec = ClassSpec("lightning_mtrl.environments.SuggestedResponse")
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: ClassSpec = ClassSpec("lightning_mtrl.algorithms.IterativePPO")
    loop: LoopConfig = field(default_factory=LoopConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    loggers: list[Literal["tensorboard", "csv"]] = field(default_factory=lambda: ["tensorboard", "csv"])

    def __post_init__(self) -> None:
        expect_in(SEED, "seed", self.seed)
        if self.fabric.strategy == "fsdp" and self.model.fine_tuning == "lora":
            raise UserError(
                "fabric.strategy is 'fsdp', which shares trained weights out among processes, but "
                "model.fine_tuning is 'lora', where they are small. Pass --fabric.strategy ddp, or "
                "--model.fine_tuning full."
            )
        _expect_text_or_null("run_dir", self.run_dir, "runs/mine")
        self.data.server.expect_adapters(self.model.fine_tuning)


def _expect_text_or_null(key: str, value: str | None, example: str) -> None:
    # An empty text is an unset variable of a shell; taken for null it would quietly mean something else.
    expect(value is None or bool(value.strip()), key, value, "a name, or null", example)
