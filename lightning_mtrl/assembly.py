"""Put a run together from its configuration: model, environment, rollouts, algorithm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric

from lightning_mtrl.algorithms.base import Algorithm, Context
from lightning_mtrl.class_lookup import class_named
from lightning_mtrl.config import ModelConfig, RunConfig
from lightning_mtrl.environments.protocol import Environment, held_out
from lightning_mtrl.errors import UserError
from lightning_mtrl.launching import join
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.load import load_model, text_limit
from lightning_mtrl.models.merging import keeps_changes
from lightning_mtrl.models.sources import expect_adapter
from lightning_mtrl.models.tiny import TINY_MODELS, tiny_model_of
from lightning_mtrl.parsing import build_algorithm, build_environment
from lightning_mtrl.processes import Processes
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.policy_server import PolicyServer
from lightning_mtrl.rollouts.sampling import SamplingConfig
from lightning_mtrl.rollouts.tokens import ChatTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Learner:
    """What learns from conversations, wherever they come from.

    Attributes:
        config: the run's configuration.
        context: what the algorithm works with.
        algorithm: set up on the context.
    """

    config: RunConfig
    context: Context
    algorithm: Algorithm

    @property
    def backbone(self) -> Backbone:
        """The shared model."""
        return self.context.backbone

    @property
    def gamma(self) -> float:
        """Discount for each response."""
        return float(getattr(self.algorithm, "gamma", 1.0))


@dataclass
class Parts(Learner):
    """Everything that a loop moves.

    Attributes:
        environment: the other side of the conversation.
        collector: collects the conversations that are learned from.
        validator: collects the conversations that measure a policy: no exploration, its own temperature.
    """

    environment: Environment
    collector: Collector
    validator: Collector

    def close(self) -> None:
        """Leave a server as it was found."""
        self.collector.close()


def assemble(
    config: RunConfig,
    loggers: list[Any] | None = None,
    show_progress: bool = True,
    served: Path | None = None,
) -> Parts:
    """Load the model and build every part; nothing is sampled or trained yet.

    Args:
        config: of the run.
        loggers: for Fabric.
        show_progress: of the collections.
        served: folder for the adapters of `data.server`; None samples here, whatever it says.

    Raises:
        UserError: if a part of the configuration cannot work.
    """
    algorithm, environment = build_algorithm(config), build_environment(config)
    context = _context(
        config, tiny_model_of(environment) if config.model.name == "tiny" else "sales", loggers
    )
    server = None
    if served is not None and config.data.server.base_url is not None:
        server = PolicyServer(config.data.server, context.backbone, served, context.processes)
    collector, validator = collectors(
        config,
        environment,
        context.chat,
        context.context_length,
        show_progress=show_progress,
        processes=context.processes,
        server=server,
    )
    algorithm.setup(context)
    return Parts(config, context, algorithm, environment, collector, validator)


def collectors(
    config: RunConfig, environment: Environment, chat: ChatTokenizer, context_length: int, **where: Any
) -> tuple[Collector, Collector]:
    """What collects the conversations to learn from, and what collects those that measure a policy.

    Args:
        config: of the run.
        environment: of both; a policy is measured on the situations that it holds out, if it does.
        chat: the model's.
        context_length: longest conversation in tokens.
        where: further arguments of both: `show_progress`, `processes`, `server`.
    """
    data, sampling = config.data, _sampling(config)
    shared: dict[str, Any] = {
        "rows": data.rows,
        "context_length": context_length,
        "max_turns": data.max_turns,
        "max_failure_share": data.max_failure_share,
        **where,
    }
    collector = Collector(
        environment,
        chat,
        sampling=sampling,
        group_size=data.group_size,
        explore_share=data.explore_share,
        explore_temperature=data.explore_temperature,
        explore_min_p=data.explore_min_p,
        personas=tuple(data.personas),
        persona_share=data.persona_share,
        **shared,
    )
    measured = replace(sampling, temperature=config.validation.temperature)
    return collector, Collector(held_out(environment), chat, sampling=measured, task="validate", **shared)


def _sampling(config: RunConfig) -> SamplingConfig:
    data = config.data
    return SamplingConfig(data.temperature, data.top_k, data.top_p, data.min_p, data.max_response_tokens)


def assemble_learner(config: RunConfig, loggers: list[Any] | None = None) -> Learner:
    """Load the model and build what learns; no environment is made.

    Raises:
        UserError: if a part of the configuration cannot work.
    """
    algorithm = build_algorithm(config)
    environment = class_named("environment", config.environment.class_path)
    tiny = tiny_model_of(environment) if config.model.name == "tiny" else "sales"
    context = _context(config, tiny, loggers)
    algorithm.setup(context)
    return Learner(config, context, algorithm)


def _context(config: RunConfig, tiny: str, loggers: list[Any] | None) -> Context:
    # Fresh adapters start from random numbers, and a run that is repeated must start from the same.
    torch.manual_seed(config.seed)
    fabric, processes = join(config.fabric, loggers or [])
    backbone, chat = processes.together(lambda: build_backbone(config.model, tiny))
    if config.model.quantization == "none":
        backbone.to(fabric.device)
    if config.fabric.strategy == "fsdp":
        backbone.shard(processes)
    return build_context(config, fabric, backbone, chat)


def build_context(config: RunConfig, fabric: Fabric, backbone: Backbone, chat: ChatTokenizer) -> Context:
    """What an algorithm works with."""
    data = config.data
    datamodule = RolloutDataModule(
        tokenizer=chat, batch_size=data.batch_size, validation_share=data.validation_share, seed=config.seed
    )
    return Context(
        fabric,
        backbone,
        chat,
        datamodule,
        _sampling(config),
        context_length(config.model, text_limit(backbone.config)),
        data.rows,
        data.group_size,
        Processes.launched(fabric.device),
        config.loop.max_skipped_steps,
    )


def build_backbone(config: ModelConfig, tiny: str = "sales") -> tuple[Backbone, ChatTokenizer]:
    """Load the base model, and put pi_0 into its role "policy".

    pi_0 is the base itself, or `model.adapter`; `tiny` brings its own. Which embedded model that name
    stands for is said by `tiny` (see `tiny_model_of`).

    Raises:
        UserError: for an adapter that full fine-tuning would have to merge into weights in half precision.
    """
    loaded = load_model(
        config.name,
        quantization=config.quantization,
        dtype=config.dtype,
        gguf_file=config.gguf_file,
        trust_remote_code=config.trust_remote_code,
        tiny=tiny,
    )
    return backbone_on(loaded.model, config, tiny), ChatTokenizer(loaded.tokenizer)


def backbone_on(model: PreTrainedModel, config: ModelConfig, tiny: str = "sales") -> Backbone:
    """Make a backbone of a base model, with pi_0 in its role "policy"; see `build_backbone`."""
    from peft import LoraConfig

    adapter = config.adapter or (str(TINY_MODELS[tiny].adapter) if config.name == "tiny" else None)
    if adapter:
        expect_adapter(adapter)
    if adapter and config.fine_tuning == "full":
        model, adapter = _merged(model, adapter), None
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=config.lora_dropout,
        target_modules=config.lora_targets,
        task_type="CAUSAL_LM",
    )
    backbone = Backbone(model, config.fine_tuning, lora, config.gradient_checkpointing)
    backbone.add_role("policy", adapter=adapter)
    return backbone


def _merged(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    from peft import PeftModel

    if not keeps_changes(model.dtype):
        dtype = str(model.dtype).removeprefix("torch.")
        raise UserError(
            f"model.dtype is {dtype!r}, but the initial policy is the adapter {adapter!r}, which "
            f"model.fine_tuning full adds to the base's weights: in half precision rounding would take most "
            f"of it away. Pass --model.dtype float32, or --model.fine_tuning lora."
        )
    if model.device.type == "meta":
        return model  # a plan has no weights, only their shapes
    merged: PreTrainedModel = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return merged


def context_length(config: ModelConfig, limit: int | None) -> int:
    """Tokens that a conversation may hold.

    Args:
        config: of the model.
        limit: that of the model itself, where it states one.

    Raises:
        UserError: if more is asked for, or neither says anything.
    """
    wanted = config.context_length
    if wanted is not None and limit is not None and wanted > limit:
        raise UserError(
            f"model.context_length is {wanted}, but {config.name!r} was made for {limit} tokens. "
            f"Pass --model.context_length {limit} or less."
        )
    length = wanted or limit
    if length is None:
        raise UserError(
            f"model.context_length is null, and {config.name!r} states no limit of its own. "
            f"Pass --model.context_length with the longest conversation in tokens."
        )
    return int(length)
