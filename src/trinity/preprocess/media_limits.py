"""MediaLimits: what the media and the prompt of one request may cost; what they do cost; MediaBudget, which counts it.

A price follows from an item's header and structure; nothing is decoded for it. ``image_prices``, ``sound_headers`` and
``video_prices`` hold the tables of formats. A unit is the decode of one small JPEG, timed once in this process, so that
the same table holds on a slow machine and on a fast one.
"""

from __future__ import annotations

import heapq
import io
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from trinity.errors import RequestTooLarge
from trinity.errors.arguments import Count, KeywordsByName, Positive, Whole, check_struct
from trinity.errors.plain_values import absolute_path
from trinity.preprocess.url_rules import UrlRules

_LESS = {"image": "fewer or smaller images", "video": "fewer or shorter videos", "audio": "fewer or shorter clips"}
Directory = Annotated[str, msgspec.Meta(min_length=1)]
_SIDE = 512  # pixels, of the square reference JPEG
_REFERENCE_NS = 2.2 * _SIDE * _SIDE  # its decode, in nanoseconds of the machine that the tables were measured on
_TRIES = 7  # decodes of the reference, of which the shortest counts
_COPIES_BYTES = 12  # of a pixel: two of Pillow's images and an array, which processors have at a time
RESIZE_NS, _PIXEL_NS = 8.0, 30.0  # a pixel that a processor resizes, and one that it makes
_ITEM_NS = 1.5e6  # what it does for each picture, however small
_timing = threading.Lock()
_timed: list[float] = []


class MediaLimits(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """Limits on the media and the prompt of one request. Raises ``ConfigError``.

    - ``max_pixels`` (pixels, 64 million): size of each decoded image. Pillow's own guard against decompression bombs
      (``PIL.Image.MAX_IMAGE_PIXELS``, 89 million) holds as well.
    - ``max_images`` (images, 64): number of images in one request.
    - ``max_image_bytes`` (bytes, 64 MiB): size of each image before it is decoded.
    - ``max_audios`` (clips, 16): number of audio clips in one request.
    - ``max_audio_bytes`` (bytes, 64 MiB): size of each clip's file before it is decoded.
    - ``max_audio_s`` (seconds, 1800): length of each clip.
    - ``max_audio_samples`` (samples, 160 million): of each clip, on all of its channels together: half an hour of
      stereo at 44.1 kHz.
    - ``max_audio_channels`` (channels, 8), ``max_sampling_rate`` (samples per second, 384 000): of each clip.
    - ``max_processed_pixels`` (pixels, 32 million): what the model's processor makes of each image: resized, padded,
      cut into tiles. Known from the image's header, before it is decoded.
    - ``max_processed_bytes`` (bytes, 4 GiB): what it makes of all images of one request, as numbers of 4 bytes.
    - ``max_videos`` (videos, 8): number of videos in one request.
    - ``max_video_bytes`` (bytes, 256 MiB): size of each video file before it is opened.
    - ``max_video_frames`` (frames, 1,024): frames of each video that are given, or decoded and kept.
    - ``max_video_seconds`` (seconds, 3,600): length of each video file.
    - ``max_video_streams`` (streams, 16): of each video file, of which the first with video is read.
    - ``max_video_pixels`` (pixels, 128 million): of the frames of each video together, as they are read and in whatever
      the model's processor makes of them. ``max_pixels`` holds for each frame.
    - ``max_media_cpu_s`` (CPU-seconds, 30): predicted time to decode and preprocess all media of one request. It is
      known from headers and structure before one is decoded (``media_costs``).
    - ``max_media_bytes`` (bytes, 1 GiB): predicted peak of the same work, files and what the model's processor makes
      included.
    - ``preprocess_timeout_s`` (seconds, 60): time that the images of one request may take on the processor's threads
      together, and longest wait for memory that other requests' media take. On threads it is looked at between images:
      what one image may cost is bounded by the limits above.
    - ``processes`` (processes, 0): prepare media in so many processes of their own, and texts in as many others, each a
      fork of one that has loaded tokenizer and processor. One that takes longer than ``preprocess_timeout_s``, more
      CPU than ``max_media_cpu_s`` or memory than ``worker_bytes`` (with media: than four times what was predicted),
      ends at a request, or is still at one a second after its caller has left is killed and replaced:
      an image or a chat template that never ends harms its own request only. PIL images that are not decoded yet are
      sent as their files. 0: on threads, which nothing can end.
    - ``worker_bytes`` (bytes, 2 GiB): memory that a process may have for a request, besides what it begins with.
    - ``max_prompt_tokens`` (tokens, None): prompt length with placeholders expanded. None: only the model's
      context limits it.
    - ``allow_paths`` (True): read files that a text among a request's images names. False refuses all; a tuple of
      directories allows files inside of them, wherever links lead.
    - ``allow_urls`` (False): fetch any http(s) URL, of the own network too, for requests that are not ``untrusted``.
    - ``allowed_hosts`` (none): hosts whose http(s) URLs are fetched for every request: "example.com", "*.example.com"
      (those below it), "*" (all), on the ports 80 and 443, or "example.com:8080", "example.com:*". Only public
      addresses are reached.
    - ``allowed_networks`` (none): networks that are not public and may be reached besides, such as "10.3.0.0/16".
    - ``url_timeout_s`` (seconds, 10): limit for one whole fetch, redirects and slow answers included.
    """

    max_pixels: Whole = 64_000_000
    max_images: Count = 64
    max_image_bytes: Whole = 64 << 20
    max_audios: Count = 16
    max_audio_bytes: Whole = 64 << 20
    max_audio_s: Positive = 1800.0
    max_audio_samples: Whole = 160_000_000
    max_audio_channels: Count = 8
    max_sampling_rate: Whole = 384_000
    max_processed_pixels: Whole = 32_000_000
    max_processed_bytes: Whole = 4 << 30
    max_videos: Count = 8
    max_video_bytes: Whole = 256 << 20
    max_video_frames: Whole = 1024
    max_video_seconds: Positive = 3600.0
    max_video_streams: Count = 16
    max_video_pixels: Whole = 128_000_000
    max_media_cpu_s: Positive = 30.0
    max_media_bytes: Whole = 1 << 30
    preprocess_timeout_s: Positive = 60.0
    processes: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    worker_bytes: Whole = 2 << 30
    max_prompt_tokens: Whole | None = None
    allow_paths: bool | tuple[Directory | Path, ...] = True
    allow_urls: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    url_timeout_s: Positive = 10.0

    def __post_init__(self) -> None:
        check_struct(self)
        if not isinstance(self.allow_paths, bool):
            allowed = tuple(absolute_path(str(each)) for each in self.allow_paths)
            msgspec.structs.force_setattr(self, "allow_paths", allowed)
        UrlRules.of(self.allowed_hosts, self.allowed_networks)


class MediaProblem(Exception):
    """Reason why an item cannot be used; becomes ``BadMedia`` where the request is known."""


class TooManyTokens(Exception):
    """The images of a request alone are more tokens than a prompt may have; becomes ``RequestTooLarge``."""


class Estimate(msgspec.Struct, frozen=True):
    """Cost of one image in the model's processor, known from its size alone.

    - ``pixels``: of all arrays that it makes, tiles and intermediate sizes included.
    - ``bytes``: of these arrays, the numbers that the encoder gets among them.
    - ``tokens`` (None): those of its expansion, separators included, where the processor can tell them beforehand.
    """

    pixels: int
    bytes: int
    tokens: int | None = None


def check_pixels(estimate: Estimate, limits: MediaLimits) -> None:
    """Refuse an image of which the model's processor makes too many pixels. Raises ``MediaProblem``."""
    if estimate.pixels > limits.max_processed_pixels:
        raise MediaProblem(
            f"becomes {estimate.pixels} pixels in the model's processor, which resizes it; the limit "
            f"max_processed_pixels is {limits.max_processed_pixels}: give a smaller image, or a less narrow one"
        )


def advise_less(kinds: Collection[str]) -> str:
    """Say what to give less of, by the kinds of the media that a request has."""
    named = (_LESS.get(kind, f"fewer media of kind {kind!r}") for kind in sorted(set(kinds)))
    return ", or ".join(named) or "fewer or smaller media"


def explain_length(tokens: int, of_media: int, context: int, limit: int, kinds: Collection[str]) -> str:
    """Say that a prompt of ``tokens``, some of them of media of these kinds, is beyond ``limit``."""
    return (
        f"the prompt has {tokens} tokens ({of_media} of them of media) and must leave room for an output in a context "
        f"of {context} (prompt limit {limit}); shorten it" + (f" or give {advise_less(kinds)}" if kinds else "")
    )


class MediaBudget:
    """Counts what the media of one request cost, on whichever threads they are processed.

    - ``limits``: what they may cost.
    - ``prompt_limit`` (tokens): longest prompt.
    - ``kinds`` (()): of these media, which a refusal names.
    """

    def __init__(self, limits: MediaLimits, prompt_limit: int, kinds: Collection[str] = ()) -> None:
        self._limits, self._prompt_limit, self._kinds = limits, prompt_limit, kinds
        self._lock = threading.Lock()
        self._bytes = self._tokens = 0
        self._seconds = 0.0

    @property
    def tokens_left(self) -> int:
        """Number of tokens that further media may have."""
        return max(0, self._prompt_limit - self._tokens)

    def check(self, estimate: Estimate) -> None:
        """Refuse an image whose estimate does not fit, alone or beside the others'.

        Raises ``MediaProblem`` (pixels, bytes) or ``TooManyTokens``.
        """
        limits, held = self._limits, self._bytes + estimate.bytes
        check_pixels(estimate, limits)
        if held > limits.max_processed_bytes:
            raise MediaProblem(
                f"needs {estimate.bytes} bytes in the model's processor, and the request's other media {self._bytes}; "
                f"the limit max_processed_bytes is {limits.max_processed_bytes}: give less or smaller media"
            )
        tokens = self._tokens + (estimate.tokens or 0)
        if tokens > self._prompt_limit:
            raise TooManyTokens(
                f"the request's media have at least {tokens} tokens, and a prompt may have {self._prompt_limit}; give "
                f"{advise_less(self._kinds)}"
            )

    def charge(self, estimate: Estimate) -> None:
        """Count an image that will be processed now; raises as ``check`` does."""
        with self._lock:
            self.check(estimate)
            self._bytes += estimate.bytes
            self._tokens += estimate.tokens or 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the work inside. Raises ``MediaProblem`` if the request has used up its own before."""
        most = self._limits.preprocess_timeout_s
        if self._seconds > most:
            raise MediaProblem(
                f"comes too late: media of this request took {self._seconds:.1f} s, and preprocess_timeout_s is "
                f"{most:g}; give {advise_less(self._kinds)}"
            )
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds += time.perf_counter() - began


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
