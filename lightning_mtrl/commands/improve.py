"""Take one batch-online step from logged conversations: a better policy, without an environment.

The logs are conversations of the policy of the configuration (`model.name`, `model.adapter`), or of that of
--run, which a later step goes on from. A run folder is left, with report.json: what was read, the critic's
held-out calibration, the estimated gain with its interval, how much of the new policy lies where Q has data,
and the policy to deploy in adapters/policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mtrl.command_logs import take_step


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    take_step("improve", __doc__ or "", arguments)
