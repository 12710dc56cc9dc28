"""CUDA graphs: calls over static tensors, recorded once and replayed to spare the host a step's kernel launches.

A recorded call reads and writes the same addresses at every replay, so its arguments are first copied into its own
inputs. Calls that cannot be recorded (they read the device's numbers on the host, or memory is short) run eagerly. One
``GraphCache`` serves one thread: its graphs share their working memory, so an output is valid until the next call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trinity.memory.devices import lock_recording
from trinity.stages.block_tables import upload
from trinity.stages.gpu.graph_constants import GraphConstants, Unrecordable

logger = logging.getLogger("trinity")
Tensors = Sequence[Tensor]
GraphFunction = Callable[[Tensors], Tensors]
Restore = Callable[[], None]
MOST_GRAPHS = 128
RESERVED_BYTES = 1 << 30
MOST_FAILED_CAPTURES = 3  # each may keep memory for good
REPLAY_TOLERANCE = 0.02  # relative to the largest value: what another matrix kernel may change in bfloat16


class GraphRecorder(Protocol):
    """Records calls and replays them."""

    def record(self, run: Callable[[], Tensors], restore: Restore) -> tuple[Callable[[], None], Tensors]:
        """Run ``run`` to warm up and record it; returns the replay function and the outputs that it fills.

        ``restore`` is to be called before each run that is carried out.
        """
        ...

    def has_room(self) -> bool:
        """Tell if there is memory for another recording."""
        ...


class CudaRecorder:
    """``GraphRecorder`` by CUDA graphs that share one memory pool; records only while RESERVED_BYTES are free.

    Other threads may use the GPU meanwhile: only this thread's calls are checked. They record one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._failed: list[Any] = []
        self._stream, self._pool = self._begin_anew()

    def has_room(self) -> bool:
        if len(self._failed) >= MOST_FAILED_CAPTURES:
            return False
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free > RESERVED_BYTES

    def record(self, run: Callable[[], Tensors], restore: Restore) -> tuple[Callable[[], None], Tensors]:
        """See ``GraphRecorder.record``. After a capture that fails this thread is on its own stream as before."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            restore()
            run()
        graph = torch.cuda.CUDAGraph()
        with lock_recording(self._device):
            try:
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    outputs = run()
            except BaseException:
                # torch.cuda.graph ends the capture first. If CUDA refused one of its operations, that raises, and its
                # stream stays the current one (``graph.__exit__`` of torch 2.11 to 2.13).
                torch.cuda.set_stream(current)
                self._give_up(graph)
                raise
        current.wait_stream(self._stream)
        return graph.replay, outputs

    def _begin_anew(self) -> tuple[Any, Any]:
        return torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]

    def _give_up(self, graph: Any) -> None:
        """Leave the pool of a capture that failed; allocators refuse to record into it again.

        The graph is kept: they may go on asking it which stream it captures.
        """
        self._failed.append(graph)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        allocator: Any = torch._C  # torch.cuda.graph leaves pools only by a capture that succeeds
        try:
            allocator._cuda_endAllocateToPool(index, self._pool)
        except RuntimeError:
            pass  # the capture did end, and the error is another one
        else:
            allocator._cuda_releasePool(index, self._pool)
        self._stream, self._pool = self._begin_anew()


@dataclass(slots=True)
class GraphCall:
    """One recording: its static inputs and constants, replay function and outputs."""

    inputs: list[Tensor]
    constants: GraphConstants
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
        self._refused: set[Hashable] = set()

    def has(self, key: Hashable) -> bool:
        """Tell if there is a recording of ``key``."""
        return self._calls.get(key) is not None

    def call(
        self, key: Hashable, run: GraphFunction, inputs: Tensors, kind: Hashable = None, moved: Tensors = ()
    ) -> Tensors | None:
        """Return ``run(inputs)`` by the recording of ``key``, which is made at the first call.

        Returns None if it cannot be recorded: call ``run`` then. ``run`` must depend only on its inputs' values, on
        ``key`` and on memory whose address stays; tensors of the host may stand for numbers in ``key``. The first call
        runs it three times, so it must be repeatable, but for tensors that it has ``moved`` on: those are put back.
        Of a ``kind`` that is ``Unrecordable`` no other key is tried.
        """
        if key not in self._calls:
            if kind in self._refused or len(self._calls) >= self._most or not self._recorder.has_room():
                return None
            self._calls[key] = self._try(key, run, inputs, kind, moved)
        call = self._calls[key]
        return None if call is None else call(inputs)

    def _try(
        self, key: Hashable, run: GraphFunction, inputs: Tensors, kind: Hashable, moved: Tensors
    ) -> GraphCall | None:
        """Record the call; None, with a warning, if that fails."""
        before = [each.clone() for each in moved]

        def restore() -> None:
            for own, held in zip(moved, before, strict=True):
                own.copy_(held)

        try:
            return self._record(run, inputs, restore)
        except Unrecordable as error:
            if kind is not None:
                self._refused.add(kind)
            logger.warning("no CUDA graph of %s: %s", key if kind is None else kind, error)
        except Exception as error:  # of the recording alone: the call itself runs eagerly next, and says what it must
            logger.warning("no CUDA graph of %s: %s", key, str(error).partition("\n")[0])
        finally:
            restore()
        return None

    def _record(self, run: GraphFunction, inputs: Tensors, restore: Restore) -> GraphCall:
        static = [upload(each, self._device).clone() for each in inputs]
        constants = GraphConstants(self._device)

        def lifted() -> Tensors:
            with constants.lifted():
                return run(static)

        wanted = [each.clone() for each in lifted()]
        constants.seal()
        call = GraphCall(static, constants, *self._recorder.record(lifted, restore))
        restore()
        if not all(_is_close(one, other) for one, other in zip(call(inputs), wanted, strict=True)):
            raise RuntimeError("a replay gives another result")
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
