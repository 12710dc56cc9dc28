"""Notebooks of the examples, run from top to bottom in a kernel of their own, and what their cells show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat

from support.paths import EXAMPLES

LIMIT_S = 400  # ten times what one takes
_PROGRAM = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=390, resources={"metadata": {"path": "."}}).execute()
nbformat.write(notebook, sys.argv[2])
"""


def run_notebook(name: str, folder: Path, where: Path = EXAMPLES) -> list[nbformat.NotebookNode]:
    """Run a notebook of the examples in the directory ``where``; return its cells of code with their outputs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    command = [sys.executable, "-c", _PROGRAM, str(EXAMPLES / name), str(folder / "ran.ipynb")]
    run = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 0, run.stderr[-2000:]
    return [cell for cell in nbformat.read(folder / "ran.ipynb", 4).cells if cell.cell_type == "code"]


def printed(cell: nbformat.NotebookNode) -> str:
    """Return what a cell printed, or its value as text."""
    return "".join(one.get("text", "") or shown(cell, "text/plain", one) for one in cell.get("outputs", []))


def shown(cell: nbformat.NotebookNode, form: str, output: nbformat.NotebookNode | None = None) -> str:
    """Return what a cell shows in a form: "text/html", "image/png" in base 64; of one output, or of all."""
    several = cell.get("outputs", []) if output is None else [output]
    return "".join(one.get("data", {}).get(form, "") for one in several)


def check_empty(name: str) -> None:
    """Check that a notebook is kept without outputs."""
    for cell in nbformat.read(EXAMPLES / name, 4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
