"""Runs notebooks in place and stores their outputs: ``python notebooks/execute.py [FILE ...]``, all by default.

Unlike ``jupyter execute``, it stores neither times nor versions, so that equal outputs make equal files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def main(files: list[str]) -> None:
    """Executes each notebook from its own folder."""
    for path in map(Path, files) if files else sorted(HERE.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(path.resolve().parent)}}
        NotebookClient(notebook, timeout=240, kernel_name="python3", record_timing=False, resources=resources).execute()
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
