"""Decodes video files with PyAV: only the frames that are asked for are kept, and nothing a file claims is believed.

FFmpeg reads the bytes alone, with demuxers and decoders of an own list: a playlist in disguise opens no other file and
no address. Frames are counted before one is decoded, whatever the container says. See SECURITY.md.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trinity.errors import describe_error, pip_install
from trinity.errors.plain_values import is_address
from trinity.preprocess.fetch.media_sources import check_bytes, read_data_uri, read_file
from trinity.preprocess.media.boxes import read_av1
from trinity.preprocess.media.clips import Frames, check_size
from trinity.preprocess.media.video_prices import CODECS, CodedFrames, count_packets, find_frames, price_frames
from trinity.preprocess.media_limits import MediaLimits, MediaProblem, check_price

_AV1, _UNITS = ("av1", "libdav1d"), 4  # names of the codec, and units of a packet
_BYTES = "max_video_bytes"
_UNKNOWN = (1920, 1080)  # pixels, of frames that say their size only as they are decoded
_MARGIN = 64  # pixels each way, by which coded frames may be larger than what is shown of them
_SHOW_ALL = ("mpeg4", "flv")  # they show each frame that they decode, and need buffers of more pixels than it
_CONTAINERS = "avi,flv,matroska,mov,mpeg,mpegts,ogg"  # none of them reads other files
_PROBED = {"probesize": str(8 << 20), "analyzeduration": "5000000"}  # bytes and microseconds that tell what a file is
_FRAME_EXIF = re.compile(rb"(\xff\xe1..)Exif", re.DOTALL)
_HEADER_EXIF = re.compile(rb"(strd....)AVIF", re.DOTALL)

Choose = Callable[[dict[str, Any]], Sequence[int]]


def read_video(source: Any, limits: MediaLimits, choose: Choose) -> Frames:
    """Decode a file's frames that ``choose`` picks, given what transformers' ``VideoMetadata`` holds.

    ``source``: a path, bytes or a data: URI. Raises ``MediaProblem`` for what is no video, is broken, or goes beyond
    the limits, and where PyAV is not installed.
    """
    data = _hide_exif(read_file_bytes(source, limits))
    if not data:
        raise MediaProblem("is empty (0 bytes)")
    av, found = _load(), _walk_file(data, limits)
    with _opened(av, data, limits, decodes=False) as (container, stream):
        found = _count_frames(container, stream, data, found.scans)
        check_price(price_frames(found, 0), limits)
    with _opened(av, data, limits) as (container, stream):
        size = {"width": stream.codec_context.width, "height": stream.codec_context.height}
        check_price(price_frames(found._replace(**size), 0), limits)
        return _read_stream(container, stream, found.number, limits, choose)


def find_coded(data: bytes, limits: MediaLimits) -> CodedFrames:
    """Find the frames of a file by its structure. Raises ``MediaProblem``, for too large or expensive ones too.

    Where the structure has no size or no rate, FFmpeg finds them, and counts the frames, without decoding one.
    """
    found = _walk_file(data, limits)
    if found.width * found.height and found.fps:
        return found
    data = _hide_exif(data)
    with _opened(_load(), data, limits, decodes=False) as (container, stream):
        counted = _count_frames(container, stream, data, found.scans)
        counted = counted._replace(fps=_find_rate(stream) or 0.0)
    sides = next(each for each in (counted[1:3], found[1:3], _UNKNOWN) if min(each))
    counted = counted._replace(width=sides[0], height=sides[1])
    check_price(price_frames(counted, 0), limits)
    return counted


def _walk_file(data: bytes, limits: MediaLimits) -> CodedFrames:
    found = find_frames(data)
    if found.width * found.height:
        check_size(1, found.height, found.width, limits)
    check_price(price_frames(found, 0), limits)
    return found


def read_file_bytes(source: Any, limits: MediaLimits) -> bytes:
    """Read a video file's bytes from a path, bytes or a data: URI. Raises ``MediaProblem``."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        check_bytes(memoryview(source).nbytes, limits, _BYTES)
        return bytes(source)
    text = os.fspath(source)
    if isinstance(text, str) and text[:5].lower() == "data:":
        return read_data_uri(text, limits, _BYTES)
    if is_address(text):
        raise MediaProblem(
            "is a URL: where allow_urls or allowed_hosts allow it, a request's are fetched before; give bytes"
        )
    return read_file(text, limits, _BYTES)


def _hide_exif(data: bytes) -> bytes:
    """Rename EXIF in frames of JPEG and in headers of AVI: FFmpeg looks through all of its entries for each other."""
    for found, name in ((_FRAME_EXIF, b"Exif"), (_HEADER_EXIF, b"AVIF")):
        data = found.sub(rb"\1none", data) if name in data else data
    return data


def _load() -> Any:
    try:
        import av
    except ImportError as exc:
        raise MediaProblem(
            f"is a video file, and PyAV is not installed, which decodes it: {pip_install('video')}, or give its frames "
            "as trinity.Clip(frames, fps=...)"
        ) from exc
    return av


@contextmanager
def _opened(av: Any, data: bytes, limits: MediaLimits, decodes: bool = True) -> Iterator[tuple[Any, Any]]:
    """Open a file and its first stream of video. What FFmpeg raises meanwhile becomes ``MediaProblem``.

    Without ``decodes`` FFmpeg may not decode the first frames, as it does to find out what they are.
    """
    codecs = ",".join(CODECS) if decodes else "none"
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "", "codec_whitelist": codecs}
    options |= {**_PROBED, "max_streams": str(limits.max_video_streams + 1)}  # further ones are not looked at
    try:
        with av.open(io.BytesIO(data), mode="r", options=options, metadata_errors="ignore") as container:
            yield container, _find_stream(container, limits, decodes)
    except MediaProblem:
        raise
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as exc:  # FFmpeg's errors are many, and PyAV's own beside them
        raise MediaProblem(f"cannot be decoded ({describe_error(exc, 200)}); is it a video, and whole?") from exc


def _find_stream(container: Any, limits: MediaLimits, decodes: bool) -> Any:
    if len(container.streams) > limits.max_video_streams:
        raise MediaProblem(
            f"has {len(container.streams)} streams; the limit max_video_streams is {limits.max_video_streams}"
        )
    streams = container.streams.video
    if not streams:
        raise MediaProblem("has no stream of video")
    stream = streams[0]
    codec = stream.codec_context
    if codec is None or codec.name not in CODECS:
        raise MediaProblem(f"has video of codec {getattr(codec, 'name', None)!r}; known are {', '.join(CODECS)}")
    if decodes or codec.height * codec.width:  # some sizes only a frame tells
        check_size(1, codec.height, codec.width, limits)
    stream.thread_type, codec.thread_count = "NONE", 1  # a frame at a time, on this thread
    most = limits.max_pixels  # also of frames that grow on the way, and of those that are not shown
    if codec.height * codec.width and codec.name not in _SHOW_ALL:
        most = min(most, (codec.height + _MARGIN) * (codec.width + _MARGIN))
    codec.options = {**codec.options, "max_pixels": str(most)}
    return stream


def _count_frames(container: Any, stream: Any, data: bytes, scans: int) -> CodedFrames:
    """Count packets of the stream, which are its frames, and their bytes, without decoding any."""
    count = coded = number = frames = 0
    parts, units = count_packets(len(data)), count_packets(len(data), _UNITS)
    codec = stream.codec_context
    for packet in container.demux():
        number = next(parts)
        if packet.stream.index == stream.index and packet.size > 0:
            count, coded = count + 1, coded + packet.size
            if codec.name == "mjpeg" and _FRAME_EXIF.search(bytes(packet)):
                raise MediaProblem("has EXIF in its frames that cannot be left out; save it without")
            frames += read_av1(bytes(packet), units).frames if codec.name in _AV1 else 1
    if count == 0:
        raise MediaProblem("has no frames")
    hidden = max(0, frames - count)
    return CodedFrames(codec.name, codec.width, codec.height, count, coded, number, scans, hidden=hidden)


def _find_rate(stream: Any) -> float | None:
    rate = stream.average_rate or stream.guessed_rate
    return float(rate) if rate else None


def _read_stream(container: Any, stream: Any, total: int, limits: MediaLimits, choose: Choose) -> Frames:
    fps = _find_rate(stream)
    seconds = total / fps if fps else 0.0
    if seconds > limits.max_video_seconds:
        raise MediaProblem(f"is {seconds:.1f} s long; the limit max_video_seconds is {limits.max_video_seconds:g}")
    height, width = stream.codec_context.height, stream.codec_context.width
    known = {"total_num_frames": total, "fps": fps, "duration": seconds if fps else None}
    wanted = [int(each) for each in choose({**known, "width": width, "height": height})]
    check_size(len(wanted), height, width, limits)
    if min(wanted) < 0 or max(wanted) >= total:
        raise MediaProblem(f"has {total} frames, and the model's processor asks for others")
    kept = _decode(container, stream, set(wanted), (height, width), limits)
    if missing := set(wanted) - set(kept):
        raise MediaProblem(f"ends before frame {min(missing)} of {total}; is it truncated or corrupt?")
    pixels = np.stack([kept[each] for each in wanted])
    return Frames(pixels, fps, tuple(map(float, wanted)), total, sampled=True)


def _decode(
    container: Any, stream: Any, wanted: set[int], size: tuple[int, int], limits: MediaLimits
) -> dict[int, np.ndarray]:
    """Decode up to the last frame that is wanted, and keep those that are."""
    kept: dict[int, np.ndarray] = {}
    last, ends = max(wanted), time.monotonic() + limits.preprocess_timeout_s
    for number, frame in enumerate(container.decode(stream)):
        if time.monotonic() > ends:
            raise MediaProblem(f"takes longer to decode than preprocess_timeout_s, {limits.preprocess_timeout_s:g} s")
        if (frame.height, frame.width) != size:
            raise MediaProblem(f"has frames of {size[1]} x {size[0]} and of {frame.width} x {frame.height} pixels")
        if number in wanted:
            kept[number] = frame.to_ndarray(format="rgb24")
        if number >= last:
            break
    return kept
