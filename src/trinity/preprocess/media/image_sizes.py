"""Sizes that a processor will make of an image, computed from its own settings and the image's size alone.

An image of 10,000 x 1 pixels is 110 bytes as a PNG. CLIP's processor scales its short side to 336 and has a billion
pixels. ``predict_pixels`` tells so in a fraction of a millisecond, before a pixel is decoded. It asks the processors'
own methods for grids and sizes, and knows for each class which arrays it makes of them.

``guard_resizes`` holds for every class, whether or not it is known here: no resize begins that goes beyond the limit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from inspect import signature
from typing import Any

_BACKENDS = ("PilBackend", "TorchvisionBackend")
_BYTES = 12  # of a pixel with three channels of float32


class ImageTooLarge(ValueError):
    """A processor was about to make more of an image than is allowed."""


def predict_pixels(images: Any, width: int, height: int, *, alone: bool = True) -> int | None:
    """Sum the pixels of all arrays that an image processor makes of one image; None for a class that is unknown here.

    - ``images``: transformers' image processor, with its PIL backend.
    - ``alone`` (True): its prompt has no other image.

    Raises ``ValueError`` if the processor refuses the size.
    """
    for each in type(images).__mro__:
        if each.__name__ in _RULES:
            return _RULES[each.__name__](images, width, height, alone)
    return _area(images, width, height) if _is_plain(images) else None


def count_bytes(images: Any, pixels: int) -> int:
    """Count the bytes of so many pixels: resized, and once more as the encoder gets them, for Qwen-VL in two frames."""
    frames = getattr(images, "temporal_patch_size", None) or 1
    return pixels * _BYTES * (1 + int(frames))


def _is_plain(images: Any) -> bool:
    from transformers.image_processing_backends import PilBackend

    # Its public ``preprocess`` is the same for all: what a class does otherwise, it does in this method.
    return isinstance(images, PilBackend) and type(images)._preprocess is PilBackend._preprocess


def resized(size: Any, width: int, height: int) -> tuple[int, int]:
    """Compute (width, height) after a resize to a processor's ``size``, as transformers' PIL backend does."""
    from transformers import image_transforms
    from transformers.image_utils import get_image_size_for_max_height_width

    if size.shortest_edge and size.longest_edge:
        rows, columns = image_transforms.get_size_with_aspect_ratio(
            (height, width), size.shortest_edge, size.longest_edge
        )
    elif size.shortest_edge:
        short = size.shortest_edge
        return (int(short * width / height), short) if height <= width else (short, int(short * height / width))
    elif size.max_height and size.max_width:
        rows, columns = get_image_size_for_max_height_width((height, width), size.max_height, size.max_width)
    else:
        rows, columns = size.height, size.width
    return columns, rows


def _area(images: Any, width: int, height: int) -> int:
    """Pixels after the resize, and after the crop where there is one."""
    columns, rows = resized(images.size, width, height) if images.do_resize else (width, height)
    cropped = images.crop_size.height * images.crop_size.width if images.do_center_crop and images.crop_size else 0
    return int(columns * rows + cropped)


def _anyres(images: Any, width: int, height: int, alone: bool) -> int:
    """LLaVA-NeXT: the image over the best of a list of canvases, tiles of that, and the image as one more tile."""
    from transformers.image_processing_utils import select_best_resolution

    rows, columns = select_best_resolution((height, width), images.image_grid_pinpoints)
    crop, size = images.crop_size, images.size
    tile = (crop and crop.height) or size.height or size.shortest_edge
    tiles = 1 + math.ceil(rows / tile) * math.ceil(columns / tile)
    return int(2 * rows * columns + tile * tile + tiles * _area(images, tile, tile))


def _onevision(images: Any, width: int, height: int, alone: bool) -> int:
    """LLaVA-OneVision: tiles of an image that is alone, else the image padded to a square of a quarter of the bytes."""
    if alone:
        return _anyres(images, width, height, alone)
    side = max(width, height)
    return side * side // 4 + _area(images, side, side)


def _patches(images: Any, width: int, height: int, alone: bool) -> int:
    """Qwen-VL: whole patches, as many as its limits allow."""
    return int(images.get_number_of_image_patches(height, width) * images.patch_size**2)


def _canvas(images: Any, width: int, height: int, alone: bool) -> int:
    """InternVL: tiles of one size, and a thumbnail where there are several."""
    tiles = images.get_number_of_image_patches(height, width)
    return int(2 * tiles * images.size.height * images.size.width)


def _split(images: Any, width: int, height: int, alone: bool) -> int:
    """Idefics3, SmolVLM: the longer side to one length, both sides to multiples of a tile, tiles and a thumbnail."""
    longest, tile = images.size["longest_edge"], images.max_image_size["longest_edge"]
    first = longest * math.ceil(longest * min(width, height) / max(width, height) + 1)
    tiles, _rows, _columns = images.get_number_of_image_patches(height, width)
    return int(first + 2 * max(1, tiles) * tile * tile)


def _crops(images: Any, width: int, height: int, alone: bool) -> int:
    """Gemma 3: the image, and crops of it where it is long and that is asked for."""
    names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
    crops = 0
    if images.do_pan_and_scan:
        settings = [getattr(images, f"pan_and_scan_{name}") for name in names]
        crops = len(images.pan_and_scan(_no_pixels(width, height), *settings))
    return (1 + crops) * _area(images, width, height)


def _slices(images: Any, width: int, height: int, alone: bool) -> int:
    """MiniCPM-V: the image at about one size, and slices of it in a grid where it is large."""
    settings = {"scale_resolution": images.scale_resolution, "patch_size": images.patch_size}
    if "downsample_mode" in signature(images.find_best_resize).parameters:  # not in transformers 5.17
        settings["downsample_mode"] = images.downsample_mode
    grid = None
    if images.slice_mode:
        grid = images.get_sliced_grid((height, width), images.max_slice_nums, images.scale_resolution)
    rows, columns = images.find_best_resize((height, width), **settings, allow_upscale=grid is None)
    pixels = 2 * rows * columns
    if grid is not None:
        rows, columns = images.get_refine_size((height, width), grid, **settings, allow_upscale=True)
        pixels += 2 * rows * columns
    return int(pixels)


def _no_pixels(width: int, height: int) -> Any:
    """Make an array [3, height, width] that takes no memory, for methods that read its shape or cut it."""
    import numpy as np

    return np.broadcast_to(np.uint8(0), (3, height, width))


_RULES: dict[str, Callable[[Any, int, int, bool], int]] = {
    "Gemma3ImageProcessorPil": _crops,
    "GotOcr2ImageProcessorPil": _canvas,
    "Idefics3ImageProcessorPil": _split,
    "LlavaNextImageProcessorPil": _anyres,
    "LlavaOnevisionImageProcessorPil": _onevision,
    "MiniCPMV4_6ImageProcessorPil": _slices,
    "Qwen2VLImageProcessorPil": _patches,
    "SmolVLMImageProcessorPil": _split,
}


def guard_resizes(images: Any, allowed: threading.local) -> None:
    """Have an image processor raise ``ImageTooLarge`` before a resize that goes beyond ``allowed.pixels``.

    ``allowed.pixels`` is counted down by each resize of this thread; without it nothing is counted. Results stay the
    same. Does nothing to a processor that is of none of transformers' backends.
    """
    backend: Any = next((each for each in type(images).__mro__ if each.__name__ in _BACKENDS), None)
    if backend is None:
        return

    class Guard(backend):  # type: ignore[misc]
        """Stands between a family's class and the backend, where every resize comes by with its size."""

        def resize(self, image: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
            left = getattr(allowed, "pixels", None)
            if left is not None:
                columns, rows = resized(size, image.shape[-1], image.shape[-2])
                allowed.pixels = left - columns * rows
                if allowed.pixels < 0:
                    raise ImageTooLarge(f"a resize to {columns} x {rows} pixels is beyond max_processed_pixels")
            return super().resize(image, size, *args, **kwargs)

    kind = type(images)
    images.__class__ = type(kind.__name__, (kind, Guard), {})  # transformers keys settings by this name
