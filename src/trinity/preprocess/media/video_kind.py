"""Videos as a kind of media: their markup in a model's text, and their reader."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity.errors import ConfigError, describe_error
from trinity.errors.plain_values import is_address
from trinity.preprocess.checkpoint.video_processors import NoVideo, backend_name
from trinity.preprocess.media.clips import Frames, check_size, plain_clip, price_clip, read_frames
from trinity.preprocess.media.image_kind import reserved_tokens
from trinity.preprocess.media.media_kinds import LoadedProcessor, MediaItem, MediaKind, ModelFiles, Placeholder
from trinity.preprocess.media.media_markup import VIDEO_TEXT
from trinity.preprocess.media.video_files import find_coded, read_file_bytes, read_video
from trinity.preprocess.media.video_prices import price_frames
from trinity.preprocess.media_limits import RESIZE_NS, Estimate, MediaBudget, MediaLimits, MediaProblem, Price

if TYPE_CHECKING:
    from trinity.preprocess.media.shapes_alone import LargestArray

_POSITIONS = ("video_grid_thw", "second_per_grid_ts")
_ENCODED = (  # inputs of encoders; the rest is text, or says where in the text features are
    "pixel_values",
    "pixel_attention_mask",
    "pixel_values_videos",
    "video_grid_thw",
    "video_merge_sizes",
    "video_compression_mask",
)
_NOT_FOR_SAMPLES = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")
_BYTES = 2 * 12  # of a pixel of three channels of float32, as it is made and once more as the encoder gets it
_CALL_NS, _MADE_NS = 3e6, 40.0  # on the machine of the price tables: a processor's call, and a pixel of floats it makes
_SIDE, _FRAMES = 112, 4  # of synthetic clips, in pixels; and their frames


class VideoReader:
    """Reads videos for one model; see ``KindReader``.

    Runs the model's own processor on one video, with only its placeholder as text.
    """

    def __init__(self, loaded: LoadedProcessor, limits: MediaLimits) -> None:
        self._loaded, self._limits = loaded, limits
        self._processor = loaded.processor
        self.fingerprint = _fingerprint(self._processor)

    def make_plain(self, source: Any, among: int, budget: MediaBudget) -> Any:
        return source if _is_file(source) else plain_clip(source, self._limits, self._loaded.transparency)

    def price_source(self, source: Any, among: int) -> Price:
        if isinstance(source, MediaProblem):  # found by the process that sent the request
            raise source
        try:
            if _is_file(source):
                return self._price_file(source)
            price, frames = price_clip(source, self._limits)
            return price.plus(self._price_made(frames))
        except MediaProblem:
            raise
        except Exception as exc:  # an object of somebody's own may raise anything
            raise MediaProblem(f"cannot be read ({describe_error(exc, 200)})") from exc

    def _price_file(self, source: Any) -> Price:
        if isinstance(source, (str, os.PathLike)) and is_address(source):
            return Price(0.0)
        data = read_file_bytes(source, self._limits)
        if not data:
            raise MediaProblem("is empty (0 bytes)")
        found = find_coded(data, self._limits)
        fps, size = found.fps or None, {"width": found.width, "height": found.height}
        known = {"total_num_frames": found.number, "fps": fps, "duration": fps and found.number / fps}
        chosen = self._choose_frames({**known, **size}) if found.number else ()
        price = price_frames(found, len(chosen)).plus(Price(0.0, len(data)))
        if not len(chosen) or not found.width * found.height:
            return price
        check_size(len(chosen), found.height, found.width, self._limits)
        shape = len(chosen), found.height, found.width, 3
        times = tuple(map(float, chosen))
        frames = Frames(np.broadcast_to(np.uint8(0), shape), found.fps or None, times, found.number, sampled=True)
        return price.plus(self._price_made(frames))

    def _price_made(self, frames: Frames) -> Price:
        """Price what the processor makes of frames, from their shape alone. Raises ``MediaProblem``."""
        largest = self._watch_shapes(frames)
        held = self._check_made(largest.numbers // 3).bytes
        nanoseconds = _CALL_NS + RESIZE_NS * largest.numbers / 3 + _MADE_NS * largest.floats / 3
        return Price.of(nanoseconds, held, held)

    def read_source(self, source: Any, among: int, budget: MediaBudget) -> MediaItem:
        frames = self._read_frames(source)
        budget.charge(self._estimate(frames))
        return self._process(frames)

    def _read_frames(self, source: Any) -> Frames:
        if isinstance(source, MediaProblem):  # found by the process that sent the request
            raise source
        try:
            if _is_file(source):
                return read_video(source, self._limits, self._choose_frames)
            return read_frames(source, self._limits, self._loaded.transparency)
        except MediaProblem:
            raise
        except Exception as exc:  # an object of somebody's own may raise anything
            raise MediaProblem(f"cannot be read ({describe_error(exc, 200)})") from exc

    def _choose_frames(self, known: dict[str, Any]) -> Sequence[int]:
        """Choose frames of a file by the processor's own rule, with all settings that it has, or all of them."""
        from transformers.video_utils import VideoMetadata

        videos, total = self._processor.video_processor, known["total_num_frames"]
        if not (videos.do_sample_frames or self._always_sampled):
            return range(total)
        settings = {name: getattr(videos, name, None) for name in videos.valid_kwargs.__annotations__}
        given = {name: value for name, value in settings.items() if name not in _NOT_FOR_SAMPLES}
        try:
            return [int(each) for each in videos.sample_frames(metadata=VideoMetadata(**known), **given)]
        except Exception as exc:
            said = f"{type(exc).__name__}: {exc!s:.300}"
            raise MediaProblem(f"has {total} frames, of which the model's processor takes no sample ({said})") from exc

    @property
    def _always_sampled(self) -> bool:
        return VIDEO_TEXT[self._loaded.config.model_type].sampled

    def _estimate(self, frames: Frames) -> Estimate:
        """Compute what the processor will make of the frames from their shape alone. Raises ``MediaProblem``."""
        return self._check_made(self._watch_shapes(frames).numbers // 3)

    def _check_made(self, pixels: int) -> Estimate:
        most = self._limits.max_video_pixels
        if pixels > most:
            raise MediaProblem(
                f"becomes {pixels} pixels in the model's processor, which resizes it; the limit max_video_pixels is "
                f"{most}: give fewer or smaller frames, or less narrow ones"
            )
        return Estimate(0, pixels * _BYTES)

    def _watch_shapes(self, frames: Frames) -> LargestArray:
        """Run the processor on arrays that have a shape and no content, and find the largest."""
        import torch

        from trinity.preprocess.media.shapes_alone import LargestArray

        largest, pixels = LargestArray(), torch.empty(frames.pixels.shape, dtype=torch.uint8, device="meta")
        with largest:
            try:
                self._call(pixels, frames)
            except Exception as exc:
                if largest.numbers == 0:
                    raise MediaProblem(_refusal(exc, frames)) from exc
        return largest

    def _call(self, pixels: Any, frames: Frames) -> Any:
        """Run the video processor alone."""
        return self._processor.video_processor([pixels], **self._settings(frames))

    def _settings(self, frames: Frames) -> dict[str, Any]:
        """Describe the frames to a processor, and say whether it takes a sample of them where that is not its own."""
        told = frames.sampled or self._always_sampled
        sampling = {"do_sample_frames": not frames.sampled} if told else {}
        return {"video_metadata": [frames.metadata()], **sampling}

    def _process(self, frames: Frames) -> MediaItem:
        token = self._loaded.placeholders["video"].token
        settings = {"return_tensors": "pt", **self._settings(frames)}
        try:
            made = dict(self._processor(text=[token], videos=[frames.pixels], **settings))
        except Exception as exc:  # processors raise anything on odd sizes, and where they miss a rate
            raise MediaProblem(_refusal(exc, frames)) from exc
        ids = made["input_ids"][0].tolist()
        tokens = sum(number in self._loaded.media_token_ids for number in ids)
        if tokens == 0:
            raise MediaProblem("the model's processor makes no visual token of it; give more or larger frames")
        inputs = {name: made[name] for name in _ENCODED if name in made}
        meta = {name: made[name][0].tolist() for name in _POSITIONS if name in made}
        text, size = self._loaded.last_call.text, frames.pixels.shape
        return MediaItem("video", text, tokens, inputs, self.fingerprint, meta, size[2], size[1])

    def number_expansion(self, expansion: str, index: int) -> str:
        return expansion

    def make_synthetic(self, tokens: int | None) -> MediaItem:
        frames = np.zeros((_FRAMES, _SIDE, _SIDE, 3), dtype=np.uint8)
        try:
            return self._process(Frames(frames, 1.0, tuple(map(float, range(_FRAMES))), sampled=True))
        except MediaProblem as problem:
            raise ConfigError(f"the model's processor refuses a plain clip: {problem}") from problem


class VideoKind(MediaKind):
    """Videos: frames in memory, or files."""

    name = "video"
    count_limit = "max_videos"
    bytes_limit = "max_video_bytes"
    accept = "video/*"

    def find_placeholder(self, files: ModelFiles) -> Placeholder | None:
        """Find the video token; None for types whose videos nobody compared, and without a video processor."""
        text, processor = VIDEO_TEXT.get(files.config.model_type), files.processor
        token, videos = (getattr(processor, name, None) for name in ("video_token", "video_processor"))
        if text is None or not isinstance(token, str) or videos is None or isinstance(videos, NoVideo):
            return None
        return Placeholder(token=token, marker=text.marker.format(token=token), reserved=reserved_tokens(files))

    def open_reader(self, loaded: LoadedProcessor, limits: MediaLimits) -> VideoReader:
        return VideoReader(loaded, limits)


def _is_file(source: Any) -> bool:
    return isinstance(source, (str, bytes, bytearray, memoryview, os.PathLike))


def _fingerprint(processor: Any) -> str:
    """Hash everything but the pixels that decides features: class, backend, sizes, library versions."""
    import transformers

    videos = processor.video_processor
    plain = {name: value for name, value in vars(processor).items() if isinstance(value, (str, int, float, bool))}
    parts = [type(videos).__name__, videos.to_dict(), plain, transformers.__version__, backend_name()]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _refusal(exc: Exception, frames: Frames) -> str:
    count, height, width = frames.pixels.shape[:3]
    hint = "; give trinity.Clip(frames, fps=...)" if frames.fps is None else ""
    return (
        f"has {count} frames of {width} x {height} pixels, which the model's processor refuses "
        f"({type(exc).__name__}: {exc!s:.300}){hint}"
    )
