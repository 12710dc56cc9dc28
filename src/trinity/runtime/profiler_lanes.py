"""Threads for profiling: one for each lane as when it serves, and both lanes at once (TriInfer 4.2)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TypeVar

from trinity.core.instance.lanes import LANE_PARTS
from trinity.instance import split_cores
from trinity.runtime.cpu_affinity import pin_thread
from trinity.runtime.cuda_stream import LaneStream, make_lane_stream
from trinity.stage_kinds import stage_of

T = TypeVar("T")
ROUNDS = 3  # each of steps alone, then steps beside the other lane
STEPS = 2  # of each kind in a round
StepTimer = Callable[[], float]  # runs one step of a lane on its thread and returns its seconds


class LaneThreads:
    """Runs a thread for each lane, with its cores, intra-op threads and stream, as ``Lane`` has them."""

    def __init__(self, lanes: Sequence[str], cores: Sequence[int], threads: int, device: str | None) -> None:
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._streams: dict[str, LaneStream] = {}
        for lane, own in zip(lanes, split_cores(cores, len(lanes)), strict=True):
            stream = self._streams[lane] = make_lane_stream(device, lane)
            begin = partial(_set_up_thread, own, threads, stream)
            self._pools[lane] = ThreadPoolExecutor(1, f"trinity-probe-{lane}", begin)

    def run(self, letter: str, work: Callable[[LaneStream], T]) -> T:
        """Call ``work(stream)`` on the thread of the lane that runs this stage, and wait for its result."""
        lane = next(lane for lane in self._pools if stage_of(letter).part in LANE_PARTS[lane])
        stream = self._streams[lane]
        return self._pools[lane].submit(stream.run, partial(work, stream)).result()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()


def _set_up_thread(cores: Sequence[int], threads: int, stream: LaneStream) -> None:
    import torch

    pin_thread(cores)
    torch.set_num_threads(threads)
    stream.__enter__()  # never left: it ends with the thread


def measure_interference(vision: StepTimer, language: Mapping[str, StepTimer], rounds: int = ROUNDS) -> float:
    """Measure how many times longer a step takes while the other lane is busy: the worst case, at least 1.

    ``vision`` runs an encode step on its lane, ``language`` a prefill and a decode step on the other. Steps alone and
    steps beside the other lane take turns, and medians are compared.
    """
    found = [1.0]
    for step in language.values():
        found += [_measure_slowdown(step, vision, rounds), _measure_slowdown(vision, step, rounds)]
    return max(found)


def _measure_slowdown(own: StepTimer, other: StepTimer, rounds: int) -> float:
    own()
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        alone += [own() for _ in range(STEPS)]
        with keep_busy(other):
            beside += [own() for _ in range(STEPS)]
    return median(beside) / max(median(alone), 1e-12)


@contextmanager
def keep_busy(step: StepTimer) -> Iterator[None]:
    """Run steps on the other lane, one after another, from before the block begins until it ends."""
    over, begun = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def again() -> None:
        begun.set()
        try:
            while not over.is_set():
                step()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=again, name="trinity-probe-busy", daemon=True)
    thread.start()
    try:
        begun.wait()
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]
