"""No file that people have is rejected for its cost: photographs, scans, screenshots, animations, sounds and videos."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice, product

import numpy as np
import pytest
from PIL import Image

from support.costly_media import encode, photograph, wav
from support.video_files import encode_video
from trinity.preprocess.media.audio import price_sound
from trinity.preprocess.media.images import price_picture
from trinity.preprocess.media.video_prices import find_frames, price_frames
from trinity.preprocess.media_limits import MediaLimits, Price, price_processing, sum_prices, unit_s

LIMITS = MediaLimits()
PROCESSED = 12_845_056  # pixels that Qwen2-VL's published processor makes of a large image
PROCESSED_BYTES = 36 * PROCESSED
PHOTOS = ((640, 480), (1024, 768), (1600, 1200), (2048, 1536), (3264, 2448), (4032, 3024), (5184, 3888), (6000, 4000),
          (6960, 4640), (8064, 6048))  # fmt: skip
SCREENS = ((1280, 720), (1440, 900), (1920, 1080), (2560, 1440), (3024, 1964), (3840, 2160))
PAGES = ((1240, 1754), (1654, 2339), (2480, 3508), (4960, 7016))  # A4 at 150 to 600 dots an inch


def photo(width: int, height: int, form: str, **how: object) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned: dict[str, object] = {}
    if form in ("JPEG", "WEBP"):
        turned["exif"] = exif
    return encode(_photograph(width, height), form, **turned, **how)


@cache
def _tile() -> Image.Image:
    return photograph(1024, 1024)


def _photograph(width: int, height: int) -> Image.Image:
    made = Image.new("RGB", (width, height))
    for left, top in product(range(0, width, 1024), range(0, height, 1024)):
        made.paste(_tile(), (left, top))
    return made


def screen(width: int, height: int, mode: str, form: str, **how: object) -> bytes:
    letters = np.random.default_rng(2).integers(0, 2, (height // 16 + 1, width // 8 + 1), dtype=np.uint8) * 255
    drawn = Image.fromarray(letters).resize((width, height), Image.Resampling.NEAREST)
    return encode(drawn.convert("RGB").convert(mode), form, **how)


def animation(width: int, height: int, form: str) -> bytes:
    frames = [photograph(width, height).rotate(9 * turn) for turn in range(12)]
    return encode(frames[0], form, save_all=True, append_images=frames[1:])


def flac(seconds: int, channels: int, rate: int) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    wave = np.sin(np.arange(seconds * rate) * 0.05)[:, None] * np.linspace(0.3, 0.6, channels)
    soundfile.write(file, wave, rate, format="FLAC")
    return file.getvalue()


def video(codec: str, container: str, seconds: int, width: int, height: int) -> bytes:
    pytest.importorskip("av")
    return encode_video(codec, container, 25 * seconds, width, height)


def list_ordinary() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Yield the kind, a name and the maker of each file, small and large ones in turns."""
    photos: list[tuple[str, dict[str, object]]] = [
        ("JPEG", {"quality": 75}), ("JPEG", {"quality": 92}), ("JPEG", {"quality": 92, "progressive": True}),
        ("JPEG", {"quality": 80, "progressive": True}), ("JPEG", {"quality": 97, "subsampling": 0}),
        ("WEBP", {"method": 0}), ("AVIF", {"speed": 10}), ("PNG", {"compress_level": 1}), ("TIFF", {}), ("BMP", {}),
    ]  # fmt: skip
    for (form, how), (width, height) in product(photos, PHOTOS):
        if form in ("JPEG", "WEBP") or width * height <= 21_000_000:
            yield "image", f"{form} {how} {width}x{height}", partial(photo, width, height, form, **how)
    screens: list[tuple[str, str, dict[str, object]]] = [
        ("RGB", "PNG", {}), ("RGBA", "PNG", {}), ("P", "PNG", {}), ("L", "PNG", {"optimize": True}), ("P", "GIF", {}),
        ("RGB", "WEBP", {"lossless": True, "method": 0}), ("RGB", "JPEG", {}), ("RGB", "BMP", {}), ("RGB", "PPM", {}),
    ]  # fmt: skip
    for (mode, form, how), (width, height) in product(screens, SCREENS):
        yield "image", f"{mode} {form} {how} {width}x{height}", partial(screen, width, height, mode, form, **how)
    packed = [
        ("1", "group4"), ("1", "group3"), ("L", "tiff_lzw"), ("RGB", "tiff_lzw"), ("RGB", "tiff_deflate"),
        ("RGB", "jpeg"), ("L", "jpeg"), ("RGB", "packbits"), ("RGB", "zstd"),
    ]  # fmt: skip
    for (mode, kind), (width, height) in product(packed, PAGES):
        yield (
            "image",
            f"{mode} TIFF {kind} {width}x{height}",
            partial(screen, width, height, mode, "TIFF", compression=kind),
        )
    for form, (width, height) in product(("GIF", "WEBP", "PNG", "TIFF"), ((320, 240), (480, 360), (800, 600))):
        yield "image", f"animation {form} {width}x{height}", partial(animation, width, height, form)
    lengths = (1, 10, 60, 180, 600)
    for seconds, channels, rate in product(lengths, (1, 2), (8000, 16_000, 44_100, 48_000)):
        if seconds * channels * rate < 30_000_000:
            yield "audio", f"wav {seconds} s {channels} x {rate}", partial(wav, seconds * rate, channels, rate)
            yield "audio", f"flac {seconds} s {channels} x {rate}", partial(flac, seconds, channels, rate)
    codecs = (("libx264", "mp4"), ("libx264", "matroska"), ("mpeg4", "mov"), ("libvpx", "webm"), ("mjpeg", "avi"))
    sizes = ((320, 240), (640, 360), (848, 480), (1280, 720), (1920, 1080))
    for (codec, container), (width, height), seconds in product(codecs, sizes, (1, 3)):
        name = f"{codec} {container} {width}x{height} {seconds} s"
        yield "video", name, partial(video, codec, container, seconds, width, height)


def check_ordinary(kind: str, name: str, make: Callable[[], bytes]) -> None:
    """Price a file as a request of it is priced; raises if it is rejected."""
    data = make()
    unit_s()
    began = time.thread_time()
    if kind == "image":
        found = price_picture(data, LIMITS)
        price = found.price.plus(price_processing(found.width * found.height, PROCESSED, PROCESSED_BYTES))
    elif kind == "audio":
        price = price_sound(data, 16_000, LIMITS).price
    else:
        frames = find_frames(data)
        kept = min(frames.number, 32)
        price = price_frames(frames, kept).plus(Price(0.0, 0, PROCESSED_BYTES))
    spent = time.thread_time() - began
    cost = sum_prices([price], LIMITS, 1, [kind], name)
    assert 0 < cost.cpu_s < LIMITS.max_media_cpu_s
    assert spent <= (0.05 + 0.02 * len(data) / (1 << 20)) * max(1.0, unit_s() / 6e-4), (name, spent)


ORDINARY = list(list_ordinary())
QUICK = [each for each in ORDINARY if each[0] != "video" or "320x240 1 s" in each[1]]


def test_there_are_300() -> None:
    assert len(ORDINARY) >= 300


@pytest.mark.parametrize("number", range(0, len(QUICK), 19))
def test_an_ordinary_file_is_accepted(number: int) -> None:
    check_ordinary(*QUICK[number])


def test_a_phone_s_largest_photograph_is_accepted() -> None:
    largest = [each for each in ORDINARY if "8064x6048" in each[1] and "progressive" in each[1]]
    for each in islice(largest, 1):
        check_ordinary(*each)


@pytest.mark.slow
def test_no_ordinary_file_is_rejected() -> None:
    for each in ORDINARY:
        check_ordinary(*each)
