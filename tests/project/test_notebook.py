"""The notebook runs from top to bottom in a kernel of its own, whose loop runs already."""

from __future__ import annotations

import base64
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


def shown(cell: nbformat.NotebookNode, form: str) -> str:
    """What the cell shows in a form: "text/html", "image/png" in base 64."""
    return "".join(one.get("data", {}).get(form, "") for one in cell.get("outputs", []))


@pytest.mark.timeout(420)  # ten times what it takes
def test_the_notebook_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "ran.ipynb")]
    run = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-2000:]
    cells = [cell for cell in nbformat.read(tmp_path / "ran.ipynb", 4).cells if cell.cell_type == "code"]
    said = [printed(cell) for cell in cells]
    assert said[1] == "Pipeline(llava on 1E1P1D, running, 0 ended)"
    assert all(f"<td>{name}</td>" in shown(cells[1], "text/html") for name in ("E0", "P0", "D0"))
    assert said[2].strip()
    assert "E0 → P0 → D0" in shown(cells[3], "text/plain")
    for drawn in (cells[4], cells[8]):
        assert base64.b64decode(shown(drawn, "image/png")).startswith(b"\x89PNG"), "a picture, without a magic line"
    assert "image E0 → P0" in said[5]
    assert "kv P0 → D0" in said[5]
    assert said[6].count("length") == 2
    assert "slices of 3 instances" in said[7]
    assert "<td>E0</td>" in shown(cells[7], "text/html")


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in nbformat.read(EXAMPLES / "notebook.ipynb", 4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
