"""Facts about GPUs that a test run must know before its first test: is there one, and its contexts made early."""

from __future__ import annotations

import os


def has_gpu() -> bool:
    """Ask torch: a sandbox may have GPUs and no /proc/driver/nvidia. Nothing is imported where they are hidden."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    import torch

    return torch.cuda.is_available()


def open_contexts() -> None:
    """Use every GPU once: the pipes, sockets and events of a context belong to the process, and to no test."""
    import torch

    for number in range(torch.cuda.device_count()):
        with torch.cuda.device(number):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(side):
                one = torch.ones(64, 64, device="cuda")
                host = (one @ one).to("cpu", non_blocking=True).pin_memory()
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(side)
            event.synchronize()
            host.to("cuda", non_blocking=True)
            torch.cuda.synchronize()
