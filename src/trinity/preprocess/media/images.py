"""Reads an image from a path, bytes, an array, a tensor or a PIL image, as a viewer shows it."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity.errors import describe_error
from trinity.errors.plain_values import is_address
from trinity.preprocess.fetch.media_sources import check_bytes, read_data_uri, read_file
from trinity.preprocess.media.colours import ORIENTATION, WHITE, Transparency, decode_rgb, narrow_array
from trinity.preprocess.media.image_prices import ImagePrice, opens_as, price_image, price_object, price_pixels
from trinity.preprocess.media.media_costs import Price, check_price
from trinity.preprocess.media_limits import MediaLimits, MediaProblem, TooManyTokens

if TYPE_CHECKING:
    from PIL import Image

    Picture = Image.Image | np.ndarray

_GIVEN = "give a path, bytes, a PIL image or an array of shape [height, width, 3]"
_COLOURS, _WITH_ALPHA = (1, 3), 4  # channels: transformers knows the former alone, and looks for them first
_lazy = tuple(threading.Lock() for _ in range(64))  # for images of others, which several requests may share


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
