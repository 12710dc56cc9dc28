"""Compiles the Triton kernels for a GPU that need not be there; run by test_triton_compile.py in a process of its own.

Prints a line for each: the kernel, its case, and what it compiled to.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from triton.compiler.errors import CompilationError

from tools.kernel_table import (
    LAYER,
    QUERY_HEADS,
    Launch,
    attention_launches,
    compile_launch,
    product_launches,
    record_launches,
)
from trinity.memory.triton_blocks import TritonBlocks
from trinity.stages.attention.fp8 import FP8
from trinity.stages.attention.interface import AttentionParams

PLAIN = AttentionParams(LAYER, 0.1)
ALL = replace(PLAIN, window=100, span=200, softcap=5.0)
CASES = {  # name: type, attention, groups, kernels that are not compiled: prefill in float32 is for tests alone
    "plain": (torch.bfloat16, PLAIN, False, ()),
    "all": (torch.float16, ALL, True, ("write_kv",)),
    "exact": (torch.float32, PLAIN, False, ("write_kv", "combine_splits", "decode", "prefill")),
}


def copy_launches(capability: int) -> dict[str, Launch]:
    """The launches of a copy and of digests of whole blocks."""
    pools, units = torch.empty((2, 4, 1 << 16), dtype=torch.uint8), torch.zeros((2, 3), dtype=torch.long)
    with record_launches(capability) as launches:
        TritonBlocks().copy(pools[0], pools[1], units, 0, 1 << 16)
        TritonBlocks().digest(pools[0], units[0], 0, 1 << 16)
    return {launch.name: launch for launch in launches}


def print_fp8(capability: int, wanted: Sequence[str]) -> None:
    """Print those of the kernels of a cache and of weights in FP8 that are ``wanted``."""
    launches = attention_launches(torch.bfloat16, capability, held=FP8) | product_launches(torch.bfloat16, capability)
    named = {name.replace(" ", "_").replace(",", ""): launch for name, launch in launches.items()}
    for name in wanted:
        print(name, "fp8", *compile_launch(named[name], capability))


def refuse_fp8(capability: int) -> None:
    """Say if the compiler refuses FP8, as ``explain_no_fp8`` does before it is asked."""
    for name, launch in attention_launches(torch.bfloat16, capability, held=FP8).items():
        if name == "write_kv":
            try:
                compile_launch(launch, capability)
            except CompilationError:
                print(name, "refused", 0, 0, 0, 0, 0, 0, "none")


def main(capability: int, fp8: Sequence[str]) -> None:
    for case, (dtype, params, groups, left_out) in CASES.items():
        sinks = torch.zeros(QUERY_HEADS, dtype=dtype) if params is ALL else None
        launches = attention_launches(dtype, capability, replace(params, sinks=sinks), groups)
        for name in launches.keys() - set(left_out):
            print(name.replace(" ", "_"), case, *compile_launch(launches[name], capability))
    if fp8:
        print_fp8(capability, fp8)
    else:
        refuse_fp8(capability)
    for name, launch in copy_launches(capability).items():
        print(name, "bytes", *compile_launch(launch, capability))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
