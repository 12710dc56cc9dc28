"""Prices of media in units of a reference decode, and what a request's media cost in CPU-seconds and bytes.

A price follows from an item's header and structure; nothing is decoded for it. ``image_prices``, ``sound_headers`` and
``video_prices`` hold the tables of formats. A unit is the decode of one small JPEG, timed once in this process, so that
the same table holds on a slow machine and on a fast one.
"""

from __future__ import annotations

import heapq
import io
import threading
import time
from collections.abc import Collection, Iterable
from functools import cache

import msgspec

from trinity.errors import RequestTooLarge
from trinity.preprocess.media_limits import MediaLimits, MediaProblem, advise_less

_SIDE = 512  # pixels, of the square reference JPEG
_REFERENCE_NS = 2.2 * _SIDE * _SIDE  # its decode, in nanoseconds of the machine that the tables were measured on
_TRIES = 7  # decodes of the reference, of which the shortest counts
_COPIES_BYTES = 12  # of a pixel: two of Pillow's images and an array, which processors have at a time
RESIZE_NS, _PIXEL_NS = 8.0, 30.0  # a pixel that a processor resizes, and one that it makes
_ITEM_NS = 1.5e6  # what it does for each picture, however small


class Price(msgspec.Struct, frozen=True):
    """Price of one item. ``what`` describes it for an error: "is a PNG of 8000 x 8000 pixels".

    - ``units``: CPU time in decodes of the reference.
    - ``passing`` (bytes, 0): held at most while the item is read, ``kept`` included.
    - ``kept`` (bytes, 0): of these, held until the request's last item is read.
    """

    units: float
    passing: int = 0
    kept: int = 0
    what: str = ""
    instead: str = ""

    @classmethod
    def of(cls, nanoseconds: float, passing: float = 0, kept: float = 0, what: str = "", instead: str = "") -> Price:
        """Make a price of nanoseconds on the machine of the tables."""
        return cls(nanoseconds / _REFERENCE_NS, int(passing), int(kept), what, instead)

    def plus(self, other: Price) -> Price:
        """Add what is done with the same item next."""
        return Price(
            self.units + other.units,
            max(self.passing, other.passing),
            self.kept + other.kept,
            self.what or other.what,
            self.instead or other.instead,
        )


class MediaCost(msgspec.Struct, frozen=True):
    """Cost of a request's media before one of them is decoded.

    - ``cpu_s`` (CPU-seconds): of reading and preprocessing them on this machine.
    - ``bytes``: their peak.
    """

    cpu_s: float = 0.0
    bytes: int = 0


@cache
def _reference_file() -> bytes:
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[0:_SIDE, 0:_SIDE]
    grain = np.random.default_rng(0).normal(0.0, 6.0, (_SIDE, _SIDE, 3))
    waves = np.stack([np.sin(columns / 97 + rows / 53), np.cos(columns / 61), np.sin(rows / 41)], -1)
    made = io.BytesIO()
    Image.fromarray(np.clip(128 + 80 * waves + grain, 0, 255).astype(np.uint8)).save(made, "JPEG", quality=75)
    return made.getvalue()


_timing = threading.Lock()
_timed: list[float] = []


def unit_s() -> float:
    """Return the CPU-seconds of the reference decode on this machine; times it at the first call (some 20 ms)."""
    with _timing:
        if not _timed:
            _timed.append(min(time_reference() for _ in range(_TRIES)))
        return _timed[0]


def time_reference() -> float:
    """Decode the reference once, and return the CPU-seconds that it took."""
    from PIL import Image

    data = _reference_file()
    began = time.thread_time()
    with Image.open(io.BytesIO(data)) as image:
        image.load()
    return time.thread_time() - began


def price_processing(pixels: int, made_pixels: int, made_bytes: int) -> Price:
    """Price what a model's processor does with a picture of so many pixels: copies of it, and what it makes."""
    nanoseconds = _ITEM_NS + RESIZE_NS * pixels + _PIXEL_NS * made_pixels
    return Price.of(nanoseconds, _COPIES_BYTES * pixels + made_bytes, made_bytes)


def check_price(price: Price, limits: MediaLimits) -> None:
    """Raise ``MediaProblem`` for an item that is by itself beyond what a request's media may cost."""
    cpu_s, held = price.units * unit_s(), max(price.passing, price.kept)
    if cpu_s > limits.max_media_cpu_s:
        raise MediaProblem(
            f"{price.what}, and would take {cpu_s:.1f} CPU-seconds to decode; the limit max_media_cpu_s is "
            f"{limits.max_media_cpu_s:g}: {price.instead or 'give a smaller one'}"
        )
    if held > limits.max_media_bytes:
        raise MediaProblem(
            f"{price.what}, and would need {held} bytes to decode; the limit max_media_bytes is "
            f"{limits.max_media_bytes}: {price.instead or 'give a smaller one'}"
        )


def sum_prices(
    prices: Iterable[Price], limits: MediaLimits, at_once: int, kinds: Collection[str], request: str
) -> MediaCost:
    """Sum the prices of the media of a ``request``. Raises ``RequestTooLarge`` beyond the limits.

    ``at_once``: items that are read at a time. ``kinds``: of the media, which an error names.
    """
    given = list(prices)
    if not given:
        return MediaCost()
    cpu_s = sum(price.units for price in given) * unit_s()
    gone = heapq.nlargest(at_once, (max(0, price.passing - price.kept) for price in given))
    held = sum(price.kept for price in given) + sum(gone)
    for name, found, most in (
        ("max_media_cpu_s", f"take {cpu_s:.1f} CPU-seconds", cpu_s > limits.max_media_cpu_s),
        ("max_media_bytes", f"need {held} bytes", held > limits.max_media_bytes),
    ):
        if most:
            raise RequestTooLarge(
                f"the request's {len(given)} media would {found} to decode and preprocess; the limit {name} is "
                f"{getattr(limits, name)}: give {advise_less(kinds)}",
                request,
            )
    return MediaCost(cpu_s, held)
