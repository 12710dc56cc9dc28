"""The functions of torchvision that transformers' video processors use, over torch alone.


torchvision's functions for tensors are calls of torch's own kernels. These are the same calls, so that pixels are
equal bit by bit (decision 0101 says how that was measured). Only what the processors ask for is here.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class InterpolationMode(Enum):
    """Filter of a resize; values are the names of torch's ``interpolate``."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


_BY_PIL = ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC", "BOX", "HAMMING")  # by the numbers of Pillow's filters
_SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC, InterpolationMode.LANCZOS)
_NEAREST = (InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT)


def resize(
    image: Tensor,
    size: Sequence[int] | int,
    interpolation: InterpolationMode | str | int = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> Tensor:
    """Resize [..., channels, height, width] to ``size``: (height, width), or the shorter edge alone.

    ``interpolation``: a mode, its name, or the number of Pillow's filter. Raises ``ValueError`` for a ``max_size``,
    which no video processor gives.
    """
    if max_size is not None:
        raise ValueError("max_size is not supported")
    if isinstance(interpolation, int):
        interpolation = InterpolationMode[_BY_PIL[interpolation]]
    interpolation = InterpolationMode(interpolation)
    height, width = _target(image.shape[-2], image.shape[-1], size)
    if (height, width) == tuple(image.shape[-2:]) or image.numel() == 0:
        return image.reshape(*image.shape[:-2], height, width)
    flat = image.reshape(-1, *image.shape[-3:])
    kept = flat.dtype in _natural_types(interpolation, image.device.type)
    made = _interpolate(flat if kept else flat.to(torch.float32), [height, width], interpolation, bool(antialias))
    if not kept:
        made = _cast_back(made, image.dtype, interpolation)
    return made.reshape(*image.shape[:-2], height, width)


def _target(height: int, width: int, size: Sequence[int] | int) -> tuple[int, int]:
    sides = [size] if isinstance(size, int) else list(size)
    if len(sides) == 2:
        return sides[0], sides[1]
    shorter, longer = sides[0], int(sides[0] * max(height, width) / min(height, width))
    return (longer, shorter) if width <= height else (shorter, longer)


def _natural_types(interpolation: InterpolationMode, device: str) -> tuple[torch.dtype, ...]:
    """List the types that torch resizes as they are; others go by way of float32."""
    floats = (torch.float32, torch.float64)
    on_cpu = device in ("cpu", "meta") and (interpolation is not InterpolationMode.BILINEAR or _has_quick_bytes())
    return (*floats, torch.uint8) if interpolation in _NEAREST or (on_cpu and interpolation in _SMOOTH) else floats


def _has_quick_bytes() -> bool:
    """Tell if torch has a bilinear kernel for bytes on this processor; else floats are used, whose pixels differ."""
    wide = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return wide or platform.machine() in ("aarch64", "arm64")


def _interpolate(image: Tensor, size: list[int], interpolation: InterpolationMode, antialias: bool) -> Tensor:
    smooth = interpolation in _SMOOTH
    return functional.interpolate(
        image,
        size=size,
        mode=interpolation.value,
        align_corners=False if smooth else None,
        antialias=antialias and smooth,
    )


def _cast_back(made: Tensor, dtype: torch.dtype, interpolation: InterpolationMode) -> Tensor:
    if dtype == torch.uint8 and interpolation in (InterpolationMode.BICUBIC, InterpolationMode.LANCZOS):
        made = made.clamp(0, 255)  # these overshoot
    return (made.round() if dtype in _INTEGERS else made).to(dtype)


def pil_to_tensor(picture: Any) -> Tensor:
    """Convert a PIL image to bytes [channels, height, width]."""
    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def pad(image: Tensor, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> Tensor:
    """Pad by (left, top, right, bottom) pixels of ``fill``, one number or one for each channel.

    Raises ``ValueError`` for other modes and lengths.
    """
    if isinstance(fill, (list, tuple)):
        own = [
            pad(part, padding, value, padding_mode) for part, value in zip(torch.split(image, 1, -3), fill, strict=True)
        ]
        return torch.cat(own, -3)
    if padding_mode != "constant" or len(padding) != 4:
        raise ValueError(f"padding of {len(padding)} numbers in mode {padding_mode!r} is not supported")
    left, top, right, bottom = padding
    return functional.pad(image, [left, right, top, bottom], value=float(fill or 0))


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """Take a window; what of it lies beyond the image is 0."""
    bottom, right = top + height, left + width
    inside = image[..., max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    if inside.shape[-2:] == (height, width):
        return inside
    above, before = min(max(-top, 0), height), min(max(-left, 0), width)
    below, behind = height - above - inside.shape[-2], width - before - inside.shape[-1]
    return functional.pad(inside, [before, behind, above, below])


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    """Subtract each channel's mean and divide by its deviation."""
    mean, std = (
        torch.as_tensor(each, dtype=image.dtype, device=image.device).reshape(-1, 1, 1) for each in (mean, std)
    )
    centred = image.sub_(mean) if inplace else image - mean
    return centred.div_(std)


def grayscale_to_rgb(image: Tensor) -> Tensor:
    """Repeat a single channel [..., 1, height, width] three times; others stay as they are."""
    if image.shape[-3] >= 3:
        return image
    return image.repeat(*[1] * (image.ndim - 3), 3, 1, 1)


def to_dtype(image: Tensor, dtype: torch.dtype, scale: bool = False) -> Tensor:
    """Convert between bytes and floats; with ``scale`` the range 0 to 255 is 0 to 1.

    Raises ``ValueError`` for a scaled conversion of other types, which no video processor asks for.
    """
    if image.dtype == dtype or not scale or (image.is_floating_point() and dtype.is_floating_point):
        return image.to(dtype)
    if image.dtype == torch.uint8 and dtype.is_floating_point:
        return image.to(dtype) * (1.0 / 255)
    if image.is_floating_point() and dtype == torch.uint8:
        return (image * math.nextafter(255.999, 0)).to(dtype)
    raise ValueError(f"no scaled conversion of {image.dtype} to {dtype}")
