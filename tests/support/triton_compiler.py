"""Compiles the Triton kernels for a GPU that need not be there; run by test_triton_compile.py in a process of its own.

Prints a line for each: name, bytes of shared memory, which matrix instructions it has.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trinity.stages.attention import triton_kernels

POINTERS = {"tables", "begins", "lengths", "tiles", "groups", "blocks", "offsets"}
FLOATS = {"scale", "softcap"}
IN_FLOAT32 = {"sums", "parts"}


def compiled(kernel: Any, dtype: str, capability: int, constants: dict[str, Any], partial: bool = False) -> Any:
    """``partial``: the result of one of several splits, in float32."""
    names, held = kernel.arg_names, {"sinks", "query", "cache", "out", "keys", "values"}
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in POINTERS:
            signature[name] = "*i64"
        elif name in IN_FLOAT32 or (partial and name == "out"):
            signature[name] = "*fp32"
        else:
            signature[name] = f"*{dtype}" if name in held else "fp32" if name in FLOATS else "i32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": 8 if constants.get("M", 0) >= 128 else 4, "num_stages": 2}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def attend(m: int, splits: int, everything: bool, dtype: str, width: int = 128) -> dict[str, Any]:
    switches = dict.fromkeys(("SOFTCAP", "WINDOW", "SPAN", "SINKS", "GROUPS"), everything)
    sizes = {"HEADS": 8, "GROUP": 4, "WIDTH": width, "WIDTH_2": 128, "M": m, "N": 32 if dtype == "fp32" else 64}
    return {**sizes, "SPLITS": splits, **switches, "PRECISION": "ieee" if dtype == "fp32" else "tf32"}


def main(capability: int) -> None:
    for dtype, m, splits, everything in (
        ("bf16", 128, 1, False),
        ("bf16", 16, 8, False),
        ("fp16", 16, 1, True),
        ("fp32", 16, 4, True),
    ):
        done = compiled(
            triton_kernels.attend_tile, dtype, capability, attend(m, splits, everything, dtype), partial=splits > 1
        )
        found = [name for name in ("wgmma", "mma.sync") if name in done.asm["ptx"]]
        print("attend", dtype, m, done.metadata.shared, ",".join(found) or "none")
    written = compiled(
        triton_kernels.write_kv, "bf16", capability, {"HEADS": 8, "WIDTH": 80, "AT_ONCE": 8, "WIDTH_2": 128}
    )
    sizes = {"QUERY_HEADS": 32, "WIDTH": 80, "WIDTH_2": 128, "SPLITS": 8, "SINKS": True}
    combined = compiled(triton_kernels.combine_splits, "bf16", capability, sizes)
    for name, done in (("write", written), ("combine", combined)):
        print(name, "bf16", 0, done.metadata.shared, len(done.asm["cubin"]) > 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
