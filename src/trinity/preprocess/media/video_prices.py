"""Prices of video files: the table of codecs, and walks over containers that count frames and bytes.

A walk reads sizes and skips content, so that it costs what a file has of parts. It is a prediction: streams that name
no size in pixels before their frames have none, and FFmpeg may find more frames than the walk. ``video_files`` prices
a file again from FFmpeg's own size and count of its packets, before a frame is decoded.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from trinity.preprocess.media.boxes import Box, find_box, walk_boxes
from trinity.preprocess.media.file_parts import UNREADABLE, Parts
from trinity.preprocess.media.video_tags import check_tags, count_comments, read_element
from trinity.preprocess.media_limits import MediaProblem, Price

_CODECS: dict[str, tuple[float, float]] = {  # by FFmpeg's name: nanoseconds a pixel of a frame, and a coded byte
    "av1": (3.5, 70.0),
    "libdav1d": (3.5, 70.0),
    "ffv1": (3.0, 40.0),
    "flv": (2.0, 18.0),
    "h264": (2.5, 85.0),
    "hevc": (2.5, 110.0),
    "mjpeg": (2.5, 14.0),
    "mpeg1video": (2.0, 20.0),
    "mpeg2video": (2.0, 20.0),
    "mpeg4": (2.0, 20.0),
    "prores": (5.0, 15.0),
    "theora": (2.5, 60.0),
    "vp8": (2.0, 90.0),
    "vp9": (2.5, 95.0),
}
CODECS = tuple(_CODECS)
_SCAN_NS = 2.0  # a pixel, in each further scan of a frame of JPEG
_FRAME_NS, _PACKET_NS = 40_000.0, 3_000.0
_SHOWN_NS = 3.0  # a pixel of a frame that is kept, made RGB and stacked
_PROBED = 2  # times that FFmpeg reads and decodes the first frames to find out what they are
_PROBED_FRAMES = 4
_HELD_FRAMES = 20  # of references and of frames that wait for their turn, at 3 bytes a pixel
_FOURCC = {
    b"avc1": "h264", b"avc3": "h264", b"h264": "h264", b"H264": "h264", b"X264": "h264", b"hev1": "hevc",
    b"hvc1": "hevc", b"HEVC": "hevc", b"av01": "av1", b"vp08": "vp8", b"vp09": "vp9", b"VP80": "vp8", b"VP90": "vp9",
    b"mp4v": "mpeg4", b"FMP4": "mpeg4", b"XVID": "mpeg4", b"DIVX": "mpeg4", b"DX50": "mpeg4", b"jpeg": "mjpeg",
    b"mjpa": "mjpeg", b"mjpb": "mjpeg", b"MJPG": "mjpeg", b"apcn": "prores", b"apch": "prores", b"apcs": "prores",
    b"apco": "prores", b"ap4h": "prores", b"ap4x": "prores", b"FFV1": "ffv1", b"FLV1": "flv", b"mpg2": "mpeg2video",
    b"mpg1": "mpeg1video",
}  # fmt: skip
_MATROSKA = {
    b"V_MPEG4/ISO/AVC": "h264", b"V_MPEGH/ISO/HEVC": "hevc", b"V_AV1": "av1", b"V_VP8": "vp8", b"V_VP9": "vp9",
    b"V_MPEG4/ISO/ASP": "mpeg4", b"V_MPEG2": "mpeg2video", b"V_MPEG1": "mpeg1video", b"V_MJPEG": "mjpeg",
    b"V_FFV1": "ffv1", b"V_PRORES": "prores", b"V_THEORA": "theora",
}  # fmt: skip


class CodedFrames(NamedTuple):
    """Frames of a file's video: codec by FFmpeg's name, size in pixels, number, coded bytes, scans beyond one a frame.

    ``packets``: of all streams. ``fps`` (0.0: unknown). ``hidden``: further frames, which are decoded and not shown.
    """

    codec: str
    width: int
    height: int
    number: int
    coded: int
    packets: int = 0
    scans: int = 0
    fps: float = 0.0
    hidden: int = 0


def count_packets(size: int, units: int = 1) -> Parts:
    """Return a counter of packets of a file of so many bytes: looking at more would cost more than its bytes may.

    ``units``: of a packet that are counted one by one.
    """
    return Parts(units * min(1 << 20, 25_000 + size // 100), f"packets in {size} bytes", "give a shorter video")


def price_frames(found: CodedFrames, kept: int) -> Price:
    """Price decoding frames, of which ``kept`` are kept as RGB. Raises ``MediaProblem`` for an unknown codec."""
    if found.codec not in _CODECS:
        raise MediaProblem(f"has video of codec {found.codec!r}; known are {', '.join(CODECS)}")
    pixel, byte = _CODECS[found.codec]
    pixels = found.width * found.height
    times = (found.number + _PROBED * min(_PROBED_FRAMES, found.number)) / max(1, found.number)
    nanoseconds = times * (
        found.number * (pixel * pixels + _FRAME_NS) + byte * found.coded + _SCAN_NS * found.scans * pixels
    )
    again = 1 + _PROBED if found.hidden > found.number else 1  # all may lie before the first that is shown
    nanoseconds += again * found.hidden * (pixel * pixels + _FRAME_NS)
    nanoseconds += _SHOWN_NS * kept * pixels + 2 * _PACKET_NS * max(found.packets, found.number)
    more = ((found.scans, "further scans"), (found.hidden, "frames that are not shown"))
    beside = "".join(f" and {count} {name}" for count, name in more if count)
    what = f"is {found.codec} of {found.number} frames of {found.width} x {found.height} pixels{beside}"
    held = 3 * pixels * (min(found.number, _HELD_FRAMES) + kept) + 2 * found.coded
    return Price.of(nanoseconds, held + 3 * kept * pixels, 3 * kept * pixels, what, "give a shorter or smaller video")


def find_frames(data: bytes) -> CodedFrames:
    """Find the frames of the first stream of video in a file. Raises ``MediaProblem`` for what is no video here."""
    walk = next((walk for accepts, walk in _CONTAINERS if accepts(data)), None)
    if walk is None:
        raise MediaProblem(
            "is no video in a supported container (AVI, FLV, Matroska, MP4, MPEG program or transport stream, Ogg, "
            "QuickTime, WebM), or is corrupt"
        )
    parts = count_packets(len(data))
    try:
        found = walk(data, parts)
        check_tags(data, parts)
    except UNREADABLE as exc:
        raise MediaProblem("has a header of video that cannot be read; is it truncated or corrupt?") from exc
    if found.codec == "mjpeg":
        scans = data.count(b"\xff\xda")
        found = found._replace(scans=max(0, scans - found.number))
    return found


# ---------------------------------------------------------------------------------------------- MP4 and QuickTime


def _walk_mov(data: bytes, parts: Parts) -> CodedFrames:
    """Read the sample tables of the first track of video, and the runs of its fragments."""
    movie = find_box(data, 0, len(data), parts, b"moov")
    if movie is None:
        raise ValueError("no moov")
    for track in (box for box in walk_boxes(data, movie.start, movie.end, parts) if box.name == b"trak"):
        media = find_box(data, track.start, track.end, parts, b"mdia")
        handler = media and find_box(data, media.start, media.end, parts, b"hdlr")
        if media and handler and data[handler.start + 8 : handler.start + 12] == b"vide":
            break
    else:
        raise MediaProblem("has no stream of video")
    table = find_box(data, media.start, media.end, parts, b"minf", b"stbl")
    if table is None:
        raise ValueError("no table")
    boxes = {box.name: box for box in walk_boxes(data, table.start, table.end, parts)}
    entry = boxes[b"stsd"].start + 8
    name = data[entry + 4 : entry + 8]
    width, height = struct.unpack_from(">HH", data, entry + 8 + 24)
    count, coded = _sample_sizes(data, boxes)
    more, bytes_more = _count_fragments(data, parts)
    count, coded = count + more, coded + bytes_more
    count_packets(len(data)).take(count)
    codec = _FOURCC.get(name, name.decode("latin-1"))
    return CodedFrames(codec, width, height, count, coded, count, fps=_mov_rate(data, media, parts, count))


def _sample_sizes(data: bytes, boxes: dict[bytes, Box]) -> tuple[int, int]:
    """Return the number of a track's samples, and their bytes."""
    if b"stsz" not in boxes:
        box = boxes[b"stz2"]
        return struct.unpack_from(">L", data, box.start + 8)[0], len(data)
    box = boxes[b"stsz"]
    each, count = struct.unpack_from(">LL", data, box.start + 4)
    if each:
        return count, each * count
    listed = min(count, (box.end - box.start - 12) // 4)
    return count, int(np.frombuffer(data, ">u4", listed, box.start + 12).sum(dtype=np.int64))


def _count_fragments(data: bytes, parts: Parts) -> tuple[int, int]:
    count = coded = 0
    for box in walk_boxes(data, 0, len(data), parts):
        if box.name == b"mdat":
            coded += box.end - box.start
        if box.name != b"moof":
            continue
        for part in walk_boxes(data, box.start, box.end, parts):
            runs = walk_boxes(data, part.start, part.end, parts) if part.name == b"traf" else ()
            count += sum(struct.unpack_from(">L", data, run.start + 4)[0] for run in runs if run.name == b"trun")
    return (count, coded) if count else (0, 0)


def _mov_rate(data: bytes, media: Box, parts: Parts, count: int) -> float:
    head = find_box(data, media.start, media.end, parts, b"mdhd")
    if head is None or not count:
        return 0.0
    long = data[head.start] == 1
    scale, duration = struct.unpack_from(">LQ" if long else ">LL", data, head.start + (20 if long else 12))
    return count * scale / duration if duration else 0.0


# ---------------------------------------------------------------------------------------------- Matroska and WebM

_INSIDE = {0x18538067, 0x1F43B675, 0xA0, 0x1654AE6B, 0xE0}  # segment, cluster, group of blocks, tracks, video
_TRACK, _NUMBER, _TYPE, _CODEC, _WIDE, _HIGH, _EACH = 0xAE, 0xD7, 0x83, 0x86, 0xB0, 0xBA, 0x23E383
_BLOCKS = {0xA3, 0xA1}


def _walk_matroska(data: bytes, parts: Parts) -> CodedFrames:
    """Count the blocks of the first track of video."""
    tracks: list[dict[int, Any]] = []
    counts: dict[int, list[int]] = {}
    at = packets = 0
    while at + 2 < len(data):
        next(parts)
        name, start, size = read_element(data, at)
        if name == _TRACK:
            tracks.append({})
        if name in _INSIDE or name == _TRACK:
            at = start
            continue
        if size < 0:
            raise ValueError("no size")
        if name in _BLOCKS:
            packets += 1
            number, laced = data[start] & 127, data[start + 3] & 6
            counted = counts.setdefault(number, [0, 0])
            counted[0] += data[start + 4] + 1 if laced else 1
            counted[1] += size
        elif tracks and name in (_NUMBER, _TYPE, _CODEC, _WIDE, _HIGH, _EACH):
            value = data[start : start + min(size, 64)]
            tracks[-1].setdefault(name, value if name == _CODEC else int.from_bytes(value, "big"))
        at = start + size
    for track in tracks:
        if track.get(_TYPE) == 1:
            count, coded = counts.get(track.get(_NUMBER, 1), (0, 0))
            codec = track.get(_CODEC, b"").rstrip(b"\0")
            known = _MATROSKA.get(
                codec, "mpeg4" if codec.startswith((b"V_MPEG4", b"V_MS")) else codec.decode("latin-1")
            )
            rate = 1e9 / track[_EACH] if track.get(_EACH) else 0.0
            return CodedFrames(known, track.get(_WIDE, 0), track.get(_HIGH, 0), count, coded, packets, fps=rate)
    raise MediaProblem("has no stream of video")


# ---------------------------------------------------------------------------------------------- AVI


def _walk_avi(data: bytes, parts: Parts) -> CodedFrames:
    """Count the chunks of the first stream of video, or the entries of its index, which may name one repeatedly."""
    at, packets, stream, number = 0, 0, -1, -1
    counts: dict[bytes, list[int]] = {}
    found: tuple[str, int, int, float] | None = None
    video, rate = False, 0.0
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sL", data, at)
        start, packets = at + 8, next(parts)
        if name in (b"RIFF", b"LIST"):
            at = start + 4
            continue
        if name == b"strh":
            stream, video = stream + 1, data[start : start + 4] == b"vids"
            scale, each = struct.unpack_from("<LL", data, start + 20)
            rate = each / scale if scale else 0.0
        elif name == b"strf" and video and found is None:
            width, height = struct.unpack_from("<ll", data, start + 4)
            fourcc, number = data[start + 16 : start + 20], stream
            found = (_FOURCC.get(fourcc, fourcc.decode("latin-1")), width, abs(height), rate)
        elif name == b"idx1" and number >= 0:
            entries = sum(data.count(b"%02d" % number + kind, start, start + size) for kind in (b"dc", b"db"))
            counted = counts.setdefault(b"%02d" % number, [0, 0])
            counted[0] = max(counted[0], entries)
        elif name[2:] in (b"dc", b"db") and size:
            counted = counts.setdefault(name[:2], [0, 0])
            counted[0], counted[1] = counted[0] + 1, counted[1] + size
        at = start + size + (size & 1)
    if found is None:
        raise MediaProblem("has no stream of video")
    codec, width, height, rate = found
    count, coded = counts.get(b"%02d" % number, (0, 0))
    return CodedFrames(codec, width, height, count, coded, packets, fps=rate)


# ---------------------------------------------------------------------------------------------- streams without a table

_STARTS = {  # beginnings of pictures, by codec
    "mpeg2video": b"\0\0\1\0", "mpeg4": b"\0\0\1\xb6", "h264": b"\0\0\1\x09", "hevc": b"\0\0\1\x46"
}  # fmt: skip


def _is_stream(data: bytes) -> bool:
    """Tell whether a file begins as an MPEG transport or program stream, which may be damaged, does.

    A GIF begins with the first byte of a transport stream too, and MPEG without a container as one that was cut.
    """
    if data.startswith(b"\0\0\1\xb3"):
        return b"\0\0\1\xba" in data
    packets = b"\x47" in (data[:1], data[4:5]) and not data.startswith(b"GIF8")
    return packets or data.startswith(b"\0\0\1\xba")


def _walk_stream(data: bytes, _parts: Parts) -> CodedFrames:
    """Count beginnings of pictures in a stream of packets that has no table."""
    counts = {codec: data.count(start) for codec, start in _STARTS.items()}
    codec = max(counts, key=lambda each: counts[each])
    width = height = 0
    at = data.find(b"\0\0\1\xb3")
    if codec == "mpeg2video" and 0 <= at < len(data) - 8:
        sides = int.from_bytes(data[at + 4 : at + 7], "big")
        width, height = sides >> 12, sides & 4095
    return CodedFrames(codec, width, height, max(1, counts[codec]), len(data), len(data) // 188)


def _walk_flv(data: bytes, parts: Parts) -> CodedFrames:
    at, count, coded, packets, codec = 13, 0, 0, 0, "h264"
    while at + 11 <= len(data):
        kind, size, packets = data[at] & 31, int.from_bytes(data[at + 1 : at + 4], "big"), next(parts)
        if kind == 9 and size:
            count, coded = count + 1, coded + size
            codec = "flv" if data[at + 11] & 15 == 2 else "h264"
        at += 15 + size
    sides = [data.find(b"\0" + bytes((len(name),)) + name + b"\0", 0, 1 << 16) for name in (b"width", b"height")]
    width = height = 0
    if min(sides) >= 0:  # numbers of the script in front
        width, height = (
            int(struct.unpack_from(">d", data, at + skip)[0]) for at, skip in zip(sides, (8, 9), strict=True)
        )
    return CodedFrames(codec, width, height, count, coded, packets)


_OGG_STREAMS = (b"\x80theora", b"\x01vorbis", b"OpusHead", b"fishead\0")
_MIRRORED = bytes(int(f"{each:08b}"[::-1], 2) for each in range(256))


def _ogg_checksum(page: bytes) -> bytes:
    """Sum up a page: its CRC is that of zlib with the bits of each byte, and of the sum, mirrored."""
    plain = (page[:22] + bytes(4) + page[26:]).translate(_MIRRORED)
    return int(f"{zlib.crc32(plain, 0xFFFFFFFF) ^ 0xFFFFFFFF:032b}"[::-1], 2).to_bytes(4, "little")


def _walk_ogg(data: bytes, parts: Parts) -> CodedFrames:
    """Read the size from Theora's header, and count packets by the lacing of all pages."""
    at = data.find(b"\x80theora")
    if at < 0:
        raise MediaProblem("has no stream of video")
    width, height = (16 * each for each in struct.unpack_from(">HH", data, at + 10))
    place = count = 0
    bodies: dict[bytes, list[bytes]] = {}
    ends_inside: dict[bytes, bool] = {}
    while place + 27 <= len(data):
        parts.take(4)  # of which each costs four times what a box does, its checksum included
        lacing = data[place + 27 : place + 27 + data[place + 26]]
        start = place + 27 + len(lacing)
        page, serial = data[place : start + sum(lacing)], data[place + 14 : place + 18]
        if start + sum(lacing) > len(data) and page.startswith(b"OggS"):
            break  # it is cut off, and read by nobody
        # FFmpeg skips what is no whole page, and may find others in it, with comments that this walk does not see
        follows = bool(page[5] & 1) == ends_inside.get(serial, False)
        if not page.startswith(b"OggS") or not follows or _ogg_checksum(page) != page[22:26]:
            raise MediaProblem("is an Ogg with pages that are damaged; save it again")
        body = data[start : start + sum(lacing)]
        if (serial not in bodies or page[5] & 2) and not body.startswith(_OGG_STREAMS):
            raise MediaProblem("has a stream of another kind than Theora, Vorbis and Opus; save it without")
        bodies.setdefault(serial, []).append(body)
        ends_inside[serial] = lacing[-1:] == b"\xff"
        count += len(lacing) - lacing.count(b"\xff")
        place = start + len(body)
    for each in bodies.values():
        count_comments(b"".join(each), parts)
    return CodedFrames("theora", width, height, count, len(data), count)


_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_CONTAINERS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes, Parts], CodedFrames]], ...] = (
    (lambda head: head[4:8] in _BOXES, _walk_mov),
    (lambda head: head.startswith(b"\x1a\x45\xdf\xa3"), _walk_matroska),
    (lambda head: head.startswith(b"RIFF") and head[8:12] == b"AVI ", _walk_avi),
    (lambda head: head.startswith(b"FLV"), _walk_flv),
    (lambda head: head.startswith(b"OggS"), _walk_ogg),
    (_is_stream, _walk_stream),
)
