"""Reading of images: every kind of source, and every way in which one can be bad."""

from __future__ import annotations

import io
import os
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trinity.preprocess.media import MediaLimits, MediaProblem, image_digest, read_image

PIXELS = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)
DEFAULT = MediaLimits()


def encoded(image: Image.Image, form: str = "PNG", **kwargs: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **kwargs)
    return buffer.getvalue()


PNG = encoded(Image.fromarray(PIXELS))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixel."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def sources(folder: Path) -> list[Any]:
    path = folder / "a.png"
    path.write_bytes(PNG)
    return [str(path), path, PNG, bytearray(PNG), memoryview(PNG), Image.fromarray(PIXELS), PIXELS, PIXELS[::1].copy()]


def test_every_source_gives_the_same_pixels(tmp_path: Path) -> None:
    images = [read_image(source, DEFAULT) for source in sources(tmp_path)]
    assert all(np.array_equal(np.asarray(image), PIXELS) for image in images)
    assert {image.mode for image in images} == {"RGB"}
    assert len({image_digest(image) for image in images}) == 1


def test_a_digest_tells_shapes_apart() -> None:
    flat = PIXELS.reshape(6, 32, 3)  # the same bytes
    assert image_digest(read_image(flat, DEFAULT)) != image_digest(read_image(PIXELS, DEFAULT))


def test_grey_arrays_become_rgb() -> None:
    grey = PIXELS[:, :, 0]
    for array in (grey, grey[:, :, None]):
        assert np.array_equal(np.asarray(read_image(array, DEFAULT)), np.stack([grey] * 3, axis=2))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    assert np.array_equal(np.asarray(read_image(image, DEFAULT)), np.asarray(image.convert("RGB")))


def test_transparency_lies_over_white() -> None:
    rgba = np.dstack([PIXELS, np.full(PIXELS.shape[:2], 255, np.uint8)])
    rgba[0, :, 3] = 0
    for source in (rgba, Image.fromarray(rgba), encoded(Image.fromarray(rgba))):
        seen = np.asarray(read_image(source, DEFAULT))
        assert (seen[0] == 255).all()
        assert np.array_equal(seen[1:], PIXELS[1:])


def test_a_palette_with_a_transparent_colour_lies_over_white() -> None:
    image = Image.fromarray(np.array([[0, 1]], np.uint8), mode=None).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    data = encoded(image, transparency=0)
    assert np.asarray(read_image(data, DEFAULT)).tolist() == [[[255, 255, 255], [40, 50, 60]]]


def test_sixteen_bits_keep_their_high_byte() -> None:
    deep = (np.arange(192, dtype=np.uint16) * 300).reshape(12, 16)
    seen = np.asarray(read_image(encoded(Image.fromarray(deep)), DEFAULT))
    assert np.array_equal(seen[:, :, 0], deep >> 8)


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to see it upright
    data = encoded(Image.fromarray(PIXELS), "PNG", exif=exif)
    assert np.array_equal(np.asarray(read_image(data, DEFAULT)), np.rot90(PIXELS, -1))
    assert np.array_equal(np.asarray(read_image(Image.open(io.BytesIO(data)), DEFAULT)), np.rot90(PIXELS, -1))


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(read_image(data, DEFAULT))[0, 0].tolist() == [255, 0, 0]


BAD: dict[str, tuple[Any, str]] = {
    "empty": (b"", "0 bytes"),
    "not an image": (b"GIF? no, only text", "not an image in a supported format"),
    "truncated": (PNG[: len(PNG) // 2], "truncated or corrupt"),
    "corrupt": (PNG[:60] + bytes(40) + PNG[100:], "truncated or corrupt"),
    "header only": (PNG[:20], ""),
    "bomb by Pillow's error": (png_header(20_000, 20_000), "decompression bomb"),
    "bomb by Pillow's warning": (png_header(10_000, 10_000), "decompression bomb"),
    "beyond max_pixels": (png_header(8_100, 8_000), "max_pixels allows 1 to 64000000"),
    "zero width": (png_header(0, 5), ""),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "supported format"),
    "missing": ("no/such/file.png", "there is no file 'no/such/file.png'"),
    "directory": (os.curdir, "not a regular file"),
    "device": ("/dev/zero", "not a regular file"),
    "nul in path": ("a\0b.png", "cannot read"),
    "endless path": ("x" * 100_000, "cannot read"),
    "url": ("https://example.org/a.png", "allow_urls"),
    "loud url": ("HTTP://example.org/a.png", "allow_urls"),
    "number": (17, "is a int"),
    "none": (None, "is a NoneType"),
    "list": ([[1, 2], [3, 4]], "is a list"),
    "float array": (PIXELS / 255.0, "float64 with shape [12, 16, 3]"),
    "channels first": (np.zeros((3, 12, 16), np.uint8), "shape [3, 12, 16]"),
    "batch": (np.zeros((1, 12, 16, 3), np.uint8), "shape [1, 12, 16, 3]"),
    "empty array": (np.zeros((0, 16, 3), np.uint8), "has no pixels"),
    "float image": (Image.new("F", (4, 4)), "floating-point"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sources_say_why(name: str) -> None:
    source, why = BAD[name]
    with pytest.raises(MediaProblem) as caught:
        read_image(source, DEFAULT)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_bomb_is_refused_where_warnings_are_only_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(MediaProblem, match="10000 x 10000 pixels"):
            read_image(png_header(10_000, 10_000), DEFAULT)


def test_a_closed_image_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    with Image.open(tmp_path / "a.png") as image:
        pass
    with pytest.raises(MediaProblem, match="cannot be decoded"):
        read_image(image, DEFAULT)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MediaProblem, match="not a regular file"):
        read_image(tmp_path / "pipe", DEFAULT)


def test_limits_hold_for_every_source(tmp_path: Path) -> None:
    few_pixels = MediaLimits(max_pixels=12 * 16 - 1)
    few_bytes = MediaLimits(max_image_bytes=len(PNG) - 1)
    for source in sources(tmp_path):
        with pytest.raises(MediaProblem, match="16 x 12 pixels"):
            read_image(source, few_pixels)
        if not isinstance(source, (Image.Image, np.ndarray)):
            with pytest.raises(MediaProblem, match="max_image_bytes"):
                read_image(source, few_bytes)
    assert read_image(PNG, MediaLimits(max_pixels=12 * 16, max_image_bytes=len(PNG))).size == (16, 12)


def test_one_lazy_image_read_by_many_threads(tmp_path: Path) -> None:
    large = np.random.default_rng(1).integers(0, 255, (400, 400, 3), dtype=np.uint8)
    for _ in range(3):
        image = Image.open(io.BytesIO(encoded(Image.fromarray(large))))
        seen: list[str] = []
        threads = [
            threading.Thread(target=lambda i=image, s=seen: s.append(image_digest(read_image(i, DEFAULT))))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [image_digest(Image.fromarray(large))] * 6


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = self.path.removeprefix("/")
        if page.startswith("to-"):
            targets = {"to-image": "/image", "to-file": "file:///etc/hostname", "to-self": "/to-self"}
            self.send_response(302)
            self.send_header("Location", targets[page])
            self.end_headers()
            return
        self.send_response(404 if page == "missing" else 200)
        self.end_headers()
        if page == "drip":
            self._drip()
        else:
            self.wfile.write(PNG if page == "image" else bytes(100_000) if page == "large" else b"<html>")

    def _drip(self) -> None:
        try:
            for _ in range(400):  # twenty seconds, unless the reader leaves
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass  # the reader has left, as it should

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pages = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    pages.daemon_threads = True
    thread = threading.Thread(target=pages.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{pages.server_address[1]}"
    pages.shutdown()
    pages.server_close()
    thread.join()


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


OPEN = MediaLimits(allow_urls=True, url_timeout_s=2.0, max_image_bytes=50_000)


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("page", ["image", "to-image"])
def test_urls_are_read_where_allowed(server: str, page: str) -> None:
    assert np.array_equal(np.asarray(read_image(f"{server}/{page}", OPEN)), PIXELS)


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("missing", "404"),
        ("html", "not an image"),
        ("large", "max_image_bytes is 50000"),
        ("to-file", "cannot be fetched"),
        ("to-self", "cannot be fetched"),
    ],
)
def test_bad_urls_say_why(server: str, page: str, why: str) -> None:
    with pytest.raises(MediaProblem, match=why):
        read_image(f"{server}/{page}", OPEN)


@pytest.mark.usefixtures("no_proxy")
def test_a_server_that_drips_or_is_not_there_cannot_hold_a_thread(server: str) -> None:
    began = time.monotonic()
    with pytest.raises(MediaProblem, match=r"url_timeout_s \(0\.2 s\)"):
        read_image(f"{server}/drip", MediaLimits(allow_urls=True, url_timeout_s=0.2))
    assert time.monotonic() - began < 10
    with pytest.raises(MediaProblem, match="cannot be fetched"):
        read_image("http://127.0.0.1:1/a.png", OPEN)
