"""The command line as a list of words: which options it gives, where, and with what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_mtrl.errors import UserError

_PATHS = (
    *("--config", "--run", "--run_dir", "--resume", "--output", "--baseline", "--candidate"),
    *("--logs", "--outcomes"),
)


def option_places(arguments: Sequence[str], option: str) -> Iterator[tuple[int, int, str]]:
    """Where an option has a value: index of the option, index of what follows its value, and the value.

    >>> list(option_places(["--seed", "1", "--config=a.yaml"], "--config"))
    [(2, 3, 'a.yaml')]
    """
    for start, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if name == option and given:
            yield start, start + 1, value
        elif name == option and start + 1 < len(arguments):
            yield start, start + 2, arguments[start + 1]


def option_values(arguments: Sequence[str], option: str) -> list[str]:
    """The values that an option such as "--config" is given, in order."""
    return [value for _, _, value in option_places(arguments, option)]


def refuse_empty_paths(arguments: Sequence[str]) -> None:
    """Refuse an empty path, which would be taken for none, or for the folder that one is in.

    Raises:
        UserError: if an option for a file or a folder has an empty value.
    """
    for option in _PATHS:
        if not all(value.strip() for value in option_values(arguments, option)):
            raise UserError(
                f"{option} is '', but a path was expected. If it comes from a variable of the shell, that is "
                f"not set. Name the path, or leave {option} out."
            )
