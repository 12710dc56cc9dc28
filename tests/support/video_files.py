"""Video files that PyAV writes on the spot."""

from __future__ import annotations

import io
from collections.abc import Sequence
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
