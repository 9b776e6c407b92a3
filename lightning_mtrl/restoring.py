"""What a run goes on from: its checkpoint, put back into what learns, and its stored conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_mtrl.assembly import Learner
from lightning_mtrl.config import LoopConfig, RunConfig
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.logs import LoadedLogs, stream_conversations
from lightning_mtrl.runs.checkpoint import (
    CheckpointState,
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    load_progress,
)
from lightning_mtrl.runs.folder import RunFolder


def restore(parts: Learner, state: CheckpointState) -> None:
    """Put a checkpoint into the parts: weights, optimizers, and what else the algorithm keeps.

    Raises:
        UserError: if the checkpoint lacks a part, or was made for another model.
    """
    for name, (module, optimizer) in parts.algorithm.modules().items():
        for kind, kept in (("weights", state.tensors), ("optimizer", state.optimizers)):
            if name not in kept:
                raise UserError(
                    f"the checkpoint of iteration {state.iteration} has no {kind} of {name!r}, which this "
                    f"configuration trains. Resume with the configuration that the run was started with."
                )
        module.load_state(dict(state.tensors[name]))
        optimizer.load_state_dict(dict(state.optimizers[name]))
    parts.algorithm.load_state(state.loop["algorithm"])


def why_over(wanted: LoopConfig, newest: CheckpointState | None) -> str:
    """Why a run has nothing left to do; empty if it has.

    Args:
        wanted: how far it shall go.
        newest: its newest checkpoint; None where there is none yet.
    """
    if newest is None:
        return ""
    done = newest.iteration
    # Checkpoints of earlier versions do not say whether the algorithm had converged.
    if wanted.stop_when_converged and newest.loop.get("converged", False):
        return (
            f"The run converged after {done} iterations, so nothing is left to do. To go on all the "
            f"same, pass --loop.stop_when_converged false (loop.iterations is {wanted.iterations})."
        )
    if done >= wanted.iterations:
        return (
            f"All iterations are done: loop.iterations is {wanted.iterations}, so nothing is left to do. "
            f"To go on, pass --loop.iterations with more than {done}."
        )
    return ""


def is_over(wanted: LoopConfig, folder: RunFolder) -> bool:
    """Whether a run has nothing left to do, found out without its weights.

    Raises:
        UserError: if its newest checkpoint is damaged, or all of them are gone.
    """
    newest = latest_checkpoint(folder)
    return bool(why_over(wanted, load_progress(newest) if newest else None))


def expect_earlier(config: RunConfig, folder: RunFolder) -> None:
    """Refuse to go on where stored conversations are lost or broken that will be learned from again.

    Raises:
        UserError: if so; it names the file.
    """
    newest = latest_checkpoint(folder) if config.data.earlier_share else None
    if newest is not None:
        for _ in earlier_conversations(config, folder, load_progress(newest).iteration):
            pass


def earlier_conversations(config: RunConfig, folder: RunFolder, iteration: int) -> Iterator[Conversation]:
    """The stored conversations of the policies before `iteration`, in order.

    Raises:
        UserError: if a file is lost or broken; it names the file.
    """
    for number in range(iteration):
        file, loaded = folder.rollouts(number, config.data.file_format), LoadedLogs()
        try:
            yield from stream_conversations(file, loaded, strict=True)
            if not loaded.read:
                raise UserError(f"{file} is empty, but logged conversations were expected there.")
        except UserError as error:
            raise UserError(
                f"{error} The run learns from these conversations again (data.earlier_share is "
                f"{config.data.earlier_share}). Put the file back, or start a new run with "
                f"`fit --config {folder.config}`."
            ) from error


def alone(config: RunConfig) -> RunConfig:
    """A run of several processes is read back by one."""
    return replace(config, fabric=replace(config.fabric, devices=1, num_nodes=1, strategy="auto"))


def chosen(folder: RunFolder, iteration: int | None) -> tuple[int, CheckpointState | None]:
    """The number of a run's policy, and the checkpoint that has it; None for the pi_0 that it began with.

    Args:
        folder: of the run.
        iteration: which; None for the newest.

    Raises:
        UserError: if there is no checkpoint of it, or all of them are gone.
    """
    if iteration is None:
        latest_checkpoint(folder)  # tells a run that lost its checkpoints from one that is still at pi_0
    found = {int(path.name.rpartition("-")[2]): path for path in checkpoints(folder)}
    wanted = max(found, default=0) if iteration is None else iteration
    if wanted and wanted not in found:
        raise UserError(
            f"--iteration is {wanted}, but {folder.path} has checkpoints of "
            f"{sorted(found) or 'none'} (and pi_0 as 0)."
        )
    return wanted, load_checkpoint(found[wanted]) if wanted in found else None
