"""The settings of policy improvement in Iterative PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_mtrl.algorithms.ranges import expect, expect_above_zero, expect_at_least


@dataclass(frozen=True)
class ImprovementConfig:
    """How the policy is improved against a fixed Q.

    Attributes:
        rounds: times that fresh responses are sampled from the policy being trained, at most.
        states: logged states drawn for each round.
        samples: responses for each state; they share its prefix.
        epochs: passes over a round's responses.
        minibatch_states: states in one optimizer step.
        micro_batch_states: states in one forward pass; null for all of a step.
        learning_rate: of the policy's AdamW.
        value_learning_rate: of the value head's AdamW.
        value_clip_range: how far the value head's prediction may move from its old one until the next round,
            in units of reward; null for no limit. Rewards far beyond 1, as of `reward` "logit" or of
            outcomes on a wider scale, need more than the default, which keeps the head from following them.
        value_role: adapter of the value head: "value" for its own, "policy" to read the policy's
            hidden states.
        clip_range: half-width of the allowed probability ratio of a token.
        kl_coef: weight of the KL penalty to pi_i, in reward per nat.
        kl_in: "loss" adds the penalty to the loss; "reward" takes it off the tokens' rewards, and always by
            the estimator k1 of the reverse direction, whatever `kl_estimator` says.
        kl_estimator: per-token estimator in the loss: "k1", "k2", "k3", or with the gradient of k2 "k1+",
            "k3+".
        kl_direction: "reverse" is KL(policy || pi_i); "forward" is KL(pi_i || policy), in the loss only.
        kl_target: KL per response in nats that an adaptive `kl_coef` aims at after every round but the first,
            before which the policy is pi_i; null keeps it fixed.
        kl_ceiling: KL(policy || pi_i) per response in nats at which an iteration's improvement stops; null
            for none.
        entropy_coef: weight of the entropy bonus, in reward per nat.
        reward: "q" rewards a response with Q; "logit" with log(Q / (1 - Q)), which tells small values apart;
            not with `evaluation.loss` "mse".
        mean_over: "token": every sampled token weighs the same in the loss; "response": every response.
        max_norm: gradients are scaled down to this norm.
        max_logprob_difference: in nats; where the rollouts' log-probability of a token is farther from the
            trainer's, in a sample of each round, the trainer computes all anew; null for never.
        certificate_states: held-out states on which the gain in Q is estimated.
        accept: "improved_only" takes a step back when the gain's 95% interval reaches below zero; "always".
    """

    rounds: int = 8
    states: int = 64
    samples: int = 8
    epochs: int = 2
    minibatch_states: int = 16
    micro_batch_states: int | None = None
    learning_rate: float = 1e-5
    value_learning_rate: float = 1e-4
    value_clip_range: float | None = 0.2
    value_role: str = "policy"
    clip_range: float = 0.2
    kl_coef: float = 0.02
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    kl_direction: Literal["reverse", "forward"] = "reverse"
    kl_target: float | None = None
    kl_ceiling: float | None = 1.5
    entropy_coef: float = 0.0
    reward: Literal["q", "logit"] = "q"
    mean_over: Literal["token", "response"] = "token"
    max_norm: float = 1.0
    max_logprob_difference: float | None = 0.05
    certificate_states: int = 128
    accept: Literal["improved_only", "always"] = "improved_only"

    def __post_init__(self) -> None:
        for name in ("rounds", "states", "samples", "epochs", "minibatch_states", "micro_batch_states"):
            expect_at_least(f"improvement.{name}", getattr(self, name), 1, 8)
        expect_at_least("improvement.certificate_states", self.certificate_states, 2, 128)
        for name in ("learning_rate", "value_learning_rate", "kl_coef", "entropy_coef"):
            expect_at_least(f"improvement.{name}", getattr(self, name), 0, 1e-5)
        expect_at_least("improvement.max_logprob_difference", self.max_logprob_difference, 0, 0.05)
        for name in ("kl_target", "kl_ceiling", "max_norm", "value_clip_range"):
            expect_above_zero(f"improvement.{name}", getattr(self, name), 1.0)
        expect(0.0 < self.clip_range < 1.0, "improvement.clip_range", self.clip_range, "in (0, 1)", 0.2)
        paired = self.kl_direction == "reverse" or not self.kl_estimator.endswith("+")
        kind = 'one of k1, k2, k3 with a kl_direction of "forward"'
        expect(paired, "improvement.kl_estimator", self.kl_estimator, kind, "k3")
        kind = 'reverse with kl_in "reward", which samples of the policy estimate'
        forward_in_reward = self.kl_in == "reward" and self.kl_direction == "forward"
        expect(not forward_in_reward, "improvement.kl_direction", self.kl_direction, kind, "reverse")
        kind = "at least 2 with kl_target, since kl_coef is adapted after the first round"
        expect(self.kl_target is None or self.rounds > 1, "improvement.rounds", self.rounds, kind, 8)
        known = self.value_role in ("value", "policy")
        expect(known, "improvement.value_role", self.value_role, "one of value, policy", "policy")
