"""Reading of images: every kind of source, and every way in which one can be bad."""

from __future__ import annotations

import io
import os
import struct
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from trinity.preprocess.media.images import Transparency, image_digest, read_image
from trinity.preprocess.media_limits import MediaLimits, MediaProblem

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
    assert {getattr(image, "mode", None) for image in images} == {"RGB"}
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


@pytest.mark.parametrize("transparency", ["white", "drop"])
def test_alpha_is_the_same_whatever_way_it_comes_in(transparency: Transparency) -> None:
    rgba = np.dstack([PIXELS, np.full(PIXELS.shape[:2], 255, np.uint8)])
    rgba[0, :, 3] = 0
    shown = PIXELS.copy()
    if transparency == "white":
        shown[0] = 255
    arrays = [rgba, np.moveaxis(rgba, -1, 0), rgba / 255, rgba.astype(np.int64), rgba.astype(np.uint16) * 257]
    for source in (*arrays, Image.fromarray(rgba), encoded(Image.fromarray(rgba))):
        found = read_image(source, DEFAULT, transparency=transparency)
        assert np.array_equal(np.asarray(found), shown)
    with pytest.raises(MediaProblem, match="alpha and values that are not all in 0 to 255"):
        read_image(rgba.astype(np.int64) * 2, DEFAULT)


def test_a_palette_with_transparent_colours_keeps_its_colours() -> None:
    image = Image.fromarray(np.array([[0, 1]], np.uint8), mode=None).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    for transparency in (0, bytes([0, 128])):
        data = encoded(image, transparency=transparency)
        assert np.asarray(read_image(data, DEFAULT, transparency="drop")).tolist() == [[[10, 20, 30], [40, 50, 60]]]


def test_sixteen_bits_keep_their_high_bytes() -> None:
    deep = (np.arange(192, dtype=np.uint16) * 341).reshape(12, 16)
    for source in (deep, deep[:, :, None], deep[None], Image.fromarray(deep), encoded(Image.fromarray(deep))):
        assert np.array_equal(np.asarray(read_image(source, DEFAULT))[:, :, 0], deep >> 8)


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


class _Path:
    """Somebody's own path."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __fspath__(self) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


BAD: dict[str, tuple[Any, str]] = {
    "empty": (b"", "0 bytes"),
    "not an image": (b"GIF? no, only text", "not an image in a supported format"),
    "truncated": (PNG[: len(PNG) // 2], "truncated or corrupt"),
    "corrupt": (PNG[:60] + bytes(40) + PNG[100:], "truncated or corrupt"),
    "header only": (PNG[:20], ""),
    "bomb by Pillow's error": (png_header(20_000, 20_000), "max_pixels"),
    "bomb by Pillow's warning": (png_header(10_000, 10_000), "max_pixels"),
    "beyond max_pixels": (png_header(8_100, 8_000), "max_pixels allows 1 to 64000000"),
    "zero width": (png_header(0, 5), ""),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is an EPS, which is not accepted"),
    "missing": ("no/such/file.png", "there is no file 'no/such/file.png'"),
    "directory": (os.curdir, "not a regular file"),
    "device": ("/dev/zero", "not a regular file"),
    "made up by the kernel": ("/proc/self/environ", "is empty (0 bytes)"),
    "read for ever": ("/proc/kmsg", ""),
    "another user's": ("/proc/1/mem", ""),
    "nul in path": ("a\0b.png", "cannot read"),
    "endless path": ("x" * 100_000, "cannot read"),
    "url": ("https://example.org/a.png", "allow_urls"),
    "loud url": ("HTTP://example.org/a.png", "allow_urls"),
    "number": (17, "is a int"),
    "none": (None, "is a NoneType"),
    "list": ([[1, 2], [3, 4]], "is a list"),
    "two channels": (np.zeros((12, 16, 2), np.uint8), "shape [12, 16, 2]"),
    "batch": (np.zeros((1, 12, 16, 3), np.uint8), "shape [1, 12, 16, 3]"),
    "empty array": (np.zeros((0, 16, 3), np.uint8), "has no pixels"),
    "complex": (np.zeros((5, 5, 3), complex), "which are no pixels"),
    "words": (np.full((4, 4), "a"), "which are no pixels"),
    "objects": (np.full((4, 4), None), "which are no pixels"),
    "not a number": (np.full((5, 5, 3), np.nan), "values that are no numbers"),
    "endless": (np.full((5, 5, 3), np.inf, np.float16), "values that are no numbers"),
    "meta tensor": (torch.zeros((3, 4, 4), device="meta"), "cannot be read"),
    "sparse tensor": (torch.zeros((4, 4)).to_sparse(), "cannot be read"),
    "vast view": (np.broadcast_to(np.uint8(0), (1 << 30, 1 << 30, 3)), "max_pixels"),
    "vast tensor": (torch.zeros(1).expand(3, 1 << 20, 1 << 20), "max_pixels"),
    "path of bytes": (_Path(b"no/such"), "there is no file"),
    "path of nothing": (_Path(None), "cannot be read"),
    "path that raises": (_Path(OSError("gone")), "cannot be read"),
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


def test_images_decode_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both, load, came = threading.Barrier(2, timeout=120), ImageFile.ImageFile.load, set[int]()

    def meet(image: Any) -> Any:
        if threading.get_ident() not in came:
            came.add(threading.get_ident())
            both.wait()  # broken if one has to wait for the other
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", meet)
    with ThreadPoolExecutor(2) as pool:
        pictures = list(pool.map(lambda _: read_image(PNG, DEFAULT), range(2)))
    assert len({image_digest(picture) for picture in pictures}) == 1
