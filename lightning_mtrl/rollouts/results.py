"""What a collection has brought: the conversations, what was dropped, and when so much was that it ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.counting import counted
from lightning_mtrl.errors import UserError

NO_ROOM = "the first prompt does not fit the context"  # a cause of dropping that is not the environment's


@dataclass(frozen=True)
class Rollouts:
    """Conversations under one policy version.

    Attributes:
        conversations: in the order of their indices, without those that were dropped.
        dropped: how many conversations have no outcome because their environment failed, by cause.
        truncated: how many of `conversations` a limit (turns, context, the environment's own) cut off.
        tokens: sampled tokens of `conversations`.
        seconds: wall-clock time of the collection.
    """

    conversations: list[Conversation]
    dropped: dict[str, int]
    truncated: int
    tokens: int
    seconds: float

    @classmethod
    def of(
        cls,
        shares: Sequence[Share],
        seconds: float,
        allowed_failures: float = math.inf,
        server: str | None = None,
    ) -> Self:
        """The whole collection from the shares of all processes, in the order of the indices.

        Args:
            shares: of all processes.
            seconds: that it took.
            allowed_failures: how many conversations may have failed.
            server: address of the one that the policy speaks on; None where it speaks here.

        Raises:
            UserError: if no conversation ended.
            TooManyFailures: if more failed than are allowed, or a share was stopped for that.
        """
        dropped = sum((share.dropped for share in shares), Counter[str]())
        conversations = [c for share in shares for c in share.conversations]
        if not conversations:
            error = next((share.error for share in shares if share.error is not None), None)
            if isinstance(error, UserError):
                raise error
            culprit, remedy = _blamed(shares, dropped, server)
            raise UserError(
                f"{culprit}: {_none_ended(shares, dropped)}, so there is nothing to learn from: "
                f"{_most_frequent(dropped)}. {remedy}"
            ) from error
        tokens = sum(len(turn.response_ids) for c in conversations for turn in c.turns)
        truncated = sum(c.truncated for c in conversations)
        rollouts = cls(conversations, dict(sorted(dropped.items())), truncated, tokens, seconds)
        if dropped.total() > allowed_failures or any(share.stopped for share in shares):
            raise TooManyFailures(rollouts, *_blamed(shares, dropped, server))
        return rollouts


class TooManyFailures(UserError):
    """So many conversations failed that going on would waste what the rest costs.

    Args:
        rollouts: the conversations that had ended by then.
        culprit: what most of the others failed by, as a key of the configuration.
        remedy: what to do about it.

    Attributes:
        rollouts: as given.
    """

    def __init__(self, rollouts: Rollouts, culprit: str, remedy: str) -> None:
        failed, kept = Counter(rollouts.dropped), len(rollouts.conversations)
        super().__init__(
            f"{culprit}: {counted(failed.total(), 'conversation')} failed, so the collection was stopped "
            f"(see data.max_failure_share): {_most_frequent(failed)}. What had ended is kept "
            f"({counted(kept, 'conversation')}). {remedy}"
        )
        self.rollouts = rollouts


def _none_ended(shares: Sequence[Share], dropped: Counter[str]) -> str:
    """What became of all conversations, where none of them ended."""
    unfinished = sum(share.unfinished for share in shares)
    if not unfinished:
        return "every conversation failed"
    return (
        f"{counted(dropped.total(), 'conversation')} failed and none had ended when the collection was "
        f"stopped for it (see data.max_failure_share), which cut off the other {unfinished}"
    )


def _blamed(shares: Sequence[Share], dropped: Counter[str], server: str | None) -> tuple[str, str]:
    """What most conversations failed by, and what to do about it."""
    if 2 * dropped[NO_ROOM] > dropped.total():
        return "model.context_length", "Raise it, or lower data.max_response_tokens."
    if server is None or 2 * sum(share.unanswered for share in shares) <= dropped.total():
        return "environment", "Mend the environment, or whatever serves it, and start again."
    return (
        f"data.server.base_url is {server!r}",
        "The policy speaks there, so it must be a vLLM server, which returns the ids of the tokens that it "
        "samples and their log-probabilities; other servers with the same API give texts alone. Its own log "
        "says more (docs/serving.md).",
    )


def _most_frequent(dropped: Counter[str]) -> str:
    return "; ".join(f"{cause} ({counted(count, 'time')})" for cause, count in dropped.most_common(5))


@dataclass(frozen=True)
class Share:
    """What one process has collected.

    Attributes:
        conversations: in the order of their indices, without those that were dropped.
        dropped: number of dropped conversations by cause.
        error: the first exception of an environment; it is not sent to other processes.
        stopped: True if it was given up, since too many conversations had failed.
        unanswered: how many were dropped since the server that the policy speaks on gave no response.
        unfinished: how many had neither ended nor failed when it was given up.
    """

    conversations: list[Conversation]
    dropped: Counter[str]
    error: BaseException | None
    stopped: bool = False
    unanswered: int = 0
    unfinished: int = 0

    def __getstate__(self) -> dict[str, Any]:
        # An exception of somebody's environment may be one that cannot be sent.
        return {**self.__dict__, "error": None}
