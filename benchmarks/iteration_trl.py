"""An engine of `iteration.py`: the same iteration of TRL's parts.

TRL's RLOO trainer takes a prompt and a completion. The completion is here the rest of a conversation of
several turns: `generate` is called once a turn with whole conversations, as TRL's loops over tools do, and
the user's replies are put in between. The trainer then computes old and reference log-probabilities and
takes one step. It would drop what follows the first end-of-turn token, so those before the last response's
are written as an ordinary token, which takes as long to train on.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback

import measuring
from engine_options import KL_COEF, LEARNING_RATE, talk_options
from lightning_mtrl.rollouts.tokens import ChatTokenizer
from rereading import generated
from talk import OPENERS, SYSTEM, Talk
from trl_settings import ENDLESS, loaded, lora, settings

ORDINARY = 1_000  # id of a token that is no end of turn


def arguments() -> argparse.Namespace:
    parser = talk_options(__doc__)
    parser.add_argument("--micro-batch", type=int, default=4)
    return parser.parse_args()


class Turns(TrainerCallback):
    """Stops the trainer between two steps until it is its turn, and says what a step took."""

    def __init__(self) -> None:
        self.turns, self.start, self.rollout, self.sampled = measuring.turns(), 0.0, 0.0, 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = time.perf_counter() - self.start
        measuring.report(
            seconds=seconds, tokens_per_second=self.sampled / seconds, peak_mib=measuring.peak_mib(),
            rollout=self.rollout, tokens=self.sampled,
        )  # fmt: skip
        self._wait()

    def _wait(self) -> None:
        if next(self.turns, None) is None:
            raise SystemExit
        measuring.give_back()
        self.start, self.rollout, self.sampled = time.perf_counter(), 0.0, 0


class Conversations:
    """Stands in for a model's `generate`: whole conversations instead of single responses."""

    generate: Any  # the model's own, once there is a trainer that has wrapped it
    lengths: list[int]  # of the completions that were given last

    def __init__(self, a: argparse.Namespace, chat: ChatTokenizer, turns: Turns) -> None:
        self.a, self.chat, self.turns = a, chat, turns

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **given: Any) -> torch.Tensor:
        start, width = time.perf_counter(), input_ids.size(1)
        held = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        ends = [len(ids) for ids in held]
        users = [Talk(self.a.turns) for _ in held]
        for number, user in enumerate(users):
            user.reset(number)
        for _ in range(self.a.turns):
            for row, new in enumerate(generated(self, held, given["generation_config"], self.chat)):
                self.turns.sampled += len(new)
                answer = users[row].step("said")
                finished = new[-1] in self.chat.end_ids
                held[row] += new + self.chat.observation_ids(
                    answer.observation, finished=finished, last=answer.terminated
                )
        longest = max(len(ids) - end for ids, end in zip(held, ends, strict=True))
        found = input_ids.new_full((len(held), width + longest), self.chat.pad_id)
        found[:, :width] = input_ids
        for row, (ids, end) in enumerate(zip(held, ends, strict=True)):
            said = [ORDINARY if token in self.chat.end_ids else token for token in ids[end:-1]]
            found[row, width : width + len(ids) - end] = torch.tensor([*said, ids[-1]])
        self.lengths = sorted(len(ids) - end for ids, end in zip(held, ends, strict=True))
        self.turns.rollout += time.perf_counter() - start
        return found

    def outcomes(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Of every second conversation 1, once it is sure that the trainer has the whole ones."""
        lengths = sorted(map(len, completion_ids))
        # Padding may begin with one end-of-turn token, which the trainer takes for the completion's.
        if any(have - given not in (0, 1) for have, given in zip(lengths, self.lengths, strict=True)):
            raise RuntimeError(f"the trainer has completions of {lengths} tokens, not of {self.lengths}")
        return [float(row % 2 == 0) for row in range(len(completion_ids))]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    a = arguments()
    model, tokenizer = loaded(a)
    turns = Turns()
    conversations = Conversations(a, ChatTokenizer(tokenizer), turns)
    prompts = [
        {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]}
        for text in OPENERS
    ]
    config = trl.RLOOConfig(
        **settings(a, LEARNING_RATE), num_generations=4, beta=KL_COEF,
        max_completion_length=a.response_tokens, max_steps=ENDLESS,
    )  # fmt: skip
    trainer = trl.RLOOTrainer(
        model=model, args=config, processing_class=tokenizer, train_dataset=Dataset.from_list(prompts * 8),
        peft_config=lora(), reward_funcs=conversations.outcomes, callbacks=[turns],
    )  # fmt: skip
    conversations.generate, trainer.model.generate = trainer.model.generate, conversations
    measuring.report(engine=f"TRL {trl.__version__}", threads=torch.get_num_threads())
    trainer.train()


if __name__ == "__main__":
    main()
