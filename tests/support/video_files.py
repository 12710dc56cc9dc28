"""Video files that PyAV writes on the spot."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np

from support.costly_media import box


@contextmanager
def usual_scheduling() -> Iterator[None]:
    """Give the thread its scheduling back: libsvtav1 makes a thread of root's that opens it one of real time.

    So did a test make its process, and all that this started: busy loops then left the others no processor.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


@usual_scheduling()
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
    ("prores", "mov"), ("flv", "flv"), ("libx264", "mpegts"), ("libx265", "mpegts"), ("libx264", "mpeg"),
)  # fmt: skip
"""FFmpeg's encoders and containers."""

_OPTIONS = {
    "libx264": {"preset": "veryfast"}, "libx265": {"preset": "ultrafast", "x265-params": "log-level=none"},
    "libvpx": {"deadline": "realtime", "cpu-used": "8"}, "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
    "libsvtav1": {"preset": "12"},
}  # fmt: skip
_PIXELS = {"mjpeg": "yuvj420p", "prores": "yuv422p10le"}


@usual_scheduling()
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


@usual_scheduling()
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


def vp8_of_hidden_frames(count: int, side: int) -> bytes:
    """Encode two frames of 16 x 16 pixels, and between them so many of larger sides that are not shown."""
    import av

    def encode(sides: int, number: int) -> list[bytes]:
        codec: Any = av.CodecContext.create("libvpx", "w")
        codec.width, codec.height, codec.pix_fmt, codec.time_base = sides, sides, "yuv420p", Fraction(1, 25)
        codec.options = {"lag-in-frames": "0", **_OPTIONS["libvpx"]}
        grey = [av.VideoFrame.from_ndarray(np.full((sides, sides, 3), 128, np.uint8), format="rgb24")] * number
        return [bytes(packet) for frame in [*grey, None] for packet in codec.encode(frame)]

    small, (key, other) = encode(16, 1), encode(side, 2)
    hidden = [bytes((each[0] & ~16,)) + each[1:] for each in (key, *[other] * (count - 1))]
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream: Any = output.add_stream("libvpx", rate=25)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for number, data in enumerate([*small, *hidden, *small]):
            packet = av.Packet(data)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 25)
            output.mux(packet)
    return file.getvalue()


def video_of_tags(kind: str, count: int) -> bytes:
    """Encode a video of four frames with so many tags: "Matroska", "chapters", "cues", "MP4", "AVI", "FLV"."""
    forms = {"MP4": ("mp4", "mpeg4"), "AVI": ("avi", "mpeg4"), "FLV": ("flv", "flv")}
    container, codec = forms.get(kind, ("matroska", "mpeg4"))
    plain = encode_video(codec, container, 4, 64, 64)
    numbers = range(count)
    if kind == "AVI":
        chunks = b"".join(b"".join(b"%c" % (65 + each // 26**place % 26) for place in range(4)) + b"\2\0\0\0x\0"
                          for each in numbers)  # fmt: skip
        place = plain.index(b"movi") - 8
        return plain[:place] + b"LIST" + struct.pack("<L", 4 + len(chunks)) + b"INFO" + chunks + plain[place:]
    if kind == "FLV":
        keys = b"".join(b"\0\6%06x\0" % each + struct.pack(">d", 1.0) for each in numbers)
        body = b"\2\0\x0aonMetaData\x08" + struct.pack(">L", count) + keys + b"\0\0\x09"
        script = b"\x12" + len(body).to_bytes(3, "big") + bytes(7) + body + struct.pack(">L", len(body) + 11)
        return plain[:13] + script + plain[13:]
    if kind == "MP4":
        free = (box(b"----", box(b"mean", bytes(4), b"com.a"), box(b"name", bytes(4), b"%06x" % each),
                    box(b"data", b"\0\0\0\1\0\0\0\0x")) for each in numbers)  # fmt: skip
        handler = box(b"hdlr", bytes(8), b"mdirappl", bytes(9))
        more = box(b"udta", box(b"meta", bytes(4), handler, box(b"ilst", *free)))
        place = plain.index(b"moov") - 4
        size = struct.unpack_from(">L", plain, place)[0]
        grown = struct.pack(">L", size + len(more)) + plain[place + 4 : place + size] + more
        return plain[:place] + grown + plain[place + size :]
    first = plain.index(b"\x18\x53\x80\x67") + 4
    cluster = plain.index(b"\x1f\x43\xb6\x75", first)
    made = {
        "Matroska": (b"\x67\xc8\x8d\x45\xa3\x86%06x\x44\x87\x81x" % each for each in numbers),
        "chapters": (b"\xb6\x8f\x73\xc4\x84" + struct.pack(">L", count - each) + b"\x91\x86"
                     + (1000 * each).to_bytes(6, "big") for each in numbers),
        "cues": (b"\xbb\x8e\xb3\x84" + struct.pack(">L", count - each) + b"\xb7\x86\xf7\x81\1\xf1\x81\1"
                 for each in numbers),
    }  # fmt: skip
    outer = {"Matroska": (b"\x12\x54\xc3\x67", b"\x73\x73"), "chapters": (b"\x10\x43\xa7\x70", b"\x45\xb9")}
    body = b"".join(made[kind])
    for name in reversed(outer.get(kind, (b"\x1c\x53\xbb\x6b",))):
        body = name + (1 << 56 | len(body)).to_bytes(8, "big") + body
    return plain[:first] + b"\x01" + b"\xff" * 7 + plain[first + 8 : cluster] + body + plain[cluster:]


def motion_jpeg_of_exif(entries: int) -> bytes:
    """Encode four frames of JPEG, with EXIF whose every entry is one directory of so many entries."""
    inside = 8 + 2 + 12 * entries + 4
    outer = struct.pack("<HHLL", 0x8769, 4, 1, inside) * entries + bytes(4)
    inner = b"".join(struct.pack("<HHLL", 1 + each, 3, 1, 1) for each in range(entries)) + bytes(4)
    tiff = b"II*\0" + struct.pack("<LH", 8, entries) + outer + struct.pack("<H", entries) + inner
    segment = b"\xff\xe1" + struct.pack(">H", 8 + len(tiff)) + b"Exif\0\0" + tiff
    return _remux("mjpeg", lambda data: data[:2] + segment + data[2:])


def _remux(codec: str, change: Callable[[bytes], bytes]) -> bytes:
    """Encode four frames into an AVI, each packet of which is changed."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="avi") as output:
        stream: Any = output.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 64, _PIXELS.get(codec, "yuv420p")
        for number in range(4):
            frame = np.full((64, 64, 3), 20 * number, np.uint8)
            for given in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                packet = av.Packet(change(bytes(given)))
                packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, given.time_base
                packet.is_keyframe = True
                output.mux(packet)
    return file.getvalue()


def avi_of_exif(entries: int) -> bytes:
    """Encode an AVI whose header has EXIF of so many entries."""
    plain = bytearray(encode_video("mpeg4", "avi", 4, 64, 64))
    tags = b"".join(struct.pack("<HHLL", 1 + each, 3, 1, 1) for each in range(entries)) + bytes(4)
    body = b"AVIF" + bytes(4) + struct.pack("<H", entries) + tags
    added = b"strd" + struct.pack("<L", len(body)) + body
    place = plain.index(b"strf")
    place += 8 + struct.unpack_from("<L", plain, place + 4)[0]
    for name in (b"strl", b"hdrl"):
        at = plain.index(name) - 4
        struct.pack_into("<L", plain, at, struct.unpack_from("<L", plain, at)[0] + len(added))
    return bytes(plain[:place]) + added + bytes(plain[place:])


def ogg_of_comments(count: int, vendor: int = 0) -> bytes:
    """Make headers of Theora in an Ogg, with so many comments behind the name of a vendor of so many bytes."""
    head = b"\x80theora\3\2\1" + struct.pack(">HH", 4, 4) + b"\0\0\x40\0\0\x40\0\0" + struct.pack(">LL", 25, 1)
    comments = b"".join(struct.pack("<L", 8) + b"%06x=x" % each for each in range(count))
    listed = b"\x81theora" + struct.pack("<L", vendor) + bytes(vendor) + struct.pack("<L", count) + comments
    packets, number, made = (head + b"\0\0\1\0\0\1\0\0\0\0\0\0", listed, b"\x82theora" + bytes(100)), 0, b""
    for packet in packets:
        lacing, at = [255] * (len(packet) // 255) + [len(packet) % 255], 0
        for first in range(0, len(lacing), 255):
            part = lacing[first : first + 255]
            flags = (2 if number == 0 else 0) | (1 if first else 0)
            page = b"OggS\0" + bytes((flags,)) + struct.pack("<QLLLB", 0, 1, number, 0, len(part)) + bytes(part)
            page += packet[at : at + sum(part)]
            made += page[:22] + struct.pack("<L", _checksum(page)) + page[26:]
            number, at = number + 1, at + sum(part)
    return made


def _checksum(page: bytes) -> int:
    rest = 0
    for byte in page:
        rest ^= byte << 24
        for _ in range(8):
            rest = (rest << 1 ^ 0x04C11DB7 if rest & 0x80000000 else rest << 1) & 0xFFFFFFFF
    return rest


def ogg_of_pages(count: int) -> bytes:
    """Make headers of Theora in an Ogg, and so many empty pages."""
    page = b"OggS\0\0" + bytes(8) + b"\1" + bytes(12)
    return ogg_of_comments(1) + (page[:22] + struct.pack("<L", _checksum(page)) + page[26:]) * count
