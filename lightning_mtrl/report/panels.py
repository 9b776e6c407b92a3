"""Which logged numbers the page draws, in what order, and what it says of them (docs/metrics.md has all)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_mtrl.report.reading import Curve

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Panel:
    """One small figure.

    Attributes:
        title: of the figure.
        unit: of its numbers.
        lines: names of the metrics, the one that the figure is of first; it must be there.
        labels: of the lines; empty for a single one.
        band: names of the metrics between which a band is drawn, such as the ends of an interval; or none.
        by_step: over the optimizer steps in which it was logged, instead of over policies.
        level: a value to compare with, such as chance; None for none.
    """

    title: str
    unit: str
    lines: tuple[str, ...]
    labels: tuple[str, ...] = ()
    band: tuple[str, ...] = ()
    by_step: bool = False
    level: float | None = None


_EVALUATION = (
    Panel("Held-out loss of Q", "loss", ("critic/q_loss", "critic/constant_loss"), ("critic", "constant")),
    Panel("Gain over a constant", "loss", ("critic/gain", "critic/gain_low"), ("mean", "lower end"), level=0),
    Panel("Order within a state", "share of pairs", ("critic/same_state_accuracy",), level=0.5),
    Panel("Calibration error of Q", "return", ("critic/calibration_error",)),
    Panel("Change of Q", "return", ("critic/q_change",)),
    Panel("Data that counts", "share", ("critic/effective_share",)),
    Panel("Held-out loss of the PRM", "nats", ("critic/prm_loss",)),
    Panel("Score and outcome", "Kendall's tau", ("critic/kendall_tau",), level=0),
    Panel("Order within a group", "share of pairs", ("critic/pair_accuracy",), level=0.5),
    Panel("Agreement with the last ranking", "Spearman", ("critic/reward_stability",)),
    Panel("Entropy of turn weights", "nats", ("critic/weight_entropy",)),
    Panel("Groups of equal outcomes", "share", ("critic/zero_variance_groups",)),
    Panel("AUC", "probability", ("critic/auc",), level=0.5),
    Panel("Training loss of Q", "loss", ("critic/training_q_loss",), by_step=True),
    Panel("Training loss of the PRM", "nats", ("prm/loss",), by_step=True),
)
_IMPROVEMENT = (
    Panel(
        "Gain in Q of a step",
        "return",
        ("policy/gain",),
        band=("policy/gain_low", "policy/gain_high"),
        level=0,
    ),
    Panel("KL", "nats a response", ("policy/kl",)),
    Panel("Policy loss", "reward", ("policy/loss",), by_step=True),
    Panel("Entropy", "nats a token", ("policy/entropy",), by_step=True),
    Panel("Clipped tokens", "share", ("policy/clip_fraction",), by_step=True),
    Panel("Largest change of a ratio", "ratio", ("policy/ratio_deviation",), by_step=True),
    Panel("Spread of the advantages", "return", ("policy/advantage_std",)),
    Panel(
        "Responses near the data",
        "share",
        ("policy/near_data", "policy/near_data_before"),
        ("after", "before"),
    ),
    Panel("Loss of the value head", "squared reward", ("value/loss",), by_step=True),
)
_ROLLOUTS = (
    Panel("Outcome of rollouts", "outcome", ("rollouts/outcome",)),
    Panel("Responses", "a conversation", ("rollouts/turns",)),
    Panel("Length of a response", "tokens", ("policy/response_tokens",)),
    Panel("Cut off by a limit", "conversations", ("rollouts/truncated",)),
    Panel("Failed", "conversations", ("rollouts/dropped",)),
    Panel("Server against trainer", "nats a token", ("rollouts/server_difference_mean",)),
    Panel("Requests to language models", "requests", ("llm/requests", "llm/failures"), ("all", "failed")),
)
GROUPS = {
    "Policy evaluation": _EVALUATION,
    "Policy improvement": _IMPROVEMENT,
    "Conversations and cost": _ROLLOUTS,
}


def groups_in(curves: Mapping[str, Curve]) -> Iterator[tuple[str, list[Panel]]]:
    """The groups of which something was logged, with the panels that have something to show."""
    for group, panels in GROUPS.items():
        drawn = [
            panel for panel in panels if panel.lines[0] in curves and _shows(curves[panel.lines[0]].values)
        ]
        if drawn:
            yield group, drawn


def _shows(values: Sequence[float]) -> bool:
    """Whether there is more than zeros, and between several values more than rounding."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    return largest > 0 and (len(values) == 1 or high - low > _ROUNDING * largest)
