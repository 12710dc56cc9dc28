"""Decodes a PIL image to the pixels that a viewer shows: upright, sRGB, 8 bits a sample, without transparency."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from trinity.preprocess.media_limits import MediaProblem

if TYPE_CHECKING:
    from PIL import Image

Transparency = Literal["white", "drop"]
WHITE: Transparency = "white"  # the default
"""White: behind what is transparent, as transformers' ``convert_to_rgb`` has it. Drop: colours without their alpha."""

_BAND_PIXELS = 1 << 20  # converted at a time: copies of a whole large image would take several times its own bytes
_MOST_PROFILE_BYTES = 4 << 20  # of a colour profile; those of printers have up to some 3 MiB
_ELEMENTS = re.compile(rb"[DB]2[DB]\d")  # names of tags of ICC 4.3
_TAGS_START, _TAG_BYTES, _MOST_TAGS = 132, 12, 100  # of a profile; LittleCMS reads so many
_SAME = 3  # levels of 255 by which an sRGB profile may differ from LittleCMS's own: makers round its curve differently
ORIENTATION, _BITS, _PHOTOMETRIC = 0x0112, 258, 262  # tags of EXIF and TIFF
_TURNS = {  # by orientation, as ``exif_transpose`` has them; that also writes all tags again, for seconds a megabyte
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
_STRAIGHT = {"RGBa": "RGBA", "La": "LA"}  # premultiplied modes
_KEY_SCALES = {"L;2": 85, "L;4": 17}  # Pillow widens such samples to 8 bits, but not the transparent one
_SPACES = {  # of profiles: the mode that a transform takes, and those of images with such colours
    "RGB ": ("RGB", ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "YCbCr", "HSV")),
    "GRAY": ("L", ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")),
    "CMYK": ("CMYK", ("CMYK",)),
}
_CONVERT = "convert it to 8 bits a channel first"


class _Samples(msgspec.Struct, frozen=True):
    """Properties that Pillow does not convert by: ``bits`` of a grey sample, if 0 is white, the transparent value."""

    bits: int
    inverted: bool
    key: Any


def decode_rgb(image: Image.Image, transparency: Transparency) -> Image.Image:
    """Decode an image and convert it to what a viewer shows, in mode RGB and with no further information.

    Equals transformers' ``convert_to_rgb(exif_transpose(image))`` where that is what a viewer shows. Otherwise grey
    samples of 16 bits keep their high bytes, as Pillow has it for colours of 16 bits, and colours are converted from
    the image's ICC profile, unless that is sRGB or unreadable.

    Raises ``MediaProblem`` for samples that have no range of their own, and whatever decoders raise.
    """
    from PIL import Image

    samples = _find_samples(image, transparency)
    profile = image.info.get("icc_profile")
    image.load()
    if turn := _TURNS.get(image.getexif().get(ORIENTATION, 1)):
        image = image.transpose(Image.Transpose[turn])
    transform = _make_transform(profile, image.mode) if profile else None
    shown, rows = Image.new("RGB", image.size), max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        shown.paste(_show(image.crop(box), samples, transform, transparency), box)
    return shown


def narrow_array(array: np.ndarray) -> np.ndarray:
    """Convert an array [height, width, 4] of numbers to bytes, and samples of 16 bits to their high bytes.

    Other arrays are returned as they are. Raises ``MediaProblem`` for numbers of which the range is not known.
    """
    if array.dtype == np.uint16:
        return (array >> 8).astype(np.uint8)
    if array.ndim != 3 or array.shape[2] != 4 or array.dtype == np.uint8:  # without alpha processors read the range
        return array
    top = 1.0 if array.dtype.kind == "f" else 255
    if not 0 <= array.min() <= array.max() <= top:
        raise MediaProblem(f"is an array of {array.dtype} with alpha and values that are not all in 0 to {top}")
    return np.round(array.astype(np.float64) * (255 / top)).astype(np.uint8)


def _find_samples(image: Image.Image, transparency: Transparency) -> _Samples:
    """Read what a decoded image no longer tells. Raises ``MediaProblem``."""
    tags: Any = getattr(image, "tag_v2", None) or {}
    tile = getattr(image, "tile", None)
    raw = str(np.ravel(tile[0][3])[0]) if tile and tile[0][3] else ""  # ``args``: a raw mode, or it and more
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        raise MediaProblem(f"has samples of mode {image.mode!r}, of which black and white are not known; {_CONVERT}")
    key = image.info.get("transparency")
    if isinstance(key, int):
        key *= _KEY_SCALES.get(raw, 1)
    if transparency == "white" and isinstance(key, tuple) and (";16" in raw or max(key) > 255):
        raise MediaProblem(
            f"has colours of 16 bits, one of which is transparent; {_CONVERT}, or give it an alpha channel"
        )
    bits = int(tags[_BITS][0]) if _BITS in tags else 16
    return _Samples(bits, tags.get(_PHOTOMETRIC) == 0, key)


def _show(band: Image.Image, samples: _Samples, transform: Any, transparency: Transparency) -> Image.Image:
    from PIL import Image, ImageCms

    if band.mode.startswith("I"):
        band = _narrow(band, samples)
    elif samples.key is not None:
        band.info["transparency"] = samples.key
    band, alpha = band.convert(_STRAIGHT.get(band.mode, band.mode)), None
    if "A" in band.getbands() or band.info.get("transparency") is not None:
        band = band.convert("RGBA")
        alpha = band.getchannel("A")
    if transform is not None:
        band = band if band.mode == transform.input_mode else band.convert("RGB").convert(transform.input_mode)
        colours: Image.Image = ImageCms.applyTransform(band, transform)  # type: ignore[assignment]
    else:
        colours = band.convert("RGB")
    if alpha is None or transparency == "drop" or alpha.getextrema()[0] == 255:
        return colours
    colours.putalpha(alpha)
    return Image.alpha_composite(Image.new("RGBA", band.size, "white"), colours).convert("RGB")


def _narrow(band: Image.Image, samples: _Samples) -> Image.Image:
    """Make grey samples of more than 8 bits 8 bits, with an alpha channel where one of them is transparent."""
    from PIL import Image

    wide = np.asarray(band)
    shifted = wide >> (samples.bits - 8)
    grey = Image.fromarray((255 - shifted if samples.inverted else shifted).clip(0, 255).astype(np.uint8))
    if samples.key is not None:
        grey.putalpha(Image.fromarray(np.where(wide == samples.key, 0, 255).astype(np.uint8)))
    return grey


def _make_transform(profile: bytes, mode: str) -> Any:
    """Make the transform from a profile to sRGB; None where the profile is sRGB or does not describe these colours.

    Viewers show an image with a broken profile, or one of another kind of colours, as if it had none. Raises
    ``MediaProblem`` for a profile that is too large.
    """
    from PIL import Image, ImageCms, features

    if not features.check("littlecms2"):
        raise MediaProblem("has a colour profile, and this Pillow has no LittleCMS; install Pillow's own wheel")
    if len(profile) > _MOST_PROFILE_BYTES:
        raise MediaProblem(
            f"has a colour profile of {len(profile)} bytes, more than {_MOST_PROFILE_BYTES}; convert it to sRGB"
        )
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(_drop_elements(profile)))
        given, modes = _SPACES.get(opened.profile.xcolor_space, ("", ()))
        if mode not in modes:
            return None
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), given, "RGB")
        if given == "CMYK":
            return transform
        levels = np.arange(0, 256, 15, dtype=np.uint8)
        grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(len(levels), -1, 3)
        probe = Image.fromarray(grid if given == "RGB" else np.arange(256, dtype=np.uint8)[None])
        found = np.asarray(ImageCms.applyTransform(probe, transform), np.int16)
    except (ImageCms.PyCMSError, OSError):
        return None
    return transform if abs(found - np.asarray(probe.convert("RGB"), np.int16)).max() > _SAME else None


def _drop_elements(profile: bytes) -> bytes:
    """Rename the tags of a profile that list processing elements: LittleCMS runs 130,000 of them for each colour.

    Browsers show an image by the profile's other tags.
    """
    kept = bytearray(profile)
    for place in range(_TAGS_START, min(len(profile), _TAGS_START + _TAG_BYTES * _MOST_TAGS), _TAG_BYTES):
        if _ELEMENTS.match(profile, place):
            kept[place : place + 4] = b"none"
    return bytes(kept)
