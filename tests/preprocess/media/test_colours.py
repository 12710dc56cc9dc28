"""Images reach a model as a viewer shows them, whatever their samples, profiles and transparent parts."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, TiffImagePlugin

import trinity
from support.checkpoint_files import checkpoint
from support.image_reader import image_reader
from trinity.errors import BadMedia
from trinity.preprocess.media.images import decode_rgb, read_image
from trinity.preprocess.media.media_markup import IMAGE_TEXT
from trinity.preprocess.media_limits import MediaLimits, MediaProblem
from trinity.preprocess.processor import RequestProcessor

NOISE = np.random.default_rng(7).integers(0, 256, (40, 56, 4), dtype=np.uint8)
DEFAULT = MediaLimits()


def saved(image: Image.Image, form: str = "PNG", **more: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **more)
    return buffer.getvalue()


def png(depth: int, kind: int, rows: list[bytes], width: int, key: bytes = b"") -> bytes:
    """Write a PNG of any depth by hand: Pillow writes neither 4 bits of grey nor 16 bits of colour."""
    head = struct.pack(">IIBBBBB", width, len(rows), depth, kind, 0, 0, 0)
    chunks = [(b"IHDR", head), *([(b"tRNS", key)] if key else [])]
    chunks += [(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def seen(source: Any, **options: Any) -> list[Any]:
    return np.asarray(read_image(source, DEFAULT, **options)).tolist()


HIDING = {
    "RGBA": lambda: Image.fromarray(NOISE),
    "LA": lambda: Image.fromarray(NOISE).convert("LA"),
    "PA": lambda: Image.fromarray(NOISE).convert("LA").convert("PA"),
    "RGBa": lambda: Image.fromarray(NOISE).convert("RGBa"),
    "La": lambda: Image.fromarray(NOISE).convert("LA").convert("La"),
}


@pytest.mark.parametrize("mode", HIDING)
def test_what_is_hidden_is_the_same_for_every_picture_under_it(mode: str) -> None:
    """Two pictures that differ only where nothing shows are one to the model, and two where alpha is dropped."""
    make: Callable[[], Image.Image] = HIDING[mode]
    hidden = NOISE[..., 3] < 100
    pictures = []
    for value in (0, 200):
        image = make()
        bands = list(image.split()) if mode != "PA" else [image.convert("LA").getchannel("L"), image.getchannel("A")]
        alpha = np.where(hidden, 0, np.asarray(bands[-1]))
        colours = [np.where(hidden & (alpha == 0), value, np.asarray(band)) for band in bands[:-1]]
        if mode in ("RGBa", "La"):
            image = Image.merge(mode, [Image.fromarray(np.where(hidden, 0, each)) for each in (*colours, alpha)])
        else:
            merged = [Image.fromarray(each.astype(np.uint8)) for each in (*colours, alpha)]
            image = Image.merge("LA" if mode == "PA" else mode, merged)
        pictures.append(read_image(image, DEFAULT))
    first, second = map(np.asarray, pictures)
    assert np.array_equal(first, second)
    assert (np.asarray(pictures[0])[hidden] == 255).all()
    if mode in ("RGBA", "LA", "PA"):
        dropped = np.asarray(read_image(image, DEFAULT, transparency="drop"))
        assert (dropped[hidden] == 200).all()


def test_one_transparent_value_counts_in_its_own_samples() -> None:
    assert seen(png(4, 0, [bytes([0x03, 0x3F])], 4, b"\0\3"))[0] == [[0] * 3, [255] * 3, [255] * 3, [255] * 3]
    assert seen(png(4, 0, [bytes([0x03, 0x3F])], 4, b"\0\3"), transparency="drop")[0][1] == [51] * 3
    assert seen(png(2, 0, [bytes([0b00011011])], 4, b"\0\1"))[0] == [[0] * 3, [255] * 3, [170] * 3, [255] * 3]
    assert seen(png(1, 0, [bytes([0b01000000])], 2, b"\0\0"))[0] == [[255] * 3, [255] * 3]
    wide = png(16, 0, [struct.pack(">3H", 300, 301, 65535)], 3, struct.pack(">H", 300))
    assert seen(wide)[0] == [[255] * 3, [1] * 3, [255] * 3]
    colours = png(16, 2, [struct.pack(">6H", 0, 0, 5, 65535, 1, 2)], 2, struct.pack(">3H", 0, 0, 5))
    with pytest.raises(MediaProblem, match="16 bits, one of which is transparent; convert it to 8 bits"):
        read_image(colours, DEFAULT)
    assert seen(colours, transparency="drop")[0] == [[0, 0, 0], [255, 0, 0]]


def test_grey_of_many_bits_keeps_its_high_bytes() -> None:
    wide = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    grey = Image.fromarray(wide)
    for source in (saved(grey), saved(grey, "TIFF"), saved(grey, "PPM"), grey, wide, np.stack([wide] * 3, axis=2)):
        assert np.array_equal(np.asarray(read_image(source, DEFAULT))[..., 0], wide >> 8)
    twisted = TiffImagePlugin.ImageFileDirectory_v2()
    twisted[262] = 0  # white is zero
    data = saved(grey, "TIFF", tiffinfo=twisted)
    assert Image.open(io.BytesIO(data)).tag_v2[262] == 0  # type: ignore[attr-defined]
    assert np.array_equal(np.asarray(read_image(data, DEFAULT))[..., 0], 255 - (wide >> 8))
    colours = png(16, 2, [struct.pack(">6H", 0, 255, 256, 65535, 1, 513)], 2)
    assert seen(colours)[0] == [[0, 0, 1], [255, 0, 2]]


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_samples_without_a_range_are_refused_by_name(kind: Any) -> None:
    image = Image.fromarray(NOISE[..., 0].astype(kind))
    for source in (image, saved(image, "TIFF")):
        with pytest.raises(MediaProblem, match=r"has samples of mode '[IF]', .*; convert it to 8 bits a channel first"):
            read_image(source, DEFAULT)


def profile_of(gamma: float, primaries: list[tuple[float, float]] | None = None) -> bytes:
    """Make a profile by hand, version 2: of grey, or with the primaries' XYZ (D50) of a matrix."""
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"

    def xyz(values: Any) -> bytes:
        return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(each * 65536) for each in values))

    tags = {b"wtpt": xyz((0.9642, 1.0, 0.8249)), b"kTRC": curve}
    if primaries is not None:
        tags = {b"wtpt": tags[b"wtpt"], **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)}
        tags |= {name: xyz(each) for name, each in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries, strict=True)}
    text = b"desc\0\0\0\0" + struct.pack(">I", 2) + b"x\0" + bytes(78)
    tags = {b"desc": text, b"cprt": b"text\0\0\0\0x\0\0\0", **tags}
    table, body, at = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += name + struct.pack(">II", at + len(body), len(content))
        body += content
    space = b"GRAY" if primaries is None else b"RGB "
    head = struct.pack(">I4sI4s4s4s", at + len(body), b"\0\0\0\0", 0x02400000, b"mntr", space, b"XYZ ")
    head += struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp") + bytes(28)
    return head + struct.pack(">3i", 63190, 65536, 54061) + bytes(48) + table + body


ADOBE_RGB: list[Any] = [(0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)]
SRGB: list[Any] = [(0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410)]


def test_colours_of_a_profile_become_srgb() -> None:
    """Adobe RGB's (128, 128, 128) is sRGB's within a level or two; its green of half is a green beyond sRGB's."""
    image = Image.new("RGB", (4, 4), (100, 200, 100))
    wide = profile_of(563 / 256, ADOBE_RGB)
    (red, green, blue), *_ = seen(saved(image, icc_profile=wide))[0]
    linear = (np.array([100, 200, 100]) / 255) ** (563 / 256)
    to_srgb = np.linalg.inv(np.array(SRGB).T) @ np.array(ADOBE_RGB).T @ linear
    coded = np.where(to_srgb < 0.0031308, 12.92 * to_srgb, 1.055 * np.clip(to_srgb, 0, 1) ** (1 / 2.4) - 0.055)
    assert np.abs(np.array([red, green, blue]) - np.clip(coded, 0, 1) * 255).max() <= 3
    assert abs(red - 100) > 20, "the control: a plain conversion shows another colour"
    for form in ("PNG", "TIFF", "WEBP"):
        more = {"lossless": True} if form == "WEBP" else {}
        lossless = saved(image, form, icc_profile=wide, **more)
        assert seen(lossless)[0][0] == [red, green, blue]
        assert seen(Image.open(io.BytesIO(lossless)))[0][0] == [red, green, blue]
    transparent = image.copy()
    transparent.putalpha(0)
    assert seen(saved(transparent, icc_profile=wide))[0][0] == [255, 255, 255]
    transparent.putalpha(255)
    assert seen(saved(transparent, icc_profile=wide))[0][0] == [red, green, blue]


def test_a_grey_profile_counts_for_grey_images() -> None:
    image = Image.new("L", (4, 4), 100)
    light = seen(saved(image, icc_profile=profile_of(1.0)))[0][0]
    expected = (1.055 * (100 / 255) ** (1 / 2.4) - 0.055) * 255
    assert len(set(light)) == 1
    assert abs(light[0] - expected) <= 2
    assert seen(saved(image, icc_profile=profile_of(2.2, ADOBE_RGB)))[0][0] == [100] * 3, "of another kind of colours"
    assert seen(saved(Image.new("RGB", (2, 2), (9, 8, 7)), icc_profile=profile_of(1.0)))[0][0] == [9, 8, 7]


def test_srgb_and_broken_profiles_change_no_pixel() -> None:
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = Image.fromarray(NOISE[..., :3])
    for profile in (own, b"no profile at all", own[:200], own[:-40] + bytes(40)):
        assert np.array_equal(np.asarray(read_image(saved(image, icc_profile=profile), DEFAULT)), NOISE[..., :3])
    image.info["icc_profile"] = bytes(5 << 20)
    with pytest.raises(MediaProblem, match="colour profile of 5242880 bytes, more than 4194304; convert it to sRGB"):
        read_image(image, DEFAULT)


def test_large_images_are_converted_in_bands_and_come_out_whole() -> None:
    large = np.random.default_rng(8).integers(0, 256, (2100, 1000, 4), dtype=np.uint8)
    found = decode_rgb(Image.fromarray(large), "white")
    white = Image.alpha_composite(Image.new("RGBA", (1000, 2100), "white"), Image.fromarray(large)).convert("RGB")
    assert np.array_equal(np.asarray(found), np.asarray(white))
    assert found.info == {}


def test_an_image_of_the_caller_stays_as_it_is() -> None:
    image = Image.fromarray(NOISE)
    image.info |= {"transparency": 3, "icc_profile": b"x", "note": "mine"}
    image.getexif()[0x0112] = 6
    before = image.tobytes(), dict(image.info), image.size
    read_image(image, DEFAULT)
    assert (image.tobytes(), dict(image.info), image.size) == before


def test_the_setting_is_part_of_the_key_of_features() -> None:
    keys = set()
    for setting in ("white", "drop"):
        processor = RequestProcessor(checkpoint("llava"), transparency=setting)  # type: ignore[arg-type]
        for source in (NOISE, NOISE[..., :3]):
            keys.add(image_reader(processor).read(read_image(source, DEFAULT, transparency=setting)).content)  # type: ignore[arg-type]
        processor.close()
    assert len(keys) == 3, "what is opaque in both has two names, and what is dropped is the opaque one"


@cache
def transformers_images(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    make: Any = AutoImageProcessor.from_pretrained
    return make(folder, backend="pil", local_files_only=True, trust_remote_code=False)


def reproduced() -> dict[str, Any]:
    exif = Image.Exif()
    exif[0x0112] = 6
    rgba = Image.fromarray(NOISE).resize((120, 90))
    return {
        "transparent": saved(rgba),
        "turned": saved(rgba.convert("RGB"), "JPEG", exif=exif),
        "grey of 16 bits": np.asarray(rgba.convert("L")).astype(np.uint16) * 257,
        "palette": rgba.convert("RGB").quantize(16),
        "printer's": saved(rgba.convert("CMYK"), "JPEG"),
    }


@pytest.mark.parametrize("name", sorted(IMAGE_TEXT))
def test_the_documented_call_makes_the_same_pixels_in_transformers(name: str) -> None:
    """For every listed type that takes images, those with a processor of videos included."""
    folder = checkpoint(name)
    processor = RequestProcessor(folder)
    try:
        for label, source in reproduced().items():
            made = processor.process(trinity.Request("<image> x", images=[source], max_tokens=1)).inputs[0]
            wanted = transformers_images(folder)(images=[trinity.open_image(source)], return_tensors="pt")
            assert torch.equal(made["pixel_values"], wanted["pixel_values"]), label
    finally:
        processor.close()


def test_open_image_says_what_is_wrong() -> None:
    with pytest.raises(BadMedia, match="the image is not an image in a supported format"):
        trinity.open_image(b"GIF? no")
    with pytest.raises(BadMedia, match="URLs are not allowed here"):
        trinity.open_image("https://example.org/a.png")
    floats = trinity.open_image(NOISE[..., :3] / 255)
    assert isinstance(floats, np.ndarray)
    assert floats.shape == (3, 40, 56)
