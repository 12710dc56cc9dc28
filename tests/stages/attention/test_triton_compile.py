"""The Triton kernels compile for GPUs that need not be there, without spills or calls, all before the first request.

The compiler is not the interpreter, and refuses what that lets pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS

pytest.importorskip("triton", reason="triton is not installed: pip install triton")
pytestmark = pytest.mark.timeout(600)  # compilers of half a minute, in processes of their own


def run_compiling(script: Path, *arguments: str, cache: Path) -> list[list[str]]:
    """Words of each line that ``script`` prints in a process that does not interpret kernels."""
    setting = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    setting |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    setting["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(TESTS)])
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=setting, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.split() for line in done.stdout.splitlines()]


ATTENTION = ("decode", "split_decode", "prefill")
FP8_KERNELS = (*ATTENTION, "write_kv", "round_inputs", *(f"FP8_product_{rows}_rows" for rows in (16, 64, 128)))


@pytest.mark.parametrize(
    ("capability", "shared", "instruction", "fp8"),
    [
        (90, 227, "wgmma", ("write_kv",)),
        pytest.param(90, 227, "wgmma", FP8_KERNELS, marks=pytest.mark.slow),
        pytest.param(80, 163, "mma.sync", (), marks=pytest.mark.slow),
        pytest.param(100, 227, "tcgen05", FP8_KERNELS, marks=pytest.mark.slow),
    ],
)
def test_they_compile_and_fit(
    capability: int, shared: int, instruction: str, fp8: tuple[str, ...], tmp_path: Path
) -> None:
    """``shared``: KiB of shared memory that a program can have there. Chunks run on the matrix units of that GPU.

    ``fp8``: kernels for caches and weights in FP8 that are compiled; a GPU without FP8 refuses them.
    """
    lines = run_compiling(TESTS / "support" / "triton_compiler.py", str(capability), *fp8, cache=tmp_path)
    found = {(name, case): (list(map(int, figures)), kind) for name, case, *figures, kind in lines}
    assert set(found) == {
        *(
            (name, case)
            for name in ("decode", "split_decode", "prefill", "combine_splits")
            for case in ("plain", "all")
        ),
        *(("write_kv", "plain"), ("split_decode", "exact")),
        *((name, "bytes") for name in ("copy_pieces_kernel", "digest_pieces_kernel")),
        *((name, "fp8") for name in fp8),
        *([] if fp8 else [("write_kv", "refused")]),
    }
    for kernel, ((_, stack, held, _, _, calls), kind) in found.items():
        assert held <= shared << 10, kernel
        if kernel[1] != "exact":  # float32, for tests
            few = 32 if kernel == ("prefill", "all") and capability != 90 else 0  # bytes; no model has all of it
            assert stack <= few, f"{kernel} spills registers"
        if kernel[0] in ATTENTION and kernel[1] in ("plain", "fp8"):
            assert calls == 0, f"{kernel} calls a division between two tiles of keys"
            assert kind == (instruction if kernel[0] == "prefill" else "mma.sync"), kernel
        if "product" in kernel[0]:
            assert kind == ("mma.sync" if "16" in kernel[0] else instruction), kernel
    assert found["split_decode", "exact"][-1] == "none", "float32 is exact: no rounding to tf32"


@pytest.mark.parametrize(
    ("model", "letters", "kernels"),
    [
        # the write; decodes and chunks, each with and without splits; what joins them
        ("llama", "PD", 6),
        pytest.param(
            "gemma3", "PD", 14, marks=pytest.mark.slow
        ),  # layers of two kinds, and chunks with images, whose tokens see each other, besides
        pytest.param("llama", "D", 4, marks=pytest.mark.slow),
        pytest.param("llama", "P", 6, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_while_serving(model: str, letters: str, kernels: int, tmp_path: Path) -> None:
    """A stage warms up, then serves 300 random mixed steps."""
    ((warm, served, launches),) = run_compiling(
        TESTS / "support" / "triton_variants.py", model, letters, cache=tmp_path
    )
    assert int(launches) > 900, "this test must launch: a recorded step replays what it has launched once"
    assert (int(warm), int(served)) == (kernels, 0)


def test_nothing_is_compiled_for_a_copy(tmp_path: Path) -> None:
    """What is tried at the start are all kernels of copies and digests, whatever blocks are like."""
    ((warm, served, launches),) = run_compiling(TESTS / "support" / "block_variants.py", cache=tmp_path)
    assert int(launches) >= 900, "this test must launch"
    assert (int(warm), int(served)) == (6, 0)
