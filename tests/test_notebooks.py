"""Each notebook runs from top to bottom on the CPU, and is stored with its outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def test_outputs_are_stored(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = _code_cells(nbformat.read(path, as_version=4))
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "stale or missing outputs: run `make notebooks`"
    assert any(cell.outputs for cell in cells), "no outputs stored: run `make notebooks`"
    errors = [output.ename for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert errors == []


@pytest.mark.slow
def test_runs(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()  # raises CellExecutionError, with the cell and its traceback
