"""Start the processes of a run: Lightning Fabric on one device, or on several on one or more machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import distributed, nn

from lightning_mtrl.config import FabricConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.processes import Processes
from lightning_mtrl.watching import watch_started

SHARDING = ("fsdp", "deepspeed", "model_parallel")  # in the names of strategies that Fabric has


class SummedGradients(DDPStrategy):
    """Fabric's DDP, but modules stay as they are, and the stepper sums gradients once an optimizer step.

    `DistributedDataParallel` sums inside the backward pass, so every process must make the same number of
    passes, through the same weights, and a pass that ran out of memory could not be repeated. Here a process
    may have more or fewer rows than another one, or none.
    """

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # not wrapped
        """The module itself."""
        return module


def launch(config: FabricConfig) -> Processes:
    """Start the processes of a run; afterwards the program runs in each of them.

    Raises:
        UserError: if Fabric cannot do what was asked for.
    """
    fabric, processes = _started(_fabric(config, []), config)
    watch_started(fabric)
    return processes


def join(config: FabricConfig, loggers: Sequence[Any]) -> tuple[Fabric, Processes]:
    """Fabric for the processes that `launch` has started, or for this one alone.

    Raises:
        UserError: if several processes are asked for and none were launched, or Fabric cannot do it.
    """
    fabric = _fabric(config, loggers)
    if fabric.world_size > 1 and not distributed.is_initialized():
        raise UserError(
            f"fabric.devices x fabric.num_nodes is {fabric.world_size}, but only `fit` runs several "
            f"processes. Pass --fabric.devices 1 --fabric.num_nodes 1."
        )
    return _started(fabric, config)


def _started(fabric: Fabric, config: FabricConfig) -> tuple[Fabric, Processes]:
    with _explained(config):
        fabric.launch()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return fabric, Processes.launched(fabric.device)


def _fabric(config: FabricConfig, loggers: Sequence[Any]) -> Fabric:
    # The backbone shares weights out itself (`Sharding`), so processes are started as for "ddp".
    strategy = "auto" if config.strategy == "fsdp" else config.strategy
    if any(name in strategy for name in SHARDING):
        raise UserError(
            f"fabric.strategy is {config.strategy!r}, but weights are shared out among processes by 'fsdp'. "
            f"Pass --fabric.strategy fsdp --model.fine_tuning full, or --fabric.strategy ddp."
        )
    with _explained(config):
        fabric = _made(config, strategy, loggers)
        if fabric.world_size == 1:
            return fabric
        made = fabric.strategy
        if isinstance(made, DDPStrategy) and not isinstance(made.launcher, _MultiProcessingLauncher):
            return _made(config, SummedGradients(), loggers)
    raise UserError(
        f"fabric.strategy is {config.strategy!r}, but several processes run with 'ddp'. Pass "
        f"--fabric.strategy ddp."
    )


def _made(config: FabricConfig, strategy: str | SummedGradients, loggers: Sequence[Any]) -> Fabric:
    return Fabric(
        accelerator=config.accelerator,
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=strategy,
        precision=config.precision,  # type: ignore[arg-type]  # Fabric checks the name itself
        loggers=list(loggers),
    )


@contextmanager
def _explained(config: FabricConfig) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, ImportError, MisconfigurationException) as error:
        given = ", ".join(f"fabric.{name} {value}" for name, value in asdict(config).items())
        raise UserError(f"fabric: {' '.join(str(error).split())} This was asked for: {given}.") from error
