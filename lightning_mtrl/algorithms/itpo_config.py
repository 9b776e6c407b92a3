"""The settings of ITPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_mtrl.algorithms.mixing import MixingConfig
from lightning_mtrl.algorithms.ranges import expect, expect_above_zero, expect_at_least
from lightning_mtrl.modules.surrogate import ClipTerm, RatioUnit


@dataclass(frozen=True)
class ITPOConfig(MixingConfig):
    """What is rewarded (see `MixingConfig`), and how the policy steps on it.

    Attributes:
        epochs: passes over the conversations of an iteration.
        minibatch_groups: groups in one optimizer step. Published: 4 groups of 8.
        micro_batch_size: conversations in one forward pass, at most; null for as many as are of similar
            length.
        learning_rate: of the policy's AdamW. Published: 1e-6 or 5e-7, with full fine-tuning.
        value_learning_rate: of the value head's AdamW, with GAE. Published: 1e-5.
        value_clip_range: how far the value head's prediction may move from its old one in an iteration, in
            units of reward; null for no limit. Rewards far beyond 1 need more than the default, which
            keeps the head from following them.
        value_role: adapter of the value head: "value" for its own, "policy" to read the policy's hidden
            states.
        ratio: whose probability ratio is clipped: "token", as in the released code; "turn_product" or
            "turn_geometric" for a whole response, as the paper argues; "sequence" for the conversation.
        mean_over: "token", "response" or "conversation": which of them weigh the same in the loss; null for
            the unit of the ratio.
        clip_range: how far below 1 a ratio is followed; and above 1 too without `clip_range_high`.
        clip_range_high: how far above 1; null for as far as below.
        dual_clip: limit above 1 on the ratio of a negative advantage; null for none. Released code: 3.
        token_gradient: a response's ratio passes its gradient to each token with that token's own advantage.
        kl_coef: weight of the KL penalty to pi_0, the initial policy. Published: 1e-3.
        kl_estimator: per-token estimator: "k1", "k2", "k3" (published), or with the gradient of k2 "k1+",
            "k3+".
        entropy_coef: weight of the entropy bonus. Published: 1e-3.
        max_norm: gradients are scaled down to this norm.
        max_logprob_difference: in nats; where the rollouts' log-probability of a token is farther from the
            trainer's, in a sample of each iteration, the trainer computes all anew; null for never.
    """

    epochs: int = 1
    minibatch_groups: int = 4
    micro_batch_size: int | None = None
    learning_rate: float = 1e-5
    value_learning_rate: float = 1e-4
    value_clip_range: float | None = 0.2
    value_role: Literal["value", "policy"] = "policy"
    ratio: RatioUnit = "token"
    mean_over: Literal["token", "response", "conversation"] | None = None
    clip_range: float = 0.2
    clip_range_high: float | None = None
    dual_clip: float | None = 3.0
    token_gradient: bool = False
    kl_coef: float = 1e-3
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    entropy_coef: float = 1e-3
    max_norm: float = 1.0
    max_logprob_difference: float | None = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "minibatch_groups", "micro_batch_size"):
            expect_at_least(f"settings.{name}", getattr(self, name), 1, 4)
        for name in ("learning_rate", "value_learning_rate", "kl_coef", "entropy_coef"):
            expect_at_least(f"settings.{name}", getattr(self, name), 0, 1e-5)
        expect_above_zero("settings.max_norm", self.max_norm, 1.0)
        expect_above_zero("settings.value_clip_range", self.value_clip_range, 0.2)
        expect_at_least("settings.max_logprob_difference", self.max_logprob_difference, 0, 0.05)
        expect(0.0 < self.clip_range < 1.0, "settings.clip_range", self.clip_range, "in (0, 1)", 0.2)
        expect_above_zero("settings.clip_range_high", self.clip_range_high, 0.28)
        limit = self.dual_clip
        expect(limit is None or limit > 1.0, "settings.dual_clip", limit, "above 1, or null", 3.0)

    @property
    def clip(self) -> ClipTerm:
        """The clipped surrogate."""
        return ClipTerm(
            self.clip_range, self.clip_range_high, self.dual_clip, self.ratio, self.token_gradient
        )
