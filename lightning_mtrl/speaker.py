"""Which process of a run speaks to the person; it is asked before a model library is imported."""

from __future__ import annotations

import os
import sys


def is_first() -> bool:
    """Whether this is the first process of a run, or the only one.

    Until all are launched it is told by what launches processes: torchrun, SLURM, Lightning, which starts the
    others on its machine by itself.
    """
    if is_launched():
        return bool(sys.modules["torch.distributed"].get_rank() == 0)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _is_zero("RANK")
    if "SLURM_NTASKS" in os.environ:
        return _is_zero("SLURM_PROCID")
    return _is_zero("NODE_RANK") and _is_zero("LOCAL_RANK")


def is_launched() -> bool:
    """Whether several processes have been launched, and know each other."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def is_first_of_machine() -> bool:
    """Whether this is the first process on its machine, where a mistake may be that no other one has."""
    return _is_zero("LOCAL_RANK") and _is_zero("SLURM_LOCALID")


def _is_zero(variable: str) -> bool:
    return os.environ.get(variable, "0") == "0"
