"""Short runs of the sweeps that reach a server from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.memory_groups import memory_group
from support.paths import TESTS


def sweep(name: str, *arguments: str) -> tuple[int, str]:
    """Run a sweep to its end; returns its exit code and its output."""
    command = [sys.executable, str(TESTS / "sweeps" / name), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_answers_are_exact_while_children_of_a_server_are_struck(tmp_path: Path) -> None:
    code, output = sweep("server_kills.py", "--strikes", "4", "--log", str(tmp_path / "log"))
    assert code == 0, output
    assert "4 strikes hit a request in flight" in output


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_mixed_requests_are_answered_right(tmp_path: Path) -> None:
    _, output = sweep("server_soak.py", "--requests", "300", "--log", str(tmp_path / "log"))
    assert "tokens compared, 0 wrong" in output, "its verdict on memory is for longer runs"


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("cc") is None, reason="it needs root, for mounts, and a compiler")
def test_answers_are_exact_on_a_machine_that_misbehaves() -> None:
    with memory_group() as group:
        tries = "clock,full,slow,front" if group is None else "clock,oom,full,slow,front"
    code, output = sweep("odd_machine.py", "--only", tries, "--readers", "100", "--deaths", "3")
    assert code == 0, output
    assert "nothing wrong" in output
