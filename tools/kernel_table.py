"""Table of what Triton's kernels compile to, for GPUs that need not be there: python tools/kernel_table.py [80 90 100]

A row for each kernel, type and compute capability: registers of a thread, bytes of stack (spills), KiB of shared
memory, instructions in all and of the loop over keys, and its calls, which are routines for divisions (traps are left
out). The launches are those of ``TritonAttention`` itself, so that another checkout gives its own table:
PYTHONPATH=OTHER/src.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from trinity.stages.attention.fp8 import FP8
from trinity.stages.attention.gpu.triton import TritonAttention
from trinity.stages.attention.interface import AttentionParams, ChunkRows, PagedRows
from trinity.stages.kernels.gpu.fp8_linear import TILES, Fp8Product, launch_fp8_product

CAPABILITIES = (80, 90, 100)
FIRST_FP8 = 89
LAYERS, LAYER, QUERY_HEADS, HEADS, BLOCK_ROWS, WIDTH = 32, 5, 32, 8, 16, 128  # those of Llama 3 8B
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PLAIN = AttentionParams(LAYER, WIDTH**-0.5)
ONE_PROGRAM, MANY = 1, 10_000  # processors to keep busy: texts whole, texts split
CALL_OF_NEXT = 0x20  # bytes from a call to the code behind it, by which the assembler for sm_80 lets a warp meet again
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Launch(NamedTuple):
    """One launch as Triton specialises it: ``key`` tells one compilation from another."""

    name: str
    key: Any
    source: ASTSource
    options: dict[str, int]


class Compiled(NamedTuple):
    """What a kernel compiled to; ``loop``: instructions of the loop with the most, 0 if there is none."""

    registers: int
    stack: int
    shared: int
    instructions: int
    loop: int
    calls: int
    matrix: str


class FakeDriver:
    """Stand-in for Triton's driver where there is no GPU: it names a target and cannot launch."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def record_launches(capability: int = 90) -> Iterator[list[Launch]]:
    """Collect the launches of kernels meanwhile; none is compiled or run.

    For processes without TRITON_INTERPRET that launch nothing afterwards: the driver stays a stand-in.
    """
    found: list[Launch] = []

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        attributes = compile["configs"][0]
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], attributes)
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        found.append(Launch(fn.name, (fn.name, compile["key"]), source, options))
        return True  # it is not compiled

    driver.set_active(FakeDriver(capability))
    triton.knobs.runtime.jit_cache_hook = record
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = None


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile a launch with Triton's own assembler and look at the result."""
    made = triton.compile(launch.source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, listing = _dump("-res-usage", file.name), _dump("-sass", file.name)
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    kind = next((each for each in ("tcgen05", "wgmma", "mma.sync") if each in made.asm["ptx"]), "none")
    return Compiled(registers, stack, made.metadata.shared, *count_instructions(listing), kind)


def _dump(*arguments: str) -> str:
    return subprocess.run([str(TOOLS / "cuobjdump"), *arguments], capture_output=True, text=True, check=True).stdout


def count_instructions(listing: str) -> tuple[int, int, int]:
    """Count a listing's instructions, those of its longest loop, and the calls among these."""
    code = {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", listing)}
    loops = [range(target, at) for at, text in code.items() if (target := _target("BRA", text)) and target < at]
    longest = max(loops, key=len, default=range(0))
    inside = [at for at in code if at in longest] + ([longest.stop] if longest else [])
    calls = [(at, target) for at in inside if (target := _target("CALL", code[at]))]
    real = [each for each in calls if each[1] - each[0] != CALL_OF_NEXT and "TRAP" not in code.get(each[1], "")]
    return len(code), len(inside), len(real)


def _target(instruction: str, text: str) -> int:
    """The address that a branch or call goes to; 0 if it is none."""
    found = re.search(rf"\b{instruction}\b\S*\s.*?\b0x([0-9a-f]+)", text)
    return int(found[1], 16) if found else 0


def attention_launches(
    dtype: torch.dtype,
    capability: int = 90,
    params: AttentionParams = PLAIN,
    grouped: bool = False,
    held: torch.dtype | None = None,
) -> dict[str, Launch]:
    """The launches of a decode, a split decode and a prefill chunk (``grouped``: with groups), by what they do.

    ``held``: dtype of the cache, as ``dtype`` unless given.
    """
    cache = torch.empty((1, LAYERS, 2, HEADS, BLOCK_ROWS, WIDTH), dtype=held or dtype)
    zeros = torch.zeros(300, dtype=torch.long)
    one = PagedRows(zeros[:1], zeros[:1], np.zeros((1, 19), dtype=np.int64), np.full(1, 301, dtype=np.int64))
    chunk = PagedRows(
        *(zeros, zeros, np.zeros((0, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)),
        (ChunkRows(0, 300, 0, zeros[:19], zeros if grouped else None),),
    )
    found = {}
    for name, rows, processors in (("decode", one, ONE_PROGRAM), ("split decode", one, MANY), ("prefill", chunk, 1)):
        query, key = (torch.empty((len(rows.blocks), heads, WIDTH), dtype=dtype) for heads in (QUERY_HEADS, HEADS))
        with record_launches(capability) as launches:
            TritonAttention(processors).attend(rows, cache, (query, key, key), params)
        by_kernel = {launch.name: launch for launch in launches}
        found[name] = by_kernel["attend_tile"]
        found |= {each: by_kernel[each] for each in ("write_kv", "combine_splits") if each in by_kernel}
    return found


def product_launches(dtype: torch.dtype, capability: int = 90) -> dict[str, Launch]:
    """The launches of a linear layer with FP8 weights, for each of its tiles; 4,096 inputs and outputs."""
    weight, scales = torch.empty((4096, 4096), dtype=FP8), torch.empty((32, 32))
    found: dict[str, Launch] = {}
    for rows, *_ in TILES:
        with record_launches(capability) as launches:
            launch_fp8_product(torch.empty((rows, 4096), dtype=dtype), Fp8Product(weight, scales, None, 128))
        by_kernel = {launch.name: launch for launch in launches}
        found |= {
            "round inputs": by_kernel["quantize_groups"],
            f"FP8 product, {rows} rows": by_kernel["multiply_groups"],
        }
    return found


def list_launches(capability: int) -> Iterator[tuple[str, str, Launch]]:
    """Yield what each launch is for, its type (of queries, and of the cache or weights if another) and the launch."""
    for name, dtype in TYPES.items():
        for what, launch in attention_launches(dtype, capability).items():
            yield what, name, launch
    if capability >= FIRST_FP8:
        for what, launch in attention_launches(torch.bfloat16, capability, held=FP8).items():
            if what != "combine_splits":
                yield what, "bf16, FP8 cache", launch
        for what, launch in product_launches(torch.bfloat16, capability).items():
            yield what, "bf16, FP8 weights", launch


def table(capabilities: tuple[int, ...]) -> Iterator[str]:
    """Lines of the table, in markdown."""
    yield "| kernel | type | sm | registers | stack | shared KiB | instructions | of the loop | calls | matrix |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for capability in capabilities:
        for what, name, launch in list_launches(capability):
            made = compile_launch(launch, capability)
            cells = [what, name, capability, made.registers, made.stack, f"{made.shared / 1024:.1f}", *made[3:]]
            yield f"| {' | '.join(map(str, cells))} |"


def main(arguments: list[str]) -> int:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("unset TRITON_INTERPRET: the interpreter compiles nothing")
        return 1
    for line in table(tuple(map(int, arguments)) or CAPABILITIES):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
