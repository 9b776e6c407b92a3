"""What an exported policy says about itself, and the base model that its adapter needs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

_BASE = "base"
_LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base})
model = PeftModel.from_pretrained(base, folder)
"""
_LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder)
"""


def name_base(folder: Path, final: Path, embedded: Path | None) -> None:
    """Let an exported adapter name a base model that stays where it is.

    An embedded base is copied beside the adapter, since its place in the package goes with an update. peft
    takes a relative name from the folder that a process is in, so the name of a local base is absolute.

    Args:
        folder: holds adapter_config.json.
        final: where the folder will be in the end.
        embedded: folder of the embedded base model; None for any other.
    """
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text("utf-8"))
    if embedded is not None:
        shutil.copytree(embedded, folder / _BASE, ignore=shutil.ignore_patterns("pi_0"))
        content["base_model_name_or_path"] = str(final.resolve() / _BASE)
    elif Path(content["base_model_name_or_path"]).exists():
        content["base_model_name_or_path"] = str(Path(content["base_model_name_or_path"]).resolve())
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def write_card(folder: Path, title: str, facts: Mapping[str, str]) -> None:
    """Write README.md: what a policy is, where it comes from, and how to load it.

    Args:
        folder: of the policy; with adapter_config.json it is an adapter, else a whole model.
        title: of the page.
        facts: rows of its table.
    """
    adapter = folder / "adapter_config.json"
    load, library = _LOAD_MODEL, "transformers"
    if adapter.is_file():
        named = json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"]
        base = f'f"{{folder}}/{_BASE}"' if (folder / _BASE).is_dir() else repr(named)
        load, library = _LOAD_ADAPTER.format(base=base), "peft"
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    tokenizer = "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
    (folder / "README.md").write_text(
        f"---\nlibrary_name: {library}\n---\n\n# {title}\n\n| | |\n|---|---|\n{rows}\n"
        f'```python\nfolder = "."  # this folder, wherever it is\n\n{load}{tokenizer}```\n',
        "utf-8",
    )
