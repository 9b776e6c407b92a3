"""What is said of a log: whether it is the policy's own, and what its figures leave out."""

from __future__ import annotations

from collections import Counter

import pytest

from lightning_mtrl.evaluation.logged import LogFit, logged_block
from lightning_mtrl.evaluation.validate import Validation
from lightning_mtrl.rollouts.behaviour import Coverage
from lightning_mtrl.rollouts.logs import LoadedLogs

INFINITE = (float("-inf"), float("inf"))
ANY_LOG = "evaluation.target expected_sarsa"


def _said(
    fit: LogFit, coverage: Counter[Coverage] | None = None, shown: int = 200, takes_returns: bool = True
) -> str:
    found = Validation(0.5, (0.4, 0.6), 0.5, (0.4, 0.6), shown, 2.0, 9.0, 0, {}, [], [])
    loaded = LoadedLogs("log.jsonl", read=203, records=203)
    return logged_block(
        "log.jsonl", loaded, {"truncated": 3}, found, fit, coverage or Counter(), takes_returns
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
    assert "without" not in _said(fit)[_said(fit).index("success rate") :]


def test_figures_of_a_log_that_is_all_under_personas_are_not_told_as_the_policys() -> None:
    said = _said(LogFit(float("nan"), None, None), Counter(persona=200), 200)
    assert "these are all not the policy's own behaviour: 200 under a persona" in said
