"""Iterative PPO: fit Q of the deployed policy, then improve it by single-turn RL against that Q.

Jiang, Bhandari, Yang, Munos and Lu 2025, "Aligning LLMs Toward Multi-Turn Conversational Outcomes Using
Iterative PPO" (arXiv:2511.21638), Algorithm 1:

    for i = 0, 1, 2, ...
        collect conversations of pi_i                                 (the loop does this)
        fit Q_i to the returns of its responses                       `evaluate`
        pi_{i+1} <- token-level PPO on the logged states, reward Q_i  `improve`
        stop when Q_i has stopped changing                            `converged`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_mtrl import ranges
from lightning_mtrl.algorithms.base import Algorithm, Context, Improvement, Signal
from lightning_mtrl.algorithms.coverage import coverage
from lightning_mtrl.algorithms.critic_inputs import CriticInputs, critic_passes, predict
from lightning_mtrl.algorithms.diagnostics import describe_critic, diagnose
from lightning_mtrl.algorithms.estimators import GAE, GRPO, RLOO, AdvantageEstimator, idle_of_values
from lightning_mtrl.algorithms.improvement_config import ImprovementConfig
from lightning_mtrl.algorithms.off_policy_targets import fit_targets, off_policy_passes
from lightning_mtrl.algorithms.policy_evaluation import EvaluationConfig, fit_critic, why_untrusted
from lightning_mtrl.algorithms.policy_improvement import SingleTurnImprover
from lightning_mtrl.algorithms.ranges import expect
from lightning_mtrl.algorithms.round_passes import round_passes
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.figures import calibration_figure
from lightning_mtrl.idle_keys import Idle
from lightning_mtrl.modules.base import RoleModule
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.q_losses import q_loss
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.modules.workload import Extent, Kept, Work
from lightning_mtrl.rollouts.datamodule import State

# Added to a phase's seed, which is below it: the certificate's samples are not those of any round.
CERTIFICATE_STREAM = 2**31


class IterativePPO(Algorithm):
    """Multi-turn policy iteration with a Q-critic and single-turn PPO.

    It is not on-policy within a step: no environment is touched while the policy improves.

    Args:
        evaluation: how the Q-critic is fitted.
        improvement: how the policy is improved.
        estimator: `GAE` (PPO with a value head), `RLOO`, `GRPO`, or a class of your own; Theorem 1 holds for
            any of them.
    """

    turn_value_name = "Q"
    learns_from_logs = True

    def __init__(
        self,
        # Frozen, so they can be shared; a union with None would hide what is wrong in a configuration.
        evaluation: EvaluationConfig = EvaluationConfig(),  # noqa: B008
        improvement: ImprovementConfig = ImprovementConfig(),  # noqa: B008
        estimator: AdvantageEstimator | None = None,
    ) -> None:
        self.evaluation, self.improvement = evaluation, improvement
        self.takes_returns = evaluation.target == "sarsa"
        self.estimator = estimator or GAE()
        samples, compares = self.improvement.samples, isinstance(self.estimator, (RLOO, GRPO))
        kind = f"at least 2 with {type(self.estimator).__name__}, which compares the responses of a state"
        expect(samples > 1 or not compares, "improvement.samples", samples, kind, 8)
        bounded = self.returns == (0.0, 1.0)
        kind = f"q with evaluation.loss {evaluation.loss}, whose Q need not lie between 0 and 1"
        reward = self.improvement.reward
        expect(reward != "logit" or bounded, "improvement.reward", reward, kind, "q")
        self._probe: list[Conversation] = []
        self._probe_q: list[float] = []
        self._changes: list[float] = []

    @property
    def gamma(self) -> float:
        """Discount for each response; it enters evaluation only, improvement is a bandit."""
        return self.evaluation.gamma

    @property
    def returns(self) -> tuple[float, float] | None:
        """Range of the returns that the critic's loss is for."""
        return q_loss(self.evaluation.loss).returns

    def idle(self) -> list[Idle]:
        """Settings of a value head that there is none of."""
        return idle_of_values("algorithm.init_args.improvement", self.improvement, self.estimator)

    def setup(self, context: Context) -> None:
        """Create critic, policy, value head and the reference role (a frozen copy of pi_i)."""
        self.context = context
        e, i = self.evaluation, self.improvement
        backbone = context.backbone
        layers = int(backbone.config.get_text_config().num_hidden_layers)
        kind = f"at most {layers}, the number of the model's layers"
        expect(e.layer is None or e.layer <= layers, "evaluation.layer", e.layer, kind, layers)
        share = context.datamodule.validation_share
        ranges.expect(share > 0, "data.validation_share", share, "above 0, to measure the Q-critic", 0.2)
        backbone.add_role("reference", like="policy", trainable=False)
        self.critic = QCritic(
            backbone,
            e.loss,
            e.gamma,
            e.td_lambda,
            e.read,
            e.layer,
            e.learning_rate,
            e.weight_decay,
            trunk=e.trunk,
            head_units=e.head_units,
        )
        kl = KLTerm(i.kl_coef, i.kl_estimator, i.kl_direction)
        self.policy = Policy(backbone, i.clip_range, kl, i.entropy_coef, i.learning_rate)
        self.critic_stepper = Stepper(context, self.critic, e.max_norm, e.micro_batch_size)
        self.policy_stepper = Stepper(context, self.policy, i.max_norm, i.micro_batch_states)
        self.value_stepper = None
        if self.estimator.needs_values:
            clip = i.value_clip_range
            value = ValueHead(backbone, i.value_role, i.value_learning_rate, clip_range=clip)
            self.value_stepper = Stepper(context, value, i.max_norm, i.micro_batch_states)
        self.improver = SingleTurnImprover(
            i, self.estimator, self.critic, self.policy_stepper, self.value_stepper, context
        )

    def evaluate(self, rollouts: list[Conversation]) -> Signal:
        """EVALUATE: regress Q_i(s, a) on the returns G of pi_i's responses, Monte Carlo by default."""
        self.inputs = CriticInputs(self.critic, self.context)
        targets = fit_targets(self.inputs, self.evaluation)
        report = fit_critic(self.inputs, self.critic_stepper, self.evaluation, targets)
        metrics = {**report.metrics(), **targets.metrics(), "q_change": self._q_change()}
        data = self.context.datamodule
        reason = why_untrusted(report, [*data.train_conversations, *data.validation_conversations])
        return Signal(metrics, report.beats_constant, reason, {"calibration": calibration_figure(report)})

    def improve(self, rollouts: list[Conversation], signal: Signal) -> Improvement:
        """IMPROVE: token-level RL on D_single, with Q_i at the end of a response as its reward."""
        context, data = self.context, self.context.datamodule
        context.backbone.copy_role("policy", "reference")
        held_out = self._drawn(data.states(data.validation_conversations))
        before = self.improver.sample(held_out, context.seed + CERTIFICATE_STREAM, role="reference")
        context.say(diagnose(before, signal, self.inputs))
        if not signal.trusted:
            context.say(f"No step is taken: {signal.reason}.")
            return Improvement({}, accepted=False)
        improved = [stepper for stepper in (self.policy_stepper, self.value_stepper) if stepper is not None]
        learned, kl_coef = [stepper.learned() for stepper in improved], self.improver.kl_coef
        metrics = self.improver.run(data.states(data.train_conversations))
        after = self.improver.sample(held_out, context.seed + CERTIFICATE_STREAM)
        gain, low, high = self.improver.gain(before, after)
        # A round's own KL is that before its steps; these responses are the improved policy's.
        metrics |= {"kl": self.improver.kl(after), "gain": gain, "gain_low": low, "gain_high": high}
        found = coverage(self.improver, before, after, self.inputs)
        context.say(found.text(context.iteration))
        metrics |= found.metrics()
        accepted = self.improvement.accept == "always" or low > 0
        if not accepted:
            context.say(
                f"The step is taken back: its gain in Q is {gain:z.4f}, "
                f"95% interval {low:z.4f} to {high:z.4f}."
            )
            for stepper, before_it in zip(improved, learned, strict=True):
                stepper.go_back(before_it)
            self.improver.kl_coef = kl_coef
        return Improvement({**metrics, "accepted": float(accepted)}, accepted)

    def describe(self, signal: Signal) -> str:
        """How good the Q-critic is on held-out conversations."""
        return describe_critic(signal, self.inputs)

    def converged(self, signal: Signal) -> bool:
        """True when Q has changed by less than the tolerance in two iterations in a row."""
        tolerance = self.evaluation.tolerance
        return len(self._changes) >= 2 and all(change < tolerance for change in self._changes[-2:])

    def modules(self) -> dict[str, tuple[RoleModule, Any]]:
        """Critic and policy, and the value head where the estimator has one."""
        steppers = {"critic": self.critic_stepper, "policy": self.policy_stepper, "value": self.value_stepper}
        return {name: (s.module.module, s.optimizer) for name, s in steppers.items() if s is not None}

    def workload(self, extent: Extent) -> list[Work]:
        """The critic reads whole conversations; the policy a state and its responses in one row."""
        rows = self.evaluation.micro_batch_size or extent.batch_size
        return [
            *critic_passes(self.critic, extent, rows, "evaluation.micro_batch_size"),
            *off_policy_passes(self.critic, self.evaluation, extent),
            *round_passes(self.improvement, self.critic, self.improver.value, extent),
            *(Kept("improve", name) for name in self.modules() if name != "critic"),
        ]

    def state(self) -> dict[str, Any]:
        """The fixed set of turns, Q on it, and how it has changed."""
        return {
            "probe": [c.to_json() for c in self._probe],
            "probe_q": self._probe_q,
            "changes": self._changes,
            "kl_coef": self.improver.kl_coef,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put `state` back."""
        self._probe = [Conversation.from_json(record) for record in state["probe"]]
        self._probe_q, self._changes = list(state["probe_q"]), list(state["changes"])
        self.improver.kl_coef = state["kl_coef"]

    def turn_values(self, conversations: list[Conversation]) -> list[list[float]]:
        """Q of each turn."""
        return [values.tolist() for values in predict(CriticInputs(self.critic, self.context), conversations)]

    def _q_change(self) -> float:
        """Mean |Q_i - Q_{i-1}| on turns of the first iteration's held-out conversations; NaN at first."""
        if not self._probe:
            self._probe = self.context.datamodule.validation_conversations[:64]
        q = torch.cat(predict(self.inputs, self._probe)).tolist()
        change = float("nan")
        if self._probe_q:
            change = sum(abs(a - b) for a, b in zip(q, self._probe_q, strict=True)) / len(q)
            self._changes.append(change)
        self._probe_q = q
        return change

    def _drawn(self, states: Sequence[State]) -> list[State]:
        generator = torch.Generator().manual_seed(self.context.seed)
        order = torch.randperm(len(states), generator=generator)[: self.improvement.certificate_states]
        return [states[place] for place in order.tolist()]
