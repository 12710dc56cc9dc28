"""Counts kernels that copies and digests of blocks ask Triton to compile; run by test_triton_compile.py in a process.

Prints how many are asked for as they are tried, and how many more by random copies, by address too, and digests.
"""

from __future__ import annotations

import numpy as np
import torch

from tools.kernel_table import record_launches
from trinity.memory.device_blocks import find_block_fault, upload_numbers
from trinity.memory.triton_blocks import TritonBlocks

COPIES = 300


def serve(blocks: TritonBlocks, noise: np.random.Generator) -> None:
    grain = int(noise.choice([1, 2, 8, 16, 512]))
    unit = int(noise.integers(1, 300)) * grain
    offset = int(noise.integers(0, unit // grain)) * grain
    length = int(noise.integers(1, (unit - offset) // grain + 1)) * grain
    count, shift = int(noise.integers(1, 70)), int(noise.choice([0, 0, 8, 1]))
    target, source = (torch.zeros(5 * unit + 16, dtype=torch.uint8)[shift : shift + 5 * unit] for _ in range(2))
    units = upload_numbers(noise.integers(0, 5, (2, count)), torch.device("cpu"))
    blocks.copy(target.view(5, unit), source.view(5, unit), units, offset, length)
    blocks.copy_addresses(target.data_ptr(), source.data_ptr() + 64, units, unit, (offset, length))
    blocks.digest(source.view(5, unit), units[1], offset, length)


if __name__ == "__main__":
    with record_launches() as launches:
        find_block_fault(torch.device("cpu"))
        warm = {launch.key for launch in launches}
        made = np.random.default_rng(0)
        for _ in range(COPIES):
            serve(TritonBlocks(), made)
    print(len(warm), len({launch.key for launch in launches} - warm), len(launches))
