"""Reads an image from a path, bytes, an array, a tensor or a PIL image, as a viewer shows it: upright, sRGB, 8 bits."""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from trinity.errors import describe_error
from trinity.errors.plain_values import is_address
from trinity.preprocess.fetch.media_sources import check_bytes, read_data_uri, read_file
from trinity.preprocess.media.image_prices import ImagePrice, opens_as, price_image, price_object, price_pixels
from trinity.preprocess.media_limits import MediaLimits, MediaProblem, Price, TooManyTokens, check_price

if TYPE_CHECKING:
    from PIL import Image

    Picture = Image.Image | np.ndarray

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
_GIVEN = "give a path, bytes, a PIL image or an array of shape [height, width, 3]"
_COLOURS, _WITH_ALPHA = (1, 3), 4  # channels: transformers knows the former alone, and looks for them first
_lazy = tuple(threading.Lock() for _ in range(64))  # for images of others, which several requests may share


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


def read_image(
    source: Any,
    limits: MediaLimits,
    check: Callable[[int, int], None] = lambda *_: None,
    transparency: Transparency = WHITE,
) -> Picture:
    """Read one image as a viewer shows it; see ``decode_rgb``.

    - ``source``: a path, encoded bytes, a data: URI, a PIL image, or an array or torch tensor [H, W], [H, W, C] or
      [C, H, W] of 1, 3 or 4 channels. An animation yields its first frame.
    - ``limits``: what may be read.
    - ``check`` (anything goes): called with (width, height) before a pixel is decoded; what it raises is passed on.
    - ``transparency`` ("white"): what becomes of transparent pixels.

    Returns an RGB image, or for numbers other than uint8 an array [3, H, W], which processors take as it is: it is they
    who tell 0 to 1 from 0 to 255. Raises ``MediaProblem``.
    """
    picture = _open(source, limits)
    width, height = size_of(picture)
    _check_sides(width, height, limits)
    check(width, height)
    if isinstance(picture, np.ndarray):
        return picture
    return _decode(source, picture, transparency)


def _check_sides(width: int, height: int, limits: MediaLimits) -> None:
    if not 0 < width * height <= limits.max_pixels:
        raise MediaProblem(f"has {width} x {height} pixels; the limit max_pixels allows 1 to {limits.max_pixels}")


def _check_price(found: ImagePrice, limits: MediaLimits) -> None:
    """Raise ``MediaProblem`` for what is too large or too expensive to decode."""
    _check_sides(found.width, found.height, limits)
    check_price(found.price, limits)


def _decode(source: Any, image: Image.Image, transparency: Transparency) -> Image.Image:
    """Decode an image at the same time as others; one that somebody else has too, once."""
    try:
        with _lazy[id(image) >> 4 & 63] if image is source else nullcontext():
            return decode_rgb(image, transparency)
    except MediaProblem:
        raise
    except Exception as exc:  # decoders raise anything on broken data
        raise MediaProblem(f"cannot be decoded ({describe_error(exc, 200)}); is it truncated or corrupt?") from exc


def size_of(picture: Picture) -> tuple[int, int]:
    """Return (width, height) of what ``read_image`` returns."""
    return (picture.shape[2], picture.shape[1]) if isinstance(picture, np.ndarray) else picture.size


def image_digest(picture: Picture) -> str:
    """Hash the pixels of a picture, so that equal pixels from any file or array have equal digests."""
    kind = str(picture.dtype) if isinstance(picture, np.ndarray) else picture.mode
    digest = hashlib.blake2b("{} {} {} ".format(kind, *size_of(picture)).encode(), digest_size=16)
    digest.update(picture.tobytes())
    return digest.hexdigest()


def make_plain(
    source: Any, limits: MediaLimits, check: Callable[[int, int], None], transparency: Transparency = WHITE
) -> Any:
    """Turn a source into one of the same picture, digest included, that another process can be sent.

    That is a path, a URL, bytes, a plain array, or an image that nobody else has. A PIL image that is not decoded yet
    is sent as its file; one that is decoded, or changed since it was opened, is checked and decoded as ``read_image``
    does, which explains the arguments. Raises ``MediaProblem``.
    """
    from PIL import Image

    if isinstance(source, Image.Image):
        file = _guard(_read_unchanged, source, limits)
        return read_image(source, limits, check, transparency) if file is None else file
    return _guard(_simplify, source, limits)


def _guard(read: Callable[[Any, MediaLimits], Any], source: Any, limits: MediaLimits) -> Any:
    try:
        return read(source, limits)
    except (MediaProblem, TooManyTokens):
        raise
    except Exception as exc:  # an object of somebody's own may raise anything
        raise MediaProblem(f"cannot be read ({describe_error(exc, 200)}); {_GIVEN}") from exc


def _open(source: Any, limits: MediaLimits) -> Picture:
    picture: Picture = _guard(_open_plain, source, limits)
    return picture


def _open_plain(source: Any, limits: MediaLimits) -> Picture:
    from PIL import Image

    if isinstance(source, Image.Image):
        _check_price(_price_object(source, limits), limits)
        return source
    plain = _simplify(source, limits)
    if isinstance(plain, bytes):
        return _from_bytes(plain, limits)
    if isinstance(plain, np.ndarray):
        return _from_array(plain)
    if isinstance(plain, str) and is_address(plain):
        raise MediaProblem(
            "is a URL: where allow_urls or allowed_hosts allow it, a request's are fetched before; give bytes"
        )
    return _from_bytes(read_file(plain, limits), limits)


def price_picture(source: Any, limits: MediaLimits) -> ImagePrice:
    """Price a source that ``read_image`` reads, without decoding it. Raises ``MediaProblem`` as that does."""
    priced: ImagePrice = _guard(_price_plain, source, limits)
    if priced.width or priced.height:
        _check_sides(priced.width, priced.height, limits)
    return priced


def _price_plain(source: Any, limits: MediaLimits) -> ImagePrice:
    from PIL import Image

    if isinstance(source, Image.Image):
        return _price_object(source, limits)
    plain = _simplify(source, limits)
    if isinstance(plain, np.ndarray):
        height, width = plain.shape[1:] if _channel_axis(plain.shape) == 0 else plain.shape[:2]
        price = price_pixels(width, height, "RGB").plus(Price(0.0, 4 * width * height * max(4, plain.itemsize)))
        return ImagePrice("array", width, height, price)
    if isinstance(plain, str) and is_address(plain):
        return ImagePrice("URL", 0, 0, Price(0.0))
    return price_image(plain if isinstance(plain, bytes) else read_file(plain, limits))


def _price_object(image: Image.Image, limits: MediaLimits) -> ImagePrice:
    """Price an image of Pillow's: its pixels, and where they are not decoded yet, its file."""
    with _lazy[id(image) >> 4 & 63]:
        if _is_decoded(image):
            return ImagePrice(image.mode, *image.size, price_pixels(*image.size, image.mode))
        return price_object(image, _read_file_of(image, limits))


def _read_file_of(image: Image.Image, limits: MediaLimits) -> bytes | None:
    """Read the open file of an image that is not decoded yet; None where it has none. Raises ``MediaProblem``."""
    file = getattr(image, "fp", None)
    if file is None or getattr(file, "closed", False):
        return None
    place = file.tell()
    file.seek(0)
    data: bytes = file.read(limits.max_image_bytes + 1)
    file.seek(place)
    check_bytes(len(data), limits)
    return data


def _read_unchanged(image: Image.Image, limits: MediaLimits) -> bytes | None:
    """Read the file of an image that is not decoded, and is as its file is opened anew; None for any other."""
    if not _decodes_as_usual():
        return None
    with _lazy[id(image) >> 4 & 63]:
        data = None if _is_decoded(image) else _read_file_of(image, limits)
        try:
            return data if data and _describe_decoding(image) == _describe_decoding(_open_file(data), image) else None
        except Exception:  # a file of another format, or something of the program's own that cannot be compared
            return None


def _decodes_as_usual() -> bool:
    """Tell whether this program has left Pillow's settings as they are: another process does not have its own."""
    from PIL import GifImagePlugin, Image, ImageFile

    own = ImageFile.LOAD_TRUNCATED_IMAGES, GifImagePlugin.LOADING_STRATEGY, Image.MAX_IMAGE_PIXELS
    return own == (False, GifImagePlugin.LoadingStrategy.RGB_AFTER_FIRST, (1 << 30) // 4 // 3)


def _describe_decoding(image: Image.Image, asked: Image.Image | None = None) -> tuple[Any, ...]:
    """List what decoding follows besides the file: a frame that was chosen, a draft, and what the program has changed.

    ``asked`` (itself): its EXIF is compared only if the program has asked for that: to ask a PNG decodes it.
    """
    palette, tags = image.palette, getattr(image, "tag_v2", {})
    changed = getattr(asked or image, "_exif", None) is not None
    return (
        (type(image), image.mode, image.size, image.tell(), image.tile, image.info),  # type: ignore[attr-defined]
        (getattr(image, "decoderconfig", ()), dict(tags), image.getexif().get(ORIENTATION, 1) if changed else 1),
        None if palette is None else (palette.mode, palette.rawmode, bytes(palette.palette)),
    )


def _is_decoded(image: Image.Image) -> bool:
    try:
        return image.im is not None
    except Exception:  # Pillow says by an assertion, or by the error of opening, that there are no pixels
        return False


def _simplify(source: Any, limits: MediaLimits) -> bytes | str | Path | np.ndarray:
    """Make text, a path, bytes or an array of whatever class it is of, once its size is known to be allowed."""
    if isinstance(source, (MediaProblem, TooManyTokens)):  # found by the process that sent the request
        raise source
    if isinstance(source, (bytes, bytearray, memoryview)):
        check_bytes(memoryview(source).nbytes, limits)
        return bytes(source)
    if isinstance(source, str):
        text = str.__str__(source)
        return read_data_uri(text, limits) if text[:5].lower() == "data:" else text
    if isinstance(source, os.PathLike):
        return Path(os.fsdecode(os.fspath(source)))
    torch: Any = sys.modules.get("torch")  # where nobody has imported it, this is none of its tensors
    if torch is not None and isinstance(source, torch.Tensor):
        source = _from_tensor(source, limits)
    if hasattr(source, "__array_interface__") and hasattr(source, "ndim"):
        _check_shape(source, limits)
        array = np.asarray(source)
        if array.dtype.kind not in "buif":
            raise MediaProblem(f"is an array of {array.dtype}, which are no pixels; {_GIVEN}")
        return array
    raise MediaProblem(f"is a {type(source).__name__}; {_GIVEN}")


def _from_tensor(tensor: Any, limits: MediaLimits) -> Any:
    _check_shape(tensor, limits)
    plain = tensor.detach().cpu()
    return plain.float().numpy() if str(plain.dtype) == "torch.bfloat16" else plain.numpy()


def _check_shape(array: Any, limits: MediaLimits) -> None:
    """Refuse shapes that are no picture, before a number of them is looked at."""
    shape = list(array.shape)
    axis = _channel_axis(shape)
    if axis is None:
        raise MediaProblem(
            f"is an array of {array.dtype} with shape {shape}; give [height, width, 3], [3, height, width] or, for "
            "grey, [height, width]"
        )
    if len(shape) == 3 and shape[0] == _WITH_ALPHA and shape[2] in (*_COLOURS, _WITH_ALPHA):
        raise MediaProblem(f"is an array of shape {shape}, with channels at either end; give a PIL image")
    if 0 in shape:
        raise MediaProblem(f"is an array of shape {shape}, which has no pixels")
    sides = shape[1:] if axis == 0 else shape[:2]
    if sides[0] * sides[1] > limits.max_pixels:
        raise MediaProblem(f"has shape {shape}; the limit max_pixels allows 1 to {limits.max_pixels} pixels")


def _channel_axis(shape: Sequence[int]) -> int | None:
    """Find the axis of channels as transformers does: the first of 1 or 3, then the last. 2 for grey, else None."""
    if len(shape) == 2:
        return 2
    if len(shape) != 3:
        return None
    for counts in (_COLOURS, (_WITH_ALPHA,)):
        for axis in (0, 2) if counts is _COLOURS else (2, 0):
            if shape[axis] in counts:
                return axis
    return None


def _from_array(array: np.ndarray) -> Picture:
    """Make a PIL image of bytes, of samples of 16 bits and of what has alpha; of other numbers an array [3, H, W]."""
    from PIL import Image

    if _channel_axis(array.shape) == 0:
        array = np.moveaxis(array, 0, -1)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise MediaProblem(f"is an array of {array.dtype} with values that are no numbers")
    array = narrow_array(array)
    flat = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.dtype == np.uint8:
        return Image.fromarray(np.ascontiguousarray(flat))
    colours = array if flat.ndim == 3 else np.repeat(flat[:, :, None], 3, axis=2)
    return np.ascontiguousarray(np.moveaxis(colours, -1, 0))


def _from_bytes(data: bytes, limits: MediaLimits) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    priced = price_image(data)
    _check_price(priced, limits)
    try:
        image = _open_file(data)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise MediaProblem(f"looks like a decompression bomb ({describe_error(exc, 200)})") from exc
    except UnidentifiedImageError as exc:
        raise MediaProblem(f"is no {opens_as(data)[0]} that can be opened; is it truncated or corrupt?") from exc
    except Exception as exc:
        raise MediaProblem(f"cannot be opened ({describe_error(exc, 200)}); is it truncated or corrupt?") from exc
    if image.width * image.height > priced.width * priced.height:  # Pillow has read another header than the walk
        raise MediaProblem(
            f"opens as an image of {image.width} x {image.height} pixels, and its header has {priced.width} x "
            f"{priced.height}; save it again as a plain JPEG or PNG"
        )
    return image


def _open_file(data: bytes) -> Image.Image:
    from PIL import Image

    Image.init()
    return Image.open(io.BytesIO(data), formats=[name for name in opens_as(data) if name in Image.OPEN])
