"""Cuts a video into groups of frames, each an item that is encoded, cached and shared by itself.

The towers of all types that serve attend within a frame, or within the few frames of a temporal patch: features of a
group are the same beside the others or alone. A group's content is the pixels that the encoder gets, and nothing of its
place in the video: a clip that comes again, or overlaps with another one, is encoded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from trinity.preprocess.media.media_kinds import MediaItem

_LEAST_ROWS = 64  # of a group: each has blocks of its own, of which the last is not full


def cut_videos(items: Sequence[MediaItem], tail: int) -> list[MediaItem]:
    """Cut each video among a prompt's items; ``tail``: rows of features behind a video's last frame."""
    return [part for item in items for part in (cut_video(item, tail) if item.kind == "video" else [item])]


def cut_video(item: MediaItem, tail: int = 0) -> list[MediaItem]:
    """Cut a video into groups of whole steps in time, of at least ``_LEAST_ROWS`` rows but for the last.

    The first has what positions are computed from, for all of them.
    """
    rows = _rows_of_steps(item, tail)
    groups = _group(rows)
    parts = []
    for number, (first, end) in enumerate(groups):
        inputs = _take(item.inputs, first, end, len(rows))
        tokens = sum(rows[first:end]) + (tail if end == len(rows) else 0)
        content = f"{_digest(inputs)}-{tokens}-{item.content}"
        meta = {} if number else item.meta
        parts.append(
            msgspec.structs.replace(item, inputs=inputs, tokens=tokens, content=content, meta=meta, strip=number)
        )
    return parts


def _rows_of_steps(item: MediaItem, tail: int) -> list[int]:
    """Rows of features of each step in time; one step where they do not add up."""
    inputs, tokens = item.inputs, item.tokens - tail
    mask, grid = inputs.get("video_compression_mask"), inputs.get("video_grid_thw")
    steps = _count_steps(inputs)
    if mask is not None:
        return [int(part.sum()) for part in mask.reshape(steps, -1)]
    if tokens % steps:
        return [tokens]
    return [tokens // steps] * steps if grid is None or len(grid) == 1 else [tokens]


def _count_steps(inputs: dict[str, Any]) -> int:
    grid = inputs.get("video_grid_thw")
    if grid is not None:
        return int(grid[0][0])
    pixels = inputs["pixel_values_videos" if "pixel_values_videos" in inputs else "pixel_values"]
    return int(pixels.shape[1] if pixels.ndim == 5 else pixels.shape[0])


def _group(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Put steps together from the first on, until a group has enough rows."""
    groups, first = [], 0
    for end in range(1, len(rows) + 1):
        if sum(rows[first:end]) >= _LEAST_ROWS or end == len(rows):
            groups.append((first, end))
            first = end
    return groups


def _take(inputs: dict[str, Any], first: int, end: int, steps: int) -> dict[str, Any]:
    """Take the steps from ``first`` to ``end`` of each input."""
    if (first, end) == (0, steps):
        return inputs
    return {name: _part(name, value, first, end, steps) for name, value in inputs.items()}


def _part(name: str, value: Any, first: int, end: int, steps: int) -> Any:
    if name == "video_merge_sizes":
        return value
    if name == "video_grid_thw":
        part = value.clone()
        part[0, 0] = end - first
        return part
    axis = 1 if value.shape[0] == 1 and value.ndim > 2 else 0
    each = value.shape[axis] // steps
    return value.narrow(axis, first * each, (end - first) * each).contiguous()


def _digest(inputs: dict[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        value = inputs[name].contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        digest.update(value.numpy())
    return digest.hexdigest()
