"""Kernels that are compiled here for a GPU that is not: Triton finds them in another folder, and compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from tools import gpu_bundle

pytest.importorskip("triton", reason="triton is not installed: pip install triton")


def compile_copies(cache: Path, folder: Path, **setting: str) -> str:
    """Compile what copies and digests blocks, without the interpreter; returns the first line that is printed."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1", "CUDA_VISIBLE_DEVICES": ""}
    given |= {"PYTHONPATH": str(ROOT / "src"), **setting}
    command = [sys.executable, str(ROOT / "tools" / "gpu_kernels.py"), str(folder), "--only", "copies"]
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[0]


def test_carried_kernels_are_found_in_another_folder(tmp_path: Path) -> None:
    """With another home, and no cache but the carried one."""
    assert compile_copies(tmp_path / "cache", tmp_path / "carried") == "6 kernels compiled, 0 found in the cache"
    shutil.rmtree(tmp_path / "cache")
    there = tmp_path / "elsewhere" / "triton"
    shutil.move(tmp_path / "carried", there)
    assert {path.suffix for path in there.rglob("*") if path.is_file()} == {".json", ".cubin", ".so"}
    assert gpu_bundle.place(there) == 6
    found = compile_copies(there, tmp_path / "again", HOME=str(tmp_path / "home"))
    assert found == "0 kernels compiled, 6 found in the cache"
