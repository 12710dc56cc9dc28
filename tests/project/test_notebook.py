"""The notebook runs from top to bottom in a kernel of its own, whose loop runs already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from support.paths import EXAMPLES

PROGRAM = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read("notebook.ipynb", 4)
NotebookClient(notebook, timeout=390, resources={"metadata": {"path": "."}}).execute()
nbformat.write(notebook, sys.argv[1])
"""


def printed(cell: nbformat.NotebookNode) -> str:
    outputs = cell.get("outputs", [])
    return "".join(one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in outputs)


@pytest.mark.timeout(420)  # ten times what it takes
def test_the_notebook_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "ran.ipynb")]
    run = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-2000:]
    said = [printed(cell) for cell in nbformat.read(tmp_path / "ran.ipynb", 4).cells if cell.cell_type == "code"]
    assert "E0" in said[1]
    assert said[2].strip()
    assert "length" in said[3]
    assert "image E0 → P0" in said[4]
    assert "kv P0 → D0" in said[4]
    assert said[5].count("length") == 2


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in nbformat.read(EXAMPLES / "notebook.ipynb", 4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
