"""Measures attention backends on the steps that a model will run, in turns, on the device at hand.

A case is one step's attention: what a backend derives once per batch, then some layers. Backends take turns (A B A B),
so that what else the machine does hits them alike, and medians are compared. Time is bounded: what does not fit is
left out, for all backends alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trinity.memory.devices import free_cached_memory
from trinity.stages.attention.interface import AttentionBackend, AttentionParams, ChunkRows, PagedRows
from trinity.stages.attention.probe import find_fault

logger = logging.getLogger("trinity")
MEASURED_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}  # of the cache that is read: more than what processors keep near
MEASURED_LAYERS = {"cuda": 8, "cpu": 2}  # calls of one step, at most
MEASURED_ROUNDS = 5
MOST_MEASURED_S = 4.0  # from when everything has run once
_QUEUE_CYCLES = 20_000_000  # some 10 ms for which a GPU waits, while the host launches what is measured
_SEED = 58


class StepCase(NamedTuple):
    """A step: ``decodes`` rows at ``context`` positions, and a chunk of ``rows`` from ``start`` on if there are any."""

    name: str
    decodes: int = 0
    context: int = 1
    rows: int = 0
    start: int = 0


def list_cases(decodes: tuple[int, ...], context: int, rows: int) -> tuple[StepCase, ...]:
    """List the cases of a device, both kinds of step in turns: what time does not allow is left out from the end."""
    few, some, many = decodes
    return (
        StepCase(f"decode {some}", some, context),
        StepCase(f"chunk of {rows}", rows=rows),
        StepCase(f"decode {few}", few, context),
        StepCase(f"chunk of {rows} behind {context}", rows=rows, start=context),
        StepCase(f"decode {many}", many, context),
        StepCase(f"chunk of {rows // 2} with {some} decodes", some, context, rows // 2),
    )


STEP_CASES = {"cuda": list_cases((1, 32, 128), 1024, 512), "cpu": list_cases((1, 8, 32), 256, 128)}
CaseTimes = dict[str, dict[str, float]]  # seconds of a step by case and backend


class AttentionWorkload:
    """Random keys, values and queries for ``cases`` over blocks of ``shape`` [layers, 2, kv_heads, rows, head_dim].

    Texts share blocks where the cache that is measured is too small for all. ``dtype`` is the cache's; queries are
    bfloat16 where that is FP8.
    """

    def __init__(self, shape: tuple[int, ...], heads: int, dtype: torch.dtype, device: torch.device) -> None:
        layers, _, kv_heads, self.block_rows, width = shape
        self.cases = STEP_CASES[device.type]
        self.calls, self.device = min(layers, MEASURED_LAYERS[device.type]), device
        kept = (2, 2, kv_heads, self.block_rows, width)  # the model's other layers would only take memory
        block_bytes = int(np.prod(kept)) * dtype.itemsize
        self.blocks = max(4, _find_room(device) // block_bytes)
        noise = torch.Generator().manual_seed(_SEED)
        rows_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        some = torch.randn((4, *kept), generator=noise).to(device, dtype)
        self.cache = some.view(torch.uint8).repeat(-(-self.blocks // 4), 1, 1, 1, 1, 1)[: self.blocks].view(dtype)
        most = max(case.decodes + case.rows for case in self.cases)
        parts = [torch.randn((most, each, width), generator=noise) for each in (heads, kv_heads, kv_heads)]
        self.qkv: list[Tensor] = [part.to(device, rows_dtype) for part in parts]
        self._order = np.random.default_rng(_SEED).permutation(self.blocks)
        self.params = [AttentionParams(at % 2, width**-0.5) for at in range(self.calls)]

    def run(self, backend: AttentionBackend, case: StepCase) -> None:
        """Run one step's attention."""
        rows, total = self._make_rows(case), case.decodes + case.rows
        query, key, value = (part[:total] for part in self.qkv)
        for params in self.params:
            backend.attend(rows, self.cache, (query, key, value), params)

    def _make_rows(self, case: StepCase) -> PagedRows:
        height, taken = self.block_rows, 0
        across, end = -(-case.context // height), case.start + case.rows
        tables = self._take(0, case.decodes * across).reshape(case.decodes, across)
        lengths = np.full(case.decodes, case.context, dtype=np.int64)
        taken = case.decodes * across
        held = self._take(taken, -(-end // height))
        at = np.arange(case.start, end)
        blocks = np.concatenate((tables[:, (case.context - 1) // height], held[at // height]))
        offsets = np.concatenate(((lengths - 1) % height, at % height))
        there = [torch.from_numpy(part).to(self.device) for part in (blocks, offsets, held)]
        chunks = (ChunkRows(case.decodes, case.rows, case.start, there[2]),) if case.rows else ()
        return PagedRows(there[0], there[1], tables, lengths, chunks)

    def _take(self, first: int, count: int) -> np.ndarray:
        taken: np.ndarray = self._order[(first + np.arange(count)) % self.blocks]
        return taken


def measure_backends(
    backends: Mapping[str, AttentionBackend],
    shape: tuple[int, ...],
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CaseTimes | None:
    """Return the median seconds of each case by backend; None where there is no memory to measure over.

    One that fails, or on a CPU differs from torch, is left out everywhere, and named in the log. Changes nothing but
    the backends' own scratch memory.
    """
    able = {name: each for name, each in backends.items() if _is_sound(name, each, shape, dtype, device)}
    try:
        return _measure_in_turns(able, shape, heads, dtype, device)
    except (RuntimeError, MemoryError) as error:  # torch's words for want of memory too
        logger.warning("attention is not measured: %s", str(error)[:300])
        return None
    finally:
        if device.type == "cuda":
            free_cached_memory(device)  # pools and graphs want it


def _is_sound(
    name: str, backend: AttentionBackend, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> bool:
    """Compare a CPU's backend with torch on a small batch; a GPU's has been compared before it comes here."""
    fault = find_fault(backend, shape, dtype, device) if device.type == "cpu" else None
    if fault is not None:
        logger.warning("attention backend %s is not used: %s", name, fault)
    return fault is None


def _runs(name: str, backend: AttentionBackend, workload: AttentionWorkload) -> bool:
    """Run every case once, which compiles what it needs. Raises where memory is short: no fault of its own."""
    try:
        for case in workload.cases:
            workload.run(backend, case)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a kernel has no such shape
        logger.warning("attention backend %s is not measured: %s: %s", name, type(error).__name__, str(error)[:300])
        return False
    return True


@torch.inference_mode()
def _measure_in_turns(
    backends: Mapping[str, AttentionBackend],
    shape: tuple[int, ...],
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CaseTimes:
    workload = AttentionWorkload(shape, heads, dtype, device)
    backends = {name: each for name, each in backends.items() if _runs(name, each, workload)}
    clock = _time_on_device if workload.device.type == "cuda" else _time_on_host
    samples: dict[str, dict[str, list[float]]] = {case.name: {name: [] for name in backends} for case in workload.cases}
    end = time.monotonic() + MOST_MEASURED_S
    for _ in range(MEASURED_ROUNDS):
        for case in workload.cases:
            if time.monotonic() > end:
                break
            for name, backend in backends.items():
                samples[case.name][name].append(clock(partial(workload.run, backend, case)))
    return {
        case: {name: median(taken) for name, taken in each.items()}
        for case, each in samples.items()
        if each and all(each.values())
    }


def _time_on_host(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _time_on_device(run: Callable[[], None]) -> float:
    """Return the seconds that a GPU computes: it waits first, so that all is launched when it begins."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    sleep: Any = torch.cuda._sleep  # the only way to keep a GPU waiting without a kernel of one's own
    sleep(_QUEUE_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _find_room(device: torch.device) -> int:
    """Return the bytes of cache to measure over: at most a quarter of what is free."""
    if device.type != "cuda":
        return MEASURED_BYTES["cpu"]
    return min(MEASURED_BYTES["cuda"], torch.cuda.mem_get_info(device)[0] // 4)
