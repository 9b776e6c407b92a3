"""What a run tells people in words: one line for each policy, and sample conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mtrl.conversation import Conversation


def sample_text(
    conversation: Conversation, values: Sequence[float] | None = None, name: str = "value"
) -> str:
    """A conversation as Markdown, with the value of each turn where there is one, under its name."""
    lines = [f"**{message.role}**: {message.content}" for message in conversation.prompt]
    for place, turn in enumerate(conversation.turns):
        value = f" ({name} {values[place]:z.2f})" if values is not None else ""
        lines.append(f"**response {place + 1}**{value}: {turn.response or '*abstains*'}")
        lines.append(f"**observation**: {turn.observation or '*nothing*'}")
    outcome = "unknown" if conversation.outcome is None else f"{conversation.outcome:g}"
    return "\n\n".join([*lines, f"**outcome**: {outcome}"])


def mismatch_line(measured: Mapping[str, float]) -> str:
    """What rollouts of a server show of its log-probabilities; `measured` is that of `with_own_logprobs`."""
    return (
        f"Log-probabilities of the server and the trainer differ by {measured['server_difference_mean']:.2g} "
        f"nats a token on average and {measured['server_difference_max']:.2g} at most (KL "
        f"{measured['server_kl']:.2g} nats a token); the trainer's are used."
    )


def policy_line(row: Mapping[str, Any], optimum: float | None, without_outcome: int = 0) -> str:
    """What a policy's row of the summary says.

    Args:
        row: of the policy.
        optimum: success rate of the best agent; None where unknown.
        without_outcome: conversations of the row that were cut off before an outcome.
    """
    best = f" of {optimum:.3f} possible" if optimum is not None else ""
    step = "" if row["accepted"] is None else f"; step {'taken' if row['accepted'] else 'not taken'}"
    # A KL that is 0 up to rounding, as of equal policies, tells nothing; an estimate of it can be below 0.
    kl = f"{row['kl'] or 0.0:z.2f}"
    spent = sum(row["seconds"].values())
    measured = "not measured yet"
    if row["success_rate"] is not None:
        low, high = row["success_rate_interval"]
        cut_off = f" ({without_outcome} of {row['conversations']} cut off without an outcome: no success)"
        measured = (
            f"success rate {row['success_rate']:.3f} [{low:.3f}, {high:.3f}]{best}"
            f"{cut_off if without_outcome else ''}, "
            f"return {row['mean_return']:z.3f}, {row['turns']:.1f} turns"
        )
    return (
        f"policy {row['iteration']}: {measured}{step}"
        f"{'' if kl == '0.00' else f', KL {kl} nats a response'}, {spent:.0f} s"
    )
