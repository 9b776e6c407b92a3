"""What a person sees while conversations are collected."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.counting import counted


class CollectionProgress:
    """A bar with conversations per second and the mean outcome so far, of those that have one.

    Where the output is no terminal it is one plain line at the end, and nothing when `shown` is False.

    Args:
        policy: name of the policy version.
        total: conversations to collect.
        shown: whether anything is printed.
        console: where; standard error by default, so that results can be piped.
        task: what the conversations are for, "collect" or "validate".
    """

    def __init__(
        self, policy: str, total: int, shown: bool, console: Console | None = None, task: str = "collect"
    ) -> None:
        self._name = f"{task} {policy}"
        self._shown = shown
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task(self._name, total=total, facts="")
        self._started = time.perf_counter()
        self._outcomes: list[float] = []
        self._done = 0
        self._dropped = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._shown and not self._console.is_terminal and kind is None:
            self._console.print(
                f"{self._name}: {counted(self._done, 'conversation')}, {self._facts()}", soft_wrap=True
            )

    def finish(self, outcome: float | None, dropped: bool = False) -> None:
        """Count one conversation that ended; `outcome` is None where it is unknown."""
        self._done += 1
        self._dropped += dropped
        if outcome is not None:
            self._outcomes.append(outcome)
        self._bar.update(self._task, advance=1, facts=self._facts())

    def join(self, conversations: Sequence[Conversation], dropped: Mapping[str, int]) -> None:
        """Count what another process has collected."""
        for conversation in conversations:
            self.finish(conversation.outcome)
        for _ in range(sum(dropped.values())):
            self.finish(None, dropped=True)

    def _facts(self) -> str:
        rate = self._done / max(time.perf_counter() - self._started, 1e-9)
        known = len(self._outcomes)
        without = self._done - self._dropped - known
        facts = [f"{rate:.1f}/s"]
        if known:
            of = f" of {known}" if without else ""
            facts.append(f"mean outcome {sum(self._outcomes) / known:z.3f}{of}")
        elif not without:
            facts.append("no outcome yet")
        if without:
            facts.append(f"{without} cut off without an outcome")
        if self._dropped:
            facts.append(f"{self._dropped} dropped")
        return ", ".join(facts)
