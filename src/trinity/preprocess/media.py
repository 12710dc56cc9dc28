"""Reads an image from a path, bytes, an array, a PIL image or a URL, as one upright RGB image."""

from __future__ import annotations

import hashlib
import io
import os
import reprlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trinity.errors.arguments import Count, Positive, Whole, check_struct

if TYPE_CHECKING:
    from PIL import Image

# Formats that Pillow decodes itself; others, such as EPS, would start other programs.
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_CHUNK = 1 << 16
_lazy = threading.Lock()


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the media and the prompt of one request.

    - ``max_pixels`` (pixels, 64 million): size of each decoded image. Pillow's own guard against decompression bombs
      (``PIL.Image.MAX_IMAGE_PIXELS``, 89 million) holds as well.
    - ``max_images`` (images, 64): number of images in one request.
    - ``max_image_bytes`` (bytes, 64 MiB): size of each image before it is decoded.
    - ``max_prompt_tokens`` (tokens, None): prompt length with placeholders expanded. None: only the model's
      context limits it.
    - ``allow_urls`` (False): fetch http(s) URLs that users give, including addresses in the server's own network.
      Allow it for trusted users only.
    - ``url_timeout_s`` (seconds, 10): limit for one whole fetch.

    Raises ``ConfigError``.
    """

    max_pixels: Whole = 64_000_000
    max_images: Count = 64
    max_image_bytes: Whole = 64 << 20
    max_prompt_tokens: Whole | None = None
    allow_urls: bool = False
    url_timeout_s: Positive = 10.0

    def __post_init__(self) -> None:
        check_struct(self)


class MediaProblem(Exception):
    """Reason why an item cannot be used; becomes ``BadMedia`` where the request is known."""


def read_image(source: Any, limits: MediaLimits) -> Image.Image:
    """Read one RGB image [H, W], turned upright by its EXIF orientation, transparency over white.

    ``source``: a path, encoded bytes, a PIL image, a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4], or an
    http(s) URL. An animation yields its first frame. Raises ``MediaProblem``.
    """
    image = _open(source, limits)
    pixels = image.width * image.height
    if not 0 < pixels <= limits.max_pixels:
        raise MediaProblem(
            f"has {image.width} x {image.height} pixels; the limit max_pixels allows 1 to {limits.max_pixels}"
        )
    try:
        with _lazy:  # Pillow decodes at first use, and two requests may share an image
            image.load()
        return _to_rgb(_upright(image))
    except MediaProblem:
        raise
    except Exception as exc:  # decoders raise anything on broken data
        raise MediaProblem(f"cannot be decoded ({_describe_error(exc)}); is it truncated or corrupt?") from exc


def image_digest(image: Image.Image) -> str:
    """Hash the pixels of an RGB image, so that equal pixels from any file or array have equal digests."""
    digest = hashlib.blake2b(f"{image.mode} {image.width} {image.height} ".encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.hexdigest()


def _open(source: Any, limits: MediaLimits) -> Image.Image:
    import numpy as np
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _from_bytes(bytes(source), limits)
    if isinstance(source, str) and source.lower().startswith(("http://", "https://")):
        return _from_bytes(_fetch(source, limits), limits)
    if isinstance(source, (str, os.PathLike)):
        return _from_bytes(_read_file(Path(source), limits), limits)
    raise MediaProblem(
        f"is a {type(source).__name__}; give a path, bytes, a PIL image or a uint8 array of shape [height, width, 3]"
    )


def _from_array(array: Any) -> Image.Image:
    from PIL import Image

    if str(array.dtype) != "uint8" or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise MediaProblem(
            f"is an array of {array.dtype} with shape {list(array.shape)}; "
            "give uint8 of shape [height, width, 3], or [height, width] for grey"
        )
    if 0 in array.shape:
        raise MediaProblem(f"is an array of shape {list(array.shape)}, which has no pixels")
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _from_bytes(data: bytes, limits: MediaLimits) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    _check_bytes(len(data), limits)
    if not data:
        raise MediaProblem("is empty (0 bytes)")
    Image.init()
    try:
        return Image.open(io.BytesIO(data), formats=[name for name in _FORMATS if name in Image.OPEN])
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise MediaProblem(f"looks like a decompression bomb ({_describe_error(exc)})") from exc
    except UnidentifiedImageError as exc:
        known = ", ".join(_FORMATS)
        raise MediaProblem(f"is not an image in a supported format ({known}), or is corrupt") from exc
    except Exception as exc:
        raise MediaProblem(f"cannot be opened ({_describe_error(exc)}); is it truncated or corrupt?") from exc


def _read_file(path: Path, limits: MediaLimits) -> bytes:
    shown = reprlib.repr(str(path))
    try:
        # A FIFO or a device would block or never end.
        if path.exists() and not path.is_file():
            raise MediaProblem(f"{shown} is not a regular file")
        _check_bytes(path.stat().st_size, limits)
        with path.open("rb") as file:
            return file.read(limits.max_image_bytes + 1)
    except FileNotFoundError as exc:
        raise MediaProblem(f"there is no file {shown}; check the path") from exc
    except (OSError, ValueError) as exc:
        raise MediaProblem(f"cannot read {shown} ({_describe_error(exc)})") from exc


def _check_bytes(size: int, limits: MediaLimits) -> None:
    if size > limits.max_image_bytes:
        raise MediaProblem(f"has {size} bytes or more; the limit max_image_bytes is {limits.max_image_bytes}")


def _fetch(url: str, limits: MediaLimits) -> bytes:
    shown = reprlib.repr(url)
    if not limits.allow_urls:
        raise MediaProblem(
            f"{shown} is a URL, and URLs are not allowed here: set MediaLimits(allow_urls=True) or give bytes"
        )
    try:
        with _http_only().open(url, timeout=limits.url_timeout_s) as answer:
            return _read_answer(answer, limits)
    except MediaProblem:
        raise
    except Exception as exc:  # urllib passes on socket, ssl and http errors
        raise MediaProblem(f"{shown} cannot be fetched ({_describe_error(exc)})") from exc


def _http_only() -> Any:
    """Make an opener without file:, ftp: and data:, so that no redirect leads there."""
    from urllib import request

    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPRedirectHandler(),
        request.HTTPErrorProcessor(),
        request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _read_answer(answer: Any, limits: MediaLimits) -> bytes:
    parts: list[bytes] = []
    size, deadline = 0, time.monotonic() + limits.url_timeout_s
    while chunk := answer.read1(_CHUNK):  # read() would wait for the whole chunk, however slowly it drips
        parts.append(chunk)
        if time.monotonic() > deadline:
            raise MediaProblem(f"took longer to fetch than url_timeout_s ({limits.url_timeout_s:g} s)")
        size += len(chunk)
        _check_bytes(size, limits)
    return b"".join(parts)


def _upright(image: Image.Image) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode == "F":
        raise MediaProblem("has floating-point pixels; convert it to 8 bits per channel first")
    if image.mode.startswith("I"):
        return _from_16_bits(image).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _from_16_bits(image: Image.Image) -> Image.Image:
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))


def _describe_error(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc!s:.200}" if str(exc) else type(exc).__name__
