"""How much of the improved policy's probability lies where Q has data: Q means nothing elsewhere.

Both measures are shares of fresh responses, so shares of the policy's own probability mass, and both are set
by what pi_i itself does, so they need no unit:

- *near data*: what the frozen base computes of (state, response), where the critic reads, is as close to the
  nearest (state, response) that the critic was fitted to as 95% of the held-out logged ones are. Each
  feature is divided by its standard deviation over the logged ones.
- *said before*: pi_i gives the response a probability above the lowest 1% of its own responses' in the same
  states. The first measure sees new meanings, this one new words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl.algorithms.critic_inputs import CriticInputs
from lightning_mtrl.algorithms.diagnostics import PROBE_CONVERSATIONS
from lightning_mtrl.algorithms.passes import rows_in_pass
from lightning_mtrl.algorithms.policy_improvement import SCORING_STATES, ScoredGroups, SingleTurnImprover
from lightning_mtrl.conversation import Conversation

NEAR = 0.95  # share of the held-out logged turns that is near by definition
USUAL = 0.99  # share of pi_i's own responses that it says often enough by definition
LOW = 0.8  # a share below it deserves a warning
ROUNDING = 1e-4


@dataclass(frozen=True)
class Coverage:
    """Shares of the responses of pi_i (before) and of the improved policy (after).

    Attributes:
        near_before: of pi_i's fresh responses, near data; about `NEAR` where the states are alike.
        near: of the improved policy's responses.
        said: of the improved policy's responses, those said before.
    """

    near_before: float
    near: float
    said: float

    def metrics(self) -> dict[str, float]:
        """The shares by their logged names."""
        return {"near_data_before": self.near_before, "near_data": self.near, "said_before": self.said}

    def text(self, iteration: int) -> str:
        """A block for people, with a warning where Q is asked about what it has not seen."""
        lines = [
            f"iteration {iteration}, after the step",
            f"  data      {100 * self.near:.0f}% of the new responses lie near what Q was fitted to "
            f"({100 * self.near_before:.0f}% of the old policy's do)",
            f"  words     {100 * self.said:.0f}% are responses that the old policy gave as well",
        ]
        if min(self.near, self.said) < LOW:
            lines.append(
                f"  WARNING   below {100 * LOW:.0f}%, the gain in Q is partly a guess: take smaller steps (a "
                f"higher improvement.kl_coef, fewer improvement.rounds), or collect wider data first "
                f"(data.explore_share, data.personas)"
            )
        return "\n".join(lines)


def coverage(
    improver: SingleTurnImprover, before: ScoredGroups, after: ScoredGroups, inputs: CriticInputs
) -> Coverage:
    """Measure how far a step has led away from the data.

    Args:
        improver: of the step.
        before: fresh responses of pi_i in held-out states.
        after: responses of the improved policy in the same states.
        inputs: what the critic reads of the rollouts.
    """
    data = inputs.context.datamodule
    known = _logged(inputs, data.train_conversations)
    spread = known.std(0, correction=0)
    scale = torch.where(spread > ROUNDING, spread, 1.0)

    def distance(points: Float[Tensor, "N H"]) -> Float[Tensor, " N"]:
        return _to_nearest(points / scale, known / scale)

    # Equal responses differ by rounding when they stand in batches of another width.
    limit = distance(_logged(inputs, data.validation_conversations)).quantile(NEAR) + ROUNDING
    near = [(distance(_sampled(inputs, scored)) <= limit).float().mean() for scored in (before, after)]
    usual = improver.reference_log_likelihood(before).quantile(1 - USUAL) - ROUNDING
    said = (improver.reference_log_likelihood(after) >= usual).float().mean()
    return Coverage(near[0].item(), near[1].item(), said.item())


def _sampled(inputs: CriticInputs, scored: ScoredGroups) -> Float[Tensor, "N H"]:
    batch = scored.batch
    size = rows_in_pass(batch.input_ids.size(1), SCORING_STATES)
    passes = [slice(start, start + size) for start in range(0, len(batch), size)]
    return torch.cat(inputs.read_base(passes, batch.rows)).flatten(0, 1).to(batch.input_ids.device)


def _logged(inputs: CriticInputs, conversations: list[Conversation]) -> Float[Tensor, "N H"]:
    read = inputs.features(conversations[:PROBE_CONVERSATIONS])
    return read.features[read.turn_mask]


def _to_nearest(points: Float[Tensor, "N H"], known: Float[Tensor, "M H"]) -> Float[Tensor, " N"]:
    """Root mean square difference, over features, of each point to the known one nearest to it."""
    # By differences: an expanded square would round equal points apart.
    exact = "donot_use_mm_for_euclid_dist"
    nearest = [torch.cdist(part, known, compute_mode=exact).min(1).values for part in points.split(256)]
    return torch.cat(nearest) / math.sqrt(points.size(1))
