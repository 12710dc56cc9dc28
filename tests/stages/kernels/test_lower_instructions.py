"""The kernels' tests hold with lower sets of instructions than this processor's, as on one that has no more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.paths import ROOT
from support.thinned import thinned
from trinity.memory import native
from trinity.stages.attention.native import uses_amx_tiles

SETS = ("portable", "avx2", "avx512", "amx")
HERE = "amx" if uses_amx_tiles(64) else native.extension.instructions() if native.has_extension() else SETS[0]
LOWER = SETS[: SETS.index(HERE)]
# Those of oneDNN and torch, which read theirs once per process too
LIBRARIES = {
    "portable": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}
SAYS = """
import torch
from trinity.memory import native
from trinity.stages.attention.native import uses_amx_tiles
from trinity.stages.kernels.native_linear import has_native_product
from trinity.stages.kernels.small_batch_gemm import has_gemm_kernel
asked = native.extension.attention_instructions
print(native.extension.instructions(), asked(False, 64), uses_amx_tiles(64), has_gemm_kernel(torch.bfloat16),
      has_gemm_kernel(torch.float32), has_native_product(torch.bfloat16))
"""
if not native.has_extension():
    pytest.skip(f"no kernels: {native.describe()}", allow_module_level=True)


def run(*asked: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run([sys.executable, *asked], env=environment, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("name", thinned(SETS, (SETS[1], HERE).__contains__))
def test_the_environment_bounds_what_is_used(name: str) -> None:
    """At most what is named, and no less than both that and the processor have."""
    used = min(name, HERE, key=SETS.index)
    vectors = min(used, "avx512", key=SETS.index)
    wanted = [vectors, vectors, used == "amx", used == "amx", used in ("avx512", "amx"), used != "portable"]
    assert run("-c", SAYS, TRINITY_ISA=name).stdout.split() == [str(each) for each in wanted]


def test_a_set_that_nobody_knows_is_refused() -> None:
    done = run("-c", "import trinity.memory.native", TRINITY_ISA="avx1024")
    assert done.returncode
    assert "ConfigError: TRINITY_ISA is 'avx1024', none of amx, avx512, avx2 and portable" in done.stderr


def test_the_setting_of_earlier_times_says_what_to_set() -> None:
    said = "set TRINITY_ISA=avx512"
    copies = "import numpy as np; from trinity.memory import native; a = np.zeros((2, 64), np.uint8);"
    copies += "[native.copy_blocks(a, a.copy(), [0], [1]) for _ in range(2)]"
    assert run("-c", copies, TRINITY_AMX="0").stderr.count(said) == 1, "once, and not with each copy"
    for others in ({"TRINITY_AMX": "1"}, {"TRINITY_AMX": "0", "TRINITY_ISA": "avx2"}):
        assert said not in run("-c", "import trinity.memory.native", **others).stderr


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("name", SETS[:-1])
def test_the_kernels_tests_hold(name: str) -> None:
    if name not in LOWER:
        pytest.skip(f"this processor has no more than {HERE}")
    kernels = sorted((ROOT / "tests/stages/kernels").glob("test_*.py"))
    files = [path for path in kernels if path.name != "test_lower_instructions.py"]
    files += sorted((ROOT / "tests/stages/attention").glob("test_attention_*.py"))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files), TRINITY_ISA=name, **LIBRARIES[name])
    assert done.returncode == 0, done.stdout[-4_000:]
