"""What the phases of an algorithm put through the model at most; a plan of memory is made from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lightning_mtrl.modules.base import RoleModule

Phase = Literal["evaluate", "improve"]


@dataclass(frozen=True)
class Extent:
    """How large conversations and batches of a run can get.

    Attributes:
        tokens: of the longest conversation.
        sampled_tokens: of those, the most that the policy sampled.
        response_tokens: of the longest response.
        conversations: of an iteration.
        batch_size: conversations in a batch (`data.batch_size`).
        group_size: conversations that share an initial state.
        rows: conversations or responses that are sampled together.
    """

    tokens: int
    sampled_tokens: int
    response_tokens: int
    conversations: int
    batch_size: int
    group_size: int
    rows: int


@dataclass(frozen=True)
class Pass:
    """One pass of a role's model, the largest of its kind.

    Attributes:
        phase: in which it happens.
        module: what it is for, such as "policy".
        role: whose weights it uses.
        rows: sequences in it.
        tokens: of a row, padding included.
        scored: tokens of a row whose log-probabilities are read.
        trains: whether a backward pass follows.
        merged: the role's adapter is merged into the base meanwhile.
        layer: last hidden layer that is computed, 1 being the first; None for all.
        key: the setting that makes it smaller.
    """

    phase: Phase
    module: str
    role: str
    rows: int
    tokens: int
    scored: int = 0
    trains: bool = False
    merged: bool = False
    layer: int | None = None
    key: str = "data.batch_size"


@dataclass(frozen=True)
class Sampling:
    """Responses sampled in a phase.

    Attributes:
        phase: in which it happens.
        rows: responses sampled together.
        tokens: of a row at its end.
        read: tokens of all rows that are read before the first one is sampled.
        key: the setting that makes it smaller.
    """

    phase: str
    rows: int
    tokens: int
    read: int
    key: str = "data.rows"


@dataclass(frozen=True)
class Kept:
    """A copy of what a module has learned, in the memory of the CPU, for a phase to go back to.

    Attributes:
        phase: in which it is kept.
        module: its name in `Algorithm.modules`.
    """

    phase: Phase
    module: str


Work = Pass | Sampling | Kept


def module_passes(
    modules: Mapping[str, tuple[RoleModule, Any]], extent: Extent, rows: int, key: str = "data.batch_size"
) -> Iterable[Pass]:
    """A training pass of each module over whole conversations.

    Policy and value head train in "improve", whatever else there is in "evaluate".

    Args:
        modules: as `Algorithm.modules` has them.
        extent: how large conversations get.
        rows: conversations in one pass.
        key: the setting that says so.
    """
    from lightning_mtrl.modules.base import RatioModule

    for name, (module, _) in modules.items():
        yield Pass(
            phase="improve" if name in ("policy", "value") else "evaluate",
            module=name,
            role=module.role,
            rows=min(rows, extent.conversations),
            tokens=extent.tokens,
            scored=extent.sampled_tokens if isinstance(module, RatioModule) else 0,
            trains=module.owns_role,
            layer=getattr(module, "layer", None),
            key=key,
        )
