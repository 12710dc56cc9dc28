"""Compile trinity's Triton kernels for a GPU that is not here: PYTHON tools/gpu_kernels.py FOLDER [--capability 90]

Run it with the Python, torch and Triton of the machine that has the GPU: Triton looks kernels up by its own sources,
too. Every launch of the probe's attention and copies, of a tiny LLaVA in float32 and of LLaVA-1.5-7B's shape in
bfloat16 goes Triton's own way, with a driver that compiles and launches nothing. FOLDER gets the cubins, their metadata
and the C launchers, a folder for each of Triton's keys; tools/gpu_bundle.py places them where they are used. Prints how
many kernels were compiled, how many were found in the cache (TRITON_CACHE_DIR), and the keys of the former.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.driver import driver

from benchmarks.gpu.model import write_weights
from benchmarks.gpu.probe_items import DTYPES, SHAPE
from tools.kernel_table import FakeDriver
from trinity.memory.block_memory import BlockMemory
from trinity.memory.device_blocks import find_block_fault
from trinity.memory.triton_blocks import TritonBlocks
from trinity.stages.attention.gpu.triton import H100_SHARED_BYTES, TritonAttention
from trinity.stages.attention.probe import find_fault
from trinity.stages.kernels import decoder_layers
from trinity.stages.kernels.gpu import device_layers
from trinity.stages.language import LanguageStage
from trinity.stages.models import load_model, loader
from trinity.testing import checkpoints_llava
from trinity.testing.checkpoints_recipes import Recipe

PROCESSORS = 132  # multiprocessors of an H100 and an H200
MOST_THREADS = 1024  # of a block
LAYERS, BLOCKS, IMAGE_TOKENS = 2, 4, 576  # of a model that is compiled for: no kernel depends on their number
CPU = torch.device("cpu")
KEPT = (".json", ".cubin", ".so")


class CompilingDriver(FakeDriver):
    """Driver of a GPU that is not here: kernels and their launchers are compiled, and launches do nothing."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self.utils = self
        _build("cuda_utils", (Path(nvidia.__file__).parent / "driver.c").read_text(encoding="utf-8"))

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": H100_SHARED_BYTES}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, None, 0, 0, MOST_THREADS

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Compile the C function that launches a kernel, as ``CudaLauncher`` does."""
        make: Any = getattr(nvidia, "make_launcher", None)  # Triton 3.9 has one launcher for all kernels
        if make is not None:
            names = source.fn.arg_names
            constants = {
                (names.index(at),) if isinstance(at, str) else at: held for at, held in source.constants.items()
            }
            _build("__triton_launcher", make(constants, dict(source.signature), metadata.tensordesc_meta))
        return lambda *_: None


def _build(name: str, source: str) -> None:
    """Compile C that calls CUDA's driver into the cache, and link it with a library of the driver's name.

    That has the functions which the source names, so that the linker keeps it as needed. Nothing of it is loaded.
    """
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "libcuda.so.1"
        called = "".join(f"void {each}(void) {{}}\n" for each in sorted(set(re.findall(r"\bcu[A-Z]\w+", source))))
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{library.name}", "-o", str(library)]
        subprocess.run(command, input=called, text=True, check=True)
        with patch.object(build, "_load_module_from_path", lambda name, path: None):
            folders = [nvidia.libdevice_dir, scratch]
            build.compile_module_from_src(source, name, folders, nvidia.include_dirs, nvidia.libraries)


def launch_probe() -> None:
    """Launch what the probe's item "attention" does."""
    for dtype in DTYPES:
        _launch_attention(SHAPE, dtype)


def launch_copies() -> None:
    """Launch what copies and digests blocks of any size."""
    _check(find_block_fault(CPU, TritonBlocks()))


def launch_model(recipe: Recipe, dtype: str) -> None:
    """Launch what a P or a D of such a model does as it loads and warms up, which is all that serving needs."""
    recipe.config.architectures = [recipe.model_class.__name__]
    for part in (recipe.config.text_config, recipe.config.vision_config):
        part.num_hidden_layers = LAYERS
    with tempfile.TemporaryDirectory() as scratch, _enter_device_layers():
        recipe.config.save_pretrained(scratch)
        model = load_model(write_weights(Path(scratch), "cpu", dtype), "PD", dtype=dtype)
        shape, features = model.kv_shape(), model.image_shape(IMAGE_TOKENS)
        _launch_attention(shape.shape, shape.dtype)
        image = None if features is None else BlockMemory(features, BLOCKS)
        LanguageStage(model, BlockMemory(shape, BLOCKS), image, "PD", backend=_make_attention()).warm_up()


def _launch_attention(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check(find_fault(_make_attention(), shape, dtype, CPU))


def _make_attention() -> TritonAttention:
    return TritonAttention(PROCESSORS, H100_SHARED_BYTES)


def _check(fault: str | None) -> None:
    """Raise ``RuntimeError`` where launches failed. That results are wrong is no news: nothing was computed."""
    if fault is not None and "fail" in fault:
        raise RuntimeError(fault)


@contextmanager
def _enter_device_layers() -> Iterator[None]:
    """Have models that are loaded meanwhile run as on a GPU, whatever their kernels give."""
    with ExitStack() as scope:
        for module in (decoder_layers, device_layers):
            scope.enter_context(patch.object(module, "is_close", lambda *_: True))
        fuse = device_layers.fuse_device_layers
        scope.enter_context(patch.object(loader, "use_kernels", lambda part, **_: fuse(part)))
        yield


LAUNCHES: dict[str, Callable[[], None]] = {
    "copies": launch_copies,
    "probe": launch_probe,
    "tiny": lambda: launch_model(checkpoints_llava.llava(), "float32"),
    "7b": lambda: launch_model(checkpoints_llava.llava_7b(), "bfloat16"),
}


@contextmanager
def count_compilations() -> Iterator[tuple[Counter[bool], list[str]]]:
    """Count kernels that come from the cache (True) and those that are compiled, by Triton's own hook."""
    counts, compiled = Counter[bool](), list[str]()

    def listen(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        counts[cache_hit] += 1
        if not cache_hit:
            compiled.append(f"{metadata['name']} {metadata['hash']}")

    with patch.object(triton.knobs.compilation, "listener", listen):
        yield counts, compiled


def collect(cache: Path, folder: Path) -> None:
    """Copy what serving reads of a Triton cache to ``folder``: no sources and no intermediate code."""
    for path in sorted(cache.glob("*/*")):
        if path.suffix in KEPT and not path.name.startswith("__grp__"):
            (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.parent.name / path.name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where cubins and launchers go")
    parser.add_argument("--capability", type=int, default=90, help="compute capability: 90 is an H100's and an H200's")
    parser.add_argument("--only", choices=tuple(LAUNCHES), action="append", default=[], help="several times")
    asked = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("unset TRITON_INTERPRET: the interpreter compiles nothing")
    driver.set_active(CompilingDriver(asked.capability))
    with count_compilations() as (counts, compiled), torch.inference_mode():
        for name in asked.only or LAUNCHES:
            LAUNCHES[name]()
    collect(Path(triton.knobs.cache.dir), asked.folder)
    print(f"{counts[False]} kernels compiled, {counts[True]} found in the cache")
    print("\n".join(compiled))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
