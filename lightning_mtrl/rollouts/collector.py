"""Collecting conversations between a policy and an environment."""

from __future__ import annotations

import copy
import inspect
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from lightning_mtrl.environments.protocol import Environment, Observation, close
from lightning_mtrl.errors import UserError
from lightning_mtrl.processes import Processes
from lightning_mtrl.ranges import COUNT, HEAT, MIN_P, SHARE
from lightning_mtrl.rollouts.collection import Collection, Terms
from lightning_mtrl.rollouts.engine import ConversationEngine
from lightning_mtrl.rollouts.environment_calls import ask
from lightning_mtrl.rollouts.ongoing import Chat, Ongoing
from lightning_mtrl.rollouts.policy_server import PolicyServer
from lightning_mtrl.rollouts.progress import CollectionProgress
from lightning_mtrl.rollouts.results import Rollouts, Share
from lightning_mtrl.rollouts.sampling import SamplingConfig
from lightning_mtrl.rollouts.served import ServedEngine
from lightning_mtrl.rollouts.speaking import EngineMaker

if TYPE_CHECKING:
    from lightning_mtrl.models.adapters import Backbone

__all__ = ["Collector", "Rollouts"]

# Keys that keep the random streams of a collection apart: environments, conversations, groups.
ENVIRONMENT_STREAM, CONVERSATION_STREAM, GROUP_STREAM = 0, 1, 2


class Collector:
    """Holds conversations with copies of an environment, as many at once as there are rows.

    A finished conversation frees its row for the next one at the following turn. Which conversations
    run side by side has no influence on what is said in them (up to rounding in the model's forward).

    Args:
        environment: copied for each conversation; `reset` and `step` may be coroutines.
        chat: turns messages into ids and sampled ids into text.
        sampling: how responses are drawn.
        rows: conversations held at once.
        context_length: longest conversation in tokens.
        max_turns: responses after which a conversation is truncated.
        group_size: conversations that share a seed of the environment (and a persona), each with its
            own sampling.
        explore_share: share of conversations in which one response is drawn at `explore_temperature`: the
            first in half of them, the second in a quarter, and so on, so that short conversations are
            explored too. Returns of turns *before* the one drawn are not the policy's, also where a
            conversation ends before it (`Conversation.explored_turn`).
        explore_temperature: temperature of those responses.
        explore_min_p: they leave out tokens less likely than this share of the likeliest one, so that a high
            temperature brings up other things to say and not a token that never fits.
        personas: texts of which one is appended to the system message in a share of the conversations
            (or groups). `prompt` and `prompt_ids` hold what was sampled from, persona included, and
            `metadata["persona"]` the text.
        persona_share: that share.
        max_failure_share: the collection is stopped once more than this share of its conversations has
            failed. Each process counts its own failures until all have ended, so with several processes it
            is stopped later, or only at its end.
        show_progress: a bar on a terminal, one line at the end elsewhere.
        task: what the conversations are for, to be shown there: "collect" or "validate".
        processes: share each collection out among them, by whole groups; all of them get all conversations.
        server: samples the responses; by default they are sampled here.

    Raises:
        UserError: if a number is out of its range, or there is a share of personas but no persona.
    """

    def __init__(
        self,
        environment: Environment,
        chat: Chat,
        *,
        sampling: SamplingConfig,
        context_length: int,
        max_turns: int,
        rows: int = 256,
        group_size: int = 1,
        explore_share: float = 0.0,
        explore_temperature: float = 2.0,
        explore_min_p: float = 0.001,
        personas: tuple[str, ...] = (),
        persona_share: float = 0.0,
        max_failure_share: float = 1.0,
        show_progress: bool = True,
        task: str = "collect",
        processes: Processes | None = None,
        server: PolicyServer | None = None,
    ) -> None:
        whole = {
            "context_length": context_length,
            "max_turns": max_turns,
            "rows": rows,
            "group_size": group_size,
        }
        for key, number in whole.items():
            _expect(COUNT.holds(number), key, number, COUNT.expected)
        for key, value, allowed in (
            ("explore_share", explore_share, SHARE),
            ("persona_share", persona_share, SHARE),
            ("max_failure_share", max_failure_share, SHARE),
            ("explore_min_p", explore_min_p, MIN_P),
            ("explore_temperature", explore_temperature, HEAT),
        ):
            _expect(allowed.holds(value), key, value, allowed.expected)
        _expect(
            bool(personas) or persona_share == 0, "personas", personas, "at least one text for persona_share"
        )
        self._terms = Terms(
            chat,
            sampling,
            rows,
            context_length,
            max_turns,
            explore_temperature,
            explore_min_p,
        )
        self._max_failure_share = max_failure_share
        self._environment, self._group_size, self._explore_share = environment, group_size, explore_share
        self._personas, self._persona_share = personas, persona_share
        self._processes, self._server = processes or Processes(), server
        self._show_progress, self._task = show_progress and self._processes.is_first, task

    def collect(
        self, model: nn.Module, *, conversations: int, seed: int, policy: str, first: int = 0
    ) -> Rollouts:
        """Hold conversations.

        Args:
            model: a transformers causal language model; it is put into evaluation mode meanwhile. A server
                samples from the policy that it was made for, and not from this.
            conversations: how many; a multiple of `group_size`.
            seed: >= 0. Equal seeds give equal conversations, byte for byte on the same machine.
            policy: name of the policy version; a conversation is named "policy-00017" by its index.
            first: index of the first conversation, a multiple of `group_size`.

        Raises:
            UserError: if `conversations` is not a multiple of `group_size`, if a prompt of the first
                batch leaves no room for a response (before anything is sampled; one of a later batch
                is dropped and counted), or if no conversation ended.
            UserError: if the server cannot serve the policy.
            TooManyFailures: if more than `max_failure_share` did; it has the conversations that ended.
        """
        if conversations < 1 or conversations % self._group_size or first % self._group_size:
            raise UserError(
                f"conversations is {conversations} (from index {first}), but a multiple of group_size "
                f"({self._group_size}), at least one group, was expected."
            )
        started, size = time.perf_counter(), self._group_size
        groups = self._processes.share(conversations // size)
        indices = range(first + groups.start * size, first + groups.stop * size)
        engine, allowed = self._engine_of(model, policy), self._max_failure_share * conversations
        with CollectionProgress(policy, conversations, self._show_progress, task=self._task) as progress:
            shares = self._processes.each(
                lambda: self._hold(engine, indices, seed, policy, progress, allowed)
            )
            for share in shares[1:]:
                progress.join(share.conversations, share.dropped)
        server = None if self._server is None else self._server.address
        return Rollouts.of(shares, time.perf_counter() - started, allowed, server)

    def speaker(self, backbone: Backbone) -> AbstractContextManager[nn.Module]:
        """The policy of a backbone as `collect` wants it: for sampling, unless a server is the one to sample.

        Merging an adapter for sampling takes the memory of the adapted weights once more.
        """
        return nullcontext(backbone) if self._server else backbone.sampling("policy")

    def expect_room(self, *, seed: int, policy: str) -> None:
        """Refuse a context in which the first prompt of a collection does not fit; no model is needed.

        An environment whose `reset` is a coroutine, which may ask and pay others, is left alone, and so is
        one that fails: `collect` says it then.

        Args:
            seed: as in `collect`.
            policy: as in `collect`.

        Raises:
            UserError: if it leaves no room for a response.
        """
        if inspect.iscoroutinefunction(self._environment.reset):
            return
        ongoing = self._begin(0, seed, policy)
        (answer,) = ask([partial(ongoing.environment.reset, ongoing.seed)], Observation)
        ask([partial(close, ongoing.environment)], object)
        if isinstance(answer, Observation):
            ongoing.open(answer, self._terms.chat)
            self._terms.expect_room(ongoing)

    def close(self) -> None:
        """Take the policy off the server, where one samples; the next collection puts it there again."""
        if self._server is not None:
            self._server.close()

    def _engine_of(self, model: nn.Module, policy: str) -> EngineMaker:
        terms = self._terms
        shared: dict[str, Any] = {
            "context_length": terms.context_length,
            "end_ids": terms.chat.end_ids,
            "sampling": terms.sampling,
        }
        if self._server is None:
            pad_id = terms.chat.pad_id
            return lambda rows: ConversationEngine(model, rows=rows, pad_id=pad_id, **shared)
        server, name = self._server, self._server.serve(policy, terms.context_length)
        return lambda rows: ServedEngine(server.client, name, vocabulary=server.vocabulary, **shared)

    def _hold(
        self,
        engine: EngineMaker,
        indices: range,
        seed: int,
        policy: str,
        progress: CollectionProgress,
        allowed: float,
    ) -> Share:
        waiting = deque(partial(self._begin, index, seed, policy) for index in indices)
        collection = Collection(self._terms, engine, waiting, progress, allowed)
        collection.run()
        return collection.share()

    def _begin(self, index: int, seed: int, policy: str) -> Ongoing:
        """Everything random about a conversation comes from its index, whatever runs beside it."""
        group = index // self._group_size
        shared = np.random.default_rng([seed, GROUP_STREAM, group])
        wears = shared.random() < self._persona_share
        stream = np.random.default_rng([seed, CONVERSATION_STREAM, index])
        explores = stream.random() < self._explore_share
        explored_turn = min(int(stream.geometric(0.5)), self._terms.max_turns)
        return Ongoing(
            id=f"{policy}-{index:05d}",
            index=index,
            group=group,
            seed=int(np.random.SeedSequence([seed, ENVIRONMENT_STREAM, group]).generate_state(1)[0]),
            policy=policy,
            environment=_copied(self._environment),
            stream=stream,
            explored_turn=explored_turn if explores else 0,
            persona=self._personas[int(shared.integers(len(self._personas)))] if wears else None,
        )


def _expect(holds: bool, key: str, value: object, expected: str) -> None:
    if not holds:
        raise UserError(f"{key} is {value}, but {expected} was expected.")


def _copied(environment: Environment) -> Environment:
    """A conversation's own environment.

    Raises:
        UserError: if it holds what cannot be copied, such as a lock.
    """
    try:
        return copy.deepcopy(environment)
    except Exception as error:
        raise UserError(
            f"environment: {type(environment).__name__} cannot be copied ({error}), but each conversation "
            f"has a copy of its own. Open locks, clients and files in `reset`, or give it a `__deepcopy__`."
        ) from error
