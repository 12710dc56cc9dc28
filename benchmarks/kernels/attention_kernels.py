"""Decode attention: the kernel of csrc/ beside a pass that only loads the same blocks, and beside torch.

All layers of the language part of llava-110m, one after the other, as a decode step asks for them; one thread.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from benchmarks.kernels.limits import alternate
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import ForeignLoad, Setting, disturbed

LAYERS, HEADS, KV_HEADS, WIDTH, HEIGHT = 12, 12, 3, 64, 16
BATCHES, CONTEXTS = (1, 4, 16, 32), (64, 256, 1024)
MOST, LARGE = 1.6, 16
WAYS = ("loads", "native", "torch")
Case = tuple[str, int, int]


class Decode:
    """Decode steps over one cache of random numbers, whose blocks are drawn anew for each case."""

    def __init__(self, dtype: Any, blocks: int, layers: int) -> None:
        import torch

        from trinity.stages.attention.native import NativeAttention
        from trinity.stages.attention.torch_reference import TorchAttention

        self.dtype, self.layers = dtype, layers
        self.cache = torch.empty(blocks, layers, 2, KV_HEADS, HEIGHT, WIDTH, dtype=dtype)
        self.cache[:1].normal_()
        self.cache[1:] = self.cache[:1]
        self.backends: dict[str, Any] = {"native": NativeAttention(), "torch": TorchAttention()}
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            self.backends = {"loads": NativeAttention("loads"), **self.backends}

    def case(self, batch: int, context: int) -> tuple[Any, tuple[Any, Any, Any]]:
        """Rows of ``batch`` requests of ``context`` positions, and their query, key and value."""
        import numpy as np
        import torch

        from trinity.stages.attention.interface import PagedRows

        tables = np.random.default_rng(batch).permutation(len(self.cache))[: batch * context // HEIGHT]
        tables = tables.reshape(batch, -1).astype(np.int64)
        last, lengths = torch.from_numpy(tables[:, -1].copy()), np.full(batch, context, np.int64)
        rows = PagedRows(last, torch.full((batch,), HEIGHT - 1), tables, lengths)
        shapes = ((batch, HEADS, WIDTH), (batch, KV_HEADS, WIDTH), (batch, KV_HEADS, WIDTH))
        query, key, value = (torch.randn(shape).to(self.dtype) for shape in shapes)
        return rows, (query, key, value)

    def step(self, way: str, rows: Any, qkv: tuple[Any, Any, Any]) -> Any:
        from trinity.stages.attention.interface import AttentionParams

        for layer in range(self.layers):
            seen = self.backends[way].attend(rows, self.cache, qkv, AttentionParams(layer, WIDTH**-0.5))
        return seen


def run(setting: Setting) -> Result:
    """Raises ``ConfigError`` where the extension has no attention."""
    import torch

    from trinity.stages.attention.backends import pick_backend
    from trinity.stages.attention.choice import CacheKind

    pick_backend("native", CacheKind((LAYERS, 2, KV_HEADS, HEIGHT, WIDTH), torch.float32, torch.device("cpu")))
    batches, contexts, layers = ((1, 16), (64,), 2) if setting.quick else (BATCHES, CONTEXTS, LAYERS)
    rounds = 2 if setting.quick else 7
    seconds: dict[Case, dict[str, float]] = {}
    errors: dict[Case, float] = {}
    busy: list[str] = []
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        decode = Decode(dtype, max(batches) * max(contexts) // HEIGHT, layers)
        for batch, context in product(batches, contexts):
            setting.settle()
            with ForeignLoad() as load:
                seconds[name, batch, context] = _measured(decode, batch, context, rounds)
            errors[name, batch, context] = _difference(decode, batch, context)
            busy += [f"{name} {batch} x {context}"] if load.share > 0.1 else []
    return result(seconds, errors, layers, busy)


def _measured(decode: Decode, batch: int, context: int, rounds: int) -> dict[str, float]:
    import torch

    rows, qkv = decode.case(batch, context)
    with torch.inference_mode():
        return alternate({way: partial(decode.step, way, rows, qkv) for way in decode.backends}, rounds)


def _difference(decode: Decode, batch: int, context: int) -> float:
    """The largest difference between the kernel's result and torch's, of the largest value."""
    import torch

    rows, qkv = decode.case(batch, context)
    with torch.inference_mode():
        ours, theirs = (decode.step(way, rows, qkv).float() for way in ("native", "torch"))
    return float((ours - theirs).abs().max() / theirs.abs().max())


def result(seconds: dict[Case, dict[str, float]], errors: dict[Case, float], layers: int, busy: list[str]) -> Result:
    """Tables and aims of what was measured."""
    rows = []
    for (dtype, batch, context), spent in seconds.items():
        size = batch * context * layers * 2 * KV_HEADS * WIDTH * (2 if dtype == "bfloat16" else 4)
        loads, native, torch = (spent.get(way) for way in WAYS)
        assert native is not None
        assert torch is not None
        rows.append([f"{dtype}, {batch} x {context}", f"{native * 1e3:.2f}", f"{size / native / 1e9:.1f}"])
        rows[-1] += [f"{size / loads / 1e9:.1f}", f"{native / loads:.2f}"] if loads else ["-", "-"]
        rows[-1] += [f"{torch / native:.1f}", f"{errors[dtype, batch, context]:.1e}"]
    header = (
        "decode rows x context",
        "ms",
        "GB/s",
        "only loading, GB/s",
        "times loading",
        "torch / ours",
        "difference",
    )
    found = Result(
        "attention_kernels",
        "Decode attention on a CPU",
        f"{layers} layers with {HEADS} heads over {KV_HEADS} of {WIDTH}, blocks of {HEIGHT}; thread CPU time, medians "
        "of alternating runs. Loading: one AVX-512 pass over the same blocks in the same order that computes nothing. "
        "All write the step's own keys and values first. Difference: the largest from torch's, of the largest value.",
        [Table("Decode attention", header, rows)],
        _aims(seconds, errors),
        disturbed(busy),
        {"seconds": [[*case, spent] for case, spent in seconds.items()]},
    )
    return found


def _aims(seconds: dict[Case, dict[str, float]], errors: dict[Case, float]) -> list[Aim]:
    ratios = {case: spent["native"] / spent["loads"] for case, spent in seconds.items() if "loads" in spent}
    aims = []
    for what, keep in (("1,024 positions", lambda length: length == max(CONTEXTS)), ("any context", lambda _: True)):
        chosen = {case: ratio for case, ratio in ratios.items() if case[1] >= LARGE and keep(case[2])}
        if chosen:
            case = max(chosen, key=lambda each: chosen[each])
            shown = f"{chosen[case]:.2f} ({case[0]}, {case[1]} x {case[2]})"
            text = f"decode attention, batch ≥ {LARGE}, {what}: times one AVX-512 pass over the blocks"
            aims.append(Aim(text, f"≤ {MOST}", shown, chosen[case] <= MOST))
    worst = max(error for case, error in errors.items() if case[0] == "float32")
    aims.append(Aim("decode attention in float32: difference from torch", "≤ 1e-5", f"{worst:.1e}", worst <= 1e-5))
    return aims
