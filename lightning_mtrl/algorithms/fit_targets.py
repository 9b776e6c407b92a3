"""What a Q-critic is fitted to: returns of the log, or what a frozen copy of it says of what follows.

A target network is a copy of the critic that stays as it is between two refreshes (Mnih et al. 2015; in
fitted Q evaluation, Le et al. 2019, arXiv:1903.08738, each refresh is an iteration). The conversations are
fixed, so all that is ever asked of the copy are its values on them: those are kept, instead of its weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from lightning_mtrl.algorithms.critic_inputs import CriticInputs, Readable, predict
from lightning_mtrl.objectives import discounted_returns

ByConversation = Mapping[str, Float[Tensor, " _"]]  # rows are as long as their conversations


class FitTargets(ABC):
    """Targets of every turn that a critic is fitted to or measured on.

    Attributes:
        moving: whether the targets depend on the critic, so that `refresh` changes them.
    """

    moving: bool = True

    @abstractmethod
    def refresh(self) -> None:
        """Make the critic as it is now the target network."""

    @abstractmethod
    def of(self, batch: Readable) -> Float[Tensor, "B K"]:
        """What Q of each turn is regressed on, in units of reward."""

    @abstractmethod
    def measured(self, batch: Readable) -> Float[Tensor, "B K"]:
        """What Q of each turn is compared with when the critic is measured, in units of reward."""

    def on(self, batch: Readable) -> Readable:
        """The batch with its targets, and with the weights for them; all rows of a step together."""
        return replace(batch, turn_targets=self.of(batch), turn_weights=self.weights(batch))

    def weights(self, batch: Readable) -> Float[Tensor, "B K"]:
        """Weight of each turn, those of `collate` for targets that go on as the log does."""
        return batch.turn_weights

    def metrics(self) -> dict[str, float]:
        """Further numbers for the logs."""
        return {}


class LoggedTargets(FitTargets):
    """The log's own continuation: Monte Carlo returns, or SARSA(lambda) with a target network.

    It evaluates the policy that led the conversations. The critic is measured on Monte Carlo returns.

    Args:
        inputs: of the critic, whose `gamma` and `td_lambda` count.
    """

    def __init__(self, inputs: CriticInputs) -> None:
        self.inputs, self.critic = inputs, inputs.critic
        self.moving = self.critic.td_lambda < 1
        self._q: ByConversation = {}

    def refresh(self) -> None:
        """See `FitTargets`."""
        if self.moving:
            self._q = logged_values(self.inputs)

    def of(self, batch: Readable) -> Float[Tensor, "B K"]:
        """See `FitTargets`."""
        if not self.moving:
            return self.measured(batch)
        return self.critic.targets(batch, rows_of(self._q, batch))

    def measured(self, batch: Readable) -> Float[Tensor, "B K"]:
        """See `FitTargets`."""
        return discounted_returns(batch.turn_rewards, batch.turn_mask, self.critic.gamma)


def logged_values(inputs: CriticInputs) -> ByConversation:
    """Q of every turn of the current conversations, fitted on or held out, by conversation."""
    data = inputs.context.datamodule
    conversations = [*data.train_conversations, *data.validation_conversations]
    inputs.critic.eval()
    return by_conversation([c.id for c in conversations], predict(inputs, conversations))


def by_conversation(ids: Sequence[str], rows: Sequence[Float[Tensor, " _"]]) -> ByConversation:
    """One row for each conversation.

    Raises:
        ValueError: if two conversations have one id.
    """
    found = dict(zip(ids, rows, strict=True))
    if len(found) < len(ids):
        raise ValueError(f"{len(ids) - len(found)} conversations have the id of another one")
    return found


def rows_of(values: ByConversation, batch: Readable) -> Float[Tensor, "B K"]:
    """The rows of a batch's conversations, on its device; 0 outside its turns."""
    found = batch.turn_rewards.new_zeros(batch.turn_rewards.shape)
    for row, name in enumerate(batch.ids):
        found[row, : len(values[name])] = values[name].to(found)
    return found
