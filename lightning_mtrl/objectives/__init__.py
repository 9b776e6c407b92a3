"""The mathematics: pure functions on tensors. No module, configuration, device, logging or randomness.

Shape letters: B conversations (or rows), T tokens, K turns, N responses, S states, V vocabulary, O bins.
"""

from lightning_mtrl.objectives.advantages import (
    gae,
    grpo_advantages,
    q_baseline_advantages,
    returns_to_go,
    rloo_advantages,
    rloo_centred_rewards,
)
from lightning_mtrl.objectives.critic_losses import (
    bce_loss,
    hl_gauss_targets,
    hl_gauss_values,
    mse_loss,
    value_clipped,
    value_loss,
)
from lightning_mtrl.objectives.kl import adaptive_kl_coef, exact_kl, importance_weights, kl_penalty
from lightning_mtrl.objectives.masked import (
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    token_weights,
    turn_index_of,
    zero_outside,
)
from lightning_mtrl.objectives.policy_losses import (
    clipped_policy_loss,
    clipped_surrogate,
    is_clipped,
    is_dual_clipped,
    reinforce_loss,
    sequence_geometric_ratio,
    sequence_product_ratio,
    token_ratio,
    turn_geometric_ratio,
    turn_product_ratio,
    with_token_gradient,
)
from lightning_mtrl.objectives.returns import discounted_returns, lambda_returns, place_turn_rewards

__all__ = [
    "adaptive_kl_coef",
    "bce_loss",
    "clipped_policy_loss",
    "clipped_surrogate",
    "discounted_returns",
    "exact_kl",
    "gae",
    "grpo_advantages",
    "hl_gauss_targets",
    "hl_gauss_values",
    "importance_weights",
    "is_clipped",
    "is_dual_clipped",
    "kl_penalty",
    "lambda_returns",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "mse_loss",
    "place_turn_rewards",
    "q_baseline_advantages",
    "reinforce_loss",
    "returns_to_go",
    "rloo_advantages",
    "rloo_centred_rewards",
    "sequence_geometric_ratio",
    "sequence_product_ratio",
    "token_ratio",
    "token_weights",
    "turn_geometric_ratio",
    "turn_index_of",
    "turn_product_ratio",
    "value_clipped",
    "value_loss",
    "with_token_gradient",
    "zero_outside",
]
