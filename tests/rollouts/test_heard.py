from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.logs import read_conversations, write_conversations
from lightning_mtrl.rollouts.results import Rollouts
from lightning_mtrl.rollouts.sampling import SamplingConfig


class Numbers:
    """A chat whose texts are numbers, each its own token."""

    system_prompt = None
    pad_id, end_ids, header_ids = 0, (1,), (2,)

    def prompt_ids(self, messages: Any) -> list[int]:
        return [2, 9, 1, 3]

    def observation_ids(self, text: str, *, finished: bool = True, last: bool = False) -> list[int]:
        return [*([] if finished else [1]), 2, 9, 1, *([] if last else [3])]

    def response_text(self, ids: Any) -> str | None:
        return " ".join(str(i) for i in ids if i != 1) or None


class Odd:
    """Ends after its second answer; in every other conversation that answer is an odd one."""

    def __init__(self, odd: dict[str, Any], facts: Any = None) -> None:
        self.odd, self.facts = odd, facts

    def reset(self, seed: int) -> Observation:
        self.left, self.is_odd = 2, seed % 2 == 1
        return Observation("x", info={"need": self.facts} if self.is_odd else {})

    def step(self, response: str | None) -> Transition:
        self.left -= 1
        usual = Transition("y", reward=0.5, terminated=self.left == 0)
        return replace(usual, **self.odd) if self.is_odd and self.left == 0 else usual


def _collected(environment: Odd) -> Rollouts:
    collector = Collector(
        environment,
        Numbers(),
        sampling=SamplingConfig(max_response_tokens=4),
        context_length=64,
        max_turns=3,
        show_progress=False,
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1)).eval()
    return collector.collect(model, conversations=8, seed=0, policy="p")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("odd", "facts", "outcome", "metadata"),
    [
        ({"terminated": np.bool_(True)}, None, 1.0, {}),
        ({"terminated": np.array(2) >= 2, "truncated": np.int64(0)}, None, 1.0, {}),
        ({"terminated": torch.tensor(True)}, None, 1.0, {}),
        ({"reward": np.float32(0.25)}, None, 0.75, {}),
        ({"reward": torch.tensor(0.25)}, None, 0.75, {}),
        ({"info": {"outcome": np.float32(0.25)}}, None, 0.25, {}),
        ({"info": {"outcome": Decimal("0.25")}}, None, 0.25, {}),
        (
            {"info": {"tokens": np.int64(4), "pivotal_turn": math.nan}},
            None,
            1.0,
            {"tokens": 4, "pivotal_turn": "nan"},
        ),
        ({"info": {"tokens": np.arange(2)}}, None, 1.0, {"tokens": [0, 1]}),
        (
            {"info": {"said": "half \ud83d"}},
            {"\ud83d": Path("x")},
            1.0,
            {"facts": {"need": {"\\ud83d": "PosixPath('x')"}}},
        ),
    ],
)
def test_what_an_environment_may_say_is_written_and_read_again(
    odd: dict[str, Any], facts: Any, outcome: float, metadata: dict[str, Any], ending: str, tmp_path: Path
) -> None:
    rollouts = _collected(Odd(odd, facts))
    assert rollouts.dropped == {}
    path = tmp_path / f"log.{ending}"
    write_conversations(path, rollouts.conversations)
    read = read_conversations(path, strict=True).conversations
    assert read == rollouts.conversations
    said = [c for c in read if c.seed % 2]
    assert {c.terminated for c in said} == {True}
    assert {c.outcome for c in said} == {outcome}
    assert all(c.metadata.items() >= metadata.items() for c in said)
    assert 0 < len(said) < len(read)


DISPOSED = "disposition is {}, which is none of accepted, edited, influenced, rejected, abstained"
ITSELF: dict[str, Any] = {}
ITSELF["itself"] = ITSELF


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        ({"info": {"sent": 5}}, "sent is neither a text nor None"),
        ({"info": {"reply": ["8"]}}, "reply is neither a text nor None"),
        ({"info": {"sent": math.nan}}, "sent is neither a text nor None"),
        ({"info": {"disposition": "ignored"}}, DISPOSED.format("'ignored'")),
        ({"info": {"disposition": np.array([1, 2])}}, DISPOSED.format("[1, 2]")),
        ({"reward": 1e300}, "reward is not a finite number"),
        ({"reward": np.array([1.0, 2.0])}, "reward is not a finite number"),
        ({"terminated": np.array([True, False])}, "ValueError"),
        ({"info": ITSELF}, "RecursionError"),
    ],
)
def test_an_answer_that_cannot_be_kept_costs_that_conversation_alone(
    odd: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    rollouts = _collected(Odd(odd))
    (dropped,) = rollouts.dropped
    assert dropped.startswith(cause)
    assert len(rollouts.conversations) + rollouts.dropped[dropped] == 8
    assert {c.seed % 2 for c in rollouts.conversations} == {0}
    for ending in ("jsonl", "parquet"):
        write_conversations(tmp_path / f"log.{ending}", rollouts.conversations)
        read = read_conversations(tmp_path / f"log.{ending}", strict=True).conversations
        assert read == rollouts.conversations
