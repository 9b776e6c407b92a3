from __future__ import annotations

import asyncio
import inspect
import io
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from small_models import small_backbone
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mtrl.batch import collate
from lightning_mtrl.conversation import Conversation, Message
from lightning_mtrl.environments.protocol import Environment, Observation, Transition
from lightning_mtrl.errors import UserError
from lightning_mtrl.evaluation.validate import figures_of
from lightning_mtrl.processes import Processes
from lightning_mtrl.rollouts.behaviour import coverage_of
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.environment_calls import PendingCalls
from lightning_mtrl.rollouts.logs import read_conversations, write_conversations
from lightning_mtrl.rollouts.policy_server import PolicyServer
from lightning_mtrl.rollouts.progress import CollectionProgress
from lightning_mtrl.rollouts.results import Rollouts, Share, TooManyFailures
from lightning_mtrl.rollouts.sampling import SamplingConfig
from lightning_mtrl.runs.texts import policy_line

PAD, END, USER, BOT, SYSTEM = range(5)


class NumberChat:
    """Texts are numbers, each its own token; every message is a marker, numbers, and the end."""

    system_prompt: str | None = None
    pad_id = PAD
    end_ids = (END,)
    header_ids = (USER,)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        marker = {"system": SYSTEM, "user": USER}
        ids: list[int] = []
        for message in messages:
            ids += [marker[message.role], *(int(n) for n in message.content.split()), END]
        return [*ids, BOT]

    def observation_ids(self, text: str, *, finished: bool = True, last: bool = False) -> list[int]:
        said = [USER, *(int(n) for n in text.split()), END] if text else []
        return [*([] if finished else [END]), *said, *([] if last else [BOT])]

    def response_text(self, ids: Sequence[int]) -> str | None:
        return " ".join(str(i) for i in ids if i != END) or None


class Dialogue:
    """Ends after some turns that depend on the seed; echoes the length of the response."""

    def __init__(self, turns: int = 0, system: str | None = None) -> None:
        self.turns = turns
        self.system = system

    def reset(self, seed: int) -> Observation:
        self.left = self.turns or 1 + seed % 4
        return Observation(f"{10 + seed % 9} 9", system=self.system, info={"seed": seed})

    def step(self, response: str | None) -> Transition:
        self.left -= 1
        size = len((response or "").split())
        ended = self.left == 0
        info = {"sent": "7", "reply": "8", "disposition": "edited", "size": size}
        return Transition(f"{5 + size} 6", reward=0.25, terminated=ended, info=info)


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def _collector(environment: Environment, chat: NumberChat | None = None, **settings: Any) -> Collector:
    sampling = SamplingConfig(**{"max_response_tokens": 5, **settings.pop("sampling", {})})
    settings = {"context_length": 120, "max_turns": 6, "show_progress": False, **settings}
    return Collector(environment, chat or NumberChat(), sampling=sampling, **settings)


def _said(conversations: list[Conversation]) -> list[Any]:
    return [
        (c.id, c.seed, c.prompt_ids, [(t.response_ids, t.observation_ids) for t in c.turns])
        for c in conversations
    ]


def test_equal_seeds_give_equal_bytes_and_other_seeds_other_conversations() -> None:
    collector, model = _collector(Dialogue(), rows=7), _model()
    runs = [collector.collect(model, conversations=30, seed=s, policy="p").conversations for s in (3, 3, 4)]
    first, again, other = (json.dumps([c.to_json() for c in run]) for run in runs)
    assert first == again
    assert first != other


def test_an_environment_that_cannot_be_copied_is_told() -> None:
    class Locked(Dialogue):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    with pytest.raises(UserError, match=r"Locked cannot be copied .*lock"):
        _collector(Locked()).collect(_model(), conversations=3, seed=0, policy="p")


def test_what_is_said_does_not_depend_on_the_number_of_rows() -> None:
    model = _model()
    runs = [
        _collector(Dialogue(), rows=rows).collect(model, conversations=40, seed=1, policy="p").conversations
        for rows in (1, 6, 256)
    ]
    assert _said(runs[0]) == _said(runs[1]) == _said(runs[2])
    assert [c.id for c in runs[1]] == [f"p-{i:05d}" for i in range(40)]
    assert {len(c.turns) for c in runs[1]} == {1, 2, 3, 4}


def test_two_halves_are_the_whole() -> None:
    collector, model = _collector(Dialogue(), rows=4, group_size=2), _model()
    whole = collector.collect(model, conversations=12, seed=1, policy="p").conversations
    halves = [collector.collect(model, conversations=6, seed=1, policy="p", first=i) for i in (0, 6)]
    assert _said(whole) == _said(halves[0].conversations + halves[1].conversations)


def test_kept_logprobs_are_those_of_one_plain_forward_over_the_conversation() -> None:
    model = _model()
    settings = {"temperature": 0.7, "top_p": 0.9}
    collector = _collector(Dialogue(), rows=5, sampling=settings, explore_share=0.5, explore_temperature=3.0)
    rollouts = collector.collect(model, conversations=20, seed=2, policy="p")
    assert rollouts.tokens == sum(len(t.response_ids) for c in rollouts.conversations for t in c.turns)
    for c in rollouts.conversations:
        ids = c.token_ids()
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        position = len(c.prompt_ids)
        for turn in c.turns:
            right = [float(logprobs[position + i - 1, token]) for i, token in enumerate(turn.response_ids)]
            assert turn.behaviour_logprobs == pytest.approx(right, abs=1e-4)
            position += len(turn.response_ids) + len(turn.observation_ids)
        assert position == len(ids)


def test_a_group_shares_the_start_and_not_the_sampling() -> None:
    collector = _collector(Dialogue(), rows=5, group_size=4)
    conversations = collector.collect(_model(), conversations=12, seed=0, policy="p").conversations
    for group in range(3):
        members = conversations[4 * group : 4 * group + 4]
        assert {c.group for c in members} == {group}
        assert len({(c.seed, c.prompt_ids) for c in members}) == 1
        assert len({c.turns[0].response_ids for c in members}) > 1
    assert len({c.seed for c in conversations}) == 3


def test_facts_of_the_environment_are_kept_where_they_belong() -> None:
    conversation = (
        _collector(Dialogue(2)).collect(_model(), conversations=1, seed=0, policy="p").conversations[0]
    )
    turn = conversation.turns[0]
    assert (turn.sent, turn.reply, turn.disposition) == ("7", "8", "edited")
    assert dict(turn.info) == {"size": len((turn.response or "").split())}
    assert conversation.metadata == {"facts": {"seed": conversation.seed}}
    assert (conversation.outcome, conversation.terminated, conversation.truncated) == (0.5, True, False)
    assert conversation.prompt == (Message("user", conversation.prompt[0].content),)


class Ending(Dialogue):
    """Ends at the second turn in the way that is asked for."""

    def __init__(self, **last: Any) -> None:
        super().__init__(99)
        self.last = last

    def step(self, response: str | None) -> Transition:
        step = super().step(response)
        return replace(step, **self.last) if self.left == 97 else step


@pytest.mark.parametrize(
    ("last", "outcome", "terminated", "turns"),
    [
        ({"terminated": True}, 0.5, True, 2),
        ({"terminated": True, "info": {"outcome": 0.125}}, 0.125, True, 2),
        ({"truncated": True}, None, False, 2),
        ({"truncated": True, "info": {"outcome": 0.75}}, 0.75, False, 2),
        ({"truncated": True, "info": {"outcome": math.nan}}, None, False, 2),
        ({}, None, False, 6),
    ],
)
def test_an_outcome_is_given_or_summed_and_unknown_after_a_limit(
    last: dict[str, Any], outcome: float | None, terminated: bool, turns: int
) -> None:
    rollouts = _collector(Ending(**last)).collect(_model(), conversations=3, seed=0, policy="p")
    assert rollouts.truncated == 3 * (not terminated)
    for c in rollouts.conversations:
        assert (c.outcome, c.terminated, c.truncated, len(c.turns)) == (
            outcome,
            terminated,
            not terminated,
            turns,
        )
        assert c.turns[-1].observation_ids[-1:] != (BOT,)
        assert all(turn.observation_ids[-1] == BOT for turn in c.turns[:-1])


class Failing(Dialogue):
    """Fails for some seeds, at the start or in the middle, in several ways."""

    def reset(self, seed: int) -> Observation:
        self.kind = seed % 6
        if self.kind == 0:
            raise TimeoutError("no answer\nafter 3 tries")
        return super().reset(seed)

    def step(self, response: str | None) -> Transition:
        step = super().step(response)
        if self.kind == 1:
            raise RuntimeError
        if self.kind == 2:
            return replace(step, reward=math.nan)
        if self.kind == 3:
            return replace(step, terminated=True, info={"outcome": None})
        return step


def test_a_conversation_whose_environment_fails_is_dropped_and_counted_by_cause() -> None:
    model = _model()
    right = _collector(Dialogue(), rows=4).collect(model, conversations=60, seed=0, policy="p").conversations
    kinds = Counter(c.seed % 6 for c in right)
    rollouts = _collector(Failing(), rows=4).collect(model, conversations=60, seed=0, policy="p")
    assert rollouts.dropped == {
        "TimeoutError: no answer": kinds[0],
        "RuntimeError": kinds[1],
        "reward is not a finite number": kinds[2],
        "no outcome": kinds[3],
    }
    assert min(kinds[kind] for kind in range(6)) > 0
    assert _said(rollouts.conversations) == _said([c for c in right if c.seed % 6 > 3])
    assert all(c.outcome == 0.25 * len(c.turns) for c in rollouts.conversations)


class Misspoken(Dialogue):
    """Says something that cannot be used for a third of the seeds, in its opening or in its answer."""

    def __init__(self, answer: dict[str, Any], opening: dict[str, Any]) -> None:
        super().__init__()
        self.answer, self.opening = answer, opening

    def reset(self, seed: int) -> Observation:
        self.fails = seed % 3 == 0
        opening = super().reset(seed)
        return replace(opening, **self.opening) if self.fails else opening

    def step(self, response: str | None) -> Transition:
        step = super().step(response)
        return replace(step, **self.answer) if self.fails else step


HALF = "ValueError: {} holds half of a character (a lone surrogate)"


@pytest.mark.parametrize(
    ("answer", "opening", "cause"),
    [
        ({}, {"text": "9 \ud83d"}, HALF.format("Observation.text")),
        ({}, {"system": "\ud83d"}, HALF.format("Observation.system")),
        ({"observation": "\ude00"}, {}, HALF.format("Transition.observation")),
        ({"info": {"sent": "\ud83d"}}, {}, HALF.format("Transition.info['sent']")),
        ({"info": {"reply": "\ud83d"}}, {}, HALF.format("Transition.info['reply']")),
        ({"reward": 10**400}, {}, "reward is not a finite number"),
        ({"terminated": True, "info": {"outcome": 10**400}}, {}, "no outcome"),
        ({"terminated": True, "info": {"outcome": "won"}}, {}, "no outcome"),
    ],
)
def test_what_an_environment_cannot_say_costs_that_conversation_alone(
    answer: dict[str, Any], opening: dict[str, Any], cause: str
) -> None:
    model = _model()
    right = _collector(Dialogue(), rows=4).collect(model, conversations=12, seed=0, policy="p").conversations
    kept = [c for c in right if c.seed % 3]
    collector = _collector(Misspoken(answer, opening), rows=4)
    collector.expect_room(seed=0, policy="p")
    rollouts = collector.collect(model, conversations=12, seed=0, policy="p")
    assert rollouts.dropped == {cause: 12 - len(kept)}
    assert 0 < len(kept) < 12
    assert _said(rollouts.conversations) == _said(kept)


class Leaving(Dialogue):
    """Raises for every third seed, when it begins or when it answers, itself or in a coroutine."""

    def __init__(self, error: BaseException, at: str, waits: bool) -> None:
        super().__init__()
        self.error, self.at = error, at
        if waits:
            self.reset, self.step = awaited(self.reset), awaited(self.step)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: Any) -> Leaving:
        return Leaving(self.error, self.at, inspect.iscoroutinefunction(self.step))

    def reset(self, seed: int) -> Observation:
        self.leaves = seed % 3 == 0
        if self.leaves and self.at == "reset":
            raise self.error
        return super().reset(seed)

    def step(self, response: str | None) -> Transition:
        if self.leaves and self.at == "step":
            raise self.error
        return super().step(response)


def awaited(call: Callable[..., Any]) -> Callable[..., Any]:
    async def later(*given: Any) -> Any:
        await asyncio.sleep(0)
        return call(*given)

    return later


class Bare(BaseException):
    """Of no family."""


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError"),
        (GeneratorExit(), "GeneratorExit"),
        (Bare("why"), "Bare: why"),
    ],
)
def test_an_environment_that_leaves_in_any_way_costs_that_conversation_alone(
    error: BaseException, cause: str, at: str, waits: bool
) -> None:
    model = _model()
    right = _collector(Dialogue(), rows=4).collect(model, conversations=12, seed=0, policy="p").conversations
    kept = [c for c in right if c.seed % 3]
    collector = _collector(Leaving(error, at, waits), rows=4)
    collector.expect_room(seed=0, policy="p")
    rollouts = collector.collect(model, conversations=12, seed=0, policy="p")
    assert rollouts.dropped == {cause: 12 - len(kept)}
    assert 0 < len(kept) < 12
    assert _said(rollouts.conversations) == _said(kept)


@pytest.mark.parametrize("waits", [False, True])
def test_an_interrupt_ends_the_collection_wherever_it_is_raised(waits: bool) -> None:
    collector, model = _collector(Leaving(KeyboardInterrupt(), "step", waits), rows=4), _model()
    with pytest.raises(KeyboardInterrupt):
        collector.collect(model, conversations=12, seed=0, policy="p")
    # The thread of all environments goes on.
    again = _collector(Leaving(ValueError("no"), "step", waits), rows=4)
    assert again.collect(model, conversations=12, seed=0, policy="p").dropped.keys() == {"ValueError: no"}


def test_an_environment_that_is_given_up_is_cancelled() -> None:
    begun, over = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            over.set()

    calls: PendingCalls[int] = PendingCalls()
    calls.start(0, endless, Transition)
    assert begun.wait(5)
    calls.cancel()
    assert over.wait(5)
    assert calls.take() == []


def test_when_all_fail_one_message_says_why() -> None:
    class Broken(Dialogue):
        def step(self, response: str | None) -> Transition:
            raise ConnectionError("refused")

    with pytest.raises(
        UserError, match=r"every conversation failed.*ConnectionError: refused \(5 times\)"
    ) as info:
        _collector(Broken()).collect(_model(), conversations=5, seed=0, policy="p")
    assert isinstance(info.value.__cause__, ConnectionError)


def test_what_was_cut_off_by_the_stop_is_not_said_to_have_failed() -> None:
    """Of nine that begin together, those that fail end the collection before anybody has spoken."""

    class OftenDown(Dialogue):
        def reset(self, seed: int) -> Observation:
            if seed % 2:
                raise ConnectionError("refused")
            return super().reset(seed)

    model = _model()
    right = _collector(Dialogue(), rows=9).collect(model, conversations=20, seed=0, policy="p").conversations
    failing = sum(c.seed % 2 for c in right[:9])
    assert 2 <= failing < 9
    with pytest.raises(UserError) as told:
        _collector(OftenDown(), rows=9, max_failure_share=0.05).collect(
            model, conversations=20, seed=0, policy="p"
        )
    assert str(told.value).startswith(
        f"environment: {failing} conversations failed and none had ended when the collection was stopped "
        f"for it (see data.max_failure_share), which cut off the other {20 - failing}, so there is nothing "
        f"to learn from: ConnectionError: refused ({failing} times)."
    )


def test_prompts_that_do_not_fit_are_the_context_s_fault_and_not_the_environment_s() -> None:
    share = Share([], Counter({"the first prompt does not fit the context": 3, "KeyError: 1": 2}), None)
    with pytest.raises(UserError) as told:
        Rollouts.of([share], 1.0)
    assert str(told.value).startswith("model.context_length: every conversation failed")
    assert "does not fit the context (3 times); KeyError: 1 (2 times). Raise it" in str(told.value)


def test_a_conversation_that_might_outgrow_the_context_is_truncated_before_the_turn() -> None:
    collector = _collector(Dialogue(50), context_length=40, max_turns=50)
    rollouts = collector.collect(_model(), conversations=30, seed=0, policy="p")
    assert rollouts.truncated == 30
    for c in rollouts.conversations:
        assert c.truncated
        assert c.outcome is None
        assert len(c.turns) >= 2
        assert len(c.token_ids()) <= 40
        assert all(t.response_ids[-1] == END or len(t.response_ids) == 5 for t in c.turns)


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_sampled() -> None:
    model = _model()
    collector = _collector(Dialogue(), context_length=11)
    model.register_forward_hook(lambda *_: pytest.fail("the model was used"))
    with pytest.raises(UserError, match=r"context_length is 11.*5 tokens.*at least 12 was expected"):
        collector.collect(model, conversations=4, seed=0, policy="p")


class Meeting(Dialogue):
    """Each step waits until all conversations of the turn have come."""

    expected = 5
    arrived = 0
    most = 0

    async def step(self, response: str | None) -> Transition:  # type: ignore[override]
        Meeting.arrived += 1
        Meeting.most = max(Meeting.most, Meeting.arrived)
        async with asyncio.timeout(5):
            while Meeting.most < self.expected:
                await asyncio.sleep(0)
        Meeting.arrived -= 1
        if "9" in (response or "").split():
            raise ValueError("nine")
        return super().step(response)


def test_coroutines_of_a_turn_are_awaited_together_also_inside_a_running_loop() -> None:
    model = _model()
    collector = _collector(Meeting(3), rows=5)

    def collect() -> Any:
        Meeting.arrived = Meeting.most = 0
        return collector.collect(model, conversations=15, seed=0, policy="p")

    async def in_a_notebook() -> Any:
        return collect()

    outside, inside = collect(), asyncio.run(in_a_notebook())
    assert _said(outside.conversations) == _said(inside.conversations)
    assert outside.dropped == inside.dropped
    assert outside.dropped["ValueError: nine"] + len(outside.conversations) == 15
    nines = [t for c in outside.conversations for t in c.turns if 9 in t.response_ids]
    assert not nines


def test_one_turn_is_explored_in_the_given_share_and_early_ones_most() -> None:
    collector = _collector(Dialogue(4), max_turns=4, explore_share=0.5, explore_temperature=9.0)
    collected = collector.collect(_model(), conversations=400, seed=0, policy="p").conversations
    explored = [[t.explored for t in c.turns] for c in collected]
    assert {sum(turns) for turns in explored} == {0, 1}
    places = Counter(turns.index(True) for turns in explored if any(turns))
    # Five standard deviations of a binomial: a false alarm about once in 10^6.
    assert abs(sum(places.values()) - 200) < 50
    for place, share in enumerate((0.5, 0.25, 0.125, 0.125)):
        assert abs(places[place] - 200 * share) < 5 * (400 * share / 2 * (1 - share / 2)) ** 0.5


def test_only_the_explored_turn_leaves_the_greedy_path() -> None:
    settings: dict[str, Any] = {"max_turns": 4, "sampling": {"temperature": 0.0}}
    model = _model()
    greedy = _collector(Dialogue(4), **settings).collect(model, conversations=40, seed=0, policy="p")
    mixed = _collector(Dialogue(4), **settings, explore_share=1.0, explore_temperature=5.0).collect(
        model, conversations=40, seed=0, policy="p"
    )
    left = 0
    for usual, other in zip(greedy.conversations, mixed.conversations, strict=True):
        first = [t.explored for t in other.turns].index(True)
        before = [t.response_ids for t in other.turns[:first]]
        assert before == [t.response_ids for t in usual.turns[:first]]
        left += usual.turns[first].response_ids != other.turns[first].response_ids
    assert left > 30


class Shopping:
    """The customer leaves after the first turn half of the time, a failure, and else buys with 0.8."""

    def reset(self, seed: int) -> Observation:
        leaves, buys = np.random.default_rng(seed).random(2) < (0.5, 0.8)
        self.rewards = [0.0] if leaves else [0.0, float(buys)]
        return Observation("9")

    def step(self, response: str | None) -> Transition:
        reward = self.rewards.pop(0)
        return Transition("6", reward=reward, terminated=not self.rewards)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_exploration_leaves_returns_and_success_of_the_policy_as_they_are(
    share: float, tmp_path: Path
) -> None:
    """All responses are alike here, so explored conversations have the values of the policy: 0.4 and 0.8.

    Bounds of 4.4 standard deviations, a false alarm in 10^5. Where only those who stayed for the turn that
    was drawn are left out, 0.27 comes out in place of 0.4.
    """
    collector = _collector(Shopping(), sampling={"max_response_tokens": 1}, explore_share=share, rows=512)
    write_conversations(
        tmp_path / "log.jsonl",
        collector.collect(_model(), conversations=1200, seed=0, policy="p").conversations,
    )
    found = read_conversations(tmp_path / "log.jsonl").conversations
    batch = collate(found, PAD)
    counted, returns = batch.turn_weights > 0, batch.turn_rewards.flip(1).cumsum(1).flip(1)
    for turn, truth in enumerate((0.4, 0.8)):
        values = returns[:, turn][counted[:, turn]]
        bound = 4.4 * (truth * (1 - truth) / len(values)) ** 0.5
        assert values.mean().item() == pytest.approx(truth, abs=bound)
    own = [c.outcome for c in found if coverage_of(c) is None]
    assert abs(len(own) - 1200 * (1 - share)) <= 4.4 * (1200 * share * (1 - share)) ** 0.5
    assert sum(map(float, own)) == pytest.approx(0.4 * len(own), abs=4.4 * (0.24 * len(own)) ** 0.5)


def test_who_is_left_out_is_decided_by_the_draw_alone() -> None:
    """However long conversations last, and where the turn that was drawn lies behind their end."""
    left_out = []
    for turns in (1, 2, 5):
        collector = _collector(Dialogue(turns), explore_share=0.6)
        found = collector.collect(_model(), conversations=60, seed=0, policy="p").conversations
        left_out.append({c.id: c.explored_turn for c in found if coverage_of(c) == "explored"})
    assert left_out[0] == left_out[1] == left_out[2]
    assert 20 < len(left_out[0]) < 50
    assert max(left_out[0].values()) > 1


def test_a_persona_is_appended_to_the_system_message_of_its_whole_group() -> None:
    settings: dict[str, Any] = {"personas": ("21", "22 23"), "persona_share": 0.6, "group_size": 2}
    collector = _collector(Dialogue(system="20"), **settings)
    collected = collector.collect(_model(), conversations=60, seed=0, policy="p").conversations
    worn = [c.metadata.get("persona") for c in collected]
    assert set(worn) == {None, "21", "22 23"}
    assert worn[::2] == worn[1::2]
    for c, persona in zip(collected, worn, strict=True):
        system = "20" if persona is None else f"20\n\n{persona}"
        assert c.prompt[0] == Message("system", system)
        assert c.plain_prompt == (Message("system", "20"), *c.prompt[1:])
        numbers = [int(n) for n in system.split()]
        assert list(c.prompt_ids[: len(numbers) + 2]) == [SYSTEM, *numbers, END]


def test_a_persona_does_not_replace_the_chat_s_own_system_prompt() -> None:
    chat = NumberChat()
    chat.system_prompt = "24"
    collector = _collector(Dialogue(), chat, personas=("21",), persona_share=1.0)
    conversation = collector.collect(_model(), conversations=1, seed=0, policy="p").conversations[0]
    assert conversation.prompt[0] == Message("system", "24\n\n21")
    assert conversation.plain_prompt == (Message("system", "24"), *conversation.prompt[1:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"context_length": 0}, "context_length is 0"),
        ({"explore_share": 1.5}, r"explore_share is 1\.5"),
        ({"explore_temperature": 0.0}, r"explore_temperature is 0\.0"),
        ({"persona_share": 0.5}, r"personas is \(\)"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _collector(Dialogue(), **settings)


@pytest.mark.parametrize(("conversations", "first"), [(0, 0), (5, 0), (4, 1)])
def test_part_of_a_group_is_refused(conversations: int, first: int) -> None:
    collector = _collector(Dialogue(), group_size=2)
    with pytest.raises(UserError, match="multiple of group_size"):
        collector.collect(_model(), conversations=conversations, seed=0, policy="p", first=first)


def test_progress_says_what_the_conversations_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("collect", "validate"):
        collector = _collector(Dialogue(), show_progress=True, task=task)
        collector.collect(_model(), conversations=1, seed=0, policy="p")
        assert capsys.readouterr().err.startswith(f"{task} p: 1 conversation, ")


@pytest.mark.parametrize(("shown", "lines"), [(True, 1), (False, 0)])
def test_progress_is_one_line_where_the_output_is_no_terminal(shown: bool, lines: int) -> None:
    written = io.StringIO()
    with CollectionProgress("p", 3, shown, Console(file=written, width=200)) as progress:
        progress.finish(1.0)
        progress.finish(0.0)
        progress.finish(None, dropped=True)
    assert written.getvalue().count("\n") == lines
    if lines:
        assert "collect p: 3 conversations" in written.getvalue()
        assert "mean outcome 0.500, 1 dropped" in written.getvalue()


class OftenCutOff(Dialogue):
    """Of three conversations one is won, one is lost, and one is cut off before it is either."""

    def reset(self, seed: int) -> Observation:
        self.kind = seed % 3
        return super().reset(seed)

    def step(self, response: str | None) -> Transition:
        if self.kind == 2:
            return Transition("5 6", truncated=True)
        return Transition("5 6", reward=float(self.kind), terminated=True)


def test_the_lines_of_a_validation_say_of_how_many_they_speak(capsys: pytest.CaptureFixture[str]) -> None:
    collector = _collector(OftenCutOff(), show_progress=True, task="validate")
    rollouts = collector.collect(_model(), conversations=30, seed=0, policy="p")
    lost, won, cut_off = (sum(c.seed % 3 == kind for c in rollouts.conversations) for kind in range(3))
    assert min(lost, won, cut_off) > 0
    said = capsys.readouterr().err
    assert said.endswith(
        f"mean outcome {won / (won + lost):.3f} of {won + lost}, {cut_off} cut off without an outcome\n"
    )
    found = figures_of(rollouts.conversations, 1.0, rollouts.truncated, rollouts.dropped)
    row = {**found.row(), "iteration": 0, "accepted": None, "kl": None, "seconds": {}}
    line = policy_line(row, None, found.without_outcome)
    assert line.startswith(f"policy 0: success rate {won / 30:.3f} [")
    assert f"] ({cut_off} of 30 cut off without an outcome: no success), return" in line


def test_progress_tells_no_outcome_yet_from_none_at_all() -> None:
    with CollectionProgress("p", 3, False) as progress:
        assert progress._facts().endswith("/s, no outcome yet")
        progress.finish(None)
        assert progress._facts().endswith("/s, 1 cut off without an outcome")


def test_progress_is_a_bar_on_a_terminal() -> None:
    written = io.StringIO()
    console = Console(file=written, width=120, force_terminal=True)
    with CollectionProgress("p", 2, True, console) as progress:
        progress.finish(1.0)
        progress.finish(0.0)
    assert "2/2" in written.getvalue()
    assert "mean outcome 0.500" in written.getvalue()


def test_a_later_prompt_that_leaves_no_room_is_dropped_and_counted() -> None:
    class Long(Dialogue):
        def reset(self, seed: int) -> Observation:
            first = super().reset(seed)
            return replace(first, text="9 " * 200) if seed == long_seed else first

    model = _model()
    everyone = (
        _collector(Dialogue(), rows=2).collect(model, conversations=8, seed=0, policy="p").conversations
    )
    long_seed = everyone[6].seed
    rollouts = _collector(Long(), rows=2).collect(model, conversations=8, seed=0, policy="p")
    assert rollouts.dropped == {"the first prompt does not fit the context": 1}
    assert _said(rollouts.conversations) == _said([c for c in everyone if c.seed != long_seed])


class Latecomer:
    """One conversation's environment answers only when another conversation is over."""

    over: asyncio.Event

    def reset(self, seed: int) -> Observation:
        self.number = int(seed)
        self.left = 3
        return Observation("7 8")

    async def step(self, response: str | None) -> Transition:
        self.left -= 1
        if self.waits:
            await asyncio.wait_for(Latecomer.over.wait(), 20)
        elif self.left == 0:
            Latecomer.over.set()
        return Transition("7", reward=1.0, terminated=self.left == 0 or self.waits)

    def __deepcopy__(self, memo: Any) -> Latecomer:
        # The first copy that is made belongs to the first conversation.
        copied = Latecomer()
        copied.waits = not Latecomer.copies
        Latecomer.copies += 1
        return copied

    waits = False
    copies = 0


def test_a_slow_environment_does_not_hold_up_the_other_conversations() -> None:
    Latecomer.over, Latecomer.copies = asyncio.Event(), 0
    rollouts = _collector(Latecomer(), rows=4).collect(_model(), conversations=4, seed=0, policy="p")
    assert rollouts.dropped == {}
    assert [len(c.turns) for c in rollouts.conversations] == [1, 3, 3, 3]


class SometimesDown(Dialogue):
    """Its simulator is down from the second turn on, for all but every sixth conversation."""

    def reset(self, seed: int) -> Observation:
        self.kind = seed % 6
        self.left = 1 if self.kind == 0 else 3
        return Observation("10 9")

    def step(self, response: str | None) -> Transition:
        if self.left == 2:
            raise ConnectionError("refused")
        return super().step(response)


def test_a_collection_that_mostly_fails_is_stopped_and_keeps_what_had_ended() -> None:
    model = _model()
    whole = _collector(SometimesDown(), rows=10).collect(model, conversations=60, seed=0, policy="p")
    failed = sum(whole.dropped.values())
    assert 30 < failed < 60
    with pytest.raises(TooManyFailures, match=r"data\.max_failure_share.*ConnectionError: refused") as info:
        _collector(SometimesDown(), rows=10, max_failure_share=0.3).collect(
            model, conversations=60, seed=0, policy="p"
        )
    kept = info.value.rollouts
    assert 18 < sum(kept.dropped.values()) <= 18 + 10
    assert 0 < len(kept.conversations) < len(whole.conversations)
    assert {c.id for c in kept.conversations} < {c.id for c in whole.conversations}
    assert all(c.outcome == 0.25 for c in kept.conversations)
    allowed = _collector(SometimesDown(), rows=10, max_failure_share=failed / 60)
    assert allowed.collect(model, conversations=60, seed=0, policy="p").dropped == whole.dropped


class SharedByTwo(Processes):
    """The first of two processes; what the other one has collected is given."""

    def __init__(self, other: Share) -> None:
        super().__init__(rank=0, size=1)
        self.other = other

    def share(self, number: int) -> range:
        return range(number // 2)

    def each(self, work: Callable[[], Any]) -> list[Any]:
        return [work(), self.other]


def test_the_share_of_failures_is_that_of_all_processes_together() -> None:
    """Of 30 conversations that one of two processes holds, about five in six fail; 60 are held in all."""
    model, alone = _model(), _collector(SometimesDown(), rows=10)
    failed = sum(alone.collect(model, conversations=30, seed=0, policy="p").dropped.values())
    assert 20 < failed < 30

    def together(failures_of_the_other: int, allowed: float) -> Rollouts:
        other = Share([], Counter({"refused there": failures_of_the_other}), None)
        processes = SharedByTwo(other)
        collector = _collector(SometimesDown(), rows=10, max_failure_share=allowed / 60, processes=processes)
        return collector.collect(model, conversations=60, seed=0, policy="p")

    # More than the allowed half of its own, but not of all; then the other one's make it too many.
    assert sum(together(0, allowed=30).dropped.values()) == failed
    assert sum(together(30 - failed, allowed=30).dropped.values()) == 30
    with pytest.raises(TooManyFailures, match="31 conversations failed") as stopped:
        together(31 - failed, allowed=30)
    assert len(stopped.value.rollouts.conversations) == 30 - failed


def test_a_users_mistake_in_an_environment_ends_the_collection_at_once() -> None:
    asked = []

    class WrongKey(Dialogue):
        def step(self, response: str | None) -> Transition:
            asked.append(response)
            raise UserError("the key is missing or wrong")

    with pytest.raises(UserError, match=r"^the key is missing or wrong$"):
        _collector(WrongKey(), rows=3).collect(_model(), conversations=30, seed=0, policy="p")
    assert len(asked) == 3


def test_an_adapter_is_merged_for_sampling_here_and_not_where_a_server_samples() -> None:
    backbone = small_backbone(["policy"])

    def merged_for(server: PolicyServer | None) -> list[bool]:
        with _collector(Dialogue(), server=server).speaker(backbone):
            return [layer.merged or layer.disable_adapters for layer in backbone.adapted_layers("policy")]

    assert all(merged_for(None))
    assert not any(merged_for(cast(PolicyServer, object())))
