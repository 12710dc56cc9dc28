"""Reads an image from a path, bytes, an array, a tensor or a PIL image, as transformers' ``load_image`` does."""

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
from trinity.preprocess.media_limits import MediaLimits, MediaProblem, TooManyTokens
from trinity.preprocess.media_sources import check_bytes, read_data_uri, read_file

if TYPE_CHECKING:
    from PIL import Image

    Picture = Image.Image | np.ndarray

# Formats that Pillow decodes itself; others, such as EPS, would start other programs.
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_GIVEN = "give a path, bytes, a PIL image or an array of shape [height, width, 3]"
_COLOURS, _WITH_ALPHA = (1, 3), 4  # channels: transformers knows the former alone, and looks for them first
_lazy = tuple(threading.Lock() for _ in range(64))  # for images of others, which several requests may share


def read_image(source: Any, limits: MediaLimits, check: Callable[[int, int], None] = lambda *_: None) -> Picture:
    """Read one image: upright by its EXIF orientation, in RGB, without its alpha, as transformers' ``load_image`` does.

    - ``source``: a path, encoded bytes, a data: URI, a PIL image, or an array or torch tensor [H, W], [H, W, C] or
      [C, H, W] of 1, 3 or 4 channels. An animation yields its first frame.
    - ``limits``: what may be read.
    - ``check`` (anything goes): called with (width, height) before a pixel is decoded; what it raises is passed on.

    Returns an RGB image, or for numbers other than uint8 an array [3, H, W], which processors take as it is: it is they
    who tell 0 to 1 from 0 to 255. Raises ``MediaProblem``.
    """
    picture = _open(source, limits)
    width, height = size_of(picture)
    if not 0 < width * height <= limits.max_pixels:
        raise MediaProblem(f"has {width} x {height} pixels; the limit max_pixels allows 1 to {limits.max_pixels}")
    check(width, height)
    if isinstance(picture, np.ndarray):
        return picture
    return _decode(source, picture)


def _decode(source: Any, image: Image.Image) -> Image.Image:
    """Decode an image at the same time as others; one that somebody else has too, once."""
    try:
        with _lazy[id(image) >> 4 & 63] if image is source else nullcontext():
            image.load()  # Pillow decodes at first use
        return _to_rgb(image)
    except Exception as exc:  # decoders raise anything on broken data
        raise MediaProblem(f"cannot be decoded ({describe_error(exc, 200)}); is it truncated or corrupt?") from exc


def size_of(picture: Picture) -> tuple[int, int]:
    """Return (width, height) of what ``read_image`` returns."""
    return (picture.shape[2], picture.shape[1]) if isinstance(picture, np.ndarray) else picture.size


def image_digest(picture: Picture) -> str:
    """Hash the pixels of a picture, so that equal pixels from any file or array have equal digests.

    With them all else that a processor reads of an image: its transparent colour, behind which one puts white.
    """
    if isinstance(picture, np.ndarray):
        kind = str(picture.dtype)
    else:
        kind = f"{picture.mode} {picture.info.get('transparency')!r}"
    digest = hashlib.blake2b("{} {} {} ".format(kind, *size_of(picture)).encode(), digest_size=16)
    digest.update(picture.tobytes())
    return digest.hexdigest()


def make_plain(source: Any, limits: MediaLimits, check: Callable[[int, int], None]) -> Any:
    """Turn a source into one of the same picture, digest included, that another process can be sent.

    That is a path, a URL, bytes, a plain array, or an image that nobody else has: a PIL image is checked and decoded as
    ``read_image`` does, which explains the arguments. Raises ``MediaProblem``.
    """
    from PIL import Image

    return read_image(source, limits, check) if isinstance(source, Image.Image) else _guard(_simplify, source, limits)


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
        return source
    plain = _simplify(source, limits)
    if isinstance(plain, bytes):
        return _from_bytes(plain)
    if isinstance(plain, np.ndarray):
        return _from_array(plain)
    if isinstance(plain, str) and is_address(plain):
        raise MediaProblem(
            "is a URL: where allow_urls or allowed_hosts allow it, a request's are fetched before; give bytes"
        )
    return _from_bytes(read_file(plain, limits))


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
    """Make a PIL image of uint8, or of one channel of 16 bits; of any other numbers an array [3, H, W]."""
    from PIL import Image

    if _channel_axis(array.shape) == 0:
        array = np.moveaxis(array, 0, -1)
    flat = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.dtype == np.uint8:
        return Image.fromarray(np.ascontiguousarray(flat))
    if array.dtype == np.uint16 and flat.ndim == 2:
        return Image.fromarray(np.ascontiguousarray(flat))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise MediaProblem(f"is an array of {array.dtype} with values that are no numbers")
    colours = array[:, :, :3] if flat.ndim == 3 else np.repeat(flat[:, :, None], 3, axis=2)
    return np.ascontiguousarray(np.moveaxis(colours, -1, 0))


def _from_bytes(data: bytes) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise MediaProblem("is empty (0 bytes)")
    Image.init()
    try:
        return Image.open(io.BytesIO(data), formats=[name for name in _FORMATS if name in Image.OPEN])
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise MediaProblem(f"looks like a decompression bomb ({describe_error(exc, 200)})") from exc
    except UnidentifiedImageError as exc:
        known = ", ".join(_FORMATS)
        raise MediaProblem(f"is not an image in a supported format ({known}), or is corrupt") from exc
    except Exception as exc:
        raise MediaProblem(f"cannot be opened ({describe_error(exc, 200)}); is it truncated or corrupt?") from exc


def _to_rgb(image: Image.Image) -> Image.Image:
    """Turn an image upright and drop its alpha, in the two calls that transformers' ``load_image`` makes."""
    from PIL import ImageOps

    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # the same colours; Pillow warns of the direct way
    upright = ImageOps.exif_transpose(image).convert("RGB")
    # Processors may read more of an image than its pixels: nothing that ``image_digest`` does not cover is left.
    upright.info = {key: value for key, value in upright.info.items() if key == "transparency"}
    return upright
