from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_models import END, small_backbone, small_chat

from lightning_mtrl.errors import UserError
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.rollouts.dialogue import Dialogue
from lightning_mtrl.rollouts.sampling import SamplingConfig

GREEDY = SamplingConfig(temperature=0.0, max_response_tokens=5)
SAID = ("hello", "x", "hex y")


def dialogue_of(backbone: Backbone, sampling: SamplingConfig = GREEDY, context_length: int = 96) -> Dialogue:
    with backbone.sampling("policy") as model:
        return Dialogue(model, small_chat(), sampling=sampling, context_length=context_length, seed=3)


def held(backbone: Backbone, dialogue: Dialogue) -> list[int]:
    for text in SAID:
        with backbone.sampling("policy"):
            dialogue.respond(text)
    return dialogue.conversation.token_ids()


def test_greedy_responses_are_those_of_generate_on_the_whole_conversation() -> None:
    backbone = small_backbone(["policy"])
    dialogue = dialogue_of(backbone)
    held(backbone, dialogue)
    conversation = dialogue.conversation
    history = list(conversation.prompt_ids)
    for turn in conversation.turns:
        with backbone.sampling("policy") as model:
            found = model.generate(
                torch.tensor([history]), max_new_tokens=5, do_sample=False, eos_token_id=END, pad_token_id=END
            )
        assert tuple(found[0, len(history) :].tolist()) == turn.response_ids
        history += [*turn.response_ids, *turn.observation_ids]
    assert [turn.observation for turn in conversation.turns] == ["x", "hex y", ""]


def test_a_critic_that_reads_in_between_changes_nothing() -> None:
    backbone = small_backbone(["policy", "critic"])
    sampled = replace(GREEDY, temperature=1.0)
    alone = held(backbone, dialogue_of(backbone, sampled))
    dialogue = dialogue_of(backbone, sampled)
    for text in SAID:
        with backbone.sampling("policy"):
            dialogue.respond(text)
        ids = torch.tensor([dialogue.conversation.token_ids()])
        with torch.no_grad():
            backbone.hidden("critic", ids, torch.ones_like(ids), torch.arange(ids.size(1))[None])
    assert dialogue.conversation.token_ids() == alone


def test_a_typed_control_token_stays_text() -> None:
    backbone = small_backbone(["policy"])
    counts = []
    for text in ("hello", "hel<eot>lo"):
        dialogue = dialogue_of(backbone)
        with backbone.sampling("policy"):
            dialogue.respond(text)
        counts.append(dialogue.conversation.prompt_ids.count(END))
    assert counts == [1, 1]


def test_reset_begins_a_conversation_as_if_none_had_been() -> None:
    backbone = small_backbone(["policy"])
    dialogue = dialogue_of(backbone)
    first = held(backbone, dialogue)
    assert dialogue.conversation.turns
    dialogue.reset()
    assert not dialogue.conversation.turns
    assert held(backbone, dialogue) == first


def test_there_is_room_until_message_and_response_no_longer_fit() -> None:
    backbone = small_backbone(["policy"])
    dialogue = dialogue_of(backbone, context_length=40)
    turns = 0
    while dialogue.has_room("hello"):
        with backbone.sampling("policy"):
            dialogue.respond("hello")
        turns += 1
        assert len(dialogue.conversation.token_ids()) <= 40
    assert turns >= 2
    with backbone.sampling("policy"), pytest.raises(ValueError, match="must then fit 40"):
        dialogue.respond("hello " * 9)


def test_a_response_that_fills_the_context_is_refused() -> None:
    with pytest.raises(UserError, match="which must hold the messages too"):
        dialogue_of(small_backbone(["policy"]), context_length=7)
