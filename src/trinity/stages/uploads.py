"""Copies arrays and tensors from the host to a device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``values`` on ``device``.

    Copies to a GPU go through pinned memory, which torch keeps until the copy has ended: the call returns at once, and
    the caller may change ``values``.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device, dtype)
    return tensor.to(dtype).pin_memory().to(device, non_blocking=True)
