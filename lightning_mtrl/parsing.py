"""From YAML files and command-line options to a `RunConfig`, and back to YAML (jsonargparse).

Two passes over the same options. The first knows every key but those of the environment and the algorithm,
and imports no model library: help and most mistakes take no time. The second imports the two classes and
checks their arguments too, still before anything long begins.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import register_type

from lightning_mtrl.class_lookup import CLASS_KEYS, cannot_find, class_type, missing_class
from lightning_mtrl.class_options import as_mappings, lost_option
from lightning_mtrl.command_line import option_places, option_values, refuse_empty_paths
from lightning_mtrl.config import ClassSpec, RunConfig
from lightning_mtrl.config_files import advice_on_order, check_file
from lightning_mtrl.errors import UserError
from lightning_mtrl.messages import readable, says_what_is_missing, told_by_class
from lightning_mtrl.ranges import expect

if TYPE_CHECKING:
    from lightning_mtrl.algorithms.base import Algorithm
    from lightning_mtrl.environments.protocol import Environment

_NEEDS_CLASSES = ("--print_config", *(f"--{key}.help" for key in CLASS_KEYS))


class _Unread:
    """A value that the first pass leaves as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


register_type(
    _Unread, serializer=lambda unread: unread.value, deserializer=_Unread, deserializer_exceptions=()
)


class _CommandParser(ArgumentParser):
    """A parser that writes out the configuration alone, for any command to read."""

    own_options: frozenset[str] | None = None  # None: all of them

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        """The text without the command's own options, such as --resume or --output."""
        kept = namespace.clone()
        for name in self.own_options or ():
            kept.pop(name, None)
        text: str = super().dump(kept, *args, **kwargs)
        return text


@dataclass(frozen=True)
class ParsedRun:
    """What a command line said.

    Attributes:
        config: the resolved configuration.
        options: the command's own options.
        name: of the run, when no `run_dir` is given: the configuration file's, or the two classes'.
    """

    config: RunConfig
    options: Namespace
    name: str


def parse_run(
    command: str,
    description: str,
    arguments: Sequence[str],
    add_options: Callable[[ArgumentParser], None] = lambda parser: None,
    environment: bool = True,
) -> ParsedRun:
    """Read the command line of a command that takes a configuration.

    Args:
        command: for the usage line, such as "fit".
        description: first lines of the help.
        arguments: the command line after the command's name.
        add_options: adds the command's own options to a parser.
        environment: False for a command that makes none, and so does not try to.

    Raises:
        UserError: for an unknown key, a wrong type or value, a missing file; it names the key.
        SystemExit: with code 0, after --help or --print_config.
    """
    typed, arguments = arguments, as_mappings(arguments, CLASS_KEYS)
    light = _run_parser(command, description, add_options, classes=False)
    if not any(argument.startswith(_NEEDS_CLASSES) for argument in arguments):
        light.instantiate(parse(light, arguments))
    full = _run_parser(command, description, add_options, classes=True)
    values = parse(full, arguments)
    # What is null stays: left out, it would take the class's own default.
    plain = json.loads(full.dump(values, format="json", skip_unset=False, skip_validation=True))
    if lost := lost_option(typed, CLASS_KEYS, plain):
        raise UserError(lost)
    specs = {key: ClassSpec(plain[key]["class_path"], plain[key].get("init_args", {})) for key in CLASS_KEYS}
    rest = values.clone()
    for key in CLASS_KEYS:
        rest[key] = None
    built = light.instantiate(rest)
    chosen: dict[str, Any] = {
        name: built[name] for name in RunConfig.__dataclass_fields__ if name not in specs
    }
    config = RunConfig(**(chosen | specs))
    if environment:
        build_environment(config)
    _expect_groups(config, build_algorithm(config))
    return ParsedRun(config, values, _name(arguments, config))


def _expect_groups(config: RunConfig, algorithm: Algorithm) -> None:
    # The algorithm refuses it too, but only knows its data once the model is loaded.
    estimator = getattr(algorithm, "estimator", None)
    kind = f"at least 2 with {type(estimator).__name__}, which compares the members of a group"
    alone = getattr(estimator, "needs_others", False) and config.data.group_size < 2
    expect(not alone, "data.group_size", config.data.group_size, kind, 8)


def load_config(*files: Path | str, overrides: Sequence[str] = (), environment: bool = True) -> RunConfig:
    """Read configuration files, later ones over earlier ones, then options such as "--seed=3".

    Args:
        files: YAML files.
        overrides: options.
        environment: False where none is made, so that it is not tried either.

    Raises:
        UserError: for an unknown key, a wrong type or value, a missing file; it names the key.
    """
    options = [f"--config={file}" for file in files]
    return parse_run("load_config", "", [*options, *overrides], environment=environment).config


def to_yaml(config: RunConfig) -> str:
    """The text of a configuration file that `load_config` reads back to an equal configuration."""
    parser = _run_parser("to_yaml", "", lambda parser: None, classes=False)
    text: str = parser.dump(parser.parse_object(asdict(config)), skip_unset=False)
    return text


def build_environment(config: RunConfig) -> Environment:
    """Make the environment of a configuration.

    Raises:
        UserError: if the class or one of its arguments does not exist or is refused.
    """
    environment: Environment = _build("environment", config.environment)
    return environment


def build_algorithm(config: RunConfig) -> Algorithm:
    """Make the algorithm of a configuration.

    Raises:
        UserError: if the class or one of its arguments does not exist or is refused.
    """
    algorithm: Algorithm = _build("algorithm", config.algorithm)
    return algorithm


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Parse, and tell a mistake as a `UserError` that names the key and the file where it stands."""
    refuse_empty_paths(arguments)
    for file in option_values(arguments, "--config"):
        check_file(file)
    try:
        return parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise UserError(_located(error, parser, arguments)) from error


def _located(error: ArgumentError, parser: ArgumentParser, arguments: Sequence[str]) -> str:
    """The first mistake, with the file that makes it; a file is read over all that stands before it."""
    written = [argument for argument in arguments if not argument.startswith("--print_config")]
    vars(parser).pop(
        "print_config", None
    )  # else it prints the first part that is right, and ends the process
    places = list(option_places(written, "--config"))
    for number, (start, end, file) in enumerate(places):
        if before := _mistake(parser, written[:start]):
            return _told(before, parser)
        if found := _mistake(parser, written[:end]):
            told, files = _told(found, parser), [file for *_, file in places]
            return f"{file}: {told}{advice_on_order(told, files, number, written[:start])}"
    return _told(error, parser)


def _mistake(parser: ArgumentParser, arguments: Sequence[str]) -> ArgumentError | None:
    """What is wrong with the beginning of a command line, apart from what it does not say yet."""
    try:
        parser.parse_args(list(arguments))
    except ArgumentError as error:
        return None if says_what_is_missing(error) else error
    return None


def _told(error: ArgumentError, parser: ArgumentParser) -> str:
    told = missing_class(str(error)) or readable(error, parser)
    own: frozenset[str] | None = getattr(parser, "own_options", frozenset())
    if own is None:
        own = frozenset(parser.get_defaults(skip_validation=True).keys())
    # Keys of a configuration stand in files too; the options of a command do not.
    return f"--{told}" if told.partition(" ")[0] in own else told


def command_parser(command: str, description: str) -> _CommandParser:
    """An empty parser for a command; its mistakes become `UserError` in `parse`."""
    return _CommandParser(
        prog=f"python -m lightning_mtrl {command}",
        description=description,
        exit_on_error=False,
        # A shortened key would be right today and mean another one tomorrow.
        allow_abbrev=False,
        print_config="--print_config",
    )


def _run_parser(
    command: str, description: str, add_options: Callable[[ArgumentParser], None], classes: bool
) -> ArgumentParser:
    parser = command_parser(command, description)
    add_options(parser)
    parser.own_options = frozenset(parser.get_defaults(skip_validation=True).keys())
    parser.add_argument(
        "--config", action="config", help="a YAML file; repeatable, later ones override earlier ones"
    )
    parser.add_class_arguments(RunConfig, skip=set(CLASS_KEYS), as_positional=False)
    defaults = RunConfig()
    for key in CLASS_KEYS:
        kind: Any = class_type(key) if classes else _Unread
        parser.add_argument(
            f"--{key}",
            type=kind,
            default={"class_path": getattr(defaults, key).class_path},
            help=f"class_path and init_args of the {key}; --{key}.help CLASS shows the arguments of a class",
        )
    return parser


def _build(key: str, spec: ClassSpec) -> Any:
    if problem := cannot_find(key, spec.class_path):
        raise UserError(problem)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{key}", type=class_type(key), required=True)
    try:
        values = parser.parse_object(
            {key: {"class_path": spec.class_path, "init_args": dict(spec.init_args)}}
        )
    except ArgumentError as error:
        raise UserError(readable(error, parser)) from error
    return _instantiate(key, values)


def _instantiate(key: str, values: Namespace) -> Any:
    # The union of types would hide what the constructor says behind what the other types say.
    path = values[key].class_path
    module_name, _, name = path.rpartition(".")
    named = getattr(importlib.import_module(module_name), name)
    given = values[key].as_dict().get("init_args") or {}
    try:
        if not inspect.signature(named).parameters:
            return named()  # a parser has no key for a class without arguments
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(named, key)
        values[key] = values[key].get("init_args") or parser.get_defaults()[key]
        return parser.instantiate(values)[key]
    except (TypeError, ValueError) as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None  # told by an argument's own constructor
        raise UserError(told_by_class(key, path, str(error), given)) from error
    except UserError:
        raise
    except Exception as error:  # whatever a class of the user's does when it is made
        told = f"{key} {path} could not be made: {type(error).__name__}: {error}. --debug shows where."
        raise UserError(told) from error


def _name(arguments: Sequence[str], config: RunConfig) -> str:
    files = option_values(arguments, "--config")
    if not files:
        classes = (config.algorithm.class_path, config.environment.class_path)
        return "-".join(path.rpartition(".")[2] for path in classes)
    last = Path(files[-1])
    return last.resolve().parent.name if last.stem == "config" else last.stem
