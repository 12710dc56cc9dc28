"""Video files that PyAV writes on the spot."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np


def write_video(
    frames: np.ndarray,
    *,
    fps: int = 10,
    container: str = "mp4",
    codec: str = "mpeg4",
    times: Sequence[int] = (),
    streams: int = 1,
) -> bytes:
    """Encode frames [n, height, width, 3]; ``times``: of each, in steps of 1/fps; ``streams``: copies side by side."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        made: list[Any] = [output.add_stream(codec, rate=fps) for _ in range(streams)]
        for stream in made:
            stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for stream in made:
            for number, frame in enumerate(frames):
                picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
                if times:
                    picture.pts = times[number]
                output.mux(stream.encode(picture))
            output.mux(stream.encode())
    return file.getvalue()


def write_sound() -> bytes:
    """A matroska file of sound alone."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream: Any = output.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


VIDEO_CODECS: tuple[tuple[str, str], ...] = (
    ("libx264", "mp4"), ("libx264", "matroska"), ("libx264", "flv"), ("libx265", "mp4"), ("libvpx", "webm"),
    ("libvpx-vp9", "webm"), ("libsvtav1", "mp4"), ("mpeg4", "avi"), ("mpeg4", "mov"), ("mpeg2video", "mpeg"),
    ("mpeg2video", "mpegts"), ("mpeg1video", "mpeg"), ("mjpeg", "avi"), ("mjpeg", "mov"), ("ffv1", "matroska"),
    ("prores", "mov"), ("flv", "flv"),
)  # fmt: skip
"""FFmpeg's encoders and containers."""

_OPTIONS = {
    "libx264": {"preset": "veryfast"}, "libx265": {"preset": "ultrafast", "x265-params": "log-level=none"},
    "libvpx": {"deadline": "realtime", "cpu-used": "8"}, "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
    "libsvtav1": {"preset": "12"},
}  # fmt: skip
_PIXELS = {"mjpeg": "yuvj420p", "prores": "yuv422p10le"}


def encode_video(codec: str, container: str, count: int, width: int, height: int, kind: str = "moving") -> bytes:
    """Encode so many frames of a kind: "moving" waves, "noise" or "flat"."""
    import av

    file, noise = io.BytesIO(), np.random.default_rng(1)
    rows, columns = np.mgrid[0:height, 0:width]
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, _PIXELS.get(codec, "yuv420p")
        stream.options = _OPTIONS.get(codec, {})
        for number in range(count):
            if kind == "noise":
                frame = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
            else:
                waves = np.sin((columns + 3 * number) / 37 + rows / 23) * (80 if kind == "moving" else 0)
                frame = np.repeat((128 + waves).astype(np.uint8)[:, :, None], 3, axis=2)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


def _list_units(data: bytes) -> Iterator[bytes]:
    """Yield the units of AV1 data, which all have a size."""
    at = 0
    while at < len(data):
        begin, size, shift = at, 0, 0
        at += 2 if data[at] & 4 else 1
        while True:
            size, shift, at = size | (data[at] & 127) << shift, shift + 7, at + 1
            if data[at - 1] < 128:
                break
        at += size
        yield data[begin:at]


def av1_of_hidden_frames(count: int, width: int, height: int, times: int) -> bytes:
    """Encode so many frames as AV1, and repeat the smallest of those that are not shown so many times."""
    import av

    rows, columns = np.mgrid[0:height, 0:width]
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream: Any = output.add_stream("libsvtav1", rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "12", "svtav1-params": "lp=1:hierarchical-levels=3"}
        packets: list[Any] = []
        for number in range(count):
            waves = (128 + np.sin((columns + 8 * number) / 37 + rows / 23) * 80).astype(np.uint8)
            packets += stream.encode(
                av.VideoFrame.from_ndarray(np.repeat(waves[:, :, None], 3, axis=2), format="rgb24")
            )
        packets += stream.encode()
        coded = [bytes(packet) for packet in sorted(packets, key=lambda packet: packet.dts)]
        hidden = [  # a frame (6) of the kind that refers to others, neither shown nor to be shown later
            unit for data in coded for unit in _list_units(data) if unit[0] >> 3 & 15 == 6 and unit[2] >> 4 == 2
        ]
        small = min(hidden, key=len)
        for number, data in enumerate(coded):
            packet = av.Packet(data.replace(small, small * times, 1))
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 25)
            packet.is_keyframe = number == 0
            output.mux(packet)
    return file.getvalue()
