"""The memory that a run will take, by phase and by what it is for, from its configuration alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from lightning_mtrl.config import RunConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.models.merging import merges_exactly
from lightning_mtrl.modules.workload import Extent, Kept, Pass, Sampling
from lightning_mtrl.planning.blank_run import BlankRun, blank_run
from lightning_mtrl.planning.devices import Device, device_of, libraries_bytes
from lightning_mtrl.planning.memory_plan import MemoryPlan, Part, Step
from lightning_mtrl.planning.passes import PassMemory, pass_memory, sampling_memory
from lightning_mtrl.planning.pretend import Pretence
from lightning_mtrl.planning.weights import bytes_of, head_bytes, optimizer_bytes
from lightning_mtrl.rollouts.lean import laid_out_bytes

PROMPT_TOKENS = 512  # room for what stands before the first response, where nothing is known of it


def plan_memory(config: RunConfig, tokens: int | None = None) -> MemoryPlan:
    """Find out what a run will take; no weights are loaded and nothing is sampled.

    Args:
        config: of the run.
        tokens: of the longest conversation; None for what the configuration allows at most.

    Raises:
        UserError: if a part of the configuration cannot work.
    """
    run = blank_run(config)
    device = device_of(config.fabric.accelerator)
    extent = _extent(run, tokens)
    held = (Part("libraries", libraries_bytes(device)), *_weights(run))
    copies = _copies(run, extent)
    try:
        steps = tuple(_Steps(run, device, extent).all())
    except RuntimeError as error:
        # Such as a mixture of experts, which looks at numbers to know who computes what.
        kind, told = type(run.backbone.causal("base")).__name__, str(error).strip().partition("\n")[0]
        raise UserError(
            f"model.name is {config.model.name!r}, a {kind}, whose passes cannot be pretended, so there is "
            f"no plan ({told}). Its weights take {run.base / 2**30:.2f} GiB. Try the run itself with a small "
            f"data.rows and small micro-batches."
        ) from error
    if device.kind == "cpu":
        return MemoryPlan(device, extent.tokens, held, tuple(_with_copies(steps, copies)))
    beside = max((step.size for step in _with_copies((), copies)), default=0)
    return MemoryPlan(device, extent.tokens, held, steps, beside)


def _extent(run: BlankRun, tokens: int | None) -> Extent:
    """How large conversations get: observations are taken to be no longer than responses."""
    data, limit = run.config.data, run.context.context_length
    sampled = data.max_turns * data.max_response_tokens
    longest = min(limit, tokens or 2 * sampled + PROMPT_TOKENS)
    return Extent(
        tokens=longest,
        sampled_tokens=min(longest, sampled),
        response_tokens=min(longest, data.max_response_tokens),
        conversations=data.conversations,
        batch_size=data.batch_size,
        group_size=data.group_size,
        rows=data.rows,
    )


def _weights(run: BlankRun) -> Iterator[Part]:
    """What holds numbers for the whole run: base, roles, heads, optimizer state."""
    backbone, modules = run.backbone, run.algorithm.modules()
    four_bits = run.config.model.quantization == "nf4" or backbone.full
    yield Part("base weights", run.base, "model.dtype" if four_bits else "model.quantization")
    key = _role_key(run)
    for role in backbone.roles:
        kind = "copy" if backbone.full else "adapter"
        yield Part(f"{role}: {kind}", bytes_of(backbone.parameters_of(role)), key)
    for name, (module, _) in modules.items():
        if heads := head_bytes(module):
            yield Part(f"{name}: head", heads)
    for name, (_, optimizer) in modules.items():
        yield Part(f"{name}: optimizer state", optimizer_bytes(optimizer), key)


def _role_key(run: BlankRun) -> str:
    return "model.fine_tuning" if run.backbone.full else "model.lora_rank"


def _copies(run: BlankRun, extent: Extent) -> dict[str, list[Part]]:
    """By phase, what is copied of modules: their weights, and the state of their optimizers."""
    modules, found = run.algorithm.modules(), defaultdict[str, list[Part]](list)
    for kept in run.algorithm.workload(extent):
        if isinstance(kept, Kept):
            module, optimizer = modules[kept.module]
            size = bytes_of(module.own_parameters()) + optimizer_bytes(optimizer)
            found[kept.phase].append(Part(f"{kept.module}: copy to go back to", size, _role_key(run)))
    return found


def _with_copies(steps: Iterable[Step], copies: Mapping[str, Sequence[Part]]) -> Iterator[Step]:
    """The steps with the copies of their phases, and the moments in which there are two of one module.

    A new copy is there before the one that it replaces is gone, and what goes back is copied too.
    """
    for step in steps:
        yield replace(step, parts=(*step.parts, *copies.get(step.phase, ())))
    for phase, parts in copies.items():
        for part in parts:
            second = replace(part, name=f"second {part.name}")
            yield Step(phase, "copy", "", (*parts, second))


class _Steps:
    """The steps of all phases, each pretended once."""

    def __init__(self, run: BlankRun, device: Device, extent: Extent) -> None:
        self.run, self.extent, self.backbone = run, extent, run.backbone
        self.modules = run.algorithm.modules()
        model = run.config.model
        self.checkpointing = model.gradient_checkpointing
        on_cpu = device.kind == "cpu" and model.dtype == "float32"
        base = self.backbone.causal("policy" if self.backbone.full else "base")
        self.laid_out = Part("weights laid out for sampling", laid_out_bytes(base) if on_cpu else 0)
        self.gradients = {name: bytes_of(m.own_parameters()) for name, (m, _) in self.modules.items()}
        self.work = run.algorithm.workload(extent)
        mixed = run.config.fabric.precision == "bf16-mixed"
        self.pretence = Pretence(self.backbone, torch.bfloat16 if mixed else None)
        self.packed, self.device = model.quantization != "none", device
        self.merges, self.merged = self._merging()
        with self.pretence.counting():  # in the precision of passes, which is not that of sampling
            self.merges_in_passes, self.merged_in_passes = self._merging()
        self._known: dict[tuple[Pass, bool], PassMemory] = {}

    def all(self) -> Iterator[Step]:
        """In the order of the phases."""
        data, validation = self.run.config.data, self.run.config.validation
        yield self._sampling(self._collected("collect", data.conversations))
        for wanted in dict.fromkeys(self.work):
            if isinstance(wanted, Sampling):
                yield self._sampling(wanted)
            elif isinstance(wanted, Pass):
                yield self._pass(wanted)
        yield self._sampling(self._collected("validate", validation.conversations))

    def _collected(self, phase: str, conversations: int) -> Sampling:
        rows, extent = min(self.extent.rows, conversations), self.extent
        first = max(1, extent.tokens - 2 * extent.sampled_tokens)
        return Sampling(phase, rows, extent.tokens, rows * min(first, PROMPT_TOKENS))

    def _sampling(self, wanted: Sampling) -> Step:
        context = self.run.context
        found = sampling_memory(
            self.pretence, self.backbone, wanted, context.sampling, context.context_length, self.merges
        )
        parts = (
            self.merged,
            self.laid_out,
            Part("keys and values", found.cache, wanted.key),
            Part("activations", found.activations, wanted.key),
        )
        return Step(wanted.phase, "sample", f"{wanted.rows} x {wanted.tokens}", parts)

    def _pass(self, wanted: Pass) -> Step:
        merged = self.merged_in_passes if wanted.merged else Part("merged weights", 0)
        wanted = replace(wanted, merged=wanted.merged and self.merges_in_passes)
        found, activations, key = self._memory(wanted, self.checkpointing), None, wanted.key
        if wanted.trains:
            without, with_it = (self._memory(wanted, on).activations for on in (False, True))
            activations = (without, with_it)
            key = key if self.checkpointing else f"model.gradient_checkpointing, {key}"
        parts = [
            Part("activations", found.activations, key),
            Part("log-probabilities", found.logprobs, wanted.key),
            Part("weights of a layer in full", self.run.largest_layer),
            merged,
        ]
        if wanted.trains:
            parts.append(Part("gradients", self.gradients.get(wanted.module, 0)))
        name = f"{'train' if wanted.trains else 'score'} {wanted.module}"
        return Step(wanted.phase, name, f"{wanted.rows} x {wanted.tokens}", tuple(parts), activations)

    def _merging(self) -> tuple[bool, Part]:
        """Whether adapters are merged in the precision in force, and what of the base is there twice then.

        See `models.merging.merged`.
        """
        layers = (layer.get_base_layer() for layer in self.backbone.adapted_layers("policy"))
        weights = [w for layer in layers for w in layer.parameters(recurse=False) if w.dim() > 1]
        written_out = self.packed and self.device.kind == "cpu"
        merges = (written_out or not self.packed) and all(map(merges_exactly, weights))
        return merges, Part("merged weights", bytes_of(weights) if merges or written_out else 0)

    def _memory(self, wanted: Pass, checkpointing: bool) -> PassMemory:
        # Adapters are alike, so passes that differ in their names alone need the same.
        base = wanted.role == "base"
        alike = replace(wanted, phase="evaluate", module="", role="base" if base else "policy", key="")
        if (alike, checkpointing) not in self._known:
            self._known[alike, checkpointing] = pass_memory(
                self.pretence, self.backbone, alike, checkpointing
            )
        return self._known[alike, checkpointing]
