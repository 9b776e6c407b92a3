"""Train a policy: collect, evaluate, improve, until Q has converged.

A new run takes its configuration from --config files and options. With --resume it takes that of the run
and goes on from its newest checkpoint; only loop.* and fabric.* can then change, as to add iterations.
With --plan nothing runs: the memory that the run would take is printed, found out without loading weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from lightning_mtrl.command_line import option_values, refuse_empty_paths
from lightning_mtrl.command_paths import expect_writable
from lightning_mtrl.config import RunConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.idle_keys import idle_keys
from lightning_mtrl.parsing import ParsedRun, build_algorithm, load_config, parse_run, to_yaml
from lightning_mtrl.runs.atomic import write_text
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.writer import OPENING_SECONDS, only_writer

if TYPE_CHECKING:
    from lightning_mtrl.processes import Processes

_CHANGEABLE = ("loop", "fabric")

_logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    refuse_empty_paths(arguments)
    resumed = option_values(arguments, "--resume")
    folder = RunFolder.open(resumed[-1]) if resumed else None
    if folder is not None:
        arguments = [f"--config={folder.config}", *arguments]
    parsed = parse_run("fit", __doc__ or "", arguments, _add_options)
    if parsed.options.plan:
        _plan(parsed)
    elif folder is not None:
        _resume(parsed.config, folder)
    else:
        _start(parsed, arguments)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--resume", type=str | None, help="folder of a run to go on with")
    parser.add_argument(
        "--plan", nargs="?", const="table", choices=("table", "json"),
        help="print the memory that the run would take, as a table or as JSON, and run nothing",
    )  # fmt: skip
    parser.add_argument(
        "--plan_tokens", type=PositiveInt | None,
        help="tokens of the longest conversation to plan for; null: what the configuration allows",
    )  # fmt: skip


def _plan(parsed: ParsedRun) -> None:
    from lightning_mtrl.planning.plan import plan_memory
    from lightning_mtrl.planning.record import as_json
    from lightning_mtrl.planning.table import show

    plan = plan_memory(parsed.config, parsed.options.plan_tokens)
    if parsed.options.plan == "json":
        print(json.dumps(as_json(plan), indent=2))
    else:
        show(plan)


def _start(parsed: ParsedRun, arguments: Sequence[str]) -> None:
    config = parsed.config
    if config.run_dir is not None:
        expect_writable("run_dir", Path(config.run_dir))
    from lightning_mtrl.launching import launch

    processes = launch(config.fabric)
    processes.first(lambda: _expect_ready(config))
    processes.first(lambda: _say_what_is_idle(config, arguments))
    # A run that is repeated from its config.yaml gets a folder of its own.
    text = to_yaml(replace(config, run_dir=None))
    folder = processes.first(lambda: RunFolder.create(text, config.run_dir, parsed.name))
    _tell(f"Run folder: {folder.path}", processes)
    with _only_writer(folder, processes):
        _run(config, folder, processes)


def _run(config: RunConfig, folder: RunFolder, processes: Processes) -> None:
    from lightning_mtrl.loop import PolicyIterationLoop

    try:
        loop = PolicyIterationLoop(config, folder)
    except BaseException:
        _discard(folder, processes)
        raise
    try:
        loop.run()
    except UserError:
        # Such as a prompt that does not fit, which only shows when the first conversation begins.
        if not folder.has_results:
            _discard(folder, processes)
        raise


def _expect_ready(config: RunConfig, resumed: RunFolder | None = None) -> None:
    from lightning_mtrl.readiness import expect_ready
    from lightning_mtrl.restoring import expect_earlier, is_over

    if resumed is not None:
        if is_over(config.loop, resumed):
            return
        expect_earlier(config, resumed)
    expect_ready(config, "fit")


def _say_what_is_idle(config: RunConfig, arguments: Sequence[str]) -> None:
    for told in idle_keys(config.model, build_algorithm(config).idle(), arguments):
        _logger.warning("%s", told)


@contextmanager
def _only_writer(folder: RunFolder, processes: Processes) -> Iterator[None]:
    """The first process holds the folder for all of them."""
    with ExitStack() as held:
        processes.first(lambda: held.enter_context(only_writer(folder.path, OPENING_SECONDS)))
        yield


def _tell(text: str, processes: Processes) -> None:
    if processes.is_first:
        print(text if processes.size == 1 else f"{text}, {processes.size} processes", flush=True)


def _discard(folder: RunFolder, processes: Processes) -> None:
    if processes.is_first:
        folder.discard()


def _resume(config: RunConfig, folder: RunFolder) -> None:
    kept = load_config(folder.config)
    for name in RunConfig.__dataclass_fields__:
        if name not in _CHANGEABLE and getattr(config, name) != getattr(kept, name):
            key, given, there = _difference(name, asdict(config)[name], asdict(kept)[name])
            raise UserError(
                f"{key} is {given!r} and differs from that of the run {folder.path}, {there!r}, but a "
                f"resumed run can change only {' and '.join(_CHANGEABLE)}. Leave it out, or start a new run "
                f"without --resume."
            )
    from lightning_mtrl.launching import launch

    processes = launch(config.fabric)
    processes.first(lambda: _expect_ready(config, folder))
    with _only_writer(folder, processes):
        processes.first(lambda: write_text(folder.config, to_yaml(config)))
        _tell(f"Run folder: {folder.path} (resumed)", processes)
        from lightning_mtrl.loop import PolicyIterationLoop

        PolicyIterationLoop(config, folder).run()


def _difference(key: str, given: object, there: object) -> tuple[str, object, object]:
    """The first key in which two configurations differ, with both values."""
    if isinstance(given, Mapping) and isinstance(there, Mapping):
        for name in (*given, *there):
            ours, theirs = given.get(name), there.get(name)
            if ours != theirs:
                return _difference(f"{key}.{name}", ours, theirs)
    return key, given, there
