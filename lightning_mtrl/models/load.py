"""Load a causal language model and its tokenizer, in full precision or in 4 bits."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_mtrl.errors import UserError
from lightning_mtrl.models.sources import Source, explained, found
from lightning_mtrl.models.tiny import TINY_MODELS, load_tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Quantization = Literal["none", "nf4"]


@dataclass(frozen=True)
class LoadedModel:
    """A base model as it was loaded, its tokenizer, and the name that it was asked for by."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str


def load_model(
    name: str,
    *,
    quantization: Quantization = "none",
    dtype: str = "float32",
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    tiny: str = "sales",
) -> LoadedModel:
    """Load a model by name; its attention accepts a mask of [B, 1, T, T].

    Args:
        name: "tiny", a Hub id, a folder, or a path to a GGUF file.
        quantization: "nf4" keeps the linear layers in 4 bits (NF4 with double quantization, QLoRA,
            arXiv:2305.14314, section 3). A GGUF file is then first written out as an ordinary model folder,
            once, under $XDG_CACHE_HOME/lightning_mtrl (~/.cache by default).
        dtype: of the other weights and of the computation: "float32", "bfloat16" or "float16".
        gguf_file: name of a GGUF file inside the folder or Hub repository.
        trust_remote_code: run Python code that comes with the model.
        tiny: which embedded model "tiny" stands for, a key of `TINY_MODELS`.

    Raises:
        UserError: if the model cannot be found or read, lacks weights, or its tokenizer has no chat template.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be 'float32', 'bfloat16' or 'float16', got {dtype!r}")
    kind: torch.dtype = getattr(torch, dtype)
    if name == "tiny" and quantization == "none":
        model, tokenizer = load_tiny(tiny, dtype)
        return LoadedModel(model, tokenizer, name)
    place = TINY_MODELS[tiny].folder if name == "tiny" else Path(name).expanduser()
    source = found(name, place, gguf_file, trust_remote_code)
    chat = _tokenizer(source)
    if quantization == "none":
        return LoadedModel(_weights(source, kind), chat, name)
    if source.gguf_file is not None:
        source = Source(name, str(_dequantized(source)), None, trust_remote_code)
    return LoadedModel(_weights(source, kind, _nf4(kind)), chat, name)


def blank_model(
    name: str,
    *,
    dtype: str = "float32",
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    tiny: str = "sales",
) -> PreTrainedModel:
    """A model of the right shapes without weights, on the device "meta"; only its configuration is read.

    Args:
        name: as in `load_model`.
        dtype: of its weights, unless they are in 4 bits.
        gguf_file: name of a GGUF file inside the folder or Hub repository; its metadata is read.
        trust_remote_code: run Python code that comes with the model.
        tiny: which embedded model "tiny" stands for.

    Raises:
        UserError: if the model cannot be found, or its configuration not be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    place = TINY_MODELS[tiny].folder if name == "tiny" else Path(name).expanduser()
    source = found(name, place, gguf_file, trust_remote_code)
    with explained(source, "its configuration"), torch.device("meta"):
        config = AutoConfig.from_pretrained(source.place, **source.options)
        kind = getattr(torch, dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=trust_remote_code)
    blank: PreTrainedModel = model
    return blank


def describe_model(
    name: str, *, gguf_file: str | None = None, trust_remote_code: bool = False, tiny: str = "sales"
) -> tuple[PreTrainedTokenizerBase, int | None]:
    """A model's tokenizer, and the tokens that it was made for, found out without its weights.

    Args:
        name: as in `load_model`.
        gguf_file: as there. Its configuration takes seconds to read, and its tokenizer too, but that is kept
            for `load_model`.
        trust_remote_code: as there.
        tiny: as there.

    Raises:
        UserError: if the model cannot be found, or its tokenizer or configuration not be read.
    """
    from transformers import AutoConfig

    place = TINY_MODELS[tiny].folder if name == "tiny" else Path(name).expanduser()
    source = found(name, place, gguf_file, trust_remote_code)
    tokenizer = _tokenizer(source)
    with explained(source, "its configuration"):
        return tokenizer, text_limit(AutoConfig.from_pretrained(source.place, **source.options))


def text_limit(config: Any) -> int | None:
    """The tokens that a model was made for, where its configuration says so."""
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit


def _tokenizer(source: Source) -> PreTrainedTokenizerBase:
    if source.gguf_file is not None:
        return _read_once(source, _fingerprint(source))
    return _read_tokenizer(source)


@lru_cache(maxsize=1)
def _read_once(source: Source, fingerprint: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, which is read string by string: three to ten seconds."""
    return _read_tokenizer(source)


def _read_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with explained(source, "its tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.place, **source.options)
    if not tokenizer.chat_template:
        raise UserError(
            f"model.name is {source.name!r}, but its tokenizer has no chat template, which conversations "
            f"need. Use an instruction-tuned model, or put a chat_template.jinja into its folder."
        )
    return tokenizer


def _weights(source: Source, dtype: torch.dtype, quantization: Any = None) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a bar for each loading of a model says nothing useful
    if source.gguf_file is not None:
        # Ordinary weights, on every machine: packed blocks can be neither merged, saved nor trained.
        quantization = GgufConfig(dequantize=True)
    settings = {} if quantization is None else {"quantization_config": quantization}
    with explained(source, "it"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.place, **source.options, **settings, dtype=dtype, output_loading_info=True
        )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"model.name is {source.name!r}, but {len(missing)} of its weights are missing, the first is "
            f"{missing[0]!r}. A whole causal language model was expected; download or save it again."
        )
    checked: PreTrainedModel = model
    _keep_trainable(checked)
    if quantization is not None:
        _leave_file(checked)
    return checked


def _leave_file(model: PreTrainedModel) -> None:
    """Copy the weights that are not in 4 bits out of the file that they are mapped from.

    As long as one of them is there, every page of the file that was read while loading stays resident.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _keep_trainable(model: PreTrainedModel) -> None:
    """Keep 4-bit weights in the layout that training passes read.

    On CPUs with AVX512-BF16 bitsandbytes packs a layer's weights anew at its first pass in evaluation mode,
    and its backward pass then reads them wrongly, so that adapters get wrong gradients.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # torch.nn's own stub


def _nf4(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _dequantized(source: Source) -> Path:
    """The folder that holds a GGUF file's weights as ordinary ones; written on first use."""
    assert source.gguf_file is not None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_mtrl"
    folder = cache / f"{Path(source.gguf_file).stem}-{_fingerprint(source)}"
    if folder.is_dir():
        return folder
    model, tokenizer = _weights(source, torch.float32), _tokenizer(source)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".unfinished-") as beside:
        model.save_pretrained(Path(beside) / "model")
        tokenizer.save_pretrained(Path(beside) / "model")
        try:
            os.rename(Path(beside) / "model", folder)
        except OSError:
            # Another process was quicker, and wrote the same.
            if not folder.is_dir():
                raise
    return folder


def _fingerprint(source: Source) -> str:
    """Changes when the file does."""
    file = Path(source.place) / str(source.gguf_file)
    stamp = (
        (file.resolve(), file.stat().st_size, file.stat().st_mtime_ns) if file.is_file() else (source.place,)
    )
    return hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]
