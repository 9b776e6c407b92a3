"""A plan of memory for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_mtrl.planning.memory_plan import PHASES, MemoryPlan, Part


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as one JSON object; sizes in bytes."""
    return {
        "device": plan.device.name,
        "device_bytes": plan.device.size,
        "tokens": plan.tokens,
        "held": _listed(plan.held),
        "phases": {phase: plan.total(phase) for phase in PHASES},
        "steps": [
            {
                "phase": step.phase,
                "name": step.name,
                "shape": step.shape,
                "bytes": step.size,
                "parts": _listed(step.parts),
                "activations_without_and_with_checkpointing": step.activations,
            }
            for step in plan.steps
        ],
        "beside_bytes": plan.beside,
        "peak_phase": plan.peak_phase,
        "peak_bytes": plan.peak,
        "fits": plan.fits,
        "advice": _listed(plan.advice),
    }


def _listed(parts: Iterable[Part]) -> list[dict[str, Any]]:
    return [{"name": part.name, "bytes": part.size, "key": part.key or None} for part in parts]
