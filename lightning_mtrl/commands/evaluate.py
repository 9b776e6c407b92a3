"""Evaluate a policy on logged conversations alone: what they say of it, and a Q-critic with its calibration.

No environment is needed. The logs are conversations of the policy of the configuration (`model.name`,
`model.adapter`), or of that of --run. A run folder is left, with report.json, and the critic for `score`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mtrl.command_logs import take_step


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    take_step("evaluate", __doc__ or "", arguments)
