"""Checkpoints that are whole or absent, and hold no pickled code.

A checkpoint is a folder: one safetensors file for each group of tensors, one file for each optimizer,
loop.json, and manifest.json with the digest of every other file. It appears under its name only when all
of it is written.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_mtrl.errors import UserError
from lightning_mtrl.runs.atomic import remove_folder, replacing_folder, write_json
from lightning_mtrl.runs.folder import RunFolder

_MANIFEST = "manifest.json"
_LOOP = "loop.json"
_GROUP_NAME = re.compile(r"[A-Za-z0-9_-]+")
_CHECKPOINT_NAME = re.compile(r"iteration-(\d+)")


@dataclass(frozen=True)
class CheckpointState:
    """All that a run needs to go on.

    Attributes:
        iteration: the iteration that was just done.
        tensors: group -> name -> tensor: adapters, heads, states of random generators.
        optimizers: name -> `state_dict()` of an optimizer: tensors, numbers, texts and containers of them.
        loop: JSON values: counters, seeds, the algorithm's own state.
    """

    iteration: int
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    optimizers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(path: Path, state: CheckpointState) -> None:
    """Write a checkpoint; a process killed meanwhile leaves the former state of `path`.

    Raises:
        ValueError: if the name of a group is not a plain word, or `loop` holds NaN.
    """
    groups = {"tensors": state.tensors, "optimizer": state.optimizers}
    for name in (name for group in groups.values() for name in group):
        if not _GROUP_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a file; use letters, digits, '_' and '-'")
    with replacing_folder(path) as folder:
        for name, tensors in state.tensors.items():
            # Tensors of one storage are refused by the format, and views would be written in full.
            save_file(_copied(tensors), folder / f"tensors-{name}.safetensors")
        for name, optimizer in state.optimizers.items():
            torch.save(dict(optimizer), folder / f"optimizer-{name}.pt")
        write_json(folder / _LOOP, dict(state.loop))
        # By name, so that a file that was lost meanwhile is an error here and no gap in the manifest.
        tensors_of = [f"tensors-{name}.safetensors" for name in state.tensors]
        optimizers_of = [f"optimizer-{name}.pt" for name in state.optimizers]
        names = sorted([*tensors_of, *optimizers_of, _LOOP])
        digests = {name: _digest(folder / name) for name in names}
        write_json(folder / _MANIFEST, {"format": 1, "iteration": state.iteration, "files": digests})


def load_checkpoint(path: Path) -> CheckpointState:
    """Read a checkpoint to the CPU.

    Raises:
        UserError: if a part is missing or altered; it names the file.
    """
    manifest = _manifest(path)
    for name, digest in manifest["files"].items():
        _verify(path / name, digest)
    state = _without_weights(path, manifest)
    tensors: dict[str, dict[str, Tensor]] = {}
    optimizers: dict[str, dict[str, Any]] = {}
    for name in manifest["files"]:
        file = path / name
        if file.suffix == ".safetensors":
            tensors[file.stem.removeprefix("tensors-")] = _read_tensors(file)
        elif file.suffix == ".pt":
            optimizers[file.stem.removeprefix("optimizer-")] = _read_optimizer(file)
    return CheckpointState(state.iteration, tensors, optimizers, state.loop)


def load_progress(path: Path) -> CheckpointState:
    """Read how far a run was, without the weights and optimizers of its checkpoint.

    Raises:
        UserError: if this part is missing or altered; it names the file.
    """
    manifest = _manifest(path)
    _verify(path / _LOOP, manifest["files"].get(_LOOP, ""))
    return _without_weights(path, manifest)


def checkpoints(folder: RunFolder) -> list[Path]:
    """All finished checkpoints of a run, oldest first."""
    found = folder.checkpoints.iterdir() if folder.checkpoints.is_dir() else ()
    numbered = {int(match[1]): path for path in found if (match := _CHECKPOINT_NAME.fullmatch(path.name))}
    return [numbered[number] for number in sorted(numbered)]


def latest_checkpoint(folder: RunFolder) -> Path | None:
    """The newest finished checkpoint; None when the run has not finished an iteration yet.

    A damaged newest checkpoint is still the newest: `load_checkpoint` says what is wrong with it, rather than
    that the run silently goes on from an older state.

    Raises:
        UserError: if the run had checkpoints, and they are gone.
    """
    found = checkpoints(folder)
    if found:
        return found[-1]
    # A new run begins with an empty folder for them, and collects again only after a checkpoint.
    removed = folder.config.is_file() and not folder.checkpoints.is_dir()
    if removed or any(_number(path) > 0 for path in folder.all_rollouts()):
        raise UserError(
            f"{folder.checkpoints} {'is missing' if removed else 'is empty'}, so the policy of the run is "
            f"lost. Put the folder back, or start a new run with `fit --config {folder.config}`."
        )
    return None


def prune_checkpoints(folder: RunFolder, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints (at least 1); None keeps all."""
    if keep is None:
        return
    for path in checkpoints(folder)[:-keep]:
        remove_folder(path)


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        raise _damaged(file, "is missing")
    try:
        manifest = json.loads(file.read_text("utf-8"))
        return {"iteration": int(manifest["iteration"]), "files": dict(manifest["files"])}
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(file, "cannot be read") from error


def _without_weights(path: Path, manifest: Mapping[str, Any]) -> CheckpointState:
    return CheckpointState(int(manifest["iteration"]), {}, {}, json.loads((path / _LOOP).read_text("utf-8")))


def _verify(file: Path, digest: str) -> None:
    if not file.is_file():
        raise _damaged(file, "is missing")
    if _digest(file) != digest:
        raise _damaged(file, "is not what was written")


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise _damaged(file, "cannot be read") from error


def _read_optimizer(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise _damaged(file, "cannot be read") from error
    return state


def _damaged(file: Path, problem: str) -> UserError:
    return UserError(
        f"{file} {problem}, so the run cannot go on from this checkpoint. Put the file back, "
        f"or remove the folder {file.parent} to go on from the checkpoint before it."
    )
