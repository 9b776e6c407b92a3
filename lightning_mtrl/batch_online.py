"""Batch-online learning: one step of policy evaluation and improvement on a log, without an environment.

A team deploys pi_k, exports its conversations, and takes one step; then it deploys pi_{k+1}. Between
two deployments nothing is sampled but single responses in logged states (Iterative PPO, arXiv:2511.21638).
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from lightning_mtrl.algorithms.base import Improvement, Signal
from lightning_mtrl.algorithms.passes import role_logprobs
from lightning_mtrl.assembly import Learner, assemble_learner
from lightning_mtrl.batch import collate
from lightning_mtrl.config import RunConfig
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.evaluation.logged import LogFit, logged_block, logged_figures, measured_in, step_block
from lightning_mtrl.evaluation.validate import Validation
from lightning_mtrl.loop import phase_of
from lightning_mtrl.parsing import build_algorithm
from lightning_mtrl.processes import Processes
from lightning_mtrl.recorder import Recorder
from lightning_mtrl.restoring import restore
from lightning_mtrl.rollouts.behaviour import count_coverage, coverage_of, told
from lightning_mtrl.rollouts.log_records import Demands
from lightning_mtrl.rollouts.log_tokens import LogEncoder
from lightning_mtrl.rollouts.logs import LoadedLogs, encoded, read_conversations
from lightning_mtrl.rollouts.split import owners
from lightning_mtrl.rollouts.usable import expect_enough, unusable
from lightning_mtrl.runs.atomic import write_json
from lightning_mtrl.runs.checkpoint import CheckpointState
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.summary import as_json

SCORED_TOGETHER = 128  # conversations
FIT_CONVERSATIONS = 256  # on which the log is compared with the policy


@dataclass(frozen=True)
class Logs:
    """Where the conversations of pi_k are, and how they are read.

    Attributes:
        path: a file, or "hub:NAME" (`read_conversations`).
        outcomes: a file of outcomes, joined by id; None where the log has them.
        strict: whether the first record that cannot be read is an error.
        join_consecutive: whether messages of one role that follow each other are one.
    """

    path: str
    outcomes: str | None = None
    strict: bool = False
    join_consecutive: bool = False


class BatchOnlineStep:
    """What logs say of pi_k, its Q, and pi_{k+1}; everything is kept in a run folder.

    Args:
        config: of the run. Its environment is never made.
        folder: where the run lives; new.
        logs: where the conversations of pi_k are.
        loaded: what `read_logs` found there; its conversations are taken over.
        start: checkpoint of the step that made pi_k, to go on from its critic and optimizers; None starts
            from the configuration's policy as pi_0.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        logs: Logs,
        loaded: LoadedLogs,
        start: CheckpointState | None = None,
    ) -> None:
        self.config, self.folder, self.logs, self.loaded = config, folder, logs, loaded
        self.recorder = Recorder(config, folder, Processes())
        self.learner: Learner = assemble_learner(config, self.recorder.loggers)
        self.number = 0 if start is None else start.iteration
        if start is not None:
            restore(self.learner, start)
        context = self.learner.context
        context.say, context.on_step, context.iteration = (
            self.recorder.say,
            self.recorder.on_step,
            self.number,
        )
        self.recorder.clock.iteration = self.number
        self.algorithm = self.learner.algorithm
        self.seconds: dict[str, float] = {}
        self.report: dict[str, Any] = {"logs": {"path": logs.path, "outcomes": logs.outcomes}}

    def evaluate(self) -> Signal:
        """Fit Q of pi_k to the logs, and leave what it learned."""
        signal = self._signal()
        if said := self.algorithm.describe(signal):
            self.recorder.say(said)
        if not signal.trusted:
            self.recorder.say(f"`improve` would take no step: {signal.reason}.")
        self._record(self.number, self.validation, signal, None)
        self.recorder.checkpoint(self.number, self.learner, converged=False)
        self._finish()
        return signal

    def improve(self) -> Improvement:
        """Fit Q of pi_k, take one step, and leave pi_{k+1}."""
        signal = self._signal()
        self._record(self.number, self.validation, None, None)
        with self._phase("improve"):
            improvement = self.algorithm.improve(self.conversations, signal)
        self._record(self.number + 1, None, signal, improvement)
        self.recorder.checkpoint(self.number + 1, self.learner, self.algorithm.converged(signal))
        self.report["step"] = {"taken": improvement.accepted, **improvement.metrics}
        self._finish()
        self.recorder.say(step_block(self.number, improvement.accepted, improvement.metrics, self.folder))
        return improvement

    def _signal(self) -> Signal:
        loaded = self._encode()
        self.recorder.say(
            logged_block(
                self.logs.path,
                loaded,
                self.dropped,
                self.validation,
                self.fit,
                self.coverage,
                self.algorithm.takes_returns,
                self.algorithm.learns_from_own,
            )
        )
        with self._phase("evaluate"):
            signal = self.algorithm.evaluate(self.conversations)
        self.report["critic"] = {"trusted": signal.trusted, "reason": signal.reason, **signal.metrics}
        for name, figure in signal.figures.items():
            self.folder.figures.mkdir(exist_ok=True)
            figure.savefig(self.folder.figures / f"{name}.png", dpi=120)
        return signal

    def _own(self, conversations: list[Conversation]) -> list[Conversation]:
        """Those that are the policy's own behaviour.

        Raises:
            UserError: if there is none.
        """
        own = [c for c in conversations if coverage_of(c) is None]
        if not own:
            raise UserError(
                f"{self.logs.path} has no conversation of the policy itself ({told(self.coverage)}), and "
                f"{type(self.algorithm).__name__} learns from those only. Log some, or use IterativePPO with "
                f"evaluation.target expected_sarsa, for which any log will do."
            )
        return own

    def _encode(self) -> LoadedLogs:
        """Give the log its token ids, split it, and see what it says of pi_k."""
        context, data, loaded = self.learner.context, self.learner.context.datamodule, self.loaded
        with self._phase("collect"):
            encoder = LogEncoder(context.chat, context.context_length, context.sampling.max_response_tokens)
            conversations = list(encoded(loaded.conversations, loaded, encoder, self.logs.strict))
            loaded.conversations = []
            # As they were logged: personas are taken out of the prompts, and log-probabilities may be made.
            usable = [c for c in conversations if unusable(c) is None]
            measured, self.coverage = measured_in(conversations), count_coverage(usable)
            own = [c for c in usable if coverage_of(c) is None]
            if self.algorithm.learns_from_own:
                conversations = self._own(conversations)
            if self.algorithm.needs_logprobs:
                conversations = with_logprobs(conversations, self.learner)
            data.set_rollouts(conversations, seed=context.seed, logs=loaded)
            self.fit = self._fit_of(own)
        self.conversations, self.dropped = data.conversations, data.dropped
        causes = Counter(loaded.dropped) + Counter(data.dropped)
        self.validation: Validation = logged_figures(measured, self.learner.gamma, causes)
        self.report["logs"] |= {
            "read": loaded.read,
            "left_out": dict(loaded.dropped),
            "unused": data.dropped,
            "messages": loaded.messages,
            "coverage": dict(self.coverage),
            "outcomes_left_out": dict(loaded.outcomes_dropped),
            "remarks": dict(loaded.remarks),
            "fit": self.fit.row(),
        }
        return loaded

    def _fit_of(self, own: list[Conversation]) -> LogFit:
        """Compare some of the log's own responses with what pi_k would say."""
        chosen = own[:FIT_CONVERSATIONS]
        scored = with_logprobs([_without_logprobs(c) for c in chosen], self.learner)
        return LogFit.of(chosen, scored)

    def _record(
        self,
        number: int,
        validation: Validation | None,
        signal: Signal | None,
        improvement: Improvement | None,
    ) -> None:
        self.recorder.policy(number, validation, signal, improvement, self.seconds, self.learner)
        self.seconds = {}

    def _finish(self) -> None:
        self.report["policy"] = self.validation.row()
        write_json(self.folder.path / "report.json", as_json(self.report))
        self.recorder.close(self.learner)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """As the loop's in this iteration."""
        return phase_of(self.config.seed, name, self.number, self.learner.context, self.seconds)


def read_logs(logs: Logs, config: RunConfig) -> LoadedLogs:
    """Read a log for a step, before a model is loaded: mistakes in it are told at once.

    Raises:
        UserError: for an algorithm that cannot learn from logs, a log with too few conversations that ended
            with an outcome, or (`strict`) a record that cannot be read.
    """
    algorithm = build_algorithm(config)
    if not algorithm.learns_from_logs:
        raise UserError(
            f"algorithm is {config.algorithm.class_path}, which learns from fresh conversations that an "
            f"environment makes for it, and not from logs. Use one that does, such as --algorithm "
            f"IterativePPO, or `fit` with an environment."
        )
    gamma = float(getattr(algorithm, "gamma", 1.0))
    demands = Demands(True, algorithm.returns, gamma, logs.join_consecutive)
    loaded = read_conversations(logs.path, logs.strict, demands, logs.outcomes)
    usable = [c for c in loaded.conversations if unusable(c) is None]
    expect_enough(loaded.conversations, set(owners(usable)), config.data.validation_share, loaded)
    return loaded


def with_logprobs(conversations: list[Conversation], learner: Learner) -> list[Conversation]:
    """Conversations with the policy's own log-probabilities where a log brings none."""
    found = list(conversations)
    missing = [place for place, c in enumerate(found) if not all(t.behaviour_logprobs for t in c.turns)]
    missing.sort(key=lambda place: len(found[place].token_ids()))
    chat = learner.context.chat
    for start in range(0, len(missing), SCORED_TOGETHER):
        places = missing[start : start + SCORED_TOGETHER]
        plain = [
            replace(found[p], turns=tuple(replace(t, trained=True) for t in found[p].turns)) for p in places
        ]
        batch = collate(plain, chat.pad_id, chat.header_ids)
        values = role_logprobs("policy", batch, learner.context)
        for row, place in enumerate(places):
            of_turn = [
                tuple(values[row][batch.turn_index[row] == k].tolist())
                for k in range(1, len(found[place].turns) + 1)
            ]
            turns = zip(found[place].turns, of_turn, strict=True)
            found[place] = replace(
                found[place], turns=tuple(replace(turn, behaviour_logprobs=given) for turn, given in turns)
            )
    return found


def _without_logprobs(conversation: Conversation) -> Conversation:
    return replace(
        conversation, turns=tuple(replace(turn, behaviour_logprobs=()) for turn in conversation.turns)
    )
