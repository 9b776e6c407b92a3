"""One frozen base, many roles: policy, reference, critic and value head share a single set of weights.

A role is a LoRA adapter on the base (or, with full fine-tuning, a model of its own). This is the only place
that knows adapters exist; everybody else asks for hidden states of a role.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from peft import LoraConfig, PeftModel, load_peft_weights
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_mtrl.errors import UserError
from lightning_mtrl.models.adapter_config import adapter_config, every_linear_layer, with_adapter
from lightning_mtrl.models.layers import evaluating, hidden_states, remove_dropout, square_mask
from lightning_mtrl.models.lean_layers import use_lean_layers
from lightning_mtrl.models.logprobs import LogitHead
from lightning_mtrl.models.merging import merged
from lightning_mtrl.models.sharding import Sharding
from lightning_mtrl.models.stored import copy_stored
from lightning_mtrl.processes import Processes


class Backbone(nn.Module):
    """A causal language model that several roles share.

    Args:
        model: the base; its weights are frozen unless `fine_tuning` is "full".
        fine_tuning: "lora": a role is an adapter. "full": a role is a copy of the model; the first one is the
            model itself, so that a policy alone needs its weights once.
        lora: configuration of new adapters; ignored with "full".
        gradient_checkpointing: trade time for memory in training passes.

    Raises:
        UserError: if the model's logits are not those of its output head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fine_tuning: str = "lora",
        lora: LoraConfig | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if fine_tuning not in ("lora", "full"):
            raise ValueError(f"fine_tuning must be 'lora' or 'full', got {fine_tuning!r}")
        self.full = fine_tuning == "full"
        self.lora = lora or every_linear_layer()
        self.roles: list[str] = []
        self._layers: list[LoraLayer] = []
        LogitHead.check(model)
        model.requires_grad_(False)
        remove_dropout(model)
        use_lean_layers(model)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        self.base: PreTrainedModel | PeftModel = model
        self.models = nn.ModuleDict()
        self.sharding = Sharding()
        self._loaded = self.sharding.changes(model)

    @property
    def config(self) -> Any:
        """Configuration of the base model."""
        return self.base.config

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.config.get_text_config().hidden_size)

    @property
    def device(self) -> torch.device:
        """Where the base lives."""
        return next(self.parameters()).device

    def add_role(
        self, role: str, like: str | None = None, trainable: bool = True, adapter: str | None = None
    ) -> None:
        """Create a role.

        A fresh role computes exactly what the base computes.

        Args:
            role: name of the new role.
            like: start as a copy of this role.
            trainable: whether its weights carry gradients.
            adapter: a peft folder to start from; its own rank counts.

        Raises:
            UserError: if the adapter was made for another base.
        """
        if role in self.roles:
            raise ValueError(f"role {role!r} exists already")
        if self.full:
            if adapter is not None:
                raise UserError(
                    f"model.adapter is {adapter!r}, but model.fine_tuning is 'full', which has no adapters. "
                    f"Merge the adapter into the model first, or use model.fine_tuning lora."
                )
            self.models[role] = self._whole_model(like)
        else:
            self._add_adapter(role, like, adapter)
        self.roles.append(role)
        if like is not None and not self.full:
            self.copy_role(like, role)
        for parameter in self.parameters_of(role):
            parameter.requires_grad_(trainable)
        if self.full:
            self.sharding.put(self.models[role])

    def keep_base(self) -> None:
        """Let "base" stay as it was loaded where the first role takes its weights over; call it before."""
        if self.full and self.models and "base" not in self.models:
            self.models["base"] = self._copied(self._as_loaded()).requires_grad_(False)
            self.sharding.put(self.models["base"])

    def shard(self, processes: Processes) -> None:
        """Share the weights of every role out, of those that are added later too; see `Sharding`."""
        if not self.full:
            raise ValueError("adapters are small, and a base that all roles share is not shared out")
        as_loaded = self.sharding.changes(self.base) == self._loaded
        self.sharding = Sharding(processes)
        for model in self.models.values():
            self.sharding.put(model)
        self._loaded = self.sharding.changes(self.base) if as_loaded else -1

    @contextmanager
    def whole(self, role: str) -> Iterator[None]:
        """A role's weights, shared out or not, are here meanwhile; all processes enter it together."""
        with self.sharding.whole(self._model_of(role)) if self.full else nullcontext():
            yield

    def hidden(
        self,
        role: str,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Tensor,
        position_ids: Int[Tensor, "B T"],
        layer: int | None = None,
    ) -> Float[Tensor, "B T H"]:
        """Hidden states of a role, before the output head.

        Args:
            role: whose weights to use.
            input_ids: token ids.
            attention_mask: [B, T] real tokens, or [B, T, T] which position looks at which.
            position_ids: position of each token in its conversation.
            layer: None for the last layer (normalised), else the output of that layer, 1 being the first.
        """
        decoder = self.causal(role).base_model
        if attention_mask.dim() == 3:
            dtype = next(self.parameters()).dtype
            attention_mask = square_mask(attention_mask, self.config._attn_implementation, dtype)
        return hidden_states(
            decoder,
            layer,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        )

    def causal(self, role: str) -> PreTrainedModel:
        """The causal language model with this role's weights active; "base" is the model without adapters."""
        self._expect(role)
        if self.full:
            model = self._model_of(role)
            if not self.sharding.is_ready(model):
                raise ValueError(f"role {role!r} is shared out; read it inside of `whole` or `sampling`")
            return cast(PreTrainedModel, model)
        for lora in self._layers:
            # peft's set_adapter also switches requires_grad, which would disturb optimizers and DDP.
            lora._active_adapter = [] if role == "base" else [role]
        base = self.base.get_base_model() if isinstance(self.base, PeftModel) else self.base
        return cast(PreTrainedModel, base)

    def logit_head(self, role: str) -> LogitHead:
        """The output head of a role."""
        return LogitHead.of(self.causal(role))

    @contextmanager
    def sampling(self, role: str) -> Iterator[PreTrainedModel]:
        """A role's language model for generation: dropout off, and the adapter merged (see `merged`)."""
        with self.whole(role):
            model = self.causal(role)
            with evaluating(model), merged([] if self.full else self._layers, role):
                yield model

    def adapted_layers(self, role: str) -> list[LoraLayer]:
        """The layers that have an adapter of a role; none with full fine-tuning."""
        return [layer for layer in self._layers if role in layer.lora_A]

    @contextmanager
    def only_trainable(self, role: str) -> Iterator[None]:
        """Only this role's weights require gradients, for the moment when a module is set up for DDP."""
        others = [p for r in self.roles if r != role for p in self.parameters_of(r) if p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def parameters_of(self, role: str) -> list[nn.Parameter]:
        """The weights that belong to a role alone."""
        return list(self.named_parameters_of(role).values())

    def named_parameters_of(self, role: str) -> dict[str, nn.Parameter]:
        """The same by name; the names do not hold the role's name."""
        if self.full:
            return dict(self.models[role].named_parameters())
        marker = f".{role}."
        return {
            name.replace(marker, ".", 1): parameter
            for name, parameter in self.base.named_parameters()
            if ".lora_" in name and marker in name
        }

    def state_of(self, role: str) -> dict[str, Tensor]:
        """A copy of a role's weights on the CPU."""
        with self.whole(role):
            return {name: p.detach().cpu().clone() for name, p in self.named_parameters_of(role).items()}

    def load_state_of(self, role: str, state: Mapping[str, Tensor]) -> None:
        """Put weights from `state_of` into a role.

        Raises:
            UserError: if names or shapes do not fit, as for an adapter of another base.
        """
        with self.whole(role):
            copy_stored(role, state, self.named_parameters_of(role))
            if self.full:
                self.sharding.keep(self.models[role])

    def copy_role(self, source: str, target: str) -> None:
        """Give `target` the weights of `source`."""
        with self.whole(source):
            self.load_state_of(target, self.named_parameters_of(source))

    def _whole_model(self, like: str | None) -> nn.Module:
        if not self.models:
            return self.base
        return self._copied(self.models[like] if like else self._as_loaded())

    def _copied(self, model: nn.Module) -> nn.Module:
        with self.sharding.whole(model):
            return copy.deepcopy(model)

    def _expect(self, role: str) -> None:
        if role != "base" and role not in self.roles:
            raise ValueError(f"unknown role {role!r}; there are {self.roles}")

    def _model_of(self, role: str) -> nn.Module:
        self._expect(role)
        return self._as_loaded() if role == "base" else self.models[role]

    def _as_loaded(self) -> nn.Module:
        """The base of full fine-tuning."""
        if "base" in self.models:
            return self.models["base"]
        if self.sharding.changes(self.base) != self._loaded:
            raise ValueError(f"the base was trained as {self.roles[0]!r}; call keep_base or add roles before")
        return self.base

    def _load_folder(self, role: str, adapter: str) -> None:
        if self.device.type == "meta":
            return  # a plan has no weights, only their shapes
        try:
            self.load_state_of(role, load_peft_weights(adapter, device="cpu"))
        except UserError as error:
            raise UserError(f"model.adapter is {adapter!r}, but {error}") from error

    def _add_adapter(self, role: str, like: str | None, adapter: str | None) -> None:
        config = self.lora
        if adapter is not None:
            config = adapter_config(adapter)
        elif like is not None:
            config = cast(LoraConfig, copy.deepcopy(cast(PeftModel, self.base).peft_config[like]))
        self.base = with_adapter(self.base, role, config)
        self._layers = [m for m in self.base.modules() if isinstance(m, LoraLayer)]
        if adapter is not None:
            self._load_folder(role, adapter)
