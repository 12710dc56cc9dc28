"""CUDA graphs: calls over static tensors, recorded once and replayed to spare the host a step's kernel launches.

A recorded call reads and writes the same addresses at every replay, so its arguments are first copied into its own
inputs. Calls that cannot be recorded (they read a tensor's values on the host, or memory is short) run eagerly. One
``GraphCache`` serves one thread: its graphs share their working memory, so an output is valid until the next call.
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
GraphFunction = Callable[[Tensors], Tensors]
MOST_GRAPHS = 64
RESERVED_BYTES = 1 << 30
REPLAY_TOLERANCE = 0.02  # relative to the largest value: what another matrix kernel may change in bfloat16


class GraphRecorder(Protocol):
    """Records calls and replays them."""

    def record(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Run ``run`` to warm up and record it; returns the replay function and the outputs that it fills."""
        ...

    def has_room(self) -> bool:
        """Tell if there is memory for another recording."""
        ...


class CudaRecorder:
    """``GraphRecorder`` by CUDA graphs that share one memory pool; records only while ``spare`` bytes are free.

    Other threads may use the GPU meanwhile: only this thread's calls are checked.
    """

    def __init__(self, device: torch.device, spare: int = RESERVED_BYTES) -> None:
        self._device, self._spare = device, spare
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def has_room(self) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device) > self._spare

    def record(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """See ``GraphRecorder.record``."""
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
class GraphCall:
    """One recording: its static inputs, replay function and outputs."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    outputs: Tensors

    def __call__(self, inputs: Tensors) -> Tensors:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given if given.device == own.device else _pin(given, own.device), non_blocking=True)
        self.replay()
        return self.outputs


class GraphCache:
    """Recorded calls by key, at most ``most`` of them."""

    def __init__(self, recorder: GraphRecorder, device: torch.device, most: int = MOST_GRAPHS) -> None:
        self._recorder, self._device, self._most = recorder, device, most
        self._calls: dict[Hashable, GraphCall | None] = {}

    def call(self, key: Hashable, run: GraphFunction, inputs: Tensors) -> Tensors | None:
        """Return ``run(inputs)`` by the recording of ``key``, which is made at the first call.

        Returns None if it cannot be recorded: call ``run`` then. ``run`` must depend only on its inputs' values, on
        ``key`` and on memory whose address stays. The first call runs it three times, so it must be repeatable.
        """
        if key not in self._calls:
            if len(self._calls) >= self._most or not self._recorder.has_room():
                return None
            self._calls[key] = self._record(key, run, inputs)
        call = self._calls[key]
        return None if call is None else call(inputs)

    def _record(self, key: Hashable, run: GraphFunction, inputs: Tensors) -> GraphCall | None:
        static = [upload(each, self._device).clone() for each in inputs]
        try:
            wanted = [each.clone() for each in run(static)]
            call = GraphCall(static, *self._recorder.record(lambda: run(static)))
            found = call(inputs)
        except RuntimeError as error:  # the host reads the device, or an operator cannot be recorded
            logger.warning("no CUDA graph of %s: %s", key, str(error).partition("\n")[0])
            return None
        if not all(_is_close(one, other) for one, other in zip(found, wanted, strict=True)):
            logger.warning("no CUDA graph of %s: a replay gives another result", key)
            return None
        return call


def make_graph_cache(device: torch.device) -> GraphCache | None:
    """Make the CUDA graphs of one stage on ``device``; None on a CPU."""
    return GraphCache(CudaRecorder(device), device) if device.type == "cuda" else None


def _pin(given: Tensor, device: torch.device) -> Tensor:
    return given.pin_memory() if device.type == "cuda" and not given.is_cuda else given


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    scale: Any = other.abs().max()
    return bool(((one - other).abs().max() <= REPLAY_TOLERANCE * scale).item())
