"""Valid media that cost far more to decode than their bytes suggest, made by hand from the structure of formats."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageCms


def encode(image: Image.Image, form: str, **how: object) -> bytes:
    made = io.BytesIO()
    image.save(made, form, **how)
    return made.getvalue()


def jpeg_of_scans(width: int, height: int, scans: int, colour: str = "L") -> bytes:
    """Make a progressive JPEG whose last scan, of some 20 bytes, stands there so many more times."""
    plain = encode(Image.new(colour, (width, height), "grey"), "JPEG", progressive=True, quality=30)
    last = plain.rindex(b"\xff\xda")
    return plain[:-2] + plain[last:-2] * scans + plain[-2:]


def chunk(name: bytes, body: bytes) -> bytes:
    """Make a chunk of a PNG."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(
    width: int, height: int, bits: int = 8, colour: int = 2, *, interlaced: bool = False, extra: bytes = b""
) -> bytes:
    """Make a PNG of zeros whose rows are filtered by Paeth's predictor, which costs the most."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    packed = zlib.compressobj(9)
    data = b""
    for left, top, across, down in passes if interlaced else [(0, 0, 1, 1)]:
        columns, rows = len(range(left, width, across)), len(range(top, height, down))
        row = b"\4" + bytes((columns * channels * bits + 7) // 8)
        data += b"".join(packed.compress(row) for _ in range(rows if columns else 0))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, int(interlaced)))
    head += chunk(b"PLTE", bytes(range(256)) * 3) if colour == 3 else b""
    body = chunk(b"IDAT", data + packed.flush()) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + extra + body


def plain_ppm(width: int, height: int) -> bytes:
    """Make a PPM whose pixels are text."""
    return b"P3\n%d %d\n255\n" % (width, height) + b"0 " * (3 * width * height)


def scaled_ppm(width: int, height: int, most: int = 254) -> bytes:
    """Make a binary PPM whose samples go up to a value that Pillow scales in Python."""
    samples = 3 * width * height * (2 if most > 255 else 1)
    return b"P6\n%d %d\n%d\n" % (width, height, most) + bytes(samples)


def bmp_of_runs(width: int, height: int, run: int = 1) -> bytes:
    """Make a BMP of run-length codes, each of so few pixels."""
    row = bytes((run, 7)) * (width // run) + bytes((width % run, 7)) * bool(width % run) + b"\0\0"
    pixels, palette = row * height + b"\0\1", b"".join(bytes((each, 0, 255 - each, 0)) for each in range(256))
    offset = 14 + 40 + len(palette)
    head = struct.pack("<2sLHHL", b"BM", offset + len(pixels), 0, 0, offset)
    return head + struct.pack("<LllHHLLllLL", 40, width, height, 1, 8, 1, len(pixels), 0, 0, 256, 0) + palette + pixels


def tiff_of_strips(width: int, height: int, times: int) -> bytes:
    """Make a grey TIFF whose two strips, nearly all of the image and its last row, are listed so many times."""
    tags = [
        (256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1),
        (273, 4, 2 * times, 0), (277, 3, 1, 1), (278, 4, 1, height - 1), (279, 4, 2 * times, 0),
    ]  # fmt: skip
    start = 8 + 2 + 12 * len(tags) + 4
    offsets, counts = start, start + 8 * times
    pixels = counts + 8 * times
    values = {273: offsets, 279: counts}
    entries = b"".join(struct.pack("<HHLL", tag, kind, many, values.get(tag, value)) for tag, kind, many, value in tags)
    lists = struct.pack("<LL", pixels, pixels) * times + struct.pack("<LL", width * (height - 1), width) * times
    return b"II*\0" + struct.pack("<LH", 8, len(tags)) + entries + bytes(4) + lists + bytes(width * height)


def gif_of_comments(blocks: int) -> bytes:
    """Make a GIF with a comment of so many blocks before its image."""
    plain = encode(Image.new("P", (16, 16)), "GIF")
    head = 13 + (3 << ((plain[10] & 7) + 1) if plain[10] & 128 else 0)
    return plain[:head] + b"!\xfe" + (b"\xff" + b"c" * 255) * blocks + b"\0" + plain[head:]


def photograph(width: int, height: int, grain: float = 6.0) -> Image.Image:
    """Make what compresses like a photograph: waves of colour under grain, of a tile that repeats."""
    side = 512
    rows, columns = np.mgrid[0:side, 0:side] * (2 * np.pi / side)
    noise = np.random.default_rng(7).normal(0.0, grain, (side, side, 3))
    waves = np.stack([np.sin(5 * columns + 3 * rows), np.cos(8 * columns), np.sin(4 * rows)], -1)
    tile = np.clip(128 + 80 * waves + noise, 0, 255).astype(np.uint8)
    times = (-(-height // side), -(-width // side), 1)
    return Image.fromarray(np.ascontiguousarray(np.tile(tile, times)[:height, :width]))


def jpeg_of_arithmetic_codes(width: int, height: int, coded: int) -> bytes:
    """Make a grey JPEG of arithmetic codes: any bytes are some picture."""
    plain = encode(Image.new("L", (width, height)), "JPEG")
    tables = plain[plain.index(b"\xff\xdb") : plain.index(b"\xff\xc0")]
    frame = struct.pack(">BBHBHHBBBB", 0xFF, 0xC9, 11, 8, height, width, 1, 1, 0x11, 0)
    scan = struct.pack(">BBHBBBBBB", 0xFF, 0xDA, 8, 1, 1, 0, 0, 63, 0)
    noise = np.random.default_rng(3).integers(0, 255, coded, dtype=np.uint8).tobytes()
    return b"\xff\xd8" + tables + frame + scan + noise + b"\xff\xd9"


def avif_of_hidden_frames(image: Image.Image, times: int) -> bytes:
    """Make an AVIF whose coded frame stands there so many times."""
    plain = encode(image, "AVIF", speed=10, quality=50)
    place = plain.index(b"iloc")
    extent = plain.index(struct.pack(">H", 1), place + 14)  # one extent: its offset and length follow
    start, length = struct.unpack(">LL", plain[extent + 2 : extent + 10])
    body = plain[start : start + length]
    head = plain[: extent + 6] + struct.pack(">L", length * times) + plain[extent + 10 : start - 8]
    return head + struct.pack(">L", 8 + length * times) + b"mdat" + body * times


def wav(samples: int, channels: int, rate: int, bits: int = 16) -> bytes:
    """Make a wav of noise."""
    data = np.random.default_rng(5).integers(0, 256, samples * channels * bits // 8, dtype=np.uint8).tobytes()
    block = channels * bits // 8
    form = struct.pack("<HHLLHH", 1, channels, rate, rate * block, block, bits)
    body = b"WAVEfmt " + struct.pack("<L", len(form)) + form + b"data" + struct.pack("<L", len(data)) + data
    return b"RIFF" + struct.pack("<L", len(body)) + body


def compressed_texts(count: int, size: int = 1 << 20) -> bytes:
    """Make chunks of a PNG that each inflate to a mebibyte of text."""
    packed = zlib.compress(b"t" * (size - 1), 9)
    return b"".join(chunk(b"zTXt", b"k%d\0\0" % number + packed) for number in range(count))


def jpeg_of_tables(segments: int) -> bytes:
    """Make a JPEG with segments of a thousand quantization tables each, of which Pillow unpacks all."""
    plain = encode(Image.new("L", (16, 16)), "JPEG")
    table = b"\0" + bytes(range(1, 65))
    segment = b"\xff\xdb" + struct.pack(">H", 2 + 1000 * len(table)) + table * 1000
    return plain[:2] + segment * segments + plain[2:]


def exif_of_ratios(count: int) -> bytes:
    """Make EXIF data of an image that lies on its side, and one tag of so many ratios."""
    tags = struct.pack("<HHLL", 0x0112, 3, 1, 6) + struct.pack("<HHLL", 0x9999, 5, count, 38)
    return b"II*\0" + struct.pack("<LH", 8, 2) + tags + bytes(4) + b"\1\2\3\4" * (2 * count)


def png_of_empty_blocks(count: int, name: bytes = b"IDAT") -> bytes:
    """Make a PNG with so many blocks of deflate before its rows, which have tables of codes and nothing else.

    ``name``: of the chunk that holds them; the two bytes before them stand in a chunk IDAT of their own.
    """
    bits: list[int] = []

    def put(value: int, length: int) -> None:
        bits.extend(value >> each & 1 for each in range(length))

    lengths = {18: 1, 1: 2, 0: 2}  # of the codes of code lengths: 18 is 0; 0 is 10; 1 is 11
    for value, length in ((0, 1), (2, 2), (0, 5), (0, 5), (15, 4)):
        put(value, length)
    for symbol in (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15):
        put(lengths.get(symbol, 0), 3)
    for value, length in ((0, 1), (127, 7), (0, 1), (107, 7), (3, 2), (3, 2), (0, 1)):  # 256 zeros, 1, 1; end of block
        put(value, length)
    blocks = np.packbits(np.tile(np.array(bits, np.uint8), 8 * -(-count // 8)), bitorder="little").tobytes()
    rows = bytes(16 * 17)
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = b"\x78\x9c" + blocks + packed.compress(rows) + packed.flush() + struct.pack(">I", zlib.adler32(rows))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 0, 0, 0, 0))
    body = data[2:]
    if name == b"fdAT":
        head += chunk(b"fcTL", struct.pack(">LLLLLHHBB", 0, 16, 16, 0, 0, 1, 1, 0, 0))
        body = struct.pack(">L", 1) + body
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data[:2]) + chunk(name, body) + chunk(b"IEND", b"")


def bmp_of_short_rows(width: int, height: int) -> bytes:
    """Make a BMP of run-length codes whose rows end after one pixel."""
    pixels, offset = b"\1\7\0\0" * height + b"\0\1", 54 + 1024
    head = struct.pack("<2sLHHL", b"BM", offset + len(pixels), 0, 0, offset)
    return (
        head + struct.pack("<LllHHLLllLL", 40, width, height, 1, 8, 1, len(pixels), 0, 0, 256, 0) + bytes(1024) + pixels
    )


def gif_of_clear_codes(count: int) -> bytes:
    """Make a GIF of one pixel with so many codes before it that clear the decoder's table."""
    codes = np.array([256] * count + [0, 257])
    bits = (codes[:, None] >> np.arange(9) & 1).astype(np.uint8).ravel()
    data = np.packbits(bits, bitorder="little").tobytes()
    parts = [data[each : each + 255] for each in range(0, len(data), 255)]
    blocks = b"".join(bytes((len(each),)) + each for each in parts)
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0xF7, 0, 0) + bytes(768)
    return head + b"," + struct.pack("<HHHHBB", 0, 0, 1, 1, 0, 8) + blocks + b"\0;"


def jpeg_of_names(width: int, height: int, names: bytes) -> bytes:
    """Make a JPEG of four components that have these names."""
    plain = encode(Image.new("L", (16, 16)), "JPEG")
    tables = plain[plain.index(b"\xff\xdb") : plain.index(b"\xff\xc0")]
    codes = plain[plain.index(b"\xff\xc4") : plain.index(b"\xff\xda")]
    frame = struct.pack(">BBHBHHB", 0xFF, 0xC0, 20, 8, height, width, 4) + b"".join(
        bytes((each, 0x11, 0)) for each in names
    )
    return (
        b"\xff\xd8"
        + tables
        + frame
        + codes
        + b"\xff\xda\0\x0e\4"
        + b"".join(bytes((each, 0)) for each in names)
        + b"\0\x3f\0"
        + bytes(20)
        + b"\xff\xd9"
    )


def tiff_of_shared_scans(across: int, scans: int) -> bytes:
    """Make a TIFF of so many tiles each way, all of which are one JPEG of many scans."""
    tile, count = jpeg_of_scans(256, 256, scans), across * across
    tags = [
        (256, 4, 1, 256 * across), (257, 4, 1, 256 * across), (258, 3, 1, 8), (259, 3, 1, 7), (262, 3, 1, 1),
        (277, 3, 1, 1), (322, 4, 1, 256), (323, 4, 1, 256), (324, 4, count, 0), (325, 4, count, 0),
    ]  # fmt: skip
    start = 8 + 2 + 12 * len(tags) + 4
    values = {324: start, 325: start + 4 * count}
    entries = b"".join(struct.pack("<HHLL", tag, kind, many, values.get(tag, value)) for tag, kind, many, value in tags)
    lists = struct.pack("<L", start + 8 * count) * count + struct.pack("<L", len(tile)) * count
    return b"II*\0" + struct.pack("<LH", 8, len(tags)) + entries + bytes(4) + lists + tile


def profile_of_elements(count: int) -> bytes:
    """Make an sRGB profile with so many matrices and curves in a row, which all lie at two places of it."""
    matrix = b"matf" + bytes(4) + struct.pack(">HH12f", 3, 3, 1, 0, 0, 0, 1, 0, 0, 0, 1, *3 * (0.001,))
    segment = (
        b"curf" + bytes(4) + struct.pack(">HH", 1, 0) + b"parf" + bytes(4) + struct.pack(">HH4f", 0, 0, 1.01, 1, 0, 0)
    )
    curves = b"cvst" + bytes(4) + struct.pack(">HH", 3, 3) + struct.pack(">LL", 36, len(segment)) * 3 + segment
    first = 16 + 8 * count
    places = [(first, len(matrix)), (first + len(matrix), len(curves))]
    listed = b"".join(struct.pack(">LL", *places[each % 2]) for each in range(count))
    elements = b"mpet" + bytes(4) + struct.pack(">HHL", 3, 3, count) + listed + matrix + curves
    plain = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    found = [
        struct.unpack_from(">4sLL", plain, 132 + 12 * each) for each in range(struct.unpack_from(">L", plain, 128)[0])
    ]
    tags = {name: plain[at : at + size] for name, at, size in found} | {b"D2B0": elements}
    table, body, start = struct.pack(">L", len(tags)), b"", 132 + 12 * len(tags)
    for name, content in tags.items():
        table += struct.pack(">4sLL", name, start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    return struct.pack(">L", start + len(body)) + plain[4:8] + b"\x04\x40\0\0" + plain[12:128] + table + body


def box(name: bytes, *content: bytes) -> bytes:
    """Make a box of the ISO base media file format."""
    body = b"".join(content)
    return struct.pack(">L4s", 8 + len(body), name) + body


def avif_of_units(size: int, unit: bytes = b"\x12\0", each: int = 32_000) -> bytes:
    """Make an AVIF of so many bytes, whose items hold so many AV1 units each."""
    step = each * len(unit)
    items = range(size // step)
    infe = (box(b"infe", b"\2\0\0\0" + struct.pack(">HH", item + 1, 0) + b"av01\0") for item in items)
    iinf = box(b"iinf", bytes(4) + struct.pack(">H", len(items)), *infe)
    ispe = box(b"iprp", box(b"ipco", box(b"ispe", struct.pack(">LLL", 0, 64, 64))))

    def head(place: int) -> bytes:
        places = (struct.pack(">HHHLL", item + 1, 0, 1, place + item * step, step) for item in items)
        iloc = box(b"iloc", bytes(4) + b"\x44\0" + struct.pack(">H", len(items)), *places)
        return box(b"ftyp", b"avif\0\0\0\0avif") + box(b"meta", bytes(4), iinf, iloc, ispe)

    return head(len(head(0)) + 8) + box(b"mdat", unit * (each * len(items)))


def avif_of_tracks(size: int, count: int) -> bytes:
    """Make an AVIF of so many bytes, all of which are the first sample of each of its tracks."""
    table = box(b"stsz", struct.pack(">LLL", 0, size, 1)) + box(b"stco", struct.pack(">LLL", 0, 1, 0))
    track = box(b"trak", box(b"mdia", box(b"minf", box(b"stbl", table))))
    ispe = box(b"iprp", box(b"ipco", box(b"ispe", struct.pack(">LLL", 0, 64, 64))))
    return (
        box(b"ftyp", b"avif\0\0\0\0avif")
        + box(b"meta", bytes(4), ispe)
        + box(b"moov", track * count)
        + box(b"mdat", bytes(size))
    )


def sequence_header() -> bytes:
    """Make an AV1 unit with the header of a sequence of 21 operating points, which is long to read."""
    bits = "000" + "0" + "0" + "0" + "0" + f"{20:05b}" + ("0" * 12 + "00001") * 21 + f"{5:04b}{5:04b}" + "1" * 12
    packed = np.packbits([int(each) for each in bits]).tobytes().ljust(56, b"\0")
    return b"\x0a" + bytes((len(packed),)) + packed


def movie_of_boxes(size: int) -> bytes:
    """Make an MP4 of one frame, and fragments that hold so many bytes of empty boxes."""
    entry = box(b"avc1", bytes(24), struct.pack(">HH", 64, 64), bytes(50))
    table = box(b"stsd", struct.pack(">LL", 0, 1), entry) + box(b"stsz", struct.pack(">LLL", 0, 10, 1))
    media = box(b"hdlr", bytes(8), b"vide", bytes(12)) + box(b"minf", box(b"stbl", table))
    inside = box(b"free") * 32_000
    fragments = box(b"moof", inside) * (size // len(inside))
    return box(b"ftyp", b"isom") + box(b"moov", box(b"trak", box(b"mdia", media))) + fragments


def jpeg_of_directories(count: int, tags: int = 5400) -> bytes:
    """Make a JPEG with so many segments of EXIF, each of which is a directory of so many tags."""
    entries = b"".join(struct.pack("<HHLL", 1 + tag, 3, 1, 1) for tag in range(tags))
    plain = encode(Image.new("RGB", (16, 16)), "JPEG")
    return jpeg_with_exif(plain, (b"II*\0" + struct.pack("<LH", 8, tags) + entries,) * count)


def jpeg_with_exif(plain: bytes, parts: tuple[bytes, ...]) -> bytes:
    """Put segments of EXIF before everything else of a JPEG."""
    bodies = (b"Exif\0\0" + part for part in parts)
    return plain[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", 2 + len(body)) + body for body in bodies) + plain[2:]


def png_of_headers(*sides: int) -> bytes:
    """Make a PNG with a header for each of these sides, of which Pillow takes the last; its rows fit that."""
    plain = png(sides[-1], sides[-1])
    heads = (chunk(b"IHDR", struct.pack(">LLBBBBB", side, side, 8, 2, 0, 0, 0)) for side in sides[:-1])
    return plain[:8] + b"".join(heads) + plain[8:]


def jpeg_of_frames(plain: bytes, marker: int, side: int, *, at_the_end: bool) -> bytes:
    """Put another header of a frame into a JPEG: before its first scan, or at its end."""
    frame = b"\xff" + bytes((marker,)) + struct.pack(">HBHHB", 17, 8, side, side, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    place = len(plain) - 2 if at_the_end else plain.index(b"\xff\xda")
    return plain[:place] + frame + plain[place:]


def tiff_of_tags(entries: list[tuple[int, int, int, int]], pixels: bytes) -> bytes:
    """Make a TIFF of entries: tag, type, count, value. Pixels stand in the place of an offset of -1."""
    start = 8 + 2 + 12 * len(entries) + 4
    listed = (struct.pack("<HHLL", tag, kind, many, start if at < 0 else at) for tag, kind, many, at in entries)
    return b"II*\0" + struct.pack("<LH", 8, len(entries)) + b"".join(listed) + bytes(4) + pixels


def tiff_of_skipped_tags(side: int) -> bytes:
    """Make a TIFF whose first width and height are larger than the file, so that Pillow takes those that follow."""
    row = (side + 7) // 8
    sides = [(tag, 4, *each) for tag in (256, 257) for each in ((1 << 23, -1), (1, side))]
    rest = [(258, 3, 1, 1), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, -1), (277, 3, 1, 1), (278, 4, 1, side)]
    return tiff_of_tags([*sides, *rest, (279, 4, 1, row * side)], struct.pack("<L", 10) + bytes(row * side - 4))


def jpeg_of_joined_exif(segments: int) -> bytes:
    """Make a JPEG whose EXIF lies in so many segments, which are one tag of ratios together."""
    each = 65_527
    count = (each * segments - 100) // 8
    tags = struct.pack("<HHLL", 0x0112, 3, 1, 6) + struct.pack("<HHLL", 0x011A, 5, count, 60)
    tags += struct.pack("<HHLL", 0x0128, 3, 1, 2)
    tiff = (b"II*\0" + struct.pack("<LH", 8, 3) + tags).ljust(60, b"\0") + b"\1\2\3\4" * (2 * count)
    plain = encode(Image.new("RGB", (16, 16)), "JPEG")
    return jpeg_with_exif(plain, tuple(tiff[at : at + each] for at in range(0, len(tiff), each)))


def jpeg_of_further_pictures(ratios: int) -> bytes:
    """Make a JPEG whose list of further pictures (CIPA DC-007), which Pillow reads at once, has a tag of ratios."""
    listed = [(0xB000, 7, 4, 0x30303130), (0xB001, 4, 1, 2), (0xB002, 7, 32, 62), (0xC000, 5, ratios, 94)]
    tags = b"".join(struct.pack("<HHLL", *each) for each in listed) + bytes(4)
    body = b"MPF\0II*\0" + struct.pack("<LH", 8, len(listed)) + tags + bytes(32) + b"\1\0\0\0\2\0\0\0" * ratios
    plain = encode(Image.new("RGB", (16, 16)), "JPEG")
    return plain[:2] + b"\xff\xe2" + struct.pack(">H", 2 + len(body)) + body + plain[2:]


def exif_of_one_tag(count: int) -> bytes:
    """Make EXIF data whose orientation is so many ratios."""
    return b"II*\0" + struct.pack("<LHHHLLL", 8, 1, 0x0112, 5, count, 26, 0) + b"\1\2\3\4" * (2 * count)


def tiff_of_exif(count: int) -> bytes:
    """Make a TIFF of 8 x 8 pixels whose EXIF directory is one tag of so many ratios."""
    sides = [(tag, 4, 1, 8) for tag in (256, 257)]
    rest = [(258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, 8)]
    start = 8 + 2 + 12 * 10 + 4
    directory = struct.pack("<HHHLLL", 1, 0x829A, 5, count, start + 18, 0) + b"\1\2\3\4" * (2 * count)
    return tiff_of_tags([*sides, *rest, (279, 4, 1, 64), (0x8769, 4, 1, -1)], directory)
