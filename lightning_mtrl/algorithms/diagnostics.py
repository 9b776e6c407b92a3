"""What to know before an improvement step, in one block: is there a signal, and is there room for it?"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl.algorithms.base import Signal
from lightning_mtrl.algorithms.critic_inputs import CriticInputs
from lightning_mtrl.algorithms.policy_improvement import ScoredGroups
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.calibration import ranking_auc

BETTER = 0.05  # a response is better than the policy's mean when its Q is higher by this much
PROBE_CONVERSATIONS = 256


def diagnose(before: ScoredGroups, signal: Signal, inputs: CriticInputs) -> str:
    """The block of text that is shown before a step.

    Args:
        before: fresh responses of the current policy in held-out states, with their Q.
        signal: what evaluation found.
        inputs: what the critic reads of the rollouts, for the probe of the base model's features.
    """
    q = before.q
    coverage = ((q.max(1).values - q.mean(1)) > BETTER).float().mean().item()
    return "\n".join(
        [
            f"iteration {inputs.context.iteration}, before the step",
            *_of_critic(signal, inputs),
            f"  coverage  a better response was sampled in {100 * coverage:.0f}% of {len(q)} held-out states",
            f"  room      mean Q {q.mean().item():z.3f}; of the best of {q.size(1)} responses "
            f"{q.max(1).values.mean().item():z.3f}",
        ]
    )


def describe_critic(signal: Signal, inputs: CriticInputs) -> str:
    """The block of text where no step follows: that of `diagnose` without what fresh responses are for.

    Args:
        signal: what evaluation found.
        inputs: as in `diagnose`.
    """
    return "\n".join([f"iteration {inputs.context.iteration}, evaluated", *_of_critic(signal, inputs)])


def _of_critic(signal: Signal, inputs: CriticInputs) -> list[str]:
    m = signal.metrics
    return [
        f"  critic    held-out loss {m['q_loss']:.4f}, of a constant {m['constant_loss']:.4f}; "
        f"calibration error {m['calibration_error']:.3f}",
        f"  ranking   AUC {m['auc']:.3f}; within the same state {m['same_state_accuracy']:.3f}",
        f"  features  linear probe of the base model: AUC {probe_base(inputs):.3f}",
    ]


def probe_base(inputs: CriticInputs) -> float:
    """AUC on held-out conversations of a ridge regression from the base's hidden states to success.

    It reads where the critic reads, before any training of the model: a critic can find with little data
    what the base's features already tell apart.
    """
    data = inputs.context.datamodule
    train_x, train_y = _features(data.train_conversations[:PROBE_CONVERSATIONS], inputs)
    test_x, test_y = _features(data.validation_conversations[:PROBE_CONVERSATIONS], inputs)
    mean, scale = train_x.mean(0), train_x.std(0).clamp(min=1e-6)
    x, centre = (train_x - mean) / scale, train_y.mean()
    gram = x.T @ x + 0.1 * len(x) * torch.eye(x.size(1), dtype=x.dtype)
    weights = torch.linalg.solve(gram, x.T @ (train_y - centre))
    return ranking_auc(((test_x - mean) / scale @ weights).float(), test_y > 0)


def _features(
    conversations: list[Conversation], inputs: CriticInputs
) -> tuple[Float[Tensor, "N H"], Float[Tensor, " N"]]:
    read = inputs.features(conversations)
    success = torch.tensor([float(c.outcome or 0.0) for c in conversations], dtype=torch.float64)
    by_turn = success[:, None].expand(read.turn_mask.shape)
    # Double precision on the CPU, since some devices (Apple's) have none.
    mask = read.turn_mask.cpu()
    return read.features.cpu()[mask].double(), by_turn[mask]
