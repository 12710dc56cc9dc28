"""Calls over static tensors, recorded once and replayed: CUDA graphs, which spare the host the launches of a step.

A recorded call reads and writes the same addresses at every replay: what it is given is copied into its own inputs
first. Calls that cannot be recorded (they look at a tensor's values on the host, or memory is short) are run as they
are. One ``Graphs`` serves one thread: its graphs share their working memory, so an output is good until the next call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trinity.stages.uploads import upload

logger = logging.getLogger("trinity")
Tensors = Sequence[Tensor]
Run = Callable[[Tensors], Tensors]
MOST = 64
SPARE_BYTES = 1 << 30
CLOSE = 0.02  # of the largest value: what another choice of matrix kernel may change in bfloat16


class Recorder(Protocol):
    """What records. ``room``: may there be another recording?"""

    def record(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Run it to warm up, record it; returns what replays it, and the outputs that a replay fills anew."""
        ...

    def room(self) -> bool: ...


class CudaRecorder:
    """``Recorder`` by CUDA graphs that share one pool of memory. None is made while less than ``spare`` bytes are free.

    Other threads go on using the GPU while one records: only what this thread does is checked.
    """

    def __init__(self, device: torch.device, spare: int = SPARE_BYTES) -> None:
        self._device, self._spare = device, spare
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def room(self) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device) > self._spare

    def record(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """See ``Recorder``."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            outputs = run()
        current.wait_stream(self._stream)
        return graph.replay, outputs


@dataclass(slots=True)
class StaticCall:
    """One recording: its inputs, what replays it, its outputs."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    outputs: Tensors

    def __call__(self, inputs: Tensors) -> Tensors:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given if given.device == own.device else _pinned(given, own.device), non_blocking=True)
        self.replay()
        return self.outputs


class Graphs:
    """Recorded calls by key, at most ``most`` of them."""

    def __init__(self, recorder: Recorder, device: torch.device, most: int = MOST) -> None:
        self._recorder, self._device, self._most = recorder, device, most
        self._calls: dict[Hashable, StaticCall | None] = {}

    def call(self, key: Hashable, run: Run, inputs: Tensors) -> Tensors | None:
        """What ``run(inputs)`` returns, by the recording of this key, which is made where there is none yet.

        None where it cannot be recorded: run it then. ``run`` must depend on nothing but its inputs' values, ``key``
        and what lies at addresses that stay; it is run three times at first, and may be run twice without harm.
        """
        if key not in self._calls:
            if len(self._calls) >= self._most or not self._recorder.room():
                return None
            self._calls[key] = self._record(key, run, inputs)
        call = self._calls[key]
        return None if call is None else call(inputs)

    def _record(self, key: Hashable, run: Run, inputs: Tensors) -> StaticCall | None:
        static = [upload(each, self._device).clone() for each in inputs]
        try:
            wanted = [each.clone() for each in run(static)]
            call = StaticCall(static, *self._recorder.record(lambda: run(static)))
            found = call(inputs)
        except RuntimeError as error:  # a look at the device from the host, an operator that cannot be recorded
            logger.warning("no CUDA graph of %s: %s", key, str(error).partition("\n")[0])
            return None
        if not all(_close(one, other) for one, other in zip(found, wanted, strict=True)):
            logger.warning("no CUDA graph of %s: a replay gives another result", key)
            return None
        return call


def graphs_for(device: torch.device) -> Graphs | None:
    """For one stage on ``device``; None where there are none (a CPU)."""
    return Graphs(CudaRecorder(device), device) if device.type == "cuda" else None


def _pinned(given: Tensor, device: torch.device) -> Tensor:
    return given.pin_memory() if device.type == "cuda" and not given.is_cuda else given


def _close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    scale: Any = other.abs().max()
    return bool(((one - other).abs().max() <= CLOSE * scale).item())
