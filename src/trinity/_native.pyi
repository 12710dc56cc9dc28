"""The compiled part, csrc/module.cpp. Use it through trinity.native."""

import numpy as np
import numpy.typing as npt

API: int
CUDA: bool

def instructions() -> str: ...
def copy_blocks(
    target: int,
    target_blocks: int,
    source: int,
    source_blocks: int,
    to: npt.NDArray[np.int64],
    from_: npt.NDArray[np.int64],
    block_bytes: int,
    offset: int,
    length: int,
    threads: int,
) -> None: ...
def digests(
    source: int,
    source_blocks: int,
    from_: npt.NDArray[np.int64],
    block_bytes: int,
    offset: int,
    length: int,
    out: npt.NDArray[np.int64],
) -> None: ...
def cuda_copy_blocks(
    target: int,
    source: int,
    to: int,
    from_: int,
    count: int,
    block_bytes: int,
    offset: int,
    length: int,
    stream: int,
) -> None: ...
