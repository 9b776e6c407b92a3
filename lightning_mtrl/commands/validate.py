"""Measure a policy of a run on fresh conversations, and print the figures as JSON.

Equal seeds give equal situations, so policies and runs can be compared. By default these are the seed and the
number of conversations of the run's own validation, and the newest policy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from lightning_mtrl.command_paths import Seed, add_run_options, open_run
from lightning_mtrl.parsing import command_parser, load_config, parse
from lightning_mtrl.runs.folder import version_name


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    options = parse(_parser(), arguments)
    folder = open_run(options)
    from lightning_mtrl.evaluation.validate import validate
    from lightning_mtrl.readiness import expect_ready
    from lightning_mtrl.recorder import load_run

    expect_ready(load_config(folder.config), "validate", options.seed)
    run = load_run(folder, options.iteration)
    wanted = run.config.validation
    figures = validate(
        run.parts.validator,
        run.parts.backbone,
        conversations=wanted.conversations if options.conversations is None else options.conversations,
        seed=wanted.seed if options.seed is None else options.seed,
        gamma=run.parts.gamma,
        policy=version_name(run.iteration),
    )
    row = json.dumps({"iteration": run.iteration, **figures.row()})
    # What is not finite, such as an interval from one conversation, is null as in summary.json.
    print(json.dumps(json.loads(row, parse_constant=lambda _: None), indent=2))


def _parser() -> ArgumentParser:
    parser = command_parser("validate", __doc__ or "")
    add_run_options(parser)
    parser.add_argument("--conversations", type=PositiveInt | None, help="how many; null: as in the run")
    parser.add_argument("--seed", type=Seed | None, help="first seed; null: as in the run")
    return parser
