"""Collect conversations into a file, with the policy of a run, or with pi_0 of a configuration.

With --run the newest policy talks, or that of --iteration. With --config (and options for its keys) the
untrained policy pi_0 talks; `run_dir` then plays no part, since no run is made. The file is JSONL or Parquet
by its ending, and keeps token ids and log-probabilities. As in the run, a share of the conversations is
drawn to have an explored response or is led under a persona where data.explore_share and data.persona_share
say so; how many is printed, and `compare` tells them from the policy's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from lightning_mtrl.command_line import option_values
from lightning_mtrl.command_paths import Seed, add_run_options, log_output, open_run
from lightning_mtrl.counting import counted
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import command_parser, load_config, parse, parse_run
from lightning_mtrl.runs.folder import version_name

if TYPE_CHECKING:
    from lightning_mtrl.assembly import Parts
    from lightning_mtrl.config import RunConfig


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    if option_values(arguments, "--config"):
        _from_config(arguments)
    else:
        _from_run(arguments)


def _from_run(arguments: Sequence[str]) -> None:
    parser = command_parser("collect", __doc__ or "")
    add_run_options(parser, "folder of a run; or give --config")
    parser.add_argument("--seed", type=Seed | None, help="null: as in the run")
    _add_output(parser)
    options = parse(parser, arguments)
    output, folder = log_output(options.output), open_run(options)
    config = load_config(folder.config)
    _expect_groups(options.conversations, config)
    from lightning_mtrl.readiness import expect_ready
    from lightning_mtrl.recorder import load_run

    seed = config.seed if options.seed is None else options.seed
    expect_ready(config, "collect", seed)
    run = load_run(folder, options.iteration)
    _collect(run.parts, output, options.conversations, seed, version_name(run.iteration))


def _from_config(arguments: Sequence[str]) -> None:
    if option_values(arguments, "--run"):
        raise UserError(
            "--run and --config are both given, but the policy comes from one of them. Leave one out."
        )
    parsed = parse_run("collect", __doc__ or "", arguments, _add_output)
    output = log_output(parsed.options.output)
    _expect_groups(parsed.options.conversations, parsed.config)
    from lightning_mtrl.assembly import assemble
    from lightning_mtrl.readiness import expect_ready

    expect_ready(parsed.config, "collect")
    _collect(
        assemble(parsed.config), output, parsed.options.conversations, parsed.config.seed, version_name(0)
    )


def _add_output(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=str, required=True, help="a .jsonl or .parquet file; replaced if there"
    )
    parser.add_argument("--conversations", type=PositiveInt | None, help="how many; null: data.conversations")


def _expect_groups(conversations: int | None, config: RunConfig) -> None:
    size = config.data.group_size
    if conversations is not None and conversations % size:
        raise UserError(
            f"--conversations is {conversations}, but it must be a multiple of data.group_size, {size}. "
            f"Pass --conversations {math.ceil(conversations / size) * size}."
        )


def _collect(parts: Parts, output: Path, conversations: int | None, seed: int, policy: str) -> None:
    from lightning_mtrl.rollouts.behaviour import count_coverage, told
    from lightning_mtrl.rollouts.logs import write_conversations
    from lightning_mtrl.rollouts.results import TooManyFailures

    number = parts.config.data.conversations if conversations is None else conversations
    with parts.collector.speaker(parts.backbone) as model:
        try:
            rollouts = parts.collector.collect(model, conversations=number, seed=seed, policy=policy)
        except TooManyFailures as stopped:
            write_conversations(output, stopped.rollouts.conversations)
            raise
    write_conversations(output, rollouts.conversations)
    print(f"{counted(len(rollouts.conversations), 'conversation')} of {policy} in {output}")
    if covered := told(count_coverage(rollouts.conversations)):
        print(
            f"Of these {covered}, by data.explore_share and data.persona_share, so not the policy's own "
            f"behaviour; `compare` leaves them out unless --coverage count is given."
        )
    for cause, count in rollouts.dropped.items():
        print(f"{count} dropped: {cause}")
