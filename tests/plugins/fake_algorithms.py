"""Algorithms of a few lines that import no model library, for tests of configuration and commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Literal

import pytest

from lightning_mtrl import environments
from lightning_mtrl.environments.suggested_response import SuggestedResponse
from lightning_mtrl.errors import UserError
from lightning_mtrl.idle_keys import Idle


@dataclass(frozen=True)
class ImprovementConfig:
    """How the policy steps.

    Attributes:
        kl_coef: weight of the KL term.
        steps: optimizer steps.
        kl_ceiling: KL at which it stops; null for none.
    """

    kl_coef: float = 0.1
    steps: int = 4
    kl_ceiling: float | None = 1.5

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError("improvement.steps is 0, but it must be at least 1.")


class Algorithm:
    """The base class."""

    def idle(self) -> list[Idle]:
        """None of its settings."""
        return []


class IterativePPO(Algorithm):
    """Stands in for the real one.

    Args:
        improvement: how the policy steps.
        estimator: how advantages are estimated.
    """

    def __init__(
        self,
        improvement: ImprovementConfig = ImprovementConfig(),  # frozen, so it can be shared
        estimator: Literal["gae", "rloo"] = "gae",
    ) -> None:
        self.improvement = improvement
        self.estimator = estimator


class Uniform(Algorithm):
    """Another algorithm, with other arguments."""

    def __init__(self, share: float = 0.5, remark: str = "") -> None:
        if share > 1:
            raise ValueError(f"share is {share}, above 1")
        self.share = share


class Credit:
    """The base class of one kind of part."""


class Shares(Credit):
    """A part with an argument that it may refuse."""

    def __init__(self, eta: float = 0.4) -> None:
        if eta <= 0:
            raise UserError(f"credit.init_args.eta is {eta}, but it must be above 0.")
        self.eta = eta


class Tokens(Credit):
    """Another part of that kind, without arguments."""


class Estimator:
    """The base class of another kind of part."""


class Group(Estimator):
    """A part."""

    def __init__(self, std: bool = True) -> None:
        self.std = std


class Composed(Algorithm):
    """An algorithm of parts that are classes themselves."""

    def __init__(
        self,
        credit: Credit | None = None,
        estimator: Estimator | None = None,
        settings: ImprovementConfig = ImprovementConfig(),
    ) -> None:
        self.credit, self.estimator, self.settings = credit, estimator, settings


class NoAlgorithm:
    """Is importable and wrong."""


def install(monkeypatch: pytest.MonkeyPatch, names: Sequence[str] = ("IterativePPO", "Uniform")) -> None:
    """Let this module be `lightning_mtrl.algorithms`, exporting `names`, and its `base` too.

    The environments then export SuggestedResponse alone, so that lists of choices are short and stable.
    """
    # What reads the real ones must have done so, or it would find these in their place.
    import_module("lightning_mtrl.readiness")
    import_module("lightning_mtrl.restoring")
    here = sys.modules[__name__]
    exports = ModuleType("lightning_mtrl.algorithms")
    exports.__dict__.update({name: getattr(here, name) for name in names}, __all__=list(names), base=here)
    monkeypatch.setitem(sys.modules, "lightning_mtrl.algorithms", exports)
    monkeypatch.setitem(sys.modules, "lightning_mtrl.algorithms.base", here)
    monkeypatch.setattr(environments, "SuggestedResponse", SuggestedResponse, raising=False)
    monkeypatch.setattr(environments, "__all__", ["SuggestedResponse"], raising=False)
