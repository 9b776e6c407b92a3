"""Multi-turn reinforcement learning of language models on Lightning Fabric.

The public names are imported when they are first used, so that help and small tools stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_mtrl import objectives as objectives
    from lightning_mtrl.config import RunConfig as RunConfig
    from lightning_mtrl.conversation import Conversation as Conversation
    from lightning_mtrl.conversation import Message as Message
    from lightning_mtrl.conversation import Turn as Turn
    from lightning_mtrl.environments.protocol import Environment as Environment
    from lightning_mtrl.environments.protocol import Observation as Observation
    from lightning_mtrl.environments.protocol import Transition as Transition
    from lightning_mtrl.errors import UserError as UserError
    from lightning_mtrl.loop import PolicyIterationLoop as PolicyIterationLoop
    from lightning_mtrl.modules.implicit_prm import ImplicitPRM as ImplicitPRM
    from lightning_mtrl.modules.policy import Policy as Policy
    from lightning_mtrl.modules.q_critic import QCritic as QCritic
    from lightning_mtrl.parsing import load_config as load_config
    from lightning_mtrl.recorder import load_run as load_run
    from lightning_mtrl.rollouts.datamodule import RolloutDataModule as RolloutDataModule
    from lightning_mtrl.runs.folder import RunFolder as RunFolder

_HOMES = {
    "Conversation": "conversation",
    "Environment": "environments.protocol",
    "ImplicitPRM": "modules.implicit_prm",
    "Message": "conversation",
    "Observation": "environments.protocol",
    "Policy": "modules.policy",
    "PolicyIterationLoop": "loop",
    "QCritic": "modules.q_critic",
    "RolloutDataModule": "rollouts.datamodule",
    "RunConfig": "config",
    "RunFolder": "runs.folder",
    "Transition": "environments.protocol",
    "Turn": "conversation",
    "UserError": "errors",
    "load_config": "parsing",
    "load_run": "recorder",
}

__all__ = [*_HOMES, "objectives"]


def __getattr__(name: str) -> Any:
    """Import a public name from the module where it is written (PEP 562)."""
    if name == "objectives":
        return importlib.import_module("lightning_mtrl.objectives")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
