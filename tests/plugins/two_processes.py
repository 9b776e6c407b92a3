"""What two processes of a run do together, without a run around it: `python two_processes.py RANK FOLDER`.

Each writes what it found to FOLDER/RANK.pt. `found_by_two` starts both; `found_alone` is the same with one.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from small_models import (
    conversations_batch,
    improvement_batch,
    move,
    own_weights,
    small_backbone,
    small_chat,
    small_context,
    small_llama,
    some_talks,
)
from torch import distributed

from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.processes import Processes
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.sampling import SamplingConfig

ROWS = (1, 2, 7, 8)


def found_by_two(folder: Path, script: str = __file__) -> list[dict[str, Any]]:
    """What both processes of a script found, by rank."""
    workers = [
        subprocess.Popen([sys.executable, script, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for worker in workers:
        _, said = worker.communicate(timeout=300)
        assert worker.returncode == 0, said
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def found_alone() -> dict[str, Any]:
    return _found(Processes())


class Shop:
    """Ends after one turn; the conversation of a seed below 2^30 cannot begin, or with `broken` none can."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def reset(self, seed: int) -> Observation:
        if self.broken or seed < 2**30:
            raise ConnectionError("no shop assistant")
        return Observation("x")

    def step(self, response: str | None) -> Transition:
        return Transition("", reward=1.0, terminated=True)


def _found(processes: Processes) -> dict[str, Any]:
    return {
        "steps": {rows: _step(processes, rows) for rows in ROWS},
        "memory": _step(processes, 8, fits=lambda rank: 1 if rank == 1 else 8),
        "no memory": caught(lambda: _step(processes, 8, fits=lambda rank: 0 if rank == 1 else 8)),
        "not finite": _step(processes, 2, spoilt=True),
        "collected": _collected(processes, broken=False),
        "nothing collected": caught(lambda: _collected(processes, broken=True)),
        "a mistake of the second": caught(lambda: processes.each(lambda: _fail_on(processes, 1, UserError))),
        "a fault of the second": caught(lambda: processes.together(lambda: _fail_on(processes, 1, KeyError))),
        "waiting inside": caught(lambda: processes.each(lambda: processes.first(lambda: 1))),
        "dealt": processes.over(range(5), lambda mine: [10 * item for item in mine]),
        "from the first": processes.first(lambda: processes.rank),
    }


def _step(
    processes: Processes, rows: int, fits: Callable[[int], int] | None = None, spoilt: bool = False
) -> dict[str, Any]:
    """Two steps of policy and value head: weights, losses, what was logged and said."""
    backbone = small_backbone(["policy"])
    said: list[str] = []
    context = small_context(backbone, processes=processes, say=said.append)
    modules = [
        Policy(backbone, kl=KLTerm(0.1), entropy_coef=0.01, learning_rate=1e-3),
        ValueHead(backbone, "value", learning_rate=1e-3),
    ]
    talks = some_talks(rows)
    batch = replace(improvement_batch(talks), turn_index=conversations_batch(talks).turn_index)
    if spoilt:
        batch.advantages[batch.response_mask] = float("nan")
    losses, logged = [], []
    for module in modules:
        if processes.rank == 1:
            move(module.own_parameters(), seed=5)  # a start of its own, which the first's must replace
        stepper = Stepper(context, module, 1.0, None)
        module.log = lambda name, value, **_: logged.append((name, float(value)))  # type: ignore[method-assign]
        if fits is not None:
            limit_rows(module, fits(processes.rank))
        losses += [stepper.step(batch), stepper.step(batch)]
    return {"weights": [own_weights(m) for m in modules], "losses": losses, "logged": logged, "said": said}


def limit_rows(module: Policy | ValueHead, rows: int) -> None:
    step = module.training_step

    def limited(batch: Any, batch_idx: int = 0) -> Any:
        if len(batch) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(batch, batch_idx)

    module.training_step = limited  # type: ignore[method-assign]


def _collected(processes: Processes, broken: bool) -> dict[str, Any]:
    chat = small_chat()
    sampling = SamplingConfig(max_response_tokens=4)
    collector = Collector(
        Shop(broken), chat, sampling=sampling, context_length=64, max_turns=2, group_size=2, rows=3,
        processes=processes,
    )  # fmt: skip
    got = collector.collect(small_llama(), conversations=14, seed=5, policy="p")
    names = [(c.id, [t.response_ids for t in c.turns]) for c in got.conversations]
    return {"conversations": names, "dropped": got.dropped, "tokens": got.tokens, "truncated": got.truncated}


def _fail_on(processes: Processes, rank: int, kind: type[Exception]) -> None:
    if processes.rank == rank:
        raise kind("it is broken here")


def caught(work: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def main(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    torch.save(copy.deepcopy(_found(Processes.launched("cpu"))), folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
