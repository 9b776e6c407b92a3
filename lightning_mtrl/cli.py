"""The command line: finds the sub-command, hands over the rest, turns mistakes into exit codes.

Each module of `lightning_mtrl.commands` is a sub-command: its docstring is the description, and its
`main(arguments)` does the work. A new command is one new file there.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType

from lightning_mtrl import commands
from lightning_mtrl.errors import AnotherFailed, UserError
from lightning_mtrl.messages import with_choices
from lightning_mtrl.speaker import is_first, is_first_of_machine, is_launched

SUCCESS, FAILURE, MISTAKE, INTERRUPTED = 0, 1, 2, 130
# What the operating system says about a path that somebody gave; other errors of it are no user's mistake.
_PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)

# Parts of Lightning that say several times that there are several processes; the run says it once.
_REMARKS = ("fabric.utilities.distributed", "fabric.utilities.rank_zero", "pytorch.utilities.rank_zero")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: command line without the program's name; None takes the process's own.

    Returns:
        The exit code: 0 on success, 2 for a user's mistake, 1 when another process of the run failed, 130
        when interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    _show_own_warnings()
    _quieten()
    try:
        _dispatch([argument for argument in given if argument != "--debug"])
    except KeyboardInterrupt:
        return _failed("interrupted. `fit --resume RUN_DIR` continues a run.", debug, INTERRUPTED)
    except UserError as error:
        return _failed(str(error), debug, MISTAKE)
    except _PATH_ERRORS as error:
        return _failed(f"{error.filename}: {error.strerror}. --debug shows what needed it.", debug, MISTAKE)
    except AnotherFailed as error:
        return _failed(str(error), debug, FAILURE)
    return SUCCESS


def _show_own_warnings() -> None:
    """Show what the package has to say, such as records that were left out, whatever libraries set up."""
    if logging.lastResort is not None:
        logging.getLogger(commands.__name__.partition(".")[0]).addHandler(logging.lastResort)


def _quieten() -> None:
    """Keep remarks of libraries about themselves, which a user can do nothing about, off the screen."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    for module in _REMARKS:
        logging.getLogger(f"lightning.{module}").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)


def _failed(message: str, debug: bool, code: int) -> int:
    """Tell what went wrong; of the processes of a run only the first one does, and has the exit code.

    Lightning kills the first process when another one fails, which would cut its message off.
    """
    if is_launched() and not is_first():
        return SUCCESS
    if not is_first_of_machine():
        return code
    if debug:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
    elif arguments[0] == "--version":
        print(version("lightning_mtrl"))
    else:
        _command(arguments[0]).main(arguments[1:])


def _names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


def _command(name: str) -> ModuleType:
    if name not in _names():
        raise UserError(with_choices(f"{name!r} is not a command", name, _names()))
    return importlib.import_module(f"{commands.__name__}.{name}")


def _overview() -> str:
    described = ((name, (_command(name).__doc__ or "").partition("\n")[0]) for name in _names())
    return "\n".join(
        [
            "usage: python -m lightning_mtrl [-h] [--version] [--debug] COMMAND [options]",
            "",
            "Multi-turn reinforcement learning of language models.",
            "",
            "commands:",
            *(f"  {name:<10}{text}" for name, text in described),
            "",
            "`python -m lightning_mtrl COMMAND --help` lists every key.",
            "--debug shows the traceback of a mistake.",
        ]
    )
