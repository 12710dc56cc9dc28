"""Visual tokens of a video, group of frames by group: what a trace has as images, and each is encoded by itself.

A group is a step in time of the model's processor: a frame, or with Qwen-VL two. Settings are those of the published
checkpoints of each family.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trinity.costs.visual_tokens import smart_resize_tokens
from trinity.errors import ConfigError, UnknownName
from trinity.traces.trace import TraceImage

_EQUAL = {"internvl": 256, "llava_next_video": 144, "llava_onevision": 196, "smolvlm": 81}  # tokens of a frame
_STEP = 2  # frames of Qwen-VL's steps


def video_tokens(family: str, frames: int, width: int, height: int) -> tuple[int, ...]:
    """List the visual tokens of each group of a video's frames, for a family of ``VIDEO_FAMILIES``.

    - ``family``: transformers' ``model_type``.
    - ``frames``: those that the processor has sampled.
    - ``width``, ``height`` (pixels): of the video.

    Raises ``UnknownName`` for another family, ``ConfigError`` for a video of no frames.
    """
    if frames < 1:
        raise ConfigError(f"a video has at least 1 frame, got {frames}")
    if family in _EQUAL:
        return (_EQUAL[family],) * (frames - 1) + (_EQUAL[family] + (family == "llava_onevision"),)
    if family not in _RESIZED:
        raise UnknownName("family with videos", family, VIDEO_FAMILIES)
    steps = math.ceil(frames / _STEP)
    return (_RESIZED[family](frames, width, height),) * steps


def video_images(family: str, frames: int, width: int, height: int) -> list[TraceImage]:
    """Make the groups of a video as the images of a trace's row, of which each is encoded and cached by itself."""
    return [TraceImage(tokens=each) for each in video_tokens(family, frames, width, height)]


def _qwen2(frames: int, width: int, height: int) -> int:
    """Qwen2-VL and Qwen2.5-VL: each frame by itself between two sizes."""
    return smart_resize_tokens(width, height, factor=28, least=128 * 28 * 28, most=768 * 28 * 28)


def _qwen3(frames: int, width: int, height: int) -> int:
    """Qwen3-VL: all frames together between two sizes, each a step's pixels of which two frames count."""
    if min(width, height) < 32:
        scale = max(32 / height, 32 / width)
        width, height = int(width * scale), int(height * scale)
    rows, columns = round(height / 32), round(width / 32)
    least, most, all_frames = 128 * 32 * 32, 768 * 32 * 32, round(frames / _STEP) * _STEP
    pixels = all_frames * rows * columns * 32**2
    if pixels > most:
        shrink = math.sqrt(frames * height * width / most)
        rows, columns = (max(1, math.floor(side / shrink / 32)) for side in (height, width))
    elif pixels < least:
        grow = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(side * grow / 32) for side in (height, width))
    return rows * columns


_RESIZED: dict[str, Callable[[int, int, int], int]] = {"qwen2_vl": _qwen2, "qwen2_5_vl": _qwen2, "qwen3_vl": _qwen3}
VIDEO_FAMILIES = tuple(sorted({*_EQUAL, *_RESIZED}))
"""Families whose videos can be counted."""
