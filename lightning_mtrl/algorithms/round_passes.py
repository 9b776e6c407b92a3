"""What a round of single-turn improvement puts through the model at most."""

from __future__ import annotations

from lightning_mtrl.algorithms.improvement_config import ImprovementConfig
from lightning_mtrl.algorithms.passes import rows_in_pass
from lightning_mtrl.algorithms.policy_improvement import SCORING_STATES
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.modules.workload import Extent, Pass, Sampling


def round_passes(
    config: ImprovementConfig, critic: QCritic, value: ValueHead | None, extent: Extent
) -> list[Pass | Sampling]:
    """Sampling, scoring and training of a round, for a plan of memory; a row is a state with its responses.

    Args:
        config: of the improvement.
        critic: scores the responses.
        value: the value head, where there is one.
        extent: how large conversations get.
    """
    states, samples = max(config.states, config.certificate_states), config.samples
    # The longest state lacks the last response of the longest conversation.
    tokens = extent.tokens + (samples - 1) * extent.response_tokens
    scored = samples * extent.response_tokens
    sampled = min(extent.rows, states * samples)
    read = -(-sampled // samples) * (extent.tokens - extent.response_tokens)
    scoring, states_key = min(rows_in_pass(tokens, SCORING_STATES), states), "improvement.states"
    rows = min(config.micro_batch_states or config.minibatch_states, config.states)
    key = "improvement.micro_batch_states"
    found: list[Pass | Sampling] = [
        Sampling("improve", sampled, extent.tokens, read),
        Pass("improve", "critic", critic.role, scoring, tokens, layer=critic.layer, key=states_key),
        Pass("improve", "reference", "reference", scoring, tokens, scored, key=states_key),
        Pass("improve", "policy", "policy", rows, tokens, scored, trains=True, key=key),
    ]
    # One that reads the policy's hidden states does so in the policy's passes.
    if value is not None and value.owns_role:
        found.append(Pass("improve", "value", value.role, rows, tokens, trains=True, key=key))
    return found
