"""What the loop asks of an algorithm: evaluate, improve, converged. The loop never asks which one runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.idle_keys import Idle
from lightning_mtrl.modules.workload import Extent, Work, module_passes
from lightning_mtrl.processes import Processes

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from matplotlib.figure import Figure

    from lightning_mtrl.models.adapters import Backbone
    from lightning_mtrl.modules.base import RoleModule
    from lightning_mtrl.rollouts.datamodule import RolloutDataModule
    from lightning_mtrl.rollouts.sampling import SamplingConfig
    from lightning_mtrl.rollouts.tokens import ChatTokenizer


@dataclass
class Context:
    """What an algorithm works with; the loop fills it once.

    Attributes:
        fabric: devices, precision and loggers.
        backbone: the shared model; its role "policy" exists and holds pi_0.
        chat: tokens of prompts, responses and observations.
        datamodule: the current rollouts.
        sampling: how responses are drawn.
        context_length: tokens that a conversation may hold.
        rows: conversations or responses that are sampled together.
        group_size: conversations that share an initial state; None where it is not known before they come.
        processes: those that run this program together; this one is alone by default.
        max_skipped_steps: non-finite steps in a row after which the run stops.
        on_step: called after every optimizer step.
        say: prints a block of text for the person who watches.
        iteration: number of the current iteration, from 0.
        seed: seed of the current phase; the loop sets it anew for each phase.
    """

    fabric: Fabric
    backbone: Backbone
    chat: ChatTokenizer
    datamodule: RolloutDataModule
    sampling: SamplingConfig
    context_length: int
    rows: int = 256
    group_size: int | None = None
    processes: Processes = field(default_factory=Processes)
    max_skipped_steps: int = 10
    on_step: Callable[[], None] = lambda: None
    say: Callable[[str], None] = print
    iteration: int = 0
    seed: int = 0

    @contextmanager
    def reading(self, role: str) -> Iterator[None]:
        """To compute with a role without training it; all processes enter it together.

        Its weights are here meanwhile, and the precision is that of training steps, so that what is found can
        be compared with what they find.
        """
        with self.backbone.whole(role), self.fabric.autocast():
            yield


@dataclass(frozen=True)
class Signal:
    """What policy evaluation found.

    Attributes:
        metrics: numbers for the logs and for the summary's row, by name without the phase.
        trusted: False when the signal is no better than knowing nothing; no step is taken then.
        reason: why it is not trusted.
        figures: matplotlib figures for the logs, by name.
    """

    metrics: Mapping[str, float]
    trusted: bool = True
    reason: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Improvement:
    """What an improvement step did.

    Attributes:
        metrics: numbers for the logs and for the summary's row.
        accepted: False when the step was not taken, or taken back.
    """

    metrics: Mapping[str, float]
    accepted: bool = True


class Algorithm(ABC):
    """One way to evaluate a policy and to improve it.

    Attributes:
        turn_value_name: what `turn_values` are, in a word for people.
        learns_from_logs: whether logged conversations of the policy are enough for a step; False where it
            needs fresh ones, made for it by an environment.
        needs_logprobs: whether it learns from the very responses of the conversations, and so needs their
            log-probabilities under the policy that gave them.
        learns_from_own: whether it learns from the policy's own conversations only: `fit` refuses a share
            that is explored or led under personas, and such ones of a log are left out.
        takes_returns: whether it takes the returns of the conversations for the policy's own, which is right
            where the policy led them.
    """

    turn_value_name: str = "value"
    learns_from_logs: bool = False
    needs_logprobs: bool = False
    learns_from_own: bool = False
    takes_returns: bool = True

    @property
    def returns(self) -> tuple[float, float] | None:
        """Range of the returns that it can learn from; None for any."""
        return None

    def idle(self) -> list[Idle]:
        """Its settings that have no effect beside others; `fit` says so of those that somebody gave."""
        return []

    @abstractmethod
    def setup(self, context: Context) -> None:
        """Create modules and optimizers on the context's backbone."""

    @abstractmethod
    def evaluate(self, rollouts: list[Conversation]) -> Signal:
        """Learn from conversations of the current policy how good its responses were."""

    @abstractmethod
    def improve(self, rollouts: list[Conversation], signal: Signal) -> Improvement:
        """Change the policy (the backbone's role "policy") for the better."""

    def describe(self, signal: Signal) -> str:
        """What to know of the last `evaluate` where no step follows, in a block of text; empty if nothing."""
        return ""

    @abstractmethod
    def converged(self, signal: Signal) -> bool:
        """True when there is nothing more to learn."""

    @abstractmethod
    def modules(self) -> dict[str, tuple[RoleModule, Any]]:
        """Each trained module with its optimizer, by the name used in checkpoints."""

    def workload(self, extent: Extent) -> Sequence[Work]:
        """The largest passes of evaluation and improvement, and what they keep; asked after `setup`.

        By default every module trains on batches of `data.batch_size` whole conversations.
        """
        return list(module_passes(self.modules(), extent, extent.batch_size))

    def state(self) -> dict[str, Any]:
        """Anything else that a resumed run needs, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # nothing to put back by default
        """Put `state` back."""

    def figures(self) -> Mapping[str, Figure]:
        """What there is to see at the end of a run, by name."""
        return {}

    def turn_values(self, conversations: list[Conversation]) -> list[list[float]] | None:
        """Value of each turn for people who read sample conversations; None if the algorithm has none."""
        return None
