"""Responses that share a prefix are scored as if each stood alone behind it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.modules.base import scored_tokens
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.rollouts.engine import SampledResponse
from lightning_mtrl.rollouts.groups import Glue, group_batch

END, PAD, HEADER = 1, 0, (2, 3)


def _backbone() -> Backbone:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=14, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    backbone = Backbone(LlamaForCausalLM(config).eval())
    backbone.add_role("policy")
    return backbone


PREFIXES = [[2, 5, 6], [2, 7, 8, 9, 4, 5, 6, 7], [3]]
RESPONSES = [
    [SampledResponse((5, 1), (-1.0, -2.0), True), SampledResponse((6, 7, 8, 9), (-1.0,) * 4, False)],
    [SampledResponse((1,), (-0.5,), True), SampledResponse((4, 4, 1), (-3.0,) * 3, True)],
    [SampledResponse((9, 9, 9, 9), (-1.5,) * 4, False), SampledResponse((5, 6, 1), (-1.0,) * 3, True)],
]
GLUE = Glue(PAD, END, HEADER)


def _alone(
    backbone: Backbone, prefix: list[int], response: SampledResponse
) -> tuple[list[float], torch.Tensor]:
    """Log-probs of a response and hidden states, by a plain forward over one unpadded row."""
    closing = [] if response.finished else [END]
    ids = torch.tensor([[*prefix, *response.ids, *closing, *HEADER]])
    with torch.no_grad():
        out = backbone.causal("policy")(input_ids=ids, output_hidden_states=True)
    logprobs = out.logits[0].log_softmax(-1)
    places = range(len(prefix), len(prefix) + len(response.ids))
    return [logprobs[p - 1, ids[0, p]].item() for p in places], out.hidden_states[-1][0]


def test_log_probs_in_a_group_are_those_of_each_response_alone() -> None:
    backbone = _backbone()
    batch = group_batch(PREFIXES, RESPONSES, GLUE)
    with torch.no_grad():
        hidden = backbone.hidden("policy", batch.input_ids, batch.attention_mask, batch.position_ids)
        logprobs, _ = scored_tokens(backbone, "policy", hidden, batch)
    rows, mask = batch.by_response(logprobs), batch.by_response(batch.response_mask)
    flat = [(p, r) for p, group in zip(PREFIXES, RESPONSES, strict=True) for r in group]
    for (prefix, response), row, sampled in zip(flat, rows, mask, strict=True):
        wanted, _ = _alone(backbone, prefix, response)
        assert torch.allclose(row[sampled], torch.tensor(wanted), atol=1e-5)
        assert float(row[~sampled].abs().sum()) == 0.0


def test_the_critic_reads_a_group_as_it_reads_each_response_alone() -> None:
    backbone = _backbone()
    batch = group_batch(PREFIXES, RESPONSES, GLUE)
    for read in ("header", "end"):
        critic = QCritic(backbone, read=read, role=f"critic_{read}")
        torch.nn.init.normal_(critic.head[-1].weight)
        q = critic.values(batch)
        for state, (prefix, group) in enumerate(zip(PREFIXES, RESPONSES, strict=True)):
            for number, response in enumerate(group):
                _, hidden = _alone(backbone, prefix, response)
                place = -1 if read == "header" else len(prefix) + len(response.ids) - 1
                with torch.no_grad():
                    wanted = critic.head(critic.norm(hidden[place]))[0].sigmoid()
                assert q[state, number].item() == pytest.approx(wanted.item(), abs=1e-5)


def test_rows_and_responses_are_two_views_of_the_same_numbers() -> None:
    batch = group_batch(PREFIXES, RESPONSES, GLUE)
    kept = torch.where(batch.response_mask, batch.behaviour_logprobs, torch.zeros(()))
    assert torch.equal(batch.by_row(batch.by_response(kept)), kept)
    assert batch.by_response(batch.response_mask).sum(1).tolist() == [2, 4, 1, 3, 4, 3]
    part = batch.rows(slice(1, 3))
    assert torch.equal(part.by_response(part.response_mask), batch.by_response(batch.response_mask)[2:])
    shortest = batch.rows(slice(2, 3))
    assert shortest.input_ids.size(1) == int(batch.row_lengths[2]) < batch.input_ids.size(1)


def test_groups_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="same number"):
        group_batch(PREFIXES[:2], [RESPONSES[0], RESPONSES[1][:1]], GLUE)
