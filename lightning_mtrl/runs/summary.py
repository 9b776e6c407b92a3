"""summary.json: what a run achieved, one row for each policy."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_mtrl.errors import UserError
from lightning_mtrl.runs.atomic import write_json

_PACKAGES = ("lightning_mtrl", "torch", "lightning", "transformers", "peft", "bitsandbytes", "datasets")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@dataclass
class Summary:
    """The one object in summary.json.

    Attributes:
        path: of summary.json.
        versions: of Python and packages.
        seconds: that the run has taken, all its sessions together.
        optimum_success_rate: of the environment's best agent; None where unknown.
        optimum_return: expected discounted return of that agent; None where unknown.
        iterations: one row for pi_0 and one for each policy after it, in order.
    """

    path: Path
    versions: dict[str, str] = field(default_factory=versions)
    seconds: float = 0.0
    optimum_success_rate: float | None = None
    optimum_return: float | None = None
    iterations: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> Summary:
        """Read summary.json, or start one where there is none.

        Raises:
            UserError: if the file is not a summary.
        """
        if not path.is_file():
            return cls(path)
        try:
            kept = json.loads(path.read_text("utf-8"))
            rows = sorted(kept.pop("iterations"), key=lambda row: int(row["iteration"]))
            return cls(path, iterations=rows, **kept)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is not a summary of a run ({error}). Remove or mend the file."
            ) from error

    def put(self, row: Mapping[str, Any]) -> None:
        """Set the row of a policy; an earlier row of the same `iteration`, and later ones, go.

        Later rows are those of a run that was killed and does these iterations again.

        Args:
            row: "iteration" and what was measured; see docs/metrics.md.
        """
        number = int(row["iteration"])
        self.iterations = [kept for kept in self.iterations if kept["iteration"] < number]
        self.iterations.append(dict(row))

    def write(self) -> None:
        """Replace summary.json."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "path"}
        write_json(self.path, as_json(content))


def as_json(value: Any) -> Any:
    """Plain JSON values; NaN and infinity, which JSON does not have, become null."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # Numbers of torch and NumPy know how to become plain ones.
    return as_json(value.item()) if hasattr(value, "item") else value
