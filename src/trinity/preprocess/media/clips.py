"""Clip: the frames of a video with their times; and the reading of clips from arrays, tensors and images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from trinity.errors import RequestError
from trinity.errors.arguments import KeywordsByName
from trinity.preprocess.media.images import WHITE, Transparency
from trinity.preprocess.media_limits import MediaLimits, MediaProblem, Price

_GIVEN = (
    "give an array [frames, height, width, 3] of bytes, a list of images of one size, or trinity.Clip(frames, fps=)"
)
_MOST_FPS = 1000.0


class Clip(msgspec.Struct, metaclass=KeywordsByName, frozen=True):
    """Frames of a video that has been decoded, as the ``source`` of ``Media("video", ...)``.

    - ``frames``: an array or tensor [frames, height, width, 3] or [frames, 3, height, width] of bytes, or a list of PIL
      images or arrays of one size.
    - ``fps`` (frames a second, None): of these frames. The model's processor then samples them as it samples a file.
    - ``timestamps`` (seconds, None): of each frame, ascending: these frames are the sample, and all are shown.
    """

    misuse = RequestError

    frames: Any
    fps: float | None = None
    timestamps: Sequence[float] | None = None


class Frames(msgspec.Struct, frozen=True):
    """Frames as processors take them.

    - ``pixels``: bytes [frames, height, width, 3].
    - ``fps`` (frames a second, None): of the video that they are from.
    - ``indices`` (None): place of each in that video, at ``fps``; None: one after another.
    - ``total`` (frames, 0): of that video; 0: these are all.
    - ``sampled`` (False): a sample already, of which the processor takes all.
    """

    pixels: np.ndarray
    fps: float | None = None
    indices: tuple[float, ...] | None = None
    total: int = 0
    sampled: bool = False

    def metadata(self) -> dict[str, Any]:
        """Describe the video as transformers' ``VideoMetadata`` does."""
        count, height, width = self.pixels.shape[:3]
        total = self.total or count
        indices = list(range(count)) if self.indices is None else list(self.indices)
        duration = None if self.fps is None else total / self.fps
        size = {"width": width, "height": height}
        return {"total_num_frames": total, "fps": self.fps, "duration": duration, "frames_indices": indices, **size}


def read_frames(source: Any, limits: MediaLimits, transparency: Transparency = WHITE) -> Frames:
    """Read a clip from memory. Raises ``MediaProblem`` for what is none, or goes beyond the limits."""
    clip = source if isinstance(source, Clip) else Clip(source)
    frames = clip.frames
    if isinstance(frames, (list, tuple)):
        _check_count(len(frames), limits)
        pixels = _stack(frames, limits, transparency)
    else:
        pixels = _from_array(frames, limits)
    return _with_times(pixels, clip)


def _with_times(pixels: np.ndarray, clip: Clip) -> Frames:
    fps, times = _rate(clip.fps), _times(clip.timestamps, len(pixels))
    if times is None:
        return Frames(pixels, fps)
    rate = fps or _mean_rate(times)
    return Frames(pixels, rate, tuple(time * rate for time in times), sampled=True)


def _check_count(count: int, limits: MediaLimits) -> None:
    if not 1 <= count <= limits.max_video_frames:
        raise MediaProblem(
            f"has {count} frames; the limit max_video_frames allows 1 to {limits.max_video_frames}: give fewer"
        )


def check_size(count: int, height: int, width: int, limits: MediaLimits) -> None:
    """Raise ``MediaProblem`` for frames that are too many, too large, or too large together."""
    _check_count(count, limits)
    if not 0 < height * width <= limits.max_pixels:
        raise MediaProblem(
            f"has frames of {width} x {height} pixels; the limit max_pixels allows 1 to {limits.max_pixels}"
        )
    if count * height * width > limits.max_video_pixels:
        raise MediaProblem(
            f"has {count} frames of {width} x {height} pixels; the limit max_video_pixels is "
            f"{limits.max_video_pixels}: give fewer or smaller ones"
        )


def _stack(frames: Sequence[Any], limits: MediaLimits, transparency: Transparency) -> np.ndarray:
    """Read a list of images of one size, each as an image is read; sizes are looked at before the first is decoded."""
    read: list[np.ndarray] = []

    def check(width: int, height: int) -> None:
        check_size(len(frames), height, width, limits)
        if read and read[0].shape[:2] != (height, width):
            shown = f"{read[0].shape[1]} x {read[0].shape[0]}"
            raise MediaProblem(f"has frames of {shown} and of {width} x {height} pixels; give frames of one size")

    for frame in frames:
        picture = read_picture(frame, limits, check, transparency)
        read.append(picture)
    return np.stack(read)


def read_picture(frame: Any, limits: MediaLimits, check: Any, transparency: Transparency) -> np.ndarray:
    """Read one frame as bytes [height, width, 3]."""
    from PIL import Image

    from trinity.preprocess.media.images import read_image

    _check_frame(frame)
    picture = read_image(frame, limits, check, transparency)
    if not isinstance(picture, Image.Image):
        raise MediaProblem(f"has frames of {picture.dtype}; {_GIVEN}")
    return np.asarray(picture)


def _check_frame(frame: Any) -> None:
    if isinstance(frame, (str, bytes)):
        raise MediaProblem(f"has a frame that is a {type(frame).__name__}; {_GIVEN}")


def _check_array(array: Any, limits: MediaLimits) -> tuple[int, int, int]:
    """Return frames, height and width of an array or tensor. Raises ``MediaProblem`` for what is no clip."""
    shape = tuple(getattr(array, "shape", ()))
    if len(shape) != 4 or 3 not in (shape[1], shape[3]):
        raise MediaProblem(
            f"is a {type(array).__name__}" + (f" of shape {list(shape)}" if shape else "") + f"; {_GIVEN}"
        )
    height, width = shape[2:] if shape[3] != 3 else shape[1:3]
    check_size(shape[0], height, width, limits)
    if "uint8" not in str(getattr(array, "dtype", "")):
        raise MediaProblem(f"is an array of {getattr(array, 'dtype', '?')}; {_GIVEN}")
    return shape[0], height, width


def _from_array(array: Any, limits: MediaLimits) -> np.ndarray:
    """Make an array or tensor bytes [frames, height, width, 3]; its shape is looked at before a number of it is."""
    _check_array(array, limits)
    plain = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
    return np.ascontiguousarray(np.moveaxis(plain, 1, 3) if plain.shape[3] != 3 else plain)


def _rate(fps: Any) -> float | None:
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, (int, float, np.number)) or not 0 < float(fps) <= _MOST_FPS:
        raise MediaProblem(f"has fps {fps!r:.60}, which must be a number above 0 and at most {_MOST_FPS:g}")
    return float(fps)


def _times(timestamps: Any, count: int) -> list[float] | None:
    if timestamps is None:
        return None
    try:
        times = [float(each) for each in timestamps]
    except (TypeError, ValueError) as exc:
        raise MediaProblem(f"has timestamps that are no numbers ({exc})") from exc
    ascending = all(earlier < later for earlier, later in pairwise(times))
    if len(times) != count or not ascending or not all(math.isfinite(each) and each >= 0 for each in times):
        raise MediaProblem(f"has {len(times)} timestamps for {count} frames; give one each, in seconds, ascending")
    return times


def _mean_rate(times: Sequence[float]) -> float:
    span = times[-1] - times[0]
    return (len(times) - 1) / span if span > 0 else 1.0


def price_clip(source: Any, limits: MediaLimits) -> tuple[Price, Frames]:
    """Price reading a clip from memory, of whose images some may not be decoded yet. Raises ``MediaProblem``.

    Returns its frames too, which have their shape and times, and no content.
    """
    from trinity.preprocess.media.images import price_picture

    clip = source if isinstance(source, Clip) else Clip(source)
    frames = clip.frames
    if isinstance(frames, (list, tuple)):
        _check_count(len(frames), limits)
        for frame in frames:
            _check_frame(frame)
        priced = [price_picture(frame, limits) for frame in frames]
        kept = sum(3 * each.width * each.height for each in priced)
        units, passing = sum(each.price.units for each in priced), max(each.price.passing for each in priced)
        what, instead = f"is a clip of {len(frames)} images", "give fewer or smaller ones"
        price = Price(units, passing + kept, kept, what, instead)
        shape = len(frames), priced[0].height, priced[0].width
        check_size(*shape, limits)
    else:
        shape = _check_array(frames, limits)
        price = Price(0.0, 0, 3 * math.prod(shape), f"is a clip of {shape[0]} frames of {shape[2]} x {shape[1]} pixels")
    return price, _with_times(np.broadcast_to(np.uint8(0), (*shape, 3)), clip)


def plain_clip(source: Any, limits: MediaLimits, transparency: Transparency = WHITE) -> Clip:
    """Make a clip of plain arrays and numbers, which another process can be sent."""
    found = read_frames(source, limits, transparency)
    times = None if found.indices is None or found.fps is None else [each / found.fps for each in found.indices]
    return Clip(found.pixels, found.fps, times)
