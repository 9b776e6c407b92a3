"""Full fine-tuning shared by two processes: `sharded_processes.py RANK FOLDER`; see `two_processes`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_models import improvement_batch, small_context, small_llama, some_talks
from torch import distributed
from two_processes import caught, limit_rows

from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.processes import Processes

ROWS = (1, 7)


def found_by(processes: Processes) -> dict[str, Any]:
    return {
        "steps": {rows: _Trained(processes).after_steps(rows) for rows in ROWS},
        "memory": _Trained(processes, lambda rank: 1 if rank == 1 else 8).after_steps(7),
        "resumed": _resumed(processes),
        "taken back": _taken_back(processes),
        "numbers": _numbers(processes),
        "unready": caught(lambda: _backbone(processes).causal("policy")),
        "trained base": caught(lambda: _Trained(processes).after_steps(1, then=_read_base)),
    }


def _backbone(processes: Processes) -> Backbone:
    # A start of its own, which the first's must replace.
    backbone = Backbone(small_llama(seed=processes.rank), "full")
    backbone.add_role("policy")
    backbone.shard(processes)
    return backbone


class _Trained:
    """A policy and a value head on a copy of the policy."""

    def __init__(self, processes: Processes, fits: Callable[[int], int] | None = None) -> None:
        self.backbone = _backbone(processes)
        context = small_context(self.backbone, processes=processes, say=lambda text: None)
        policy = Policy(self.backbone, kl=KLTerm(0.1), entropy_coef=0.01, learning_rate=1e-3)
        value = ValueHead(self.backbone, "value", learning_rate=1e-3)
        self.modules = [policy, value]
        for module in self.modules:
            module.log = lambda name, value, **_: None  # type: ignore[method-assign]
            if fits is not None:
                limit_rows(module, fits(processes.rank))
        self.steppers = [Stepper(context, module, 1.0, None) for module in self.modules]

    def step(self, rows: int) -> list[float]:
        batch = improvement_batch(some_talks(rows))
        return [stepper.step(batch) for stepper in self.steppers]

    def after_steps(
        self, rows: int, then: Callable[[Backbone], Any] = lambda backbone: None
    ) -> dict[str, Any]:
        losses = [self.step(rows), self.step(rows)]
        then(self.backbone)
        return {"losses": losses, "weights": self.weights()}

    def weights(self) -> list[dict[str, torch.Tensor]]:
        return [module.state() for module in self.modules]

    def optimizers(self) -> list[dict[str, Any]]:
        return [stepper.optimizer.state_dict() for stepper in self.steppers]


def _read_base(backbone: Backbone) -> None:
    with backbone.sampling("base"):
        pass


def _resumed(processes: Processes) -> dict[str, Any]:
    """A step more by the same modules, and by fresh ones from what would be stored."""
    first, second = _Trained(processes), _Trained(processes)
    first.step(7)
    # The first process writes a checkpoint, and all read it.
    kept = first.weights(), first.optimizers()
    weights, optimizers = processes.each(lambda: kept)[0]
    stored = copy.deepcopy(optimizers)  # those that read it may go on with the very tensors
    for module, stepper, w, o in zip(
        second.modules, second.steppers, weights, copy.deepcopy(stored), strict=True
    ):
        module.load_state(w)
        stepper.optimizer.load_state_dict(o)
    return {
        "stored": stored,
        "went on": (first.step(7), first.weights())[1],
        "began again": (second.step(7), second.weights())[1],
    }


def _taken_back(processes: Processes) -> dict[str, Any]:
    """A step after another one, then both again from before them."""
    trained = _Trained(processes)
    trained.step(7)
    learned = [stepper.learned() for stepper in trained.steppers]
    once = trained.after_steps(1)["weights"]
    trained.step(7)
    for stepper, before in zip(trained.steppers, learned, strict=True):
        stepper.go_back(before)
    return {"once": once, "again": trained.after_steps(1)["weights"]}


def _numbers(processes: Processes) -> dict[str, int]:
    """How many numbers one process keeps between two steps."""
    trained = _Trained(processes)
    trained.step(7)
    policy = trained.steppers[0].optimizer
    stepped = [weights for group in policy.param_groups for weights in group["params"]]
    moments = [policy.state[weights]["exp_avg"] for weights in stepped]
    return {
        "in the model": sum(p.numel() for p in trained.backbone.parameters()),
        "stepped": sum(weights.numel() for weights in stepped),
        "moments": sum(moment.numel() for moment in moments),
        "gradients": sum(p.grad is not None for p in [*trained.backbone.parameters(), *stepped]),
        "of the policy": sum(value.numel() for value in trained.weights()[0].values()),
    }


def main(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    torch.save(found_by(Processes.launched("cpu")), folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
