"""The implicit process reward model: rewards of turns and tokens from a log-ratio, learned from outcomes."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.batch import ConversationBatch, ReferencedBatch, TokenBatch
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.modules.base import RatioModule, scored_logprobs
from lightning_mtrl.modules.prm_losses import PRMLoss, prm_loss


class ImplicitPRM(RatioModule):
    """A language model pi_phi for which beta log(pi_phi / pi_0) of a conversation predicts its outcome.

    It is not a reward head: there is no output but the language model's own. Both models start as pi_0, the
    role `start` at the moment of construction, never the bare base; so all rewards are 0 before training.
    Both are read in the same precision and without dropout, so that equal weights give equal numbers.

    Args:
        backbone: the shared model, with the role `start`.
        beta: reward per nat of log-ratio, above 0. Published: 5e-3 to 5e-2 (full fine-tuning).
        loss: "ce" for outcomes in [0, 1], soft ones too; "pairwise" for outcomes that are only compared
            inside a group; or a loss of your own.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        role: name of pi_phi.
        reference: name of pi_0, frozen; made if the backbone lacks it.
        start: role that both begin as.

    Attributes:
        latest_scores: conversation id -> trajectory score when it was last trained on, before that step; so
            after one pass over fresh conversations these are predictions.

    Raises:
        ValueError: if beta is not above 0, or the backbone lacks `start`.

    Source: "Free Process Rewards without Process Labels" (arXiv:2412.01981); ITPO (arXiv:2603.23550).
    """

    def __init__(
        self,
        backbone: Backbone,
        beta: float = 0.05,
        loss: str | PRMLoss = "ce",
        learning_rate: float = 1e-5,
        weight_decay: float = 0.0,
        role: str = "prm",
        reference: str = "initial",
        start: str = "policy",
    ) -> None:
        if not beta > 0:
            raise ValueError(f"beta is {beta}, but a reward model needs a scale above 0")
        if start not in backbone.roles:
            raise ValueError(f"the backbone has no role {start!r} to start from; it has {backbone.roles}")
        for name, trainable in ((reference, False), (role, True)):
            if name not in backbone.roles:
                backbone.add_role(name, like=start, trainable=trainable)
        super().__init__(backbone, role, learning_rate, weight_decay)
        self.beta, self.reference = beta, reference
        self.objective = prm_loss(loss) if isinstance(loss, str) else loss
        self.latest_scores: dict[str, float] = {}

    def forward(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """U = log pi_phi - log pi_0 in nats of each sampled token; 0 elsewhere.

        Source: ITPO (arXiv:2603.23550), the token reward without beta.
        """
        # pi_0 goes first: a backward pass that computes activations again needs pi_phi's role in force.
        reference = self.reference_logprobs(batch)
        return scored_logprobs(self.backbone, self.role, batch) - reference

    @torch.no_grad()
    def reference_logprobs(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Log pi_0 of each sampled token, taken from the batch where it has been scored already."""
        if isinstance(batch, ReferencedBatch):
            return batch.reference_logprobs
        return scored_logprobs(self.backbone, self.reference, batch)

    def scores(self, batch: TokenBatch) -> Float[Tensor, " B"]:
        """Beta times the summed log-ratio of each conversation: the logit of its outcome."""
        return objectives.trajectory_scores(self(batch), batch.response_mask, self.beta)

    def rewards(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Beta u of each sampled token; no gradient."""
        with torch.no_grad():
            return objectives.implicit_rewards(self(batch), batch.response_mask, self.beta)

    def training_step(self, batch: ConversationBatch, batch_idx: int = 0) -> Float[Tensor, ""]:
        """Loss of trajectory scores against outcomes, in nats."""
        scores = self.scores(batch)
        self.latest_scores.update(zip(batch.ids, scores.detach().tolist(), strict=True))
        loss = self.objective(scores, batch)
        # A part of a step has a part of its loss; what is logged is the mean over the part.
        share = 1.0 if self.objective.whole_step else batch.conversation_weights.sum()
        self.log_metrics("prm", {"loss": loss.detach() / share}, weight=share)
        return loss

    def validation_step(self, batch: ConversationBatch, batch_idx: int = 0) -> None:
        """The same loss on held-out conversations; over an epoch each of them weighs the same."""
        loss = self.objective(self.scores(batch), batch)
        self.log_metrics("prm", {"validation_loss": loss}, weight=int((batch.conversation_weights > 0).sum()))
