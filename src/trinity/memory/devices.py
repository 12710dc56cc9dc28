"""The door by which a thread comes to a GPU, and the streams on which blocks are copied there.

A thread of CUDA has a current device, 0 until it says otherwise: events are recorded, kernels of Triton launched and
contexts made there, whatever device the tensors are on. So each thread that touches a GPU first passes ``use_device``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

URGENT, PATIENT = -1, 0  # CUDA's stream priorities: the lower number runs first when both have kernels ready
ENCODE_BYTES = 1 << 30  # working memory of an encoder on a GPU: a step's media are encoded in pieces that keep it
_copy_streams: dict[int, Any] = {}
_making = threading.Lock()
_recording: dict[int, threading.RLock] = {}


def gpu_number(device: object) -> int | None:
    """Return the ordinal of a GPU, such as 1 of "cuda:1" and 0 of "cuda"; None for a CPU, ``None`` included.

    ``device``: a name, a ``torch.device``, or an ordinal already.
    """
    if device is None or isinstance(device, int):
        return device
    kind, _, number = str(device).partition(":")
    return int(number or 0) if kind == "cuda" else None


def use_device(device: object) -> AbstractContextManager[Any]:
    """Make a GPU the calling thread's current device in the ``with`` block, and the one before again at its end.

    ``device`` is as ``gpu_number`` takes it. Does nothing for a CPU, and does not import torch then. A block that never
    ends, as of a thread that dies, changes no other thread: torch's own object has no finalizer.
    """
    number = gpu_number(device)
    if number is None:
        return nullcontext()
    from torch import cuda

    return cuda.device(number)


@contextmanager
def use_copy_stream(*devices: object) -> Iterator[None]:
    """Run what the ``with`` block queues on these GPUs on their copy streams, and wait for it at the end.

    A copy stream waits for what is queued on the default stream, where pools are made, and for no lane: what lanes have
    written is there when their instance offers it (decision 0048). The last device is the current one meanwhile.
    Does nothing for a CPU.
    """
    numbers = dict.fromkeys(number for each in devices if (number := gpu_number(each)) is not None)
    if not numbers:
        yield
        return
    from torch import cuda

    with ExitStack() as scope:
        streams = [_copy_stream(number) for number in numbers]
        for number, stream in zip(numbers, streams, strict=True):
            scope.enter_context(use_device(number))
            stream.wait_stream(cuda.default_stream(number))
            scope.enter_context(cuda.stream(stream))
        try:
            yield
        finally:
            for stream in streams:
                wait_for_stream(stream)


def make_device_buffer(size: int, gpu: int | None) -> torch.Tensor:
    """Make ``size`` bytes on a GPU for somebody who knows no stream: nothing that is queued still uses this memory."""
    import torch

    with use_copy_stream(gpu):
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")


def wait_for_default_stream(device: object) -> None:
    """Block until a GPU has run what is queued on its default stream so far, where weights and pools are made."""
    from torch import cuda

    with use_device(device):
        wait_for_stream(cuda.default_stream(gpu_number(device)))


def wait_for_stream(stream: Any) -> None:
    """Block until a GPU has run what is queued on ``stream`` so far; the interpreter's lock is released meanwhile."""
    from torch import cuda

    ended: Any = cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits does not spin
    ended.record(stream)
    ended.synchronize()


def lock_recording(device: object) -> threading.RLock:
    """Return the lock of a GPU for CUDA graphs: hold it to record one, and for what no recording may meet.

    While any stream of a device records, CUDA refuses a wait for the whole device and breaks that recording, and
    torch's allocator refuses to give memory back. ``torch.cuda.graph`` does both as it begins. A thread may hold the
    lock twice: finalizers that wait for a device run anywhere.
    """
    return _recording.setdefault(gpu_number(device) or 0, threading.RLock())


def free_cached_memory(device: object) -> None:
    """Give memory that torch keeps for a GPU back to it, while none of its streams records."""
    from torch import cuda

    with lock_recording(device):
        cuda.empty_cache()


def _copy_stream(number: int) -> Any:
    """Return the copy stream of a GPU, one for all threads: copies side by side would be no faster.

    It goes before the lanes' kernels, since a request waits for its blocks and a copy is short.
    """
    from torch import cuda

    with _making:
        if number not in _copy_streams:
            made: Any = cuda.Stream(number, priority=URGENT)  # type: ignore[no-untyped-call]
            _copy_streams[number] = made
        return _copy_streams[number]
