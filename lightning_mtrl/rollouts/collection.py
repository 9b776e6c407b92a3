"""One collection under way: a steady batch of conversations over a queue of waiting ones."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.decoding import Draw, SampledResponse
from lightning_mtrl.rollouts.environment_calls import Failure, PendingCalls
from lightning_mtrl.rollouts.farewells import Farewells
from lightning_mtrl.rollouts.heard import fault_of
from lightning_mtrl.rollouts.ongoing import Chat, Ongoing
from lightning_mtrl.rollouts.progress import CollectionProgress
from lightning_mtrl.rollouts.results import NO_ROOM, Share
from lightning_mtrl.rollouts.sampling import SamplingConfig
from lightning_mtrl.rollouts.speaking import Engine, EngineMaker


@dataclass(frozen=True)
class Terms:
    """What holds for all conversations of a collection; `Collector` explains and checks the values."""

    chat: Chat
    sampling: SamplingConfig
    rows: int
    context_length: int
    max_turns: int
    explore_temperature: float
    explore_min_p: float

    @property
    def room(self) -> int:
        """Tokens that every turn needs: of a response, and the header behind it at which a critic reads."""
        return self.sampling.max_response_tokens + len(self.chat.header_ids) + 1

    def expect_room(self, ongoing: Ongoing) -> None:
        """Refuse a context that the first prompt of a conversation leaves no room in.

        Raises:
            UserError: if it does.
        """
        if not self.fits_first(ongoing):
            raise UserError(
                f"model.context_length is {self.context_length}, but the first prompt of conversation "
                f"{ongoing.id} has {len(ongoing.unsaid)} tokens and a response needs up to {self.room} more, "
                f"so at least {len(ongoing.unsaid) + self.room} was expected. Raise model.context_length, or "
                f"lower data.max_response_tokens."
            )

    def fits_first(self, ongoing: Ongoing) -> bool:
        """Whether there is room for a response behind the first prompt."""
        return len(ongoing.unsaid) + self.room <= self.context_length


class Collection:
    """Conversations in all stages: who is waiting, who is talking, who is done.

    Args:
        terms: what holds for all of them.
        engine: made for a number of rows, lets the policy speak.
        waiting: each begins one conversation; only then is its environment copied.
        progress: is told of each that ended.
        allowed_failures: it is given up once more have failed.
    """

    def __init__(
        self,
        terms: Terms,
        engine: EngineMaker,
        waiting: deque[partial[Ongoing]],
        progress: CollectionProgress,
        allowed_failures: float = math.inf,
    ) -> None:
        self._terms = terms
        self._chat = terms.chat
        self._progress = progress
        self._waiting = waiting
        self._make_engine = engine
        self._rows = min(terms.rows, len(waiting))
        self._allowed_failures = allowed_failures
        self._free = list(range(self._rows))
        self._talking: dict[int, Ongoing] = {}
        self._said: dict[int, tuple[SampledResponse, str | None]] = {}  # what a row's environment is hearing
        self._calls: PendingCalls[int] = PendingCalls()
        self._farewells = Farewells()
        self._done: dict[int, Conversation] = {}
        self._dropped: Counter[str] = Counter()
        self._unanswered = 0  # of those that were dropped, since the policy's server gave no response
        self._error: BaseException | None = None
        self._sampled_any = False

    @cached_property
    def _engine(self) -> Engine:
        # Made when the first prompts are known to fit, so that a wrong length costs no forward.
        return self._make_engine(self._rows)

    def run(self) -> None:
        """Admit, listen to the environments, and let the policy speak; until nobody is left."""
        try:
            while (self._waiting or self._talking) and not self._is_hopeless:
                self._admit()
                self._listen()
                if self._responding():
                    self._speak()
        finally:
            self._calls.cancel()
            if self._responding():
                self._engine.cancel()
            for ongoing in self._talking.values():
                self._farewells.say(ongoing.environment)
            self._farewells.finish()

    def _responding(self) -> bool:
        return "_engine" in self.__dict__ and bool(self._engine.responding)

    def share(self) -> Share:
        """What was collected."""
        done = [self._done[index] for index in sorted(self._done)]
        unfinished = len(self._waiting) + len(self._talking)
        return Share(done, self._dropped, self._error, self._is_hopeless, self._unanswered, unfinished)

    @property
    def _is_hopeless(self) -> bool:
        """Too many failed, or one by a mistake of the user that the rest share, such as a wrong key."""
        return self._dropped.total() > self._allowed_failures or isinstance(self._error, UserError)

    def _admit(self) -> None:
        """Give free rows to waiting conversations."""
        while self._waiting and self._free:
            row, ongoing = self._free.pop(), self._waiting.popleft()()
            self._talking[row] = ongoing
            self._calls.start(row, partial(ongoing.environment.reset, ongoing.seed), Observation)

    def _listen(self) -> None:
        """Take what environments have said; while nobody is responding, wait for one of them."""
        begun = [
            row for row, answer in self._calls.take(wait=not self._responding()) if self._take(row, answer)
        ]
        for row in begun:
            self._begin(row)

    def _take(self, row: int, answer: Observation | Transition | Failure[Any]) -> bool:
        """Hear an answer; whether the policy is to respond to it."""
        if isinstance(answer, Failure):
            self._free_row(row)
            self._drop(answer.cause, answer.error)
        elif isinstance(answer, Observation):
            self._talking[row].open(answer, self._chat)
            if not self._fits_first(self._talking[row]):
                self._free_row(row)
        elif (fault := fault_of(answer)) is not None:
            self._free_row(row)
            self._drop(fault)
        else:
            ended = answer.terminated or answer.truncated
            self._continue(row, answer, ended or len(self._talking[row].turns) + 1 == self._terms.max_turns)
        return row in self._talking

    def _begin(self, row: int) -> None:
        ongoing, sampling, terms = self._talking[row], self._terms.sampling, self._terms
        explored = (terms.explore_temperature, terms.explore_min_p)
        usual = (sampling.temperature, sampling.min_p)
        numbers = ongoing.uniforms(sampling.max_response_tokens)
        self._engine.begin(row, ongoing.unsaid, Draw(numbers, *(explored if ongoing.explores else usual)))

    def _speak(self) -> None:
        """Sample on, and let the environments hear what was said."""
        self._sampled_any = True
        for row, said in self._engine.advance(self._calls.ready).items():
            if isinstance(said, Failure):
                self._free_row(row)
                self._unanswered += 1
                self._drop(said.cause, said.error)
                continue
            text = self._chat.response_text(said.ids)
            self._said[row] = (said, text)
            self._calls.start(row, partial(self._talking[row].environment.step, text), Transition)

    def _fits_first(self, ongoing: Ongoing) -> bool:
        if self._terms.fits_first(ongoing):
            return True
        if not self._sampled_any:
            self._terms.expect_room(ongoing)
        self._drop(NO_ROOM)
        return False

    def _continue(self, row: int, answer: Transition, ended: bool) -> None:
        """Append the turn; close the conversation if it ended or its next turn might not fit."""
        ongoing, held, (said, text) = self._talking[row], self._engine.length(row), self._said.pop(row)
        limit = self._terms.context_length
        following = self._chat.observation_ids(answer.observation, finished=said.finished, last=ended)
        if not ended and held + len(following) + self._terms.room > limit:
            ended = True
            following = self._chat.observation_ids(answer.observation, finished=said.finished, last=True)
        if ended and held + len(following) > limit:
            # Nothing is sampled after it, and a forward over the whole conversation must fit.
            following = self._chat.observation_ids("", finished=said.finished, last=True)
        ongoing.add(said, text, answer, following)
        if ended:
            self._free_row(row)
            conversation = ongoing.close(answer)
            self._done[ongoing.index] = conversation
            self._progress.finish(conversation.outcome)

    def _free_row(self, row: int) -> None:
        self._farewells.say(self._talking.pop(row).environment)
        self._said.pop(row, None)
        if self._sampled_any:
            self._engine.release(row)
        self._free.append(row)

    def _drop(self, cause: str, error: BaseException | None = None) -> None:
        self._dropped[cause] += 1
        if self._error is None or isinstance(error, UserError):
            self._error = error
        self._progress.finish(None, dropped=True)
