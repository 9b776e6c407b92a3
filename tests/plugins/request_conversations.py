"""Checks that the tasks with a withheld fact share, on conversations of scripted agents and by hand."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence

from lightning_mtrl.environments.protocol import Transition
from lightning_mtrl.environments.request_agents import MEDIOCRE, PLANNER, Habits, ScriptedAgent, play
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


def check_pivotal_turns(environment: RequestDialogue, luck: float, number: int = 600) -> None:
    """The pivotal turn is that of the largest change of the exact chance of success of the mediocre agent.

    `luck` is the chance that one of its guesses is right; what it says when it stays vague never is.
    """
    for seed in range(number):
        agent = ScriptedAgent(MEDIOCRE, random.Random(seed))
        environment.reset(seed)
        plan = (environment.invited_turn, environment.last_turn)
        chances = [_chance(plan, luck, 1, environment.questions_left, False)]
        while True:
            step = environment.step(agent.respond(environment))
            if step.terminated:
                break
            told = bool(environment.told)
            chances.append(_chance(plan, luck, environment.turn + 1, environment.questions_left, told))
        chances.append(float(step.info["outcome"] > 0.5))
        changes = [abs(after - before) for before, after in itertools.pairwise(chances)]
        assert step.info["pivotal_turn"] == 1 + changes.index(max(changes))


def _chance(plan: tuple[int, int], luck: float, turn: int, left: int, told: bool) -> float:
    """Chance of success of `MEDIOCRE` before its response number `turn`, for a user of one question."""
    invited, last = plan
    delivers = MEDIOCRE.informed if told else MEDIOCRE.guesses * luck
    if turn == last:
        return delivers
    later = functools.partial(_chance, plan, luck, turn + 1)
    right = MEDIOCRE.right_question
    asks = right * later(0, True) + (1 - right) * later(0, told) if left else 0.0
    if turn == invited and left:
        return MEDIOCRE.asks_invited * asks + (1 - MEDIOCRE.asks_invited) * later(left, told)
    share = MEDIOCRE.asks if left else 0.0
    return MEDIOCRE.early * delivers + share * asks + (1 - MEDIOCRE.early - share) * later(left, told)


def _mean_outcome(environment: RequestDialogue, habits: Habits, number: int, solved: bool = False) -> float:
    outcomes = [float(str(play(environment, habits, seed)[1]["outcome"])) for seed in range(number)]
    return sum(o > 0.5 if solved else o for o in outcomes) / number
