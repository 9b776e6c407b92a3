from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.logs import write_conversations
from lightning_mtrl.rollouts.tokens import ChatTokenizer

WORDS = ["<pad>", "<eot>", "<user>", "<bot>", "a", "b", "c"]


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    inner = Tokenizer(models.BPE({w: i for i, w in enumerate(WORDS)}, []))
    inner.add_special_tokens(WORDS[:4])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eot>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ 'user' if m.role == 'user' else 'bot' }}>{{ m.content }}<eot>{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    return ChatTokenizer(tokenizer)


def _talk(number: int, turns: int = 2, **changes: Any) -> Conversation:
    said = tuple(Turn("b" * (number % 5 + 1), "c", 0.0) for _ in range(turns - 1))
    whole = Conversation(f"c-{number}", (Message("user", "a"),), (*said, Turn("b", "", 1.0)), 1.0)
    return replace(whole, **changes)


def _talks(number: int) -> list[Conversation]:
    return [_talk(n, turns=n % 3 + 1) for n in range(number)]


def _ids(conversations: list[Conversation]) -> list[str]:
    return [c.id for c in conversations]


def test_every_conversation_is_on_one_side(chat: ChatTokenizer) -> None:
    data = RolloutDataModule(_talks(200), tokenizer=chat)
    train, held_out = _ids(data.train_conversations), _ids(data.validation_conversations)
    assert sorted(train + held_out) == sorted(_ids(_talks(200)))
    # 200 draws at 0.2: the bounds are more than five standard deviations away.
    assert 10 < len(held_out) < 70


def test_the_split_depends_on_seed_and_ids_alone(chat: ChatTokenizer) -> None:
    def held_out(talks: list[Conversation], seed: int) -> set[str]:
        return set(_ids(RolloutDataModule(talks, tokenizer=chat, seed=seed).validation_conversations))

    first = held_out(_talks(100), 0)
    assert held_out(_talks(100)[::-1], 0) == first
    assert held_out(_talks(150), 0) & set(_ids(_talks(100))) == first
    assert held_out(_talks(100), 1) != first


def test_a_customers_conversations_stay_together(chat: ChatTokenizer) -> None:
    talks = [_talk(n, metadata={"customer": n % 10}) for n in range(60)]
    data = RolloutDataModule(talks, tokenizer=chat, validation_share=0.4)
    sides = [
        {c.metadata["customer"] for c in side}
        for side in (data.train_conversations, data.validation_conversations)
    ]
    assert all(sides)
    assert sides[0].isdisjoint(sides[1])
    assert sides[0] | sides[1] == set(range(10))


def _sides(data: RolloutDataModule) -> tuple[set[str], set[str]]:
    return set(_ids(data.train_conversations)), set(_ids(data.validation_conversations))


def test_a_groups_conversations_stay_together(chat: ChatTokenizer) -> None:
    talks = [_talk(n, group=n // 4, seed=1000 + n // 4, policy="iteration-0001") for n in range(80)]
    train, held_out = _sides(RolloutDataModule(talks, tokenizer=chat, validation_share=0.4))
    assert len(train | held_out) == 80
    for side in (train, held_out):
        groups = Counter(int(name[2:]) // 4 for name in side)
        assert groups
        assert set(groups.values()) == {4}


def test_customers_and_groups_that_share_a_conversation_stay_together(chat: ChatTokenizer) -> None:
    """A chain through both: c-0 and c-1 are one group, c-1 and c-2 one customer, c-2 and c-3 one group."""
    chain = [
        _talk(0, group=1, seed=11),
        _talk(1, group=1, seed=11, metadata={"customer": "ann"}),
        _talk(2, group=2, seed=12, metadata={"customer": "ann"}),
        _talk(3, group=2, seed=12),
    ]
    for seed in range(20):
        data = RolloutDataModule([*chain, *_talks(14)[10:]], tokenizer=chat, validation_share=0.5, seed=seed)
        train, held_out = _sides(data)
        assert {"c-0", "c-1", "c-2", "c-3"} <= train or {"c-0", "c-1", "c-2", "c-3"} <= held_out


def test_groups_of_two_policies_with_one_number_are_two_groups(chat: ChatTokenizer) -> None:
    fresh = [_talk(n, group=n // 2, seed=50 + n // 2, policy="iteration-0001") for n in range(20)]
    earlier = [_talk(100 + n, group=n // 2, seed=70 + n // 2, policy="iteration-0000") for n in range(20)]
    data = RolloutDataModule(fresh, tokenizer=chat)
    data.set_rollouts(fresh, earlier=earlier)
    assert set(_ids(earlier)) <= set(_ids(data.train_conversations))


def test_logs_without_groups_are_split_by_conversation(chat: ChatTokenizer) -> None:
    train, held_out = _sides(RolloutDataModule(_talks(100), tokenizer=chat, validation_share=0.5))
    assert min(len(train), len(held_out)) > 20


def test_a_conversation_alone_in_its_group_is_drawn_by_its_id(chat: ChatTokenizer) -> None:
    alone = [_talk(n, group=n, seed=900 + n) for n in range(60)]
    plain = [_talk(n) for n in range(60)]
    assert _sides(RolloutDataModule(alone, tokenizer=chat)) == _sides(
        RolloutDataModule(plain, tokenizer=chat)
    )


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_both_sides_have_something(chat: ChatTokenizer, share: float) -> None:
    data = RolloutDataModule(_talks(3), tokenizer=chat, validation_share=share)
    assert data.train_conversations
    assert data.validation_conversations


def test_nothing_is_held_out_at_share_0(chat: ChatTokenizer) -> None:
    data = RolloutDataModule(_talks(1), tokenizer=chat, validation_share=0.0)
    assert _ids(data.train_conversations) == ["c-0"]
    assert data.val_dataloader() == []


def test_conversations_without_a_return_stay_but_are_not_fitted(chat: ChatTokenizer) -> None:
    odd = [
        _talk(100, outcome=None),
        _talk(101, terminated=False, truncated=True),
        _talk(102, terminated=False, truncated=True, outcome=None),
    ]
    data = RolloutDataModule([*_talks(10), *odd], tokenizer=chat)
    assert len(data.conversations) == 13
    assert data.dropped == {"no outcome": 1, "truncated": 2}
    fitted = _ids(data.train_conversations) + _ids(data.validation_conversations)
    assert not {"c-100", "c-101", "c-102"} & set(fitted)
    assert data.outcomes()["c-101"] == 1.0
    assert "c-100" not in data.outcomes()


def test_new_rollouts_take_the_place_of_the_old_and_earlier_ones_are_only_fitted(chat: ChatTokenizer) -> None:
    data = RolloutDataModule(_talks(5), tokenizer=chat)
    earlier = [_talk(n, policy="iteration-0000") for n in range(50, 60)]
    data.set_rollouts(_talks(20), earlier=[*earlier, _talk(70, outcome=None)], seed=3)
    assert _ids(data.conversations) == _ids(_talks(20))
    assert set(_ids(earlier)) <= set(_ids(data.train_conversations))
    assert not set(_ids(earlier)) & set(_ids(data.validation_conversations))
    assert "c-70" not in _ids(data.train_conversations)
    assert data.dropped == {}


def test_an_earlier_conversation_of_a_held_out_customer_is_left_out(chat: ChatTokenizer) -> None:
    data = RolloutDataModule(_talks(2), tokenizer=chat)
    fresh = [_talk(n, metadata={"customer": n}) for n in range(20)]
    data.set_rollouts(fresh, earlier=[_talk(100 + n, metadata={"customer": n}) for n in range(20)])
    held_out = {c.metadata["customer"] for c in data.validation_conversations}
    assert held_out.isdisjoint({c.metadata["customer"] for c in data.train_conversations})


def test_states_are_what_stood_before_each_response(chat: ChatTokenizer) -> None:
    data = RolloutDataModule(_talks(2), tokenizer=chat)
    talk = Conversation("c", (Message("user", "a"),), (Turn("b", "c"), Turn(None, "a")), 1.0)
    first, second = data.states([talk])
    # <user> a <eot> <bot> | b <eot> <user> c <eot> <bot> | <eot> <user> a <eot>
    assert first.ids == (2, 4, 1, 3)
    assert second.ids == (2, 4, 1, 3, 5, 1, 2, 6, 1, 3)
    assert [(s.conversation_id, s.turn) for s in (first, second)] == [("c", 1), ("c", 2)]


def test_states_tell_which_of_them_belong_together(chat: ChatTokenizer) -> None:
    """By conversation; by group and by customer where these are known, as a split does."""
    data = RolloutDataModule(_talks(2), tokenizer=chat)
    group = [_talk(n, policy="p", seed=7, group=3) for n in (2, 3)]
    customer = [_talk(n, metadata={"customer": "x"}) for n in (4, 5, 6)]
    states = data.states([_talk(0), _talk(1), *group, *customer])
    assert len(states) == 14
    assert [len({s.owner for s in states[a:b]}) for a, b in ((0, 2), (2, 4), (4, 8), (8, 14))] == [1] * 4
    assert len({s.owner for s in states}) == 4


def _led_under(persona: str, chat: ChatTokenizer, system: str | None) -> Conversation:
    """As a collector records it: prompt and ids as they were sampled from, and the persona by its text."""
    words = "\n\n".join(filter(None, (system, persona)))
    prompt = (Message("system", words), Message("user", "a"))
    sampled = [
        replace(turn, behaviour_logprobs=(-1.5,) * len(turn.response_ids))
        for turn in chat.encode(_talk(0)).turns
    ]
    ids = tuple(chat.prompt_ids(prompt))
    metadata = {"persona": persona}
    return replace(_talk(0), prompt=prompt, prompt_ids=ids, turns=tuple(sampled), metadata=metadata)


@pytest.mark.parametrize("system", [None, "b"])
def test_a_persona_is_in_no_prompt_that_is_trained_on(chat: ChatTokenizer, system: str | None) -> None:
    led = _led_under("c", chat, system)
    opening = () if system is None else (Message("system", system),)
    plain = tuple(chat.prompt_ids((*opening, Message("user", "a"))))
    assert led.prompt_ids != plain
    data = RolloutDataModule([led], tokenizer=chat, validation_share=0.0)
    (kept,) = data.conversations
    assert kept.prompt == (*opening, Message("user", "a"))
    assert kept.prompt_ids == plain
    assert (kept.turns, kept.metadata) == (led.turns, {"persona": "c"})
    assert [state.ids[: len(plain)] for state in data.states([led])] == [plain, plain]
    (batch,) = data.train_dataloader()
    assert tuple(batch.input_ids[0, : len(plain)].tolist()) == plain
    assert set(batch.behaviour_logprobs[batch.response_mask].tolist()) == {-1.5}
    # Once more changes nothing, and earlier conversations are treated alike.
    data.set_rollouts([kept], earlier=[replace(led, id="earlier")])
    assert {c.prompt_ids for c in data.train_conversations} == {plain}


def test_a_logs_own_word_persona_takes_nothing_out(chat: ChatTokenizer) -> None:
    talk = _talk(0, prompt=(Message("system", "b"), Message("user", "a")), metadata={"persona": "a"})
    assert (
        RolloutDataModule([talk], tokenizer=chat, validation_share=0.0).conversations[0].prompt == talk.prompt
    )


def test_taking_a_persona_out_needs_the_tokenizer(chat: ChatTokenizer) -> None:
    with pytest.raises(UserError, match="'c-0' has a persona in its prompt, and no tokenizer was given"):
        RolloutDataModule([_led_under("c", chat, None)], validation_share=0.0)


def _epoch(data: RolloutDataModule) -> list[tuple[str, ...]]:
    return [batch.ids for batch in data.train_dataloader()]


def test_an_epoch_has_every_conversation_once_in_batches_of_similar_length(chat: ChatTokenizer) -> None:
    data = RolloutDataModule(_talks(300), tokenizer=chat, batch_size=8)
    batches = list(data.train_dataloader())
    assert sorted(i for b in batches for i in b.ids) == sorted(_ids(data.train_conversations))
    assert sorted(len(b) for b in batches)[1:] == [8] * (len(batches) - 1)
    padding = sum(int((~b.attention_mask).sum()) for b in batches) / sum(b.input_ids.numel() for b in batches)
    assert padding < 0.1


def test_the_order_changes_with_the_epoch_and_comes_back_with_the_seed(chat: ChatTokenizer) -> None:
    data, again = (RolloutDataModule(_talks(100), tokenizer=chat, batch_size=8, seed=5) for _ in range(2))
    epochs = [_epoch(data) for _ in range(3)]
    assert epochs == [_epoch(again) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    data.set_rollouts(_talks(100))
    assert _epoch(data) == epochs[0]
    data.train_dataloader().sampler.set_epoch(2)  # type: ignore[union-attr]
    assert _epoch(data) == epochs[2]


def test_validation_batches_keep_their_order(chat: ChatTokenizer) -> None:
    data = RolloutDataModule(_talks(100), tokenizer=chat, batch_size=8)
    orders = [[b.ids for b in data.val_dataloader()] for _ in range(2)]
    assert orders[0] == orders[1]
    assert sorted(i for ids in orders[0] for i in ids) == sorted(_ids(data.validation_conversations))


class _Constant(LightningModule):
    """Fits one number to the outcomes, and notes what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.guess = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[str]] = []
        self.checked: Counter[str] = Counter()

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: ConversationBatch, batch_idx: int) -> torch.Tensor:
        assert isinstance(batch, ConversationBatch)
        self.seen[-1] += batch.ids
        return ((self.guess - batch.outcome) ** 2).mean()

    def validation_step(self, batch: ConversationBatch, batch_idx: int) -> None:
        self.checked.update(batch.ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trainer(folder: Path) -> Trainer:
    return Trainer(
        max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        default_root_dir=folder,
    )  # fmt: skip


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_plain_trainer_fits_on_a_file_of_logs(chat: ChatTokenizer, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"logs.{ending}"
    write_conversations(path, [*_talks(40), _talk(90, outcome=None)])
    data, module = RolloutDataModule(logs=str(path), tokenizer=chat, batch_size=8), _Constant()
    _trainer(tmp_path).fit(module, datamodule=data)
    assert [sorted(ids) for ids in module.seen] == [sorted(_ids(data.train_conversations))] * 3
    assert module.seen[0] != module.seen[1] != module.seen[2]
    assert module.checked == Counter(dict.fromkeys(_ids(data.validation_conversations), 3))
    assert data.dropped == {"no outcome": 1}
    assert module.guess > 0.5


TOO_LITTLE = {
    "none": [],
    "one": [_talk(0)],
    "one customer": [_talk(n, metadata={"customer": "x"}) for n in range(9)],
    "no outcomes": [_talk(n, outcome=None) for n in range(9)],
}


@pytest.mark.parametrize("kind", TOO_LITTLE)
def test_too_few_conversations_for_a_split_are_refused(chat: ChatTokenizer, kind: str) -> None:
    with pytest.raises(UserError, match="at least 2 are needed to hold one out"):
        RolloutDataModule(TOO_LITTLE[kind], tokenizer=chat)


def test_where_too_few_ended_the_cut_off_and_the_failed_are_counted_apart(chat: ChatTokenizer) -> None:
    cut_off = [_talk(n, outcome=None, terminated=False, truncated=True) for n in range(5)]
    with pytest.raises(
        UserError, match=r"1 of 9 conversations .* Left out: truncated 5, ConnectionError 3\."
    ):
        RolloutDataModule(tokenizer=chat).set_rollouts([_talk(9), *cut_off], failed={"ConnectionError": 3})


def test_what_a_split_or_a_batch_cannot_be_is_refused(chat: ChatTokenizer) -> None:
    with pytest.raises(UserError, match=r"validation_share is 1\.0"):
        RolloutDataModule(validation_share=1.0)
    with pytest.raises(UserError, match="batch_size is 0"):
        RolloutDataModule(batch_size=0)
    with pytest.raises(UserError, match="'c-0' has no token ids, and no tokenizer was given"):
        RolloutDataModule(_talks(4))
    data = RolloutDataModule([chat.encode(c) for c in _talks(4)])
    with pytest.raises(UserError, match="no tokenizer was given"):
        data.train_dataloader()
