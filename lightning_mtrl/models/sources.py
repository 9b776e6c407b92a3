"""Where a model is: a folder, a GGUF file, a repository of the Hub; and what is wrong with its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_mtrl.errors import UserError
from lightning_mtrl.models.hub import OutOfReach, is_only_cached
from lightning_mtrl.models.stored import expect_whole

EXPECTED = "'tiny', the id of a model on the Hugging Face Hub, a folder with config.json, or a .gguf file"
# A name that begins like this is never looked for on the Hub, which takes a minute where it is out of reach.
_LOCAL = ("./", "../", "~", "models/")
_FETCHED = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Source:
    """Where transformers finds a model, and the key that the user would have to mend.

    Attributes:
        name: as it was asked for.
        place: folder, or name of a repository.
        gguf_file: in it; None for an ordinary model.
        trust_remote_code: run Python code that comes with it.
        is_only_cached: the Hub does not answer, and its cache on this machine has the model.
    """

    name: str
    place: str
    gguf_file: str | None
    trust_remote_code: bool
    is_only_cached: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for `from_pretrained`."""
        gguf = {} if self.gguf_file is None else {"gguf_file": self.gguf_file}
        offline = {"local_files_only": True} if self.is_only_cached else {}
        return {**gguf, **offline, "trust_remote_code": self.trust_remote_code}


def found(name: str, path: Path, gguf_file: str | None, trust_remote_code: bool) -> Source:
    """Look at what is on the disk; anything else is taken for a Hub id.

    Raises:
        UserError: if nothing is there, its weights are broken, or the Hub cannot be asked.
    """
    if path.is_file() and path.suffix == ".gguf":
        return Source(name, str(path.parent), path.name, trust_remote_code)
    if path.is_dir():
        wanted = path / (gguf_file or "config.json")
        if not wanted.is_file():
            key = f"model.gguf_file is {gguf_file!r}" if gguf_file else f"model.name is {name!r}"
            raise UserError(f"{key}, but there is no file {wanted}. model.name must be {EXPECTED}.")
        if gguf_file is None:
            expect_whole(path)
        return Source(name, str(path), gguf_file, trust_remote_code)
    is_path = path.is_absolute() or name.startswith(_LOCAL) or name.count("/") > 1
    if path.is_file() or is_path or path.suffix == ".gguf":
        state = "is not a model" if path.exists() else "does not exist"
        fetched = path.name == _FETCHED and not path.exists()
        advice = f" To get it: python scripts/fetch_smollm2.py {name}" if fetched else ""
        raise UserError(f"model.name is {name!r}, but that path {state}. It must be {EXPECTED}.{advice}")
    try:
        cached = is_only_cached(name, gguf_file or "config.json")
    except OutOfReach as error:
        raise UserError(
            f"model.name is {name!r}, which is nothing on this machine, and the Hub cannot be asked for it "
            f"({error}). It must be {EXPECTED}. Where the Hub is out of reach, give a folder or a file."
        ) from None
    return Source(name, name, gguf_file, trust_remote_code, cached)


def expect_adapter(adapter: str) -> None:
    """Refuse an adapter that is broken, or nothing on this machine where the Hub cannot be asked for it.

    Raises:
        UserError: if it is so.
    """
    if Path(adapter).exists():
        expect_whole(Path(adapter))
        return
    try:
        is_only_cached(adapter, "adapter_config.json")
    except OutOfReach as error:
        raise UserError(
            f"model.adapter is {adapter!r}, but no peft adapter is there ({error}). A folder with "
            f"adapter_config.json and adapter_model.safetensors was expected."
        ) from None


@contextmanager
def explained(source: Source, what: str) -> Iterator[None]:
    """Turn what transformers raises for a model that is not there, or broken, into a `UserError`."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"model.name is {source.name!r}, and reading {what} needs a package that is not installed: "
            f"{_first_line(error)} For GGUF files: pip install 'lightning_mtrl[gguf]'."
        ) from error
    except Exception as error:
        # Broken files raise almost anything; tokenizers raises the bare class.
        raise UserError(
            f"model.name is {source.name!r}, but {what} could not be loaded: {_first_line(error)} It must be "
            f"{EXPECTED}. Where the Hub is out of reach, give a folder or a file."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".:") + "."
