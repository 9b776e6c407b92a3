"""What the commands that learn from logs share: their options, and one step in a run folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser

from lightning_mtrl.command_line import option_values, refuse_empty_paths
from lightning_mtrl.command_paths import expect_writable
from lightning_mtrl.config import RunConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import load_config, parse_run, to_yaml
from lightning_mtrl.rollouts.log_files import expect_logs
from lightning_mtrl.rollouts.outcomes import expect_outcomes
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.writer import OPENING_SECONDS, only_writer

if TYPE_CHECKING:
    from lightning_mtrl.runs.checkpoint import CheckpointState


def add_log_options(parser: ArgumentParser) -> None:
    """Add the options that name a log and say how it is read."""
    parser.add_argument(
        "--logs", type=str, required=True, help="a .jsonl, .json or .parquet file, or hub:NAME[:SPLIT]"
    )
    parser.add_argument("--strict", action="store_true", help="end at the first record that cannot be read")
    parser.add_argument(
        "--join_consecutive", action="store_true", help="join messages of one role that follow each other"
    )
    parser.add_argument("--outcomes", type=str | None, help="outcomes by id: a .jsonl, .csv or .parquet file")


def take_step(command: Literal["evaluate", "improve"], description: str, arguments: Sequence[str]) -> None:
    """Evaluate or improve a policy on a log, and leave a run folder.

    Args:
        command: which of the two.
        description: of the command, for its help.
        arguments: the command line after the command's name.
    """
    refuse_empty_paths(arguments)
    runs = option_values(arguments, "--run")
    previous = RunFolder.open(runs[-1]) if runs else None
    carried = _carried_on(previous) if previous is not None else []
    parsed = parse_run(command, description, [*carried, *arguments], _add_options, environment=False)
    config, options = parsed.config, parsed.options
    expect_logs(options.logs)
    if options.outcomes is not None:
        expect_outcomes(options.outcomes)
    if config.run_dir is not None:
        _expect_own_folder(command, Path(config.run_dir), previous)
    from lightning_mtrl.batch_online import BatchOnlineStep, Logs, read_logs
    from lightning_mtrl.readiness import expect_ready

    logs = Logs(options.logs, options.outcomes, options.strict, options.join_consecutive)
    start = _start(previous, config) if previous is not None else None
    expect_ready(config, "logs")
    loaded = read_logs(logs, config)
    folder = RunFolder.create(to_yaml(replace(config, run_dir=None)), config.run_dir, parsed.name)
    print(f"Run folder: {folder.path}", flush=True)
    try:
        with only_writer(folder.path, OPENING_SECONDS):
            step = BatchOnlineStep(config, folder, logs, loaded, start)
            step.improve() if command == "improve" else step.evaluate()
    except BaseException:
        if not folder.has_results:
            folder.discard()
        raise


def _expect_own_folder(command: str, wanted: Path, previous: RunFolder | None) -> None:
    """Refuse the folder of another run: a step leaves a run of its own, also where it goes on from one."""
    expect_writable("run_dir", wanted)
    if previous is not None and wanted.resolve() == previous.path.resolve():
        raise UserError(
            f"--run and --run_dir are both {str(wanted)!r}, but `{command}` reads the one and leaves a new "
            f"run in the other. Pass --run_dir with a new folder, or leave it out."
        )
    if wanted.is_dir() and any(wanted.iterdir()):
        raise UserError(
            f"run_dir is {str(wanted)!r}, which is not empty. Pass --run_dir with a new folder; to go on "
            f"from a run that is there, pass --run {wanted} too."
        )


def _add_options(parser: ArgumentParser) -> None:
    add_log_options(parser)
    parser.add_argument(
        "--run",
        type=str | None,
        help="folder of the run that made the policy; its configuration, policy and critic are gone on with",
    )


def _carried_on(folder: RunFolder) -> list[str]:
    """Options that make a run's policy the one to start from."""
    options = [f"--config={folder.config}"]
    if (folder.policy_adapter / "adapter_config.json").is_file():
        return [*options, f"--model.adapter={folder.policy_adapter}"]
    if folder.policy_adapter.is_dir():
        raise UserError(
            f"--run is {str(folder.path)!r}, whose policy is a whole model (model.fine_tuning full). Write "
            f"it out with `export --run {folder.path} --output DIR`, and give --config {folder.config} "
            f"--model.name DIR in the place of --run."
        )
    return options


def _start(folder: RunFolder, config: RunConfig) -> CheckpointState | None:
    """Where the run stands; None where it has learned nothing yet."""
    from lightning_mtrl.runs.checkpoint import latest_checkpoint, load_checkpoint

    newest = latest_checkpoint(folder)
    made_with = load_config(folder.config, environment=False).algorithm.class_path
    if newest is not None and config.algorithm.class_path != made_with:
        raise UserError(
            f"algorithm is {config.algorithm.class_path}, but the run {folder.path} was made with "
            f"{made_with}, whose critic and optimizers --run goes on with. Leave it out, or give "
            f"--model.adapter {folder.policy_adapter} in the place of --run."
        )
    return load_checkpoint(newest) if newest is not None else None
