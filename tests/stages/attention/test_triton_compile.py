"""The Triton kernels compile for an H200 (sm_90) and an A100 (sm_80), which need not be there: the compiler is not the
interpreter, and refuses what that lets pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import TESTS

pytest.importorskip("triton", reason="triton is not installed: pip install triton")


def kernels(capability: int, tmp_path: Path) -> dict[tuple[str, str, int], tuple[int, str]]:
    setting = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    setting |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(TESTS / "support" / "triton_compiler.py"), str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=setting, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(name, dtype, int(m)): (int(shared), said) for name, dtype, m, shared, said in lines}


@pytest.mark.parametrize(
    ("capability", "shared", "instruction"),
    [(90, 227, "wgmma"), pytest.param(80, 163, "mma.sync", marks=pytest.mark.slow)],
)
def test_they_compile_and_fit(capability: int, shared: int, instruction: str, tmp_path: Path) -> None:
    """``shared``: KiB of shared memory that a program can have there. Chunks run on the matrix units of that GPU."""
    found = kernels(capability, tmp_path)
    assert set(found) == {
        *(("attend", *kind) for kind in (("bf16", 128), ("bf16", 16), ("fp16", 16), ("fp32", 16))),
        ("write", "bf16", 0),
        ("combine", "bf16", 0),
    }
    assert all(bytes_ <= shared << 10 for bytes_, _ in found.values())
    assert found["attend", "bf16", 128][1] == instruction
    assert found["attend", "bf16", 16][1] == "mma.sync", "decode rows too, 16 at a time"
    assert found["attend", "fp32", 16][1] == "none", "float32 is exact: no rounding to tf32"
    assert found["write", "bf16", 0][1] == found["combine", "bf16", 0][1] == "True"
