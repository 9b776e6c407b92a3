"""What to know before an improvement step, in one block: is there a signal, and is there room for it?"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl.algorithms.base import Context, Signal
from lightning_mtrl.algorithms.policy_evaluation import scoring_batches
from lightning_mtrl.algorithms.policy_improvement import ScoredGroups
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.calibration import ranking_auc

BETTER = 0.05  # a response is better than the policy's mean when its Q is higher by this much
PROBE_CONVERSATIONS = 256


def diagnose(before: ScoredGroups, signal: Signal, context: Context) -> str:
    """The block of text that is shown before a step.

    Args:
        before: fresh responses of the current policy in held-out states, with their Q.
        signal: what evaluation found.
        context: rollouts and backbone, for the probe of the base model's features.
    """
    m = signal.metrics
    q = before.q
    coverage = ((q.max(1).values - q.mean(1)) > BETTER).float().mean().item()
    return "\n".join(
        [
            f"iteration {context.iteration}, before the step",
            f"  critic    held-out loss {m['q_loss']:.4f}, of a constant {m['constant_loss']:.4f}; "
            f"calibration error {m['calibration_error']:.3f}",
            f"  ranking   AUC {m['auc']:.3f}; within the same state {m['same_state_accuracy']:.3f}",
            f"  features  linear probe of the base model: AUC {probe_base(context):.3f}",
            f"  coverage  a better response was sampled in {100 * coverage:.0f}% of {len(q)} held-out states",
            f"  room      mean Q {q.mean().item():.3f}; of the best of {q.size(1)} responses "
            f"{q.max(1).values.mean().item():.3f}",
        ]
    )


@torch.no_grad()
def probe_base(context: Context) -> float:
    """AUC on held-out conversations of a ridge regression from the base's hidden states to success.

    A critic can find with little data what the base's features already tell apart.
    """
    data = context.datamodule
    train_x, train_y = _features(data.train_conversations[:PROBE_CONVERSATIONS], context)
    test_x, test_y = _features(data.validation_conversations[:PROBE_CONVERSATIONS], context)
    mean, scale = train_x.mean(0), train_x.std(0).clamp(min=1e-6)
    x, centre = (train_x - mean) / scale, train_y.mean()
    gram = x.T @ x + 0.1 * len(x) * torch.eye(x.size(1), dtype=x.dtype)
    weights = torch.linalg.solve(gram, x.T @ (train_y - centre))
    return ranking_auc(((test_x - mean) / scale @ weights).float(), test_y > 0)


def _features(
    conversations: list[Conversation], context: Context
) -> tuple[Float[Tensor, "N H"], Float[Tensor, " N"]]:
    features, success = [], []
    for _, batch in scoring_batches(conversations, context):
        with context.fabric.autocast():
            hidden = context.backbone.hidden(
                "base", batch.input_ids, batch.attention_mask, batch.position_ids
            )
        places = batch.turn_read[..., None].expand(-1, -1, hidden.size(-1))
        features.append(hidden.gather(1, places)[batch.turn_mask].double().cpu())
        success.append(batch.outcome[:, None].expand(batch.turn_mask.shape)[batch.turn_mask].double().cpu())
    return torch.cat(features), torch.cat(success)
