"""Figures of how an implicit PRM's scores develop, as in ITPO's paper but for one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_mtrl.credit.probe import PRMProbe
from lightning_mtrl.evaluation.ranking import SUCCESS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def probe_figures(probe: PRMProbe) -> dict[str, Figure]:
    """Kendall's tau, agreement with the last ranking, slope of the score, and one conversation's rewards."""
    iterations = range(1, len(probe.rewards) + 1)
    places = range(len(probe.rewards))
    tau, axes = _axes("Kendall's tau of PRM score and outcome")
    axes.plot(iterations, probe.taus, marker="o")
    ranking, axes = _axes("Spearman's correlation with the last ranking")
    for unit in ("turn", "token"):
        axes.plot(iterations, [probe.agreement(i, -1, unit) for i in places], marker="o", label=f"{unit}s")
    axes.legend()
    slope, axes = _axes("slope of PRM score against outcome, same conversations")
    axes.plot(iterations, [probe.slope(i) for i in places], marker="o")
    return {
        "kendall_tau": tau,
        "ranking_agreement": ranking,
        "score_slope": slope,
        "reward_dynamics": reward_dynamics(probe),
    }


def reward_dynamics(probe: PRMProbe) -> Figure:
    """Rewards of the turns of one conversation, a success where there is one (figure 2)."""
    outcomes = [float(c.outcome or 0.0) for c in probe.conversations]
    row = max(range(len(outcomes)), key=lambda place: (outcomes[place] > SUCCESS, -place))
    conversation = probe.conversations[row]
    pivotal = conversation.metadata.get("pivotal_turn")
    figure, axes = _axes(f"PRM rewards of the turns of {conversation.id}, outcome {outcomes[row]:g}")
    rewards = [probe.turn_rewards(iteration)[row] for iteration in range(len(probe.rewards))]
    for turn, said in enumerate(conversation.turns):
        label = f"{turn + 1}: {(said.response or 'abstains')[:32]}"
        decisive = turn + 1 == pivotal
        axes.plot(
            range(1, len(rewards) + 1),
            [row_rewards[turn] for row_rewards in rewards],
            marker="o",
            linewidth=3 if decisive else 1,
            label=f"{label} (pivotal)" if decisive else label,
        )
    figure.legend(fontsize="x-small", ncols=2, loc="outside lower center")
    return figure


def _axes(title: str) -> tuple[Figure, Axes]:
    # Drawn without a display; imported here, since most commands draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("iteration")
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    return figure, axes
