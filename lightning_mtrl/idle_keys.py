"""Keys that somebody gives in a configuration, and that have no effect beside its others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mtrl.command_line import option_values
from lightning_mtrl.config import ModelConfig

_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")


@dataclass(frozen=True)
class Idle:
    """Settings that have no effect beside others.

    Attributes:
        key: of the section that has them, such as "model".
        section: a dataclass whose fields all have defaults.
        names: of the settings.
        why: what makes them so, to follow "since".
    """

    key: str
    section: Any
    names: Sequence[str]
    why: str

    def changed(self) -> Iterator[tuple[str, object]]:
        """Key and value of those that are not at their default."""
        usual = type(self.section)()
        for name in self.names:
            value = getattr(self.section, name)
            if value != getattr(usual, name):
                yield f"{self.key}.{name}", value


def idle_keys(model: ModelConfig, of_algorithm: Iterable[Idle], arguments: Sequence[str]) -> Iterator[str]:
    """What to say of each key that was given and has no effect.

    Files that are put together hold keys for whichever class another file names, so of several files nothing
    is said; of one alone, and of options, it is.

    Args:
        model: of the configuration.
        of_algorithm: of the configuration's algorithm.
        arguments: the command line.
    """
    options = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    is_one_file = len(option_values(arguments, "--config")) < 2
    for idle in (*_of_model(model), *of_algorithm):
        for key, value in idle.changed():
            if is_one_file or any(_gives(option, key) for option in options):
                yield f"{key} is {value!r}, but it has no effect, since {idle.why}. Leave it out."


def _of_model(model: ModelConfig) -> Iterator[Idle]:
    if model.fine_tuning == "full":
        yield Idle("model", model, _LORA, "model.fine_tuning is 'full', which makes no adapters")


def _gives(option: str, key: str) -> bool:
    """Whether an option gives a key, or a section that it is in; `init_args` may be left out."""
    section, found = (text.removeprefix("--").replace(".init_args", "") for text in (option, key))
    return found == section or ("." in section and found.startswith(f"{section}."))
