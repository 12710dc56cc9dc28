"""The kernels of device layers compile for an A100, an H200 and a B200 without one; serving compiles none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import PYTHON_PATH, TESTS

pytest.importorskip("triton", reason="triton is not installed: pip install triton")
pytestmark = pytest.mark.timeout(600)  # compilers of half a minute, in processes of their own


def run(tmp_path: Path, *capabilities: int) -> list[list[str]]:
    setting = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    setting |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    setting["PYTHONPATH"] = PYTHON_PATH
    command = [sys.executable, str(TESTS / "support" / "layer_kernels.py"), *map(str, capabilities)]
    done = subprocess.run(command, capture_output=True, text=True, env=setting, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_compile_and_spill_nothing(capability: int, tmp_path: Path) -> None:
    (_, loaded, added), *found = run(tmp_path, capability)
    assert int(added) == 0, "after load, steps of all sizes ask for no variant that is not there"
    assert int(loaded) == len(found) <= 12
    assert {name for name, *_ in found} == {"norm_row", "rotate_heads", "gate_row"}
    for name, _, registers, spilled, _ in found:
        assert int(spilled) == 0, name
        assert int(registers) <= 64, f"{name}: a processor of 64 Ki registers then has 1,024 threads of it"
