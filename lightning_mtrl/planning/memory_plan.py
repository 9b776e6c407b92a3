"""What a plan of memory says: parts, steps of phases, and where the most is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_mtrl.planning.devices import Device

PHASES = ("collect", "evaluate", "improve", "validate")


@dataclass(frozen=True)
class Part:
    """Some of the memory of a phase.

    Attributes:
        name: what it is for.
        size: bytes.
        key: the setting that makes it smaller; empty for none.
    """

    name: str
    size: int
    key: str = ""


@dataclass(frozen=True)
class Step:
    """One of the things that a phase does; only the largest of them counts.

    Attributes:
        phase: in which it happens.
        name: what it is, such as "train policy".
        shape: rows and tokens.
        parts: what it needs besides weights and optimizer state.
        activations: without and with `model.gradient_checkpointing`, in bytes; None where nothing is trained.
    """

    phase: str
    name: str
    shape: str
    parts: tuple[Part, ...]
    activations: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will take.

    Attributes:
        device: where.
        tokens: of the longest conversation that this is for.
        held: what is there in every phase: libraries, base, roles, optimizer state.
        steps: what the phases do.
        beside: bytes of the CPU's memory that copies take at most, where the device has its own.
    """

    device: Device
    tokens: int
    held: tuple[Part, ...]
    steps: tuple[Step, ...]
    beside: int = 0

    def largest(self, phase: str) -> Step:
        """The step of a phase that needs the most."""
        nothing = Step(phase, "nothing", "", ())
        return max(
            (step for step in self.steps if step.phase == phase), key=lambda s: s.size, default=nothing
        )

    def total(self, phase: str) -> int:
        """Bytes of a phase at its peak."""
        return sum(part.size for part in self.held) + self.largest(phase).size

    @cached_property
    def peak_phase(self) -> str:
        """The phase that needs the most."""
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes of the whole run at its peak."""
        return self.total(self.peak_phase)

    @property
    def fits(self) -> bool | None:
        """Whether the device has as much; None where that is not known."""
        return None if self.device.size is None else self.peak <= self.device.size

    @property
    def advice(self) -> list[Part]:
        """What makes the peak smaller, the largest part first; one for each setting."""
        found: dict[str, Part] = {}
        parts = [*self.held, *self.largest(self.peak_phase).parts]
        for part in sorted(parts, key=lambda part: -part.size):
            if part.key and part.size:
                found.setdefault(part.key, part)
        return list(found.values())
