"""The shop: its three terminal rules, its four treatments, its words, and its exact values."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from lightning_mtrl.conversation import describe_sent
from lightning_mtrl.environments.sales_agents import MEDIOCRE, PLANNER, Habits, play
from lightning_mtrl.environments.sales_dynamics import SalesDynamics
from lightning_mtrl.environments.sales_language import (
    ACT_PHRASES,
    NEEDS,
    REPLIES,
    STYLE_ENDINGS,
    TIERS,
    Act,
    classify,
    phrase,
    read_reply,
    reply_text,
)
from lightning_mtrl.environments.sales_values import Belief, Move, SalesValues, blind_offers
from lightning_mtrl.environments.suggested_response import SuggestedResponse

GAMMA = 0.95


def _conversation(environment: SuggestedResponse, response: str | None, seed: int) -> list:
    environment.reset(seed)
    steps = [environment.step(response)]
    while not steps[-1].terminated:
        steps.append(environment.step(response))
    return steps


def test_equal_seeds_give_equal_conversations() -> None:
    environment = SuggestedResponse()
    for seed in range(20):
        first, second = (_conversation(environment, "What do you need?", seed) for _ in range(2))
        assert first == second


def test_a_conversation_ends_by_a_sale_or_a_departure_and_never_by_truncation() -> None:
    endings = Counter()
    for seed in range(400):
        steps = _conversation(SuggestedResponse(max_turns=4), "I recommend our basic laptop.", seed)
        assert all(not step.truncated for step in steps)
        assert all(not step.terminated and step.reward == 0 for step in steps[:-1])
        last = steps[-1]
        assert last.terminated
        assert len(steps) <= 4
        ending = "sale" if last.reward else "business" if not last.info["sent"] else "customer"
        assert (ending == "customer") == (bool(last.info["sent"]) and not last.info["reply"])
        assert (ending == "sale") == (bool(last.info["reply"]))
        endings[ending] += 1
    assert set(endings) == {"sale", "business", "customer"}


def test_the_business_treats_suggestions_in_every_way_with_the_stated_chances() -> None:
    """Each count is binomial; 4.5 standard deviations give a false alarm below 1e-5 for each of five."""
    environment, number = SuggestedResponse(), 4000
    seen = Counter()
    for seed in range(number):
        environment.reset(seed)
        step = environment.step("What do you need?")
        seen["left" if not step.info["sent"] else step.info["disposition"]] += 1
    chances = SalesDynamics().treatments(Act("ask_need"))
    assert math.isclose(sum(chance for _, chance in chances), 1.0)
    for disposition, chance in chances:
        spread = math.sqrt(number * chance * (1 - chance))
        assert abs(seen[disposition] - number * chance) < 4.5 * spread, disposition


def test_an_abstention_leaves_the_business_to_itself() -> None:
    environment = SuggestedResponse()
    environment.reset(3)
    step = environment.step(None)
    assert step.info["disposition"] == "abstained"
    assert step.info["sent"]
    assert f"(Sent instead: {step.info['sent']})" in step.observation


def test_the_state_shows_suggestion_and_sent_message() -> None:
    assert describe_sent("Hi.", "Hi.", "I see.") == "I see."
    assert describe_sent("Hi.", "Hi. Cheers!", "I see.") == "I see. (Sent instead: Hi. Cheers!)"
    assert describe_sent(None, "Hello.", "") == "(The customer left.) (Sent instead: Hello.)"
    assert describe_sent("Hi.", "Hi.", "") == "(The customer left.)"
    assert describe_sent("Hi.", "", "") == "(The business left.)"


def test_every_phrase_is_read_as_what_it_was_written_for() -> None:
    rng = random.Random(0)
    for kind, options in ACT_PHRASES.items():
        for _ in range(10 * len(options)):
            offer = kind == "offer"
            act = Act(kind, rng.choice(NEEDS), rng.choice(TIERS)) if offer else Act(kind)
            text = phrase(act, rng)
            assert classify(text) == act
            assert all(classify(text + ending) == act for ending in STYLE_ENDINGS.values())


@pytest.mark.parametrize(
    ("text", "act"),
    [
        ("Could you tell me what kind of product you're looking for?", Act("ask_need")),
        ("Are you interested in a laptop, a phone or a camera?", Act("ask_need")),
        ("How much would you like to spend?", Act("ask_budget")),
        ("Do you have a price range in mind for the laptop?", Act("ask_budget")),
        ("Our high-end notebook is perfect for you!", Act("offer", "laptop", "premium")),
        ("How about our affordable printer?", Act("offer", "printer", "basic")),
        ("We have a great camera for you.", Act("offer", "camera", None)),
        ("Thank you, have a nice day!", Act("chat")),
        ("zxq 77 %%", Act("nonsense")),
        ("", Act("nonsense")),
        ("We sell laptops. " * 60, Act("nonsense")),
    ],
)
def test_free_text_is_read_by_rules(text: str, act: Act) -> None:
    assert classify(text) == act


@pytest.mark.parametrize("size", ["small", "large"])
def test_the_customers_words_are_read_back(size: str) -> None:
    rng = random.Random(1)
    for name in REPLIES:
        kind = name.removesuffix("_small").removesuffix("_large")
        read, fact = read_reply(reply_text(kind, "camera", size, rng))
        assert read == kind
        if kind.endswith("_need") and kind != "wrong_need":
            assert fact == "camera"
        if kind.endswith(("_budget", "_tier")):
            assert fact == size


def test_planning_is_worth_far_more_than_greed() -> None:
    optimum = SuggestedResponse().optimum(GAMMA)
    assert optimum.success_rate - optimum.greedy_success_rate > 0.15
    assert optimum.mean_return > optimum.greedy_return


def _habit_policy(habits: Habits):
    offers = 1 - habits.ask_need - habits.ask_budget - habits.chat - habits.abstain

    def policy(belief: Belief) -> list[tuple[Move, float]]:
        informed = Move("offer", True, "fit" if belief.known_budget else "guess")
        moves = [
            (Move("ask_need"), habits.ask_need),
            (Move("ask_budget"), habits.ask_budget),
            (Move("chat"), habits.chat),
            (Move("abstain"), habits.abstain),
            (informed, offers * habits.informed),
        ]
        return moves + [
            (move, offers * (1 - habits.informed) * share) for move, share in blind_offers(belief)
        ]

    return policy


def _plan_policy(belief: Belief) -> list[tuple[Move, float]]:
    if not belief.stated_need:
        return [(Move("ask_need"), 1.0)]
    return [(Move("offer", True, "fit") if belief.known_budget else Move("ask_budget"), 1.0)]


@pytest.mark.parametrize(
    ("habits", "policy"),
    [(MEDIOCRE, _habit_policy(MEDIOCRE)), (PLANNER, _plan_policy)],
    ids=["mediocre", "planner"],
)
def test_exact_values_agree_with_simulated_scripted_agents(habits: Habits, policy) -> None:
    """4.5 standard errors: false alarm below 1e-5 a case. Simulator and values share only the "
    "table of chances."""
    exact = SalesValues(SalesDynamics(), 8, GAMMA).evaluate(policy)
    number = 8000
    environment = SuggestedResponse()
    outcomes = [play(environment, habits, seed)[1] for seed in range(number)]
    mean = sum(outcomes) / number
    assert abs(mean - exact.success) < 4.5 * math.sqrt(exact.success * (1 - exact.success) / number)


def test_the_best_agent_is_at_least_as_good_as_any_scripted_one() -> None:
    values = SalesValues(SalesDynamics(), 8, GAMMA)
    best = values.optimum().mean_return
    for policy in (_habit_policy(MEDIOCRE), _plan_policy, values.greedy_policy):
        assert values.evaluate(policy).value <= best + 1e-12


def test_probabilities_after_every_move_sum_to_one() -> None:
    values = SalesValues(SalesDynamics(), 8, GAMMA)
    frontier = [belief for belief, _ in values.starts()]
    assert math.isclose(sum(p for _, p in values.starts()), 1.0)
    for belief in frontier:
        for move in (Move("ask_need"), Move("offer"), Move("abstain"), Move("nonsense")):
            assert math.isclose(sum(p for p, _, _ in values.outcomes(belief, move)), 1.0)


def test_one_turn_values_are_the_chance_of_a_blind_sale() -> None:
    """By hand, in the only turn there is.

    An offer that fits by luck (1/8) sells with 0.94 and one of the wrong tier (1/8) with 0.02, when it is
    sent (0.94); in 5% the business does what it likes, and 30% of that is a blind offer too. Customers who
    open with their need (15%), or with need and budget (4.5%), are offered that.
    """
    sent, own = 0.94, 0.05 * 0.3
    blind = (0.94 + 0.02) / 8
    guess_tier = (0.94 + 0.02) / 2
    by_start = {
        "vague": (sent + own) * blind,
        "need": sent * guess_tier + own * blind,
        "both": sent * 0.94 + own * blind,
    }
    wanted = 0.85 * by_start["vague"] + 0.15 * (0.7 * by_start["need"] + 0.3 * by_start["both"])
    assert math.isclose(SalesValues(SalesDynamics(), 1, GAMMA).optimum().success_rate, wanted, rel_tol=1e-9)
