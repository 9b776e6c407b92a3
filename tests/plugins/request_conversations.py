"""Checks that the tasks with a withheld fact share, on conversations of scripted agents and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_mtrl.environments.protocol import Transition
from lightning_mtrl.environments.request_agents import MEDIOCRE, PLANNER, Habits, play
from lightning_mtrl.environments.request_dialogue import INVITATION, RequestDialogue

GREEDY = Habits(asks=0.0, asks_invited=0.0, early=1.0, guesses=1.0)


def hold(environment: RequestDialogue, responses: Sequence[str | None], seed: int = 0) -> list[Transition]:
    """One conversation with given responses, all of which are used."""
    environment.reset(seed)
    steps = []
    for response in responses:
        assert not steps or not steps[-1].terminated
        steps.append(environment.step(response))
    return steps


def check_course(environment: RequestDialogue, number: int = 300) -> None:
    """Same seeds, same talk; one invitation and one demand; an end in time; words and outcomes as stated."""
    longest = 0
    for seed in range(number):
        messages, info = play(environment, MEDIOCRE, seed)
        assert play(environment, MEDIOCRE, seed) == (messages, info)
        texts = [text for role, text in messages if role == "user"]
        responses = [text for role, text in messages if role == "assistant"]
        assert sum(INVITATION in text for text in texts) <= 1
        demands = [place for place, text in enumerate(texts) if environment.demand in text]
        assert demands in ([], [len(texts) - 2])
        assert 0.0 <= info["outcome"] <= 1.0
        assert 1 <= info["pivotal_turn"] <= len(responses) <= environment.patience.most_turns
        assert info["tokens"] == len(" ".join(text for _, text in messages[1:]).split())
        longest = max(longest, len(responses))
    assert longest == environment.patience.most_turns


def shares_of(environment: RequestDialogue, number: int = 4000) -> None:
    """The best and the greedy agent, played, against `optimum`.

    4.5 standard errors of a mean in [0, 1]: a false alarm has a chance below 1e-5.
    """
    optimum = environment.optimum(1.0)
    best = _mean_outcome(environment, PLANNER, number)
    greedy = _mean_outcome(environment, GREEDY, number)
    assert math.isclose(best, optimum.mean_return)
    assert abs(greedy - optimum.greedy_return) < 4.5 * math.sqrt(0.25 / number)
    assert optimum.mean_return - optimum.greedy_return > 0.4
    mediocre = _mean_outcome(environment, MEDIOCRE, number, solved=True)
    assert 0.1 < mediocre / optimum.success_rate < 0.4


def _mean_outcome(environment: RequestDialogue, habits: Habits, number: int, solved: bool = False) -> float:
    outcomes = [float(str(play(environment, habits, seed)[1]["outcome"])) for seed in range(number)]
    return sum(o > 0.5 if solved else o for o in outcomes) / number
