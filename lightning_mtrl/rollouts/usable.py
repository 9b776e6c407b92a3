"""Which conversations can be learned from, and what to do where these are too few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.counting import by_cause, counted
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.logs import LoadedLogs


def unusable(conversation: Conversation) -> str | None:
    """Why a conversation has no Monte Carlo return; None if it has one."""
    if not conversation.turns:
        return "no response"
    if conversation.truncated:
        return "truncated"
    return "no outcome" if conversation.outcome is None else None


def expect_any(logs: LoadedLogs) -> None:
    """Refuse a log of which nothing could be read.

    Raises:
        UserError: if so; it says what was left out.
    """
    if logs.read:
        return
    raise UserError(
        f"{logs.path}: 0 of {counted(logs.records, 'conversation')} could be read, but at least 1 is needed. "
        f"Left out: {by_cause(logs.dropped) or 'none'}. Give a log with conversations."
    )


def expect_enough(
    conversations: Sequence[Conversation],
    names: Collection[str],
    validation_share: float,
    logs: LoadedLogs | None = None,
    failed: Mapping[str, int] | None = None,
) -> None:
    """Refuse conversations of which too few ended with an outcome to fit on some and to hold one out.

    Args:
        conversations: all that there are.
        names: of what the usable ones belong to and a split keeps together (`split.owners`), each once.
        validation_share: share that is to be held out; 0 holds nothing out.
        logs: where they were read from; None for those that were collected.
        failed: how many more were collected and dropped, by cause.

    Raises:
        UserError: if they are too few; it says how many there are, what was left out, and what to do.
    """
    causes = [unusable(conversation) for conversation in conversations]
    needed, usable = 2 if validation_share else 1, causes.count(None)
    if len(names) >= needed:
        return
    lost = Counter(failed) if logs is None else logs.dropped
    dropped = Counter(filter(None, causes)) + lost
    total = len(conversations) + lost.total() if logs is None else logs.records
    told = (
        f"{'' if logs is None else f'{logs.path}: '}{usable} of {counted(total, 'conversation')} ended with "
        f"an outcome, but at least {needed} {'are' if needed == 2 else 'is'} needed "
        f"{'to hold one out' if needed == 2 else 'to fit on'}"
    )
    if usable >= needed:
        told += ", and these are of one group or customer, which is never split"
    told += f". Left out: {by_cause(dropped) or 'none'}."
    if logs is not None and logs.outcomes_dropped:
        told += f" Outcomes of {logs.outcomes} not used: {by_cause(logs.outcomes_dropped)}."
    raise UserError(f"{told} {_remedy(usable, dropped, logs)}")


def _remedy(usable: int, dropped: Mapping[str, int], logs: LoadedLogs | None) -> str:
    if usable >= 2:
        return "Pass --data.validation_share 0 to hold none out, or give conversations of another one too."
    if logs is None:
        return (
            "Raise data.conversations, or data.max_turns where limits cut them off (truncated), and mend the "
            "environment where it failed."
        )
    if "outcome of no conversation" in logs.outcomes_dropped:
        return f"The ids in {logs.outcomes} must be those of the log; mend them there, or in the log."
    if "no outcome" in dropped:
        return (
            'Give each record a number in "outcome", or pass --outcomes FILE, a .jsonl, .csv or .parquet '
            "file with id and outcome."
        )
    return "Give a log with more conversations that ended."
