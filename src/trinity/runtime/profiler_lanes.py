"""Where stages are measured: on a thread for each lane as when they serve, and both lanes at once (TriInfer 4.2)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TypeVar

from trinity.core.instance.lanes import LANES
from trinity.instance import shares
from trinity.runtime.cpu_affinity import pin_thread
from trinity.runtime.cuda_stream import LaneStream, stream_for

T = TypeVar("T")
ROUNDS = 3  # of steps alone and steps beside the other lane, in turns
STEPS = 2  # of each kind in a round
Timed = Callable[[], float]  # runs one step of a lane on its thread; seconds of it


class LaneThreads:
    """A thread for each lane, on its cores, with its intra-op threads and its stream, as ``Lane`` has them."""

    def __init__(self, lanes: Sequence[str], cores: Sequence[int], threads: int, device: str | None) -> None:
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._streams: dict[str, LaneStream] = {}
        for lane, own in zip(lanes, shares(cores, len(lanes)), strict=True):
            stream = self._streams[lane] = stream_for(device, lane)
            begin = partial(_begin, own, threads, stream)
            self._pools[lane] = ThreadPoolExecutor(1, f"trinity-probe-{lane}", begin)

    def run(self, letter: str, work: Callable[[LaneStream], T]) -> T:
        """Do it on the thread of the lane that has this stage, and wait."""
        lane = next(lane for lane in self._pools if letter in LANES[lane])
        return self._pools[lane].submit(work, self._streams[lane]).result()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()


def _begin(cores: Sequence[int], threads: int, stream: LaneStream) -> None:
    import torch

    pin_thread(cores)
    torch.set_num_threads(threads)
    stream.__enter__()  # until the thread ends, with all that it was given


def interference(vision: Timed, language: Mapping[str, Timed], rounds: int = ROUNDS) -> float:
    """How many times longer a step of one lane takes while the other one is busy, where that is most; at least 1.

    ``vision`` runs one encode step on its lane, ``language`` a prefill and a decode step on the other. Steps alone and
    steps beside the other lane take turns, and medians are compared.
    """
    found = [1.0]
    for step in language.values():
        found += [_slower(step, vision, rounds), _slower(vision, step, rounds)]
    return max(found)


def _slower(own: Timed, other: Timed, rounds: int) -> float:
    own()
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        alone += [own() for _ in range(STEPS)]
        with busy(other):
            beside += [own() for _ in range(STEPS)]
    return median(beside) / max(median(alone), 1e-12)


@contextmanager
def busy(step: Timed) -> Iterator[None]:
    """The other lane runs one step after another, from before the block begins until it ends."""
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
