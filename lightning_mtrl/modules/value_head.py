"""The token-level value head of PPO: the expected reward of a response that is partly written."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from lightning_mtrl import objectives
from lightning_mtrl.batch import ImprovementBatch, TokenBatch
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.precision import in_float32
from lightning_mtrl.modules.base import RoleModule, at_predecessor, scatter_to_tokens


class ValueHead(RoleModule):
    """V(state, tokens so far) at every sampled token, before it is sampled.

    It is not the multi-turn value of a state; it is the baseline of a single-turn problem.

    Args:
        backbone: the shared model.
        role: whose hidden states to read. Its own role ("value") is trained with the head; another
            module's role is only read, in that module's own passes (`Stepper.joined_by`).
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        clip_range: half-width of the clipped value loss, in units of reward; None for no clipping.
    """

    def __init__(
        self,
        backbone: Backbone,
        role: str = "value",
        learning_rate: float = 1e-4,
        weight_decay: float = 0.0,
        clip_range: float | None = 0.2,
    ) -> None:
        super().__init__(backbone, role, learning_rate, weight_decay, owns_role=role not in backbone.roles)
        self.clip_range = clip_range
        self.head = nn.Linear(backbone.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Value at each sampled token, 0 elsewhere; float32 in mixed precision too."""
        return self._values(self.hidden(batch), batch)

    def training_step(self, batch: ImprovementBatch, batch_idx: int = 0) -> Float[Tensor, ""]:
        """Clipped squared error against the returns, weighted like the policy's loss."""
        return self.loss(self.hidden(batch), batch)

    def loss(self, hidden: Float[Tensor, "B T H"], batch: ImprovementBatch) -> Float[Tensor, ""]:
        """The same from hidden states of the role that are there already."""
        losses = objectives.value_loss(
            self._values(hidden, batch), batch.values, batch.returns, self.clip_range, batch.response_mask
        )
        loss = (batch.loss_weights * losses).sum()
        share = batch.loss_weights.sum().clamp(min=1e-12)
        self.log_metrics("value", {"loss": loss.detach() / share}, weight=share)
        return loss

    def _values(self, hidden: Float[Tensor, "B T H"], batch: TokenBatch) -> Float[Tensor, "B T"]:
        read = at_predecessor(hidden, batch)
        return scatter_to_tokens(in_float32(self.head, read).squeeze(-1), batch)
