"""Regions of a GPU over the stand-in for the driver, whose memory is the host's: tensors of it are a CPU's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from trinity.memory import shared_regions
from trinity.memory.cuda_driver import CudaDriver


def use_fake_gpu(library: str, replace: Callable[[Any, str, Any], None]) -> None:
    """Have regions of GPUs use the stand-in ``library``; ``replace`` sets an attribute."""
    driver = CudaDriver(library)
    replace(shared_regions, "_load_driver", lambda: driver)
    replace(shared_regions, "_find_fault", shared_regions._find_fault.__wrapped__)  # of no earlier test
    replace(shared_regions, "_make_device_tensor", make_tensor)
    replace(shared_regions, "use_device", lambda device: nullcontext())
    replace(shared_regions, "wait_for_default_stream", lambda device: None)


def make_tensor(memory: Any, gpu: int) -> torch.Tensor:
    """As torch makes one of the array interface: it keeps ``memory`` as long as it lives."""
    said = memory.__cuda_array_interface__
    assert (said["typestr"], said["version"], gpu) == ("|u1", 3, 0)

    class Held(ctypes.c_uint8 * said["shape"][0]):  # type: ignore[misc]
        memory: Any

    held = Held.from_address(said["data"][0])
    held.memory = memory
    return torch.frombuffer(held, dtype=torch.uint8)
