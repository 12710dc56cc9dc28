"""Bodies of requests that cost a server as much as its sender can make them cost; each is valid HTTP and JSON.

``list_attacks`` has two sorts: files that the bounds are to refuse, and the dearest ones that they let through.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import wave
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from support import costly_media
from support.serve_command import chat

MOST_BODY = 60 << 20  # bytes, below the server's default


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def save(image: Image.Image, form: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Make a picture that does not compress."""
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    numbers = np.random.default_rng(width).integers(0, 256, (height, width, *channels), dtype=np.uint8)
    return Image.fromarray(numbers)


def many_scans(width: int, height: int, count: int) -> bytes:
    """Make a progressive JPEG with its last scan ``count`` times more (valid: a scan may refine what it likes)."""
    data = save(Image.new("L", (width, height), 128), "JPEG", progressive=True, quality=30)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + data[-2:]


def flat_png(width: int, height: int, bits: int = 1, colour: int = 0) -> bytes:
    """Make a PNG of one colour: some kilobytes for any number of pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    row, pack = bytes((width * bits * channels + 7) // 8 + 1), zlib.compressobj(9)
    packed = b"".join([pack.compress(row) for _ in range(height)]) + pack.flush()
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def plain_ppm(pixels: int) -> bytes:
    """Make a picture whose numbers are text."""
    return b"P3\n%d %d\n255\n" % (pixels // 1000, 1000) + b"0 " * (3 * pixels // 1000 * 1000)


def animation(form: str, frames: int, side: int) -> bytes:
    first, *rest = (Image.new("RGB", (side, side), (each, 0, 0)) for each in range(frames))
    return save(first, form, save_all=True, append_images=rest)


def sound(seconds: float, rate: int = 8000) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(bytes(int(2 * seconds * rate)))
    return data.getvalue()


def picture(make: Callable[[], bytes], count: int = 1, kind: str = "image/png") -> Callable[[], bytes]:
    return lambda: chat("What is this?", count * (url(make(), kind),), max_tokens=2)


def schema(depth: int) -> bytes:
    """Ask for an answer by a schema that doubles at each level."""
    names: dict[str, Any] = {"d0": {"type": "string", "pattern": "(a?){50}b{3,9}"}}
    for level in range(1, depth):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        names[f"d{level}"] = {"type": "object", "properties": {"a": below, "b": below}, "required": ["a", "b"]}
    made = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"$ref": f"#/$defs/d{depth - 1}", "$defs": names}},
    }
    return chat("Write.", max_tokens=4, response_format=made)


ATTACKS: dict[str, Callable[[], bytes]] = {
    "jpeg of 6,000 scans": picture(lambda: many_scans(3000, 2999, 6000)),
    "jpeg of 40 scans": picture(lambda: many_scans(2000, 1500, 40)),
    "jpeg of 12 scans, 48 Mpixel": picture(lambda: many_scans(8000, 6000, 3)),
    "plain ppm": picture(lambda: plain_ppm(4_000_000)),
    "png of 64 Mpixel, 1 bit": picture(lambda: flat_png(8000, 8000)),
    "png of 36 Mpixel, 16 bits RGBA": picture(lambda: flat_png(6000, 6000, 16, 6)),
    "8 pngs of 16 Mpixel": picture(lambda: flat_png(4000, 4000), 8),
    "64 pngs of 1 Mpixel": picture(lambda: flat_png(1000, 1000, 8, 2), 64),
    "noise png, 12 Mpixel": picture(lambda: save(noise(4000, 3000), "PNG", compress_level=1)),
    "noise webp lossless, 4 Mpixel": picture(lambda: save(noise(2000, 2000), "WEBP", lossless=True, method=0)),
    "flat webp lossless, 60 Mpixel": picture(lambda: save(Image.new("RGB", (8000, 7500)), "WEBP", lossless=True)),
    "avif, 12 Mpixel": picture(lambda: save(noise(4000, 3000), "AVIF", quality=30, speed=10)),
    "tiff lzw, 48 Mpixel": picture(lambda: save(Image.new("RGB", (8000, 6000)), "TIFF", compression="tiff_lzw")),
    "jpeg of arithmetic codes": picture(lambda: costly_media.jpeg_of_arithmetic_codes(4000, 4000, 2 << 20)),
    "jpeg of 200,000 tables": picture(lambda: costly_media.jpeg_of_tables(200)),
    "ppm that is scaled": picture(lambda: costly_media.scaled_ppm(3600, 3600)),
    "bmp of runs": picture(lambda: costly_media.bmp_of_runs(6000, 3000)),
    "tiff whose strips repeat": picture(lambda: costly_media.tiff_of_strips(4000, 4000, 20_000)),
    "gif with a comment of 16 MB": picture(lambda: costly_media.gif_of_comments(65_000)),
    "png of 60 texts": picture(lambda: costly_media.png(64, 64, extra=costly_media.compressed_texts(60))),
    "avif of 300 hidden frames": picture(
        lambda: costly_media.avif_of_hidden_frames(costly_media.photograph(3000, 2000), 300)
    ),
    "gif of 200 frames": picture(lambda: animation("GIF", 200, 500)),
    "webp of 100 frames": picture(lambda: animation("WEBP", 100, 500)),
    "thin png": picture(lambda: flat_png(60_000, 2)),
    "body of 40 MB of numbers": lambda: chat("x", stop=[0] * (10 << 20)),
    "body of 40 MB of text": lambda: chat("word " * (8 << 20), max_tokens=1),
    "body, deep": lambda: b'{"messages": ' + b"[" * (1 << 20) + b"]" * (1 << 20) + b"}",
    "schema that doubles": lambda: schema(14),
    "template with much work": lambda: chat("x", max_tokens=1, chat_template_kwargs={"x": ["y"] * 10**5}),
    "sound": lambda: json.dumps(
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "input_audio",
                            "input_audio": {"data": base64.b64encode(sound(1200)).decode(), "format": "wav"},
                        }
                    ],
                }
            ]
        }
    ).encode(),
}


def list_attacks() -> dict[str, bytes]:
    """Make all bodies, by name."""
    made = {name: make() for name, make in ATTACKS.items()}
    return {name: body for name, body in made.items() if len(body) <= MOST_BODY}
