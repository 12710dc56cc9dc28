"""Numbers and layouts of the driver's calls, which are written by hand, beside NVIDIA's own: cuda-bindings has them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from trinity.memory import cuda_driver

driver: Any = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

UNAVAILABLE = (
    "OUT_OF_MEMORY",
    "NOT_INITIALIZED",
    "STUB_LIBRARY",
    "CALL_REQUIRES_NEWER_DRIVER",
    "DEVICE_UNAVAILABLE",
    "NO_DEVICE",
    "INVALID_DEVICE",
    "NOT_SUPPORTED",
    "SYSTEM_NOT_READY",
    "SYSTEM_DRIVER_MISMATCH",
    "COMPAT_NOT_SUPPORTED_ON_DEVICE",
    "UNKNOWN",
)
BAD_HANDLE = ("INVALID_VALUE", "INVALID_CONTEXT", "ALREADY_MAPPED", "PEER_ACCESS_UNSUPPORTED", "INVALID_HANDLE")
LOST = (
    "DEINITIALIZED", "ILLEGAL_ADDRESS", "CONTEXT_IS_DESTROYED", "ILLEGAL_INSTRUCTION", "INVALID_PC", "LAUNCH_FAILED",
)  # fmt: skip


def codes(names: tuple[str, ...]) -> set[int]:
    return {int(getattr(driver.CUresult, f"CUDA_ERROR_{name}")) for name in names}


def test_errors_are_those_that_are_meant() -> None:
    found = (cuda_driver.UNAVAILABLE_CODES, cuda_driver.BAD_HANDLE_CODES, cuda_driver.LOST_CODES)
    assert found == (codes(UNAVAILABLE), codes(BAD_HANDLE), codes(LOST))
    assert sum(map(len, found)) == len(set[int]().union(*found)), "one code is one error"


def test_flags_and_attributes() -> None:
    pointer, device = driver.CUpointer_attribute, driver.CUdevice_attribute
    assert cuda_driver.LEGACY_IPC_CAPABLE == pointer.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    assert cuda_driver.LAZY_PEER_ACCESS == driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    assert cuda_driver.OWN_STREAM == driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert cuda_driver.HANDLE_BYTES == ctypes.sizeof(cuda_driver.IpcHandle) == driver.CU_IPC_HANDLE_SIZE
    assert cuda_driver.SHARES_MEMORY == (
        device.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        device.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    )


def bytes_at(value: Any, kind: type[ctypes.Structure]) -> bytes:
    """The bytes of a structure of cuda-bindings, as many as ours has."""
    return ctypes.string_at(int(value.getPtr()), ctypes.sizeof(kind))


@pytest.mark.parametrize("device", [0, 1, 7])
def test_structures_are_the_same_bytes(device: int) -> None:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    assert bytes_at(location, cuda_driver.Location) == bytes(cuda_driver.Location(cuda_driver.ON_DEVICE, device))

    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    made.location = location
    ours = cuda_driver.AllocationProperties.of(device)
    assert bytes_at(made, cuda_driver.AllocationProperties) == bytes(ours)

    access = driver.CUmemAccessDesc()
    access.location = location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    mine = cuda_driver.Access(cuda_driver.Location(cuda_driver.ON_DEVICE, device), cuda_driver.READ_AND_WRITE)
    assert bytes_at(access, cuda_driver.Access) == bytes(mine)
