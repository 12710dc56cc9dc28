"""Conversions of FP8 (E4M3) in Triton's interpreter by torch: to the nearest, ties to even, NaN to NaN.

The interpreter's own (Triton 3.9) rounds ties up, loses the carry of a mantissa that rounds to the next power of two,
and reads NaN as 480. What is too large is NaN here, as the format has it, where a GPU saturates: a kernel has to clamp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as untyped

interpreter: Any = untyped
_TYPES: dict[Any, Any] = {
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float16: (torch.float16, np.uint16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float32: (torch.float32, np.uint32),
}


@contextmanager
def exact_fp8() -> Iterator[None]:
    """Have the interpreter convert from and to FP8 as torch does."""
    own = interpreter._convert_float

    def convert(given: Any, given_as: Any, wanted_as: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (given_as, wanted_as):
            return own(given, given_as, wanted_as, rounding)
        (source, held), (target, bits) = _TYPES[given_as], _TYPES[wanted_as]
        values = torch.from_numpy(np.frombuffer(given.tobytes(), held).copy()).view(source)
        wide = values.float()
        if wanted_as == tl.float8e4nv:
            wide = wide.masked_fill(wide.abs() > 464, torch.nan)
        found: Any = wide.to(target).view(torch.uint8).numpy()
        return found.view(bits).reshape(given.shape)

    with patch.object(interpreter, "_convert_float", convert):
        yield
