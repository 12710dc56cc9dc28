"""On a processor with AMX tiles, the kernels' tests hold without them too: as on one that has none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.paths import ROOT
from trinity.memory import native
from trinity.stages.attention.native import uses_amx_tiles

# trinity's own tiles, and those of oneDNN; both are asked for once per process
WITHOUT_AMX = {"TRINITY_AMX": "0", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
SAYS = """
import torch
from trinity.stages.attention.native import uses_amx_tiles
from trinity.stages.kernels.small_batch_gemm import has_gemm_kernel
print(uses_amx_tiles(64), has_gemm_kernel(torch.bfloat16))
"""


def run(*asked: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run([sys.executable, *asked], env=environment, capture_output=True, text=True, cwd=ROOT)


def test_tiles_are_switched_off_by_the_environment() -> None:
    here = uses_amx_tiles(64)
    assert run("-c", SAYS, **WITHOUT_AMX).stdout.split() == ["False", "False"]
    assert run("-c", SAYS, TRINITY_AMX="1").stdout.split() == [str(here)] * 2


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.skipif(not uses_amx_tiles(64), reason=f"no AMX tiles to switch off: {native.describe()}")
def test_the_kernels_tests_hold_without_tiles() -> None:
    kernels = sorted((ROOT / "tests/stages/kernels").glob("test_*.py"))
    files = [path for path in kernels if path.name != "test_without_amx.py"]
    files += sorted((ROOT / "tests/stages/attention").glob("test_attention_*.py"))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files), **WITHOUT_AMX)
    assert done.returncode == 0, done.stdout[-4_000:]
