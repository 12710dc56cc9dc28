"""The notebook of composition by hand runs from top to bottom, and its tokens are those of generate()."""

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
notebook = nbformat.read("compose.ipynb", 4)
NotebookClient(notebook, timeout=390, resources={"metadata": {"path": "."}}).execute()
nbformat.write(notebook, sys.argv[1])
"""


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(one.get("text", "") for one in cell.get("outputs", []))


@pytest.mark.timeout(420)  # ten times what it takes
def test_it_composes_and_its_tokens_are_those_of_generate(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "ran.ipynb")]
    run = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-2000:]
    said = [printed(cell) for cell in nbformat.read(tmp_path / "ran.ipynb", 4).cells if cell.cell_type == "code"]
    text = "".join(said)
    assert text.count("equal to generate(): True") == 2
    assert text.count("image by inproc 1 blocks 4096 bytes") == 2  # 16 rows of 64 floats, of a block of 576
    assert "length on E0 and PD0" in text
    assert "kv by shm" in text
    assert [text.index(f"to {name}\n") for name in ("PD0 Offer", "PD0 Commit", "E0 Release")]


def test_it_is_kept_without_outputs() -> None:
    for cell in nbformat.read(EXAMPLES / "compose.ipynb", 4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
