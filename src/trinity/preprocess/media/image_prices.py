"""Prices of encoded images: one table of the accepted formats, each with a walk over its structure.

``price_image`` finds the format, the size and the price of a file from its header and the skeleton of its parts: scans
of a JPEG, chunks of a PNG, strips of a TIFF, coded frames of an AVIF. It decodes nothing, and looks at so many parts of
a file as its one counter allows (``Parts``). What a header claims is charged even where the file ends early.

Constants are nanoseconds a pixel, sample or byte, measured with Pillow 13 where the reference decode of ``media_costs``
takes 2.2 ns a pixel. They stand near the expensive end of what files of a format cost.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from trinity.preprocess.media.boxes import Box, find_box, read_av1, walk_boxes
from trinity.preprocess.media.file_parts import UNREADABLE, Parts
from trinity.preprocess.media_limits import MediaProblem, Price

if TYPE_CHECKING:
    from PIL import Image

_PART_NS = 4_000.0  # a segment, chunk or block, in Pillow's own Python
_PYTHON_BYTE_NS = 250.0  # a byte that Pillow reads by itself
_COPY_NS = 0.15  # a byte that is copied
_UPRIGHT_NS = 1.5  # a pixel turned upright, and copied as RGB
_TO_RGB_NS = {"RGB": 0.6, "L": 1.0, "1": 1.5, "P": 8.0, "I": 2.0, "I;16": 5.0, "F": 2.0, "LA": 8.0, "PA": 8.0,
              "LAB": 15.0, "HSV": 20.0}  # fmt: skip
_OTHER_NS = 12.0  # modes of four channels, laid over white, and rare ones
_PROFILE_NS, _PROFILE_CMYK_NS, _PROFILE_SETUP_NS = 20.0, 70.0, 6e6  # of a colour profile: a pixel, and its tables
_MODE_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2}  # of a pixel in memory; others have 4
_RGB_BYTES = 4
_UNKNOWN_NS = 100.0  # a pixel of a file that cannot be looked into


class ImagePrice(NamedTuple):
    """Format of a file by Pillow's name, its size in pixels, and its price with the conversion to RGB."""

    format: str
    width: int
    height: int
    price: Price


class _Walked(NamedTuple):
    """Findings of a walk: size, Pillow's mode, nanoseconds and bytes of decoding, and a few words for errors."""

    width: int
    height: int
    mode: str
    nanoseconds: float
    passing: float
    why: str = ""
    instead: str = ""
    profile: bool = False


class _Format(NamedTuple):
    name: str
    accepts: Callable[[bytes], bool]  # given its first 32 bytes
    walk: Callable[[bytes, Parts], _Walked]


def price_image(data: bytes) -> ImagePrice:
    """Price an image file. Raises ``MediaProblem`` for a format that is not in the table, and for a broken header."""
    head = data[:32]
    if not data:
        raise MediaProblem("is empty (0 bytes)")
    for known in _FORMATS:
        if known.accepts(head):
            break
    else:
        raise MediaProblem(_explain_unknown(head))
    try:
        found = known.walk(data, Parts(instead="save it again as a plain JPEG or PNG"))
    except UNREADABLE as exc:
        raise MediaProblem(f"is a {known.name} whose header cannot be read; is it truncated or corrupt?") from exc
    what = f"is a {known.name} of {found.width} x {found.height} pixels{found.why}"
    decoding = Price.of(found.nanoseconds, found.passing, 0, what, found.instead)
    pixels = price_pixels(found.width, found.height, found.mode)
    if found.profile:
        pixel = _PROFILE_CMYK_NS if found.mode == "CMYK" else _PROFILE_NS
        pixels = pixels.plus(Price.of(_PROFILE_SETUP_NS + pixel * found.width * found.height))
    decoded = found.width * found.height * _MODE_BYTES.get(found.mode, 4)
    held = max(decoding.passing + decoded, pixels.passing) + len(data)
    total = Price(decoding.units + pixels.units, held, 0, what, found.instead)
    return ImagePrice(known.name, found.width, found.height, total)


def opens_as(data: bytes) -> list[str]:
    """List Pillow's names of the one format that a priced file may be opened as; a JPEG may be an MPO too."""
    name = next(each.name for each in _FORMATS if each.accepts(data[:32]))
    return ["JPEG", "MPO"] if name == "JPEG" else [name]


def price_object(image: Image.Image, data: bytes | None) -> ImagePrice:
    """Price an image of Pillow's that is not decoded yet, by the bytes of its file; by its size where it has none.

    Raises ``MediaProblem`` as ``price_image`` does.
    """
    known = {"MPO", *(each.name for each in _FORMATS)}
    if image.format not in known:
        raise MediaProblem(
            f"is an image of format {image.format} that is not decoded yet, and that format is not accepted; call its "
            "load() first"
        )
    try:
        found = price_image(data) if data else None
    except MediaProblem:
        if image.format == "PPM":
            raise
        found = None  # it begins elsewhere in its file
    frames, (width, height) = image.tell() + 1, image.size
    pixels = price_pixels(width, height, image.mode)
    if found is None or (found.width * found.height < width * height):
        price = pixels.plus(Price.of(_UNKNOWN_NS * width * height, 24 * width * height))
    else:
        price = found.price
    return ImagePrice(str(image.format), width, height, msgspec.structs.replace(price, units=price.units * frames))


def price_pixels(width: int, height: int, mode: str) -> Price:
    """Price the pixels of an image in Pillow's ``mode``: they are held, turned upright and made RGB."""
    pixels = width * height
    nanoseconds = pixels * (_UPRIGHT_NS + _TO_RGB_NS.get(mode, _OTHER_NS))
    held = pixels * (_MODE_BYTES.get(mode, 4) + 2 * _RGB_BYTES)
    return Price.of(nanoseconds, held, 0, f"is an image of {width} x {height} pixels in mode {mode}")


def _explain_unknown(head: bytes) -> str:
    known = ", ".join(sorted({each.name for each in _FORMATS}))
    for magic, name in _REFUSED:
        if re.match(magic, head, re.DOTALL):
            return f"is {name}, which is not accepted; give one of {known}"
    return f"is not an image in a supported format ({known}), or is corrupt"


# ---------------------------------------------------------------------------------------------- JPEG

_MARKER = re.compile(rb"\xff([^\xff\x00\xd0-\xd7])", re.DOTALL)
_PROGRESSIVE, _ARITHMETIC = {0xC2, 0xCA}, {0xC9, 0xCA}
_JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SAMPLE_NS = 0.7  # IDCT and colour of a sample
_SCAN_NS = 1.3  # a sample, in each scan of several
_SCAN_SETUP_NS = 20_000.0  # tables of a scan
_MOST_SEGMENT = 1 << 16  # bytes
_TABLE_BYTE_NS = 150.0  # of quantization tables, which Pillow unpacks
_JPEG_BYTE_NS, _PROGRESSIVE_BYTE_NS, _ARITHMETIC_BYTE_NS, _ARITHMETIC_SAMPLE_NS = 10.0, 28.0, 150.0, 4.0


def _walk_jpeg(data: bytes, parts: Parts) -> _Walked:
    """Count the scans of a JPEG and the samples that each covers."""
    kind = width = height = channels = 0
    components: dict[int, float] = {}
    scans, scanned, setup, tagged, at, before_scan, profile = 0, 0.0, 0.0, 0.0, 2, 2, False
    exif: list[bytes] = []
    pictures = b""  # its list of further ones, as an MPO has it
    for _ in parts:
        found = _MARKER.search(data, at)
        if found is None:
            break
        marker, at = found[1][0], found.end()
        if not scans:
            setup += _PYTHON_BYTE_NS * (found.start() - before_scan) + _PART_NS
        if marker == 0xD9 and scans:
            break
        if marker in (0xD8, 0xD9, 0x01):
            before_scan = at
            continue
        length = int.from_bytes(data[at : at + 2], "big")
        body = data[at + 2 : at + max(2, length)]
        at = before_scan = at + max(2, length)
        if marker in _JPEG_FRAMES:
            sides = struct.unpack(">HH", body[1:5])
            read = _jpeg_components(body, sides[1], sides[0])
            if sum(read.values()) > sum(components.values()):  # of several the largest
                kind, (height, width), components, channels = marker, sides, read, body[5]
        elif marker == 0xDA:
            named = body[1 : 1 + 2 * body[0] : 2]
            scanned += sum(components.get(each, 0.0) for each in named)
            scans, setup = scans + 1, setup + _SCAN_SETUP_NS
        elif marker == 0xDB:
            setup += _TABLE_BYTE_NS * length
        elif marker == 0xE1 and body.startswith(b"Exif\0\0"):
            exif.append(body[6:])
            setup += _COPY_NS * _MOST_SEGMENT * len(exif)  # each is joined to those before
        elif marker == 0xE2 and body.startswith(b"ICC_PROFILE\0"):
            profile = True
        elif marker == 0xE2 and body.startswith(b"MPF\0"):
            pictures = body[4:]
        elif marker == 0xED:
            setup += _PART_NS * body.count(b"8BIM")
    samples = sum(components.values())
    if not scans or not samples:
        raise ValueError("no scan")
    for tags in filter(None, (b"".join(exif), pictures)):
        nanoseconds, held = _price_tags(tags, parts)
        setup, tagged = setup + nanoseconds, tagged + held
    priced = _price_jpeg(kind, (width, height, channels), samples, scans, scanned, len(data), setup)
    return priced._replace(profile=profile, passing=priced.passing + tagged)


def _jpeg_components(body: bytes, width: int, height: int) -> dict[int, float]:
    """Return the samples of the components of a frame, by their id, which several may share."""
    read = [(body[6 + 3 * each], body[7 + 3 * each] >> 4, body[7 + 3 * each] & 15) for each in range(body[5])]
    across, down = max(each[1] for each in read), max(each[2] for each in read)
    if not across or not down:
        raise ValueError("no sampling factors")
    samples: dict[int, float] = {}
    for name, h, v in read:
        samples[name] = samples.get(name, 0.0) + (width + 15) * (height + 15) * (h * v) / (across * down)
    return samples


def _price_jpeg(
    kind: int, size: tuple[int, int, int], samples: float, scans: int, scanned: float, coded: int, setup: float
) -> _Walked:
    width, height, channels = size
    several = scans > 1 or kind in _PROGRESSIVE or scanned < samples
    each = _PROGRESSIVE_BYTE_NS if kind in _PROGRESSIVE else _JPEG_BYTE_NS
    sample = _SAMPLE_NS * samples + (_SCAN_NS * scanned if several else 0.0)
    if kind in _ARITHMETIC:
        each, sample = _ARITHMETIC_BYTE_NS, sample + _ARITHMETIC_SAMPLE_NS * max(samples, scanned)
    mode = {1: "L", 3: "RGB"}.get(channels, "CMYK")
    held = (2 * samples if several else 0.0) + 64 * width
    why = f" with {scans} scans" if several else ""
    return _Walked(width, height, mode, sample + each * coded + setup, held, why, "save it as a baseline JPEG")


# ---------------------------------------------------------------------------------------------- tags of TIFF and EXIF

_TAG_NS = 6_000.0
_VALUE_NS, _VALUE_HELD = 50.0, 48  # a number of a tag that Pillow decodes, and its bytes in memory
_RATIO_NS, _RATIO_HELD = 3_000.0, 200
_TEXTS, _RATIOS = (1, 2, 7), (5, 10)  # types of tags: texts and bytes, which are copied, and ratios
_SUB_TAGS = (0x8769, 0x8825, 0xA005)  # directories that hold further tags: EXIF, GPS, interoperability
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_LEVELS = 3  # of directories: the first, EXIF, interoperability
_Entry = tuple[int, int, int]  # type, count, place of the value
_Directory = dict[int, _Entry]  # by tag


def _price_tags(tiff: bytes, parts: Parts) -> tuple[float, float]:
    """Price the tags of EXIF data: nanoseconds, and bytes that are held."""
    try:
        entries, count = _read_tags(tiff, parts)
    except UNREADABLE:
        return _PART_NS, 0.0
    nanoseconds, held = _price_directories(tiff, entries, count, parts)
    values = sum(_TYPE_BYTES.get(kind, 1) * count for kind, count, _ in entries.values())
    return nanoseconds + _COPY_NS * min(values, 4 * len(tiff)), held + 3 * len(tiff)


def _price_directories(data: bytes, entries: _Directory, count: int, parts: Parts) -> tuple[float, float]:
    """Price the values of a directory of ``count`` entries and of the directories in it, all of which Pillow decodes.

    It skips values that are larger in all than the file.
    """
    level, ratios, numbers = [entries], 0, 0
    for _ in range(_LEVELS):
        for kind, many, _ in chain.from_iterable(each.values() for each in level):
            many = min(many, len(data) // _TYPE_BYTES.get(kind, 1))
            ratios += many if kind in _RATIOS else 0
            numbers += many if kind not in (*_RATIOS, *_TEXTS) else 0
        pointers = [each[name] for each in level for name in _SUB_TAGS if name in each]
        level = []
        for pointer in pointers:
            with suppress(*UNREADABLE):
                inside, more = _read_directory(data, _number(data, pointer), parts)
                level, count = [*level, inside], count + more
    nanoseconds = _TAG_NS * count + _RATIO_NS * ratios + _VALUE_NS * numbers
    return nanoseconds, _RATIO_HELD * ratios + _VALUE_HELD * numbers


def _order(data: bytes) -> str:
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None:
        raise ValueError("no byte order")
    return order


def _read_tags(data: bytes, parts: Parts) -> tuple[_Directory, int]:
    """Read the first directory of a TIFF, and count its entries."""
    order = _order(data)
    if struct.unpack_from(order + "H", data, 2)[0] == 43:
        start = struct.unpack_from(order + "Q", data, 8)[0]
    else:
        start = struct.unpack_from(order + "L", data, 4)[0]
    return _read_directory(data, start, parts)


def _read_directory(data: bytes, start: int, parts: Parts) -> tuple[_Directory, int]:
    """Read the entries of a directory, of each tag the first, and count them all."""
    order = _order(data)
    large = struct.unpack_from(order + "H", data, 2)[0] == 43
    head, form, inline = (8, "HHQQ", 8) if large else (2, "HHLL", 4)
    count = struct.unpack_from(order + ("Q" if large else "H"), data, start)[0]
    size = struct.calcsize(order + form)
    entries: _Directory = {}
    count = max(0, min(count, (len(data) - start) // size))
    parts.take(count)
    for number in range(count):
        place = start + head + number * size
        tag, kind, values, offset = struct.unpack_from(order + form, data, place)
        if _TYPE_BYTES.get(kind, 1) * values <= inline:
            offset = place + size - inline
        entries.setdefault(tag, (kind, values, offset))
    return entries, count


def _numbers(data: bytes, entry: _Entry) -> np.ndarray:
    """Read the whole numbers of a tag, as far as the file has them."""
    kind, count, at = entry
    size = {1: 1, 3: 2, 4: 4, 13: 4, 16: 8, 18: 8}.get(kind)
    if size is None:
        raise ValueError("no whole numbers")
    whole = min(count, max(0, len(data) - at) // size)
    return np.frombuffer(data, f"{_order(data)}u{size}", whole, min(at, len(data)))


def _number(data: bytes, entry: _Entry) -> int:
    return int(_numbers(data, entry)[0])


# ---------------------------------------------------------------------------------------------- PNG

_PNG_MODES = {0: "L", 2: "RGB", 3: "P", 4: "LA", 6: "RGBA"}
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_FILTERED_NS, _INFLATED_NS = 2.5, 4.5  # a byte of a row, a byte of compressed data
_EMPTY_NS = 70.0  # a byte of compressed data beyond what rows need: blocks that have tables and nothing else
_INTERLACED_NS = 2.5  # a pixel of an interlaced image
_MOST_TEXT = 1 << 20  # bytes that Pillow inflates of a compressed text
_KEY_BYTES = 24  # of a text that Pillow takes as EXIF: "exif", "Raw profile type exif"
_PNG_DATA = (b"IDAT", b"DDAT", b"fdAT")
_DEFLATE = 1032  # bytes that one byte of deflate data becomes at most


def _walk_png(data: bytes, parts: Parts) -> _Walked:
    """Walk the chunks of a PNG: what they inflate to, and the rows of the first image."""
    length, name, width, height, bits, colour, _, _, interlaced = struct.unpack_from(">L4sLLBBBBB", data, 8)
    channels = _PNG_CHANNELS.get(colour)
    if name != b"IHDR" or channels is None or bits not in (1, 2, 4, 8, 16):
        raise ValueError("no IHDR")
    at, coded, setup, text, held, profile, ended = 8, 0, 0.0, 0, 0.0, False, False
    for _ in parts:
        if at + 8 > len(data):
            break
        length, name = struct.unpack_from(">L4s", data, at)
        setup += _PART_NS
        ended = ended or (coded > 0 and name not in _PNG_DATA)  # Pillow takes all data in a row as the first image's
        if name in _PNG_DATA:
            coded += length if name != b"fdAT" or not ended else 0
        elif name in (b"zTXt", b"iTXt", b"iCCP", b"tEXt"):
            profile = profile or name == b"iCCP"
            inflated = length if name == b"tEXt" else min(_MOST_TEXT, length * _DEFLATE)
            text, setup = text + inflated, setup + 3.0 * inflated + _COPY_NS * 4 * length
            ratios = inflated // 8 if b"exif\0" in data[at + 8 : at + 8 + _KEY_BYTES] else 0
            setup, held = setup + _RATIO_NS * ratios, held + _RATIO_HELD * ratios
        elif name == b"eXIf":
            tags, more = _price_tags(data[at + 8 : at + 8 + length], parts)
            setup, held = setup + tags, held + more
        elif name == b"IHDR" and at > 8:
            raise ValueError("two IHDR")  # of which Pillow takes the last
        elif name == b"IEND":
            break
        at += 12 + length
    pixels = width * height
    raw = height * (1 + (width * channels * bits + 7) // 8)
    nanoseconds = _FILTERED_NS * raw + _INFLATED_NS * coded + 0.8 * pixels + setup
    nanoseconds += _EMPTY_NS * max(0, coded - raw - raw // 8 - 4096)
    nanoseconds += _INTERLACED_NS * pixels if interlaced else 0.0
    mode = {(16, 0): "I;16", (1, 0): "1"}.get((bits, colour), _PNG_MODES[colour])
    why = f", {channels} channels of {bits} bits" + (", interlaced" if interlaced else "")
    return _Walked(width, height, mode, nanoseconds, 4 * text + 64 * width + held, why, "give a smaller one", profile)


# ---------------------------------------------------------------------------------------------- GIF

_LZW_PIXEL_NS, _LZW_BYTE_NS = 2.5, 4.0


def _walk_gif(data: bytes, parts: Parts) -> _Walked:
    """Walk a GIF up to its first image, the only one that is read. It may be larger than the canvas."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << ((flags & 7) + 1) if flags & 128 else 0)
    setup = 0.0
    for seen in parts:
        kind = data[at]
        if kind == 0x2C:
            left, top, columns, rows = struct.unpack_from("<HHHH", data, at + 1)
            width, height = max(width, left + columns), max(height, top + rows)
            pixels = width * height
            coded = _gif_codes(data, at, parts)
            nanoseconds = _LZW_PIXEL_NS * pixels + _LZW_BYTE_NS * coded + setup + _PART_NS * seen
            return _Walked(width, height, "P", nanoseconds, pixels + 32 * width)
        at += 2 if kind == 0x21 else 1
        while kind == 0x21:
            size = data[at]
            setup, at = setup + _COPY_NS * 255 * next(parts), at + 1 + size
            if not size:
                break
    raise ValueError("no image")


def _gif_codes(data: bytes, at: int, parts: Parts) -> int:
    """Count the bytes from an image's descriptor to the end of its codes, or of the file after many blocks."""
    place = at + 11 + (3 << ((data[at + 9] & 7) + 1) if data[at + 9] & 128 else 0)
    for _ in range(parts.left):
        if place >= len(data) or not data[place]:
            return min(place, len(data)) - at
        place += 1 + data[place]
    return len(data) - at


# ---------------------------------------------------------------------------------------------- WebP

_LOSSY_NS, _LOSSY_BYTE_NS, _LOSSLESS_NS, _LOSSLESS_BYTE_NS, _CANVAS_NS = 5.0, 30.0, 5.0, 5.0, 2.0


def _walk_webp(data: bytes, parts: Parts) -> _Walked:
    """Walk the chunks of a WebP up to its first frame, the only one that is read, on its canvas."""
    width = height = 0
    at, nanoseconds, frames, profile, held = 12, 0.0, 0, False, 0.0
    for _ in parts:
        if at + 8 > len(data):
            break
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        body, nanoseconds = data[at + 8 : at + 8 + 32], nanoseconds + 500.0
        if name == b"VP8X":
            width, height = (1 + int.from_bytes(body[each : each + 3], "little") for each in (4, 7))
        elif name in (b"VP8 ", b"VP8L") and not frames:
            frames += 1
            sides = _webp_sides(name, body)
            width, height = (width, height) if width else sides
            nanoseconds += _webp_frame(name, sides, length)
        elif name == b"ICCP":
            profile = True
        elif name == b"ALPH":
            nanoseconds += _LOSSLESS_NS * width * height + _LOSSLESS_BYTE_NS * length
        elif name == b"ANMF" and not frames:
            at += 16  # its chunks lie inside
            length = 0
        elif name == b"EXIF":
            tags, more = _price_tags(data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0"), parts)
            nanoseconds, held = nanoseconds + tags, held + more
        at += 8 + length + (length & 1)
    if not frames:
        raise ValueError("no frame")
    pixels = width * height
    nanoseconds += _CANVAS_NS * pixels
    return _Walked(width, height, "RGBA", nanoseconds, 20 * pixels + 2 * len(data) + held, profile=profile)


def _webp_sides(name: bytes, body: bytes) -> tuple[int, int]:
    if name == b"VP8 ":
        width, height = struct.unpack_from("<HH", body, 6)
        return width & 0x3FFF, height & 0x3FFF
    bits = int.from_bytes(body[1:5], "little")
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1


def _webp_frame(name: bytes, sides: tuple[int, int], coded: int) -> float:
    pixels = sides[0] * sides[1]
    if name == b"VP8 ":
        return _LOSSY_NS * pixels + _LOSSY_BYTE_NS * coded
    return _LOSSLESS_NS * pixels + _LOSSLESS_BYTE_NS * coded


# ---------------------------------------------------------------------------------------------- BMP and PPM

_RAW_BYTE_NS = 0.5
_RUN_BYTE_NS = 600.0  # Pillow decodes runs by itself, two bytes each
_REST_NS = 35.0  # a pixel of a row that a code ends early: Pillow fills rows pixel by pixel
_COLOUR_NS = 250.0  # of a palette
_BMP_MODES = {1: "P", 4: "P", 8: "P", 16: "RGB", 24: "RGB", 32: "RGBA"}


def _walk_bmp(data: bytes, _parts: Parts) -> _Walked:
    size = struct.unpack_from("<L", data, 14)[0]
    if size == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
        compression = colours = 0
    else:
        width, height, _, bits, compression, *_, colours, _ = struct.unpack_from("<LlHHLLLLLL", data, 18)
    height, raw = abs(height), (width * bits + 31) // 32 * 4 * abs(height)
    runs = compression in (1, 2)
    nanoseconds = _RUN_BYTE_NS * len(data) if runs else _RAW_BYTE_NS * raw
    nanoseconds += 0.5 * width * height + _COLOUR_NS * min(colours, 1 << 16)
    nanoseconds += _REST_NS * width * min(height, data.count(b"\0\0")) if runs else 0.0
    why = ", run-length encoded" if runs else ""
    return _Walked(width, height, _BMP_MODES.get(bits, "RGBA"), nanoseconds, 2 * width * height * runs, why)


_PPM_GAP = rb"[ \t\n\v\f\r](?:[ \t\n\v\f\r]|#[^\r\n]*[\r\n])*"  # Pillow reads on in a number after a comment
_PPM_HEADER = re.compile(
    rb"(P[456])" + 2 * (_PPM_GAP + rb"(\d{1,10})") + rb"(?:" + _PPM_GAP + rb"(\d{1,10}))?[ \t\n\v\f\r]"
)
_PPM_HEAD_BYTES = 4096
_PPM_SAMPLE_NS = 500.0  # a sample that Pillow scales by itself


def _walk_ppm(data: bytes, _parts: Parts) -> _Walked:
    found = _PPM_HEADER.match(data[:_PPM_HEAD_BYTES])
    if found is None:
        raise ValueError("no header")
    kind, width, height = found[1], int(found[2]), int(found[3])
    if kind != b"P4" and found[4] is None:
        raise ValueError("no greatest value")
    most = 1 if kind == b"P4" else int(found[4])
    mode = {b"P4": "1", b"P5": "L", b"P6": "RGB"}[kind]
    samples = width * height * (3 if kind == b"P6" else 1)
    scaled = kind != b"P4" and most != 255 and not (kind == b"P5" and most == 65535)
    nanoseconds = (_PPM_SAMPLE_NS if scaled else _RAW_BYTE_NS) * samples + 0.5 * width * height
    nanoseconds += _PYTHON_BYTE_NS * _PPM_HEAD_BYTES
    why = f" with values up to {most}, which are scaled one by one" if scaled else ""
    mode = "I" if most > 255 and mode == "L" else mode
    return _Walked(width, height, mode, nanoseconds, samples * (4 if scaled else 0), why, "give values up to 255")


# ---------------------------------------------------------------------------------------------- TIFF

_TIFF_KINDS: dict[int, tuple[str, float, float]] = {  # name, nanoseconds a byte of rows, a byte of coded data
    1: ("raw", 0.5, 0.5),
    2: ("CCITT", 64.0, 20.0),
    3: ("group 3", 64.0, 20.0),
    4: ("group 4", 64.0, 20.0),
    5: ("LZW", 1.3, 2.0),
    7: ("JPEG", _SAMPLE_NS, _JPEG_BYTE_NS),
    8: ("deflate", 1.3, 3.0),
    32773: ("packbits", 0.6, 1.5),
    32946: ("deflate", 1.3, 3.0),
    34925: ("LZMA", 3.0, 28.0),
    50000: ("zstandard", 1.1, 3.0),
    50001: ("WebP", 2.0, _LOSSY_BYTE_NS),
}
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _ROWS = 256, 257, 258, 259, 262, 277, 278
_OFFSETS, _COUNTS, _PLANAR, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS = 273, 279, 284, 322, 323, 324, 325
_STRIP_NS = 3_000.0
_PHOTO_MODES = {2: "RGB", 3: "P", 5: "CMYK", 6: "RGB", 8: "LAB"}


def _walk_tiff(data: bytes, parts: Parts) -> _Walked:
    """Walk the strips or tiles of a TIFF's first image, the only one that is read."""
    tags, count = _read_tags(data, parts)
    if len(tags) < count:
        raise ValueError("a tag twice")  # of which Pillow takes the first that it does not skip, and libtiff another

    def one(tag: int, default: int) -> int:
        return _number(data, tags[tag]) if tag in tags else default

    width, height, kind = one(_WIDTH, 0), one(_HEIGHT, 0), one(_COMPRESSION, 1)
    if kind not in _TIFF_KINDS:
        raise MediaProblem(
            f"is a TIFF of compression {kind}, which is not accepted; save it with none, LZW, deflate, JPEG or group 4"
        )
    bits = int(_numbers(data, tags[_BITS]).max(initial=1)) if _BITS in tags else 1
    channels, planes = one(_SAMPLES, 1), one(_SAMPLES, 1) if one(_PLANAR, 1) == 2 else 1
    tiled = _TILE_OFFSETS in tags
    columns, rows = (one(_TILE_WIDTH, width), one(_TILE_HEIGHT, height)) if tiled else (width, one(_ROWS, height))
    rows = rows if tiled else max(1, min(rows, height))
    needed = -(-width // max(1, columns)) * -(-height // max(1, rows)) * planes
    given = tags.get(_TILE_OFFSETS if tiled else _OFFSETS, (4, needed, 0))[1]
    strips = max(needed, min(given, len(data)))
    row = (columns * bits * (channels // planes) + 7) // 8
    raw = strips * rows * row
    counts = tags.get(_TILE_COUNTS if tiled else _COUNTS)
    coded = len(data) * strips
    if counts:
        listed = _numbers(data, counts)  # of 8, 16, 32 or 64 bits
        coded = int(np.minimum(listed, min(len(data), np.iinfo(listed.dtype).max)).sum(dtype=np.uint64))
    name, row_ns, coded_ns = _TIFF_KINDS[kind]
    nanoseconds = row_ns * raw + coded_ns * coded + _STRIP_NS * strips + 0.5 * width * height
    decoding, decoded = _price_directories(data, tags, count, parts)
    nanoseconds += decoding
    values = sum(_TYPE_BYTES.get(each, 1) * many for each, many, _ in tags.values())
    why = f", compression {name}, of {strips} {'tiles' if tiled else 'strips'}"
    if kind == 7:
        scans = data.count(b"\xff\xda") * max(1, coded // len(data))  # tiles may share their bytes
        nanoseconds += scans / max(1, strips) * raw * _SCAN_NS * (scans > strips)
        coded_scans = scans > strips
        nanoseconds += (_PROGRESSIVE_BYTE_NS - coded_ns) * coded * coded_scans
        why += f" with {scans} scans" if coded_scans else ""
    held = rows * row * (4 if kind == 7 else 1) * planes + min(values, 2 * len(data)) * 4 + decoded
    mode = _PHOTO_MODES.get(one(_PHOTOMETRIC, 1), "I" if bits > 8 else "L")
    mode = "RGBA" if mode == "RGB" and channels > 3 else mode
    return _Walked(width, height, mode, nanoseconds, held, why, "save it as a JPEG or PNG", 34675 in tags)


_REFUSED: tuple[tuple[bytes, str], ...] = (
    (rb"P[123]", "a plain PPM, whose pixels are text"),
    (rb"P[0fyF7]", "a PPM of an uncommon kind"),
    (rb"%PDF", "a PDF"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "an EPS"),
    (rb"\x00\x00[\x01\x02]\x00", "an ICO or CUR, which holds other images"),
    (rb"icns", "an ICNS, which holds other images"),
    (rb"....ftyp(heic|heix|hevc|heim|heis)", "a HEIC"),
    (rb"\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51", "a JPEG 2000"),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "a JPEG XL"),
    (rb"8BPS", "a Photoshop file"),
    (rb"\s*<(\?xml|svg)", "an SVG"),
    (rb"DDS |qoif|SIMPLE|\x0a[\x00-\x05]\x01", "an image of a rare format"),
)


# ---------------------------------------------------------------------------------------------- AVIF

_AV1_NS, _AV1_BYTE_NS = 9.0, 70.0
_MOST_SHARED = 2  # times the bytes of a file, in its items and samples together
_SHARED = "is an AVIF whose items share their bytes; save it as a JPEG or PNG"
_AV1_HELD = 24  # bytes a pixel: planes of two frames, and two copies in RGBA


def _walk_avif(data: bytes, parts: Parts) -> _Walked:
    """Sum the coded items of an AVIF: its tiles, its alpha, and frames that are not shown. A sequence counts as one."""
    meta = find_box(data, 0, len(data), parts, b"meta")
    if meta is None:
        raise MediaProblem("is an AVIF without an image item; give one of its frames")
    inside = {box.name: box for box in walk_boxes(data, meta.start + 4, meta.end, parts)}
    coded = _avif_items(data, inside[b"iinf"], parts) if b"iinf" in inside else set()
    extents = _avif_places(data, inside, parts) if b"iloc" in inside else {}
    width, height = _avif_size(data, inside, parts)
    nanoseconds, pixels, bits, frames = 0.0, 0, 0, 0
    contents = [b"".join(data[start:end] for start, end in extents[item]) for item in sorted(coded & extents.keys())]
    for content in chain(contents, _first_samples(data, parts)):
        found = read_av1(content, parts)
        frames += found.frames
        pixels += found.width * found.height * found.frames
        bits += len(content)
        if bits > _MOST_SHARED * len(data):
            raise MediaProblem(_SHARED)
        width, height = max(width, 1), max(height, 1)
    nanoseconds = _AV1_NS * max(pixels, width * height) + _AV1_BYTE_NS * bits
    why = f" of {frames} coded frames and {bits} bytes"
    held = _AV1_HELD * width * height + 4 * pixels + len(data)
    profile = any(data.find(name, meta.start, meta.end) >= 0 for name in (b"colrprof", b"colrrICC"))
    return _Walked(width, height, "RGBA", nanoseconds, held, why, "save it as a JPEG or PNG", profile)


def _first_samples(data: bytes, parts: Parts) -> Iterator[bytes]:
    """Yield the first sample of each track of a sequence: its colours, and its alpha."""
    movie = find_box(data, 0, len(data), parts, b"moov")
    for track in walk_boxes(data, movie.start, movie.end, parts) if movie else ():
        if track.name != b"trak":
            continue
        table = find_box(data, track.start, track.end, parts, b"mdia", b"minf", b"stbl")
        boxes = {box.name: box.start for box in walk_boxes(data, table.start, table.end, parts)} if table else {}
        if b"stsz" not in boxes or not boxes.keys() & {b"stco", b"co64"}:
            continue
        each, _, first = struct.unpack_from(">LLL", data, boxes[b"stsz"] + 4)
        wide = b"stco" not in boxes
        place = struct.unpack_from(">Q" if wide else ">L", data, boxes[b"co64" if wide else b"stco"] + 8)[0]
        yield data[place : place + (each or first)]


def _avif_items(data: bytes, box: Box, parts: Parts) -> set[int]:
    """List the items that are coded as AV1."""
    first = box.start + (6 if data[box.start] == 0 else 8)
    found = set()
    for entry in walk_boxes(data, first, box.end, parts):
        wide = data[entry.start] == 3
        number = int.from_bytes(data[entry.start + 4 : entry.start + (8 if wide else 6)], "big")
        at = entry.start + (10 if wide else 8)
        if data[at : at + 4] == b"av01":
            found.add(number)
    return found


def _avif_places(data: bytes, inside: dict[bytes, Box], parts: Parts) -> dict[int, list[tuple[int, int]]]:
    """Read where the bytes of each item lie. Raises ``MediaProblem`` if items share their bytes many times."""
    box = inside[b"iloc"]
    version, at = data[box.start], box.start + 4
    sizes = int.from_bytes(data[at : at + 2], "big")
    offset_size, length_size, base_size, index_size = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    at += 2

    def take(count: int) -> int:
        nonlocal at
        at += count
        if at > box.end:
            raise ValueError("no place")
        return int.from_bytes(data[at - count : at], "big")

    places: dict[int, list[tuple[int, int]]] = {}
    held = 0
    for _ in range(take(4 if version == 2 else 2)):
        next(parts)
        item = take(4 if version == 2 else 2)
        inner = version in (1, 2) and take(2) & 15 == 1
        take(2)
        base = take(base_size) + (inside[b"idat"].start if inner and b"idat" in inside else 0)
        for _ in range(take(2)):
            take(index_size if version in (1, 2) else 0)
            start, length = base + take(offset_size), take(length_size)
            end = min(len(data), start + length) if length else len(data)
            places.setdefault(item, []).append((start, max(start, end)))
            held += max(0, end - start)
            if next(parts) and held > _MOST_SHARED * len(data):
                raise MediaProblem(_SHARED)
    return places


def _avif_size(data: bytes, inside: dict[bytes, Box], parts: Parts) -> tuple[int, int]:
    """Find the largest size that an item has."""
    properties = inside.get(b"iprp")
    found = properties and find_box(data, properties.start, properties.end, parts, b"ipco")
    if found is None:
        raise ValueError("no size")
    sizes = [
        struct.unpack_from(">LL", data, box.start + 4)
        for box in walk_boxes(data, found.start, found.end, parts)
        if box.name == b"ispe"
    ]
    width, height = max(sizes, key=lambda each: each[0] * each[1])
    return int(width), int(height)


# ---------------------------------------------------------------------------------------------- the table

_AVIF_BRANDS = (b"avif", b"avis", b"mif1", b"msf1")
_FORMATS: tuple[_Format, ...] = (
    _Format("JPEG", lambda head: head.startswith(b"\xff\xd8\xff"), _walk_jpeg),
    _Format("PNG", lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"), _walk_png),
    _Format("GIF", lambda head: head.startswith((b"GIF87a", b"GIF89a")), _walk_gif),
    _Format("WEBP", lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP", _walk_webp),
    _Format("AVIF", lambda head: head[4:8] == b"ftyp" and head[8:12] in _AVIF_BRANDS, _walk_avif),
    _Format("BMP", lambda head: head.startswith(b"BM"), _walk_bmp),
    _Format("TIFF", lambda head: head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), _walk_tiff),
    _Format("PPM", lambda head: head[:1] == b"P" and head[1:2] in (b"4", b"5", b"6"), _walk_ppm),
)
