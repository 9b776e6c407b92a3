"""An engine of `training.py`: one optimisation step of ours on whole conversations.

It is the product's own step: `collate`, the check of the rollouts' log-probabilities, advantages, and
`Policy` in a `Stepper`; with `--algorithm ppo` also what TRL's PPO does in a step: log-probabilities of pi_0,
values, GAE, and a step of the value head, which has a role of its own, or with `--value-role policy`, our
default elsewhere, reads the policy's hidden states. The checked log-probabilities serve as old ones.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from lightning.fabric import Fabric
from torch import Tensor

import measuring
from engine_options import training_options
from lightning_mtrl import objectives
from lightning_mtrl.algorithms.agreement import BehaviourCheck
from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.conversation_estimators import GAE, GRPO, RLOO
from lightning_mtrl.algorithms.passes import of_similar_length, role_logprobs, token_values
from lightning_mtrl.algorithms.stepping import Stepper, begin
from lightning_mtrl.assembly import build_backbone
from lightning_mtrl.batch import ConversationBatch, ImprovementBatch, collate
from lightning_mtrl.config import ModelConfig
from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.credit.base import conversation_ends
from lightning_mtrl.modules.policy import Policy
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.sampling import SamplingConfig

TURNS = 5
LOW, HIGH = 100, 40_000  # ids of ordinary tokens


def arguments() -> argparse.Namespace:
    parser = training_options(__doc__, micro_batch=1)
    parser.add_argument("--value-role", choices=["value", "policy"], default="value")
    return parser.parse_args()


def conversations(number: int, tokens: int, scored: int, header: tuple[int, ...]) -> list[Conversation]:
    """Random conversations of five turns with so many tokens, of which so many are sampled ones."""
    rng = random.Random(0)

    def said(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(LOW, HIGH) for _ in range(length))

    response, heard = scored // TURNS, max(len(header), (tokens - scored) // (2 * (TURNS - 1)))
    prompt = tokens - scored - (TURNS - 1) * heard
    first, found = (Message("user", "x"),), []
    for row in range(number):
        turns = tuple(
            Turn(
                "said", "heard" if turn < TURNS - 1 else "", response_ids=said(response),
                behaviour_logprobs=(-11.0,) * response,
                observation_ids=(*header, *said(heard - len(header))) if turn < TURNS - 1 else (),
            )
            for turn in range(TURNS)
        )  # fmt: skip
        ids = said(prompt)
        found.append(Conversation(str(row), first, turns, rng.random(), group=row // 4, prompt_ids=ids))
    return found


def with_logprobs(conversation: Conversation, values: Tensor) -> Conversation:
    """Random tokens as if the policy had drawn them: with its log-probabilities."""
    turns, place = [], len(conversation.prompt_ids)
    for turn in conversation.turns:
        end = place + len(turn.response_ids)
        turns.append(replace(turn, behaviour_logprobs=tuple(values[place:end].tolist())))
        place = end + len(turn.observation_ids)
    return replace(conversation, turns=tuple(turns))


class Trainer:
    """Policy, and for PPO pi_0 and a value head, on one backbone."""

    def __init__(self, a: argparse.Namespace) -> None:
        backbone, chat = build_backbone(ModelConfig(name=a.model, fine_tuning=a.fine_tuning, dtype=a.dtype))
        fabric = Fabric(accelerator="auto", devices=1)
        fabric.launch()
        backbone.to(fabric.device)
        data = RolloutDataModule(tokenizer=chat)
        self.context = Context(fabric, backbone, chat, data, SamplingConfig(), context_length=2 * a.tokens)
        self.backbone, self.micro_batch = backbone, a.micro_batch
        if a.algorithm == "ppo":
            backbone.add_role("initial", like="policy", trainable=False)
        # The same rollouts serve all steps, so the policy must stay the one that they are from.
        policy = Policy(backbone, learning_rate=1e-9)
        self.policy = Stepper(self.context, policy, 1.0, a.micro_batch)
        # One conversation of eight is what 16 of an iteration's 128 are.
        self.check = BehaviourCheck(self.context, policy, 0.05, max(1, a.conversations // 8))
        self.steppers = [self.policy]
        if a.algorithm == "ppo":
            self.value = Stepper(self.context, ValueHead(backbone, a.value_role), 1.0, a.micro_batch)
            self.steppers = self.policy.joined_by(self.value)
        talks = conversations(a.conversations, a.tokens, a.scored, tuple(chat.header_ids))
        batch = collate(talks, chat.pad_id, chat.header_ids)
        self.talks = [
            with_logprobs(talk, values)
            for talk, values in zip(talks, role_logprobs("policy", batch, self.context), strict=True)
        ]

    def step(self, prepare: Callable[[ConversationBatch], ImprovementBatch]) -> None:
        """One optimizer step on all conversations."""
        chat = self.context.chat
        rollouts = collate(self.talks, chat.pad_id, chat.header_ids)
        rollouts, _ = self.check.agreed(rollouts, lambda some: of_similar_length(some, self.micro_batch))
        batch = prepare(rollouts)
        begin(self.steppers)
        for stepper in self.steppers:
            stepper.step(batch, of_similar_length)

    def compared(self, batch: ConversationBatch, estimator: RLOO | GRPO) -> ImprovementBatch:
        """Each outcome against those of its group; the KL term is off, as in the peer."""
        zeros = torch.zeros_like(batch.behaviour_logprobs)
        last = conversation_ends(batch)
        rewards = torch.where(last, batch.outcome[:, None], 0.0)
        advantages, returns = estimator.estimate(rewards, last, zeros, batch.turn_index, batch.group)
        return improvement(batch, zeros, advantages, returns, zeros)

    def valued(self, batch: ConversationBatch) -> ImprovementBatch:
        """GAE on outcome and KL to pi_0, as in the peer."""
        reference = role_logprobs("initial", batch, self.context)
        value = self.value.module.module
        values = token_values(value, value.role, batch, self.context)
        outcome = torch.where(conversation_ends(batch), batch.outcome[:, None], 0.0)
        kl = torch.where(batch.response_mask, batch.behaviour_logprobs - reference, 0.0)
        advantages, returns = GAE(gae_lambda=0.95).estimate(
            outcome - 0.05 * kl, batch.response_mask, values, batch.turn_index, batch.group
        )
        return improvement(batch, reference, advantages, returns, values)


def improvement(
    batch: ConversationBatch, reference: Tensor, advantages: Tensor, returns: Tensor, values: Tensor
) -> ImprovementBatch:
    shared = {f.name: getattr(batch, f.name) for f in fields(ImprovementBatch) if hasattr(batch, f.name)}
    weights = objectives.token_weights(batch.response_mask)
    return ImprovementBatch(
        **shared,
        reference_logprobs=reference,
        advantages=advantages,
        returns=returns,
        values=values,
        loss_weights=weights,
    )


def main() -> None:
    a = arguments()
    trainer = Trainer(a)
    prepare = {
        "rloo": lambda batch: trainer.compared(batch, RLOO()),
        "grpo": lambda batch: trainer.compared(batch, GRPO()),
        "ppo": trainer.valued,
    }[a.algorithm]
    tokens = a.conversations * a.tokens  # the header after a last response, which we read too, is not counted
    scored = sum(len(turn.response_ids) for talk in trainer.talks for turn in talk.turns)
    measuring.report(engine="lightning_mtrl", threads=torch.get_num_threads(), tokens=tokens, scored=scored)
    for _ in measuring.turns():
        measuring.give_back()
        start, worked = time.perf_counter(), time.process_time()
        trainer.step(prepare)
        seconds, cpu = time.perf_counter() - start, time.process_time() - worked
        peak = measuring.peak_mib()
        measuring.report(seconds=seconds, cpu_seconds=cpu, tokens_per_second=tokens / seconds, peak_mib=peak)


if __name__ == "__main__":
    main()
