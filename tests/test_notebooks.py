from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

# A minute of computing, but a busy machine can make several of it.
SECONDS = 600
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]
NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").rglob("*.ipynb"))


def test_the_notebooks_are_found_and_hold_no_outputs() -> None:
    assert len(NOTEBOOKS) >= 2
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert code
        assert all(cell.outputs == [] and cell.execution_count is None for cell in code), path


# A minute together on one core: less than the learning curves of the slow lane.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_and_draws(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert path.read_bytes() == before
