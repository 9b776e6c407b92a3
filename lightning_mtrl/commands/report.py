"""Write one page of a run: what it achieved, its figures, some of its conversations, its configuration.

The page is a single HTML file that needs nothing else: no network, no script, and no model is loaded to make
it. A run that is still going, or was killed, has a page of what is there so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_mtrl.command_paths import expect_writable
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import command_parser, parse
from lightning_mtrl.runs.folder import RunFolder


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    options = parse(_parser(), arguments)
    folder = RunFolder.open(options.run)
    output = folder.report if options.output is None else _output(options.output)
    expect_writable("--run" if options.output is None else "--output", output)
    from lightning_mtrl.report.page import render
    from lightning_mtrl.report.reading import read_run
    from lightning_mtrl.runs.atomic import write_text

    # Beside a run that is being written this is safe too: nothing of a run has this name, and it is renamed
    # into its place whole.
    write_text(output, render(read_run(folder)))
    print(f"Report of {folder.path} in {output}")


def _output(name: str) -> Path:
    path = Path(name)
    if path.suffix not in (".html", ".htm") or path.is_dir():
        raise UserError(f"--output is {name!r}, but a file that ends with .html was expected.")
    return path


def _parser() -> ArgumentParser:
    parser = command_parser("report", __doc__ or "")
    parser.add_argument("--run", "--run_dir", type=str, required=True, help="folder of the run")
    parser.add_argument(
        "--output", type=str | None, help="a .html file, replaced if there; null: report.html in the run"
    )
    return parser
