"""What is said of a log: whether it is the policy's own, and what its figures leave out."""

from __future__ import annotations

from collections import Counter

import pytest

from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.evaluation.logged import LogFit, logged_block, logged_figures, measured_in
from lightning_mtrl.evaluation.validate import Validation
from lightning_mtrl.rollouts.behaviour import Coverage
from lightning_mtrl.rollouts.logs import LoadedLogs

INFINITE = (float("-inf"), float("inf"))
ANY_LOG = "evaluation.target expected_sarsa"


def _said(
    fit: LogFit,
    coverage: Counter[Coverage] | None = None,
    shown: int = 200,
    takes_returns: bool = True,
    own_only: bool = False,
) -> str:
    found = Validation(0.5, (0.4, 0.6), 0.5, (0.4, 0.6), shown, 2.0, 9.0, 0, {}, [], [])
    loaded = LoadedLogs("log.jsonl", read=203, records=203)
    return logged_block(
        "log.jsonl", loaded, {"truncated": 3}, found, fit, coverage or Counter(), takes_returns, own_only
    )


@pytest.mark.parametrize(
    ("fit", "own", "told"),
    [
        (LogFit(-1.2, 0.0, (-0.01, 0.01)), True, "yes: the log's own log-probabilities agree"),
        (LogFit(-1.2, 0.7, (0.5, 0.9)), False, "no: the log's own log-probabilities are not those"),
        (LogFit(-1.2, 0.0, INFINITE), None, "not known: too few responses"),
        (LogFit(-1.2, None, None), None, "not known: the log has no log-probabilities"),
        (
            LogFit(-17.0, None, None),
            False,
            "no: below -8 nats a token on average, the policy cannot have said",
        ),
        (LogFit(float("nan"), None, None), None, "not known: in no conversation did the policy alone speak"),
    ],
)
def test_whether_a_log_is_the_policys_own_is_one_sentence(fit: LogFit, own: bool | None, told: str) -> None:
    said = _said(fit)
    assert (fit.own, fit.row()["own"]) == (own, own)
    assert [line for line in said.splitlines() if line.startswith(f"  own       {told}")]
    assert ("WARNING" in said) == (ANY_LOG in said) == (own is False)
    assert "nan" not in said


def test_where_any_log_will_do_there_is_no_warning() -> None:
    foreign = LogFit(-17.0, None, None)
    assert "WARNING" not in _said(foreign, Counter(persona=155), 45, takes_returns=False)


def test_what_is_left_out_of_the_rates_is_counted_and_returns_under_personas_are_warned_of() -> None:
    fit = LogFit(-1.2, 0.0, (-0.01, 0.01))
    said = _said(fit, Counter(persona=140, explored=15), 45)
    assert "2.0 turns, in 45 conversations" in said
    (left_out,) = [line for line in said.splitlines() if "without 155 conversations that are not" in line]
    assert "15 drawn to be explored and 140 under a persona" in left_out
    (warning,) = [line for line in said.splitlines() if "WARNING" in line]
    assert "140 conversations" in warning
    assert ANY_LOG in warning
    assert "WARNING" not in _said(fit, Counter(explored=15), 185)
    own_only = _said(fit, Counter(persona=140, explored=15), 45, own_only=True)
    assert "under a persona); they are not learned from" in own_only
    assert "WARNING" not in own_only
    assert "without" not in _said(fit)[_said(fit).index("success rate") :]


def test_figures_of_a_log_that_is_all_under_personas_are_not_told_as_the_policys() -> None:
    said = _said(LogFit(float("nan"), None, None), Counter(persona=200), 200)
    assert "these are all not the policy's own behaviour: 200 under a persona" in said


def _talk(name: str, outcome: float | None, truncated: bool = False, explored: bool = False) -> Conversation:
    turn = Turn("a", reward=outcome or 0.0, explored=explored)
    prompt = (Message("user", "q"),)
    return Conversation(name, prompt, (turn,), outcome, terminated=not truncated, truncated=truncated)


def test_what_a_limit_cut_off_is_no_success_of_a_log_and_is_counted_once() -> None:
    """10 of 40 won, and 20 never got that far: a quarter, as `validate` would say, and not a half."""
    talks = [_talk(f"{n}", 1.0 if n < 10 else 0.0) for n in range(20)]
    talks += [_talk(f"cut {n}", None, truncated=True) for n in range(20)]
    talks += [_talk("scored", 1.0, truncated=True), _talk("open", None)]
    found = logged_figures(
        measured_in(talks), 1.0, Counter({"truncated": 21, "no outcome": 1, "not JSON": 2})
    )
    assert (found.conversations, found.truncated) == (41, 21)
    assert found.success_rate == pytest.approx(10 / 41)
    assert found.dropped == {"no outcome": 1, "not JSON": 2}


def test_a_log_is_measured_by_the_policys_own_conversations_where_there_are_some() -> None:
    explored = [_talk("e", 1.0, explored=True), _talk("e cut", None, truncated=True, explored=True)]
    own, cut = _talk("o", 0.0), _talk("c", None, truncated=True)
    assert measured_in([*explored, own, cut]) == [own, cut]
    assert measured_in([*explored, cut]) == [*explored, cut]
    assert measured_in(explored) == explored
