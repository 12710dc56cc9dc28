"""Statistics of a trace: request counts, arrival rate, burstiness and sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from trinity.tables import Table, as_html, as_text, distribution

BIN_S = 10.0  # seconds over which arrivals are counted for their coefficient of variation
_FEWEST_BINS = 2


class TracedMedium(Protocol):
    """An image, a video or an audio clip of a request; ``tokens`` is None where unknown."""

    @property
    def tokens(self) -> int | None: ...


class Video(TracedMedium, Protocol):
    """A video; ``frames`` is None where unknown."""

    @property
    def frames(self) -> int | None: ...


class Audio(TracedMedium, Protocol):
    """An audio clip; ``seconds`` is None where unknown."""

    @property
    def seconds(self) -> float | None: ...


class Arrival(Protocol):
    """Fields of a trace's row that statistics read; ``timestamp`` (ms) is the arrival."""

    @property
    def timestamp(self) -> float: ...
    @property
    def text_tokens(self) -> int: ...
    @property
    def images(self) -> Sequence[TracedMedium]: ...
    @property
    def videos(self) -> Sequence[Video]: ...
    @property
    def audio(self) -> Sequence[Audio]: ...
    @property
    def visual_tokens(self) -> int: ...
    @property
    def output_length(self) -> int: ...


Distribution = dict[str, float] | None


class TraceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a trace.

    ``duration_s`` (s): first arrival to last. ``rate`` (requests/s): arrivals after the first, over the duration.
    ``cv``: coefficient of variation of the arrivals in each full 10 s, None where the trace is too short.
    ``image_share``, ``video_share``, ``audio_share``: shares of requests with images, with videos, with audio.
    Distributions have mean, p50, p90, p95, p99 and max, and are None where nothing was counted: ``text_tokens`` and
    ``output_tokens`` of each request, ``images`` of each request with images, ``clips`` of each with audio,
    ``visual_tokens`` of each with media, ``image_tokens``, ``video_tokens`` and ``audio_tokens`` of each medium,
    ``frames`` of each video and ``audio_s`` (s) of each audio clip whose size is known.
    """

    requests: int
    duration_s: float
    rate: float | None
    cv: float | None
    image_share: float
    text_tokens: Distribution
    images: Distribution
    image_tokens: Distribution
    visual_tokens: Distribution
    output_tokens: Distribution
    video_share: float = 0.0
    audio_share: float = 0.0
    frames: Distribution = None
    video_tokens: Distribution = None
    clips: Distribution = None
    audio_s: Distribution = None
    audio_tokens: Distribution = None

    def _tables(self) -> list[Table]:
        figures = [("requests", f"{self.requests:,}"), ("duration", f"{self.duration_s:,.1f} s")]
        figures.append(("rate", "unknown" if self.rate is None else f"{self.rate:.3f} requests/s"))
        figures.append(("CV of arrivals in 10 s", "unknown" if self.cv is None else f"{self.cv:.2f}"))
        figures.append(("with images", f"{self.image_share:.1%}"))
        for name, share in (("with videos", self.video_share), ("with audio", self.audio_share)):
            figures += [(name, f"{share:.1%}")] if share else []
        found = [("text tokens", self.text_tokens), ("images", self.images), ("tokens of an image", self.image_tokens)]
        found += [("frames of a video", self.frames), ("tokens of a video", self.video_tokens)]
        found += [("audio clips", self.clips), ("seconds of a clip", self.audio_s)]
        found += [("tokens of a clip", self.audio_tokens)]
        found += [("visual tokens", self.visual_tokens), ("output tokens", self.output_tokens)]
        rows = [(name, *(f"{value:,.1f}" for value in values.values())) for name, values in found if values]
        columns = next((tuple(values) for _, values in found if values), ())
        return [Table(("trace", ""), figures), *([Table(("of a request", *columns), rows)] if rows else [])]

    def __str__(self) -> str:
        return "\n\n".join(as_text(table) for table in self._tables())

    def _repr_html_(self) -> str:
        return "".join(as_html(table) for table in self._tables())


def trace_statistics(rows: Iterable[Arrival]) -> TraceStatistics:
    """Compute the statistics of requests given in any order."""
    found = list(rows)
    seconds = sorted(row.timestamp / 1000 for row in found)
    pictures = [[image.tokens or 0 for image in row.images] for row in found if row.images]
    videos = [video for row in found for video in row.videos]
    clips = [clip for row in found for clip in row.audio]
    return TraceStatistics(
        requests=len(found),
        duration_s=seconds[-1] - seconds[0] if seconds else 0.0,
        rate=arrival_rate(seconds),
        cv=arrival_cv(seconds),
        image_share=_share(found, [bool(row.images) for row in found]),
        text_tokens=distribution(row.text_tokens for row in found),
        images=distribution(map(len, pictures)),
        image_tokens=distribution(tokens for each in pictures for tokens in each),
        visual_tokens=distribution(row.visual_tokens for row in found if row.images or row.videos or row.audio),
        output_tokens=distribution(row.output_length for row in found),
        video_share=_share(found, [bool(row.videos) for row in found]),
        audio_share=_share(found, [bool(row.audio) for row in found]),
        frames=distribution(video.frames for video in videos if video.frames is not None),
        video_tokens=distribution(video.tokens or 0 for video in videos),
        clips=distribution(len(row.audio) for row in found if row.audio),
        audio_s=distribution(clip.seconds for clip in clips if clip.seconds is not None),
        audio_tokens=distribution(clip.tokens or 0 for clip in clips),
    )


def _share(rows: Sequence[object], having: Sequence[bool]) -> float:
    return sum(having) / len(rows) if rows else 0.0


def arrival_rate(seconds: Sequence[float]) -> float | None:
    """Arrivals a second after the first, from ascending times in s; None where all came at once."""
    if not seconds or seconds[-1] <= seconds[0]:
        return None
    return (len(seconds) - 1) / (seconds[-1] - seconds[0])


def arrival_cv(seconds: Sequence[float], bin_s: float = BIN_S) -> float | None:
    """Coefficient of variation (standard deviation over mean) of the arrivals in each full ``bin_s`` seconds.

    From ascending times in s; None for fewer than two full bins.
    """
    if not seconds:
        return None
    bins = int((seconds[-1] - seconds[0]) / bin_s)
    if bins < _FEWEST_BINS:
        return None
    counts = Counter(int((each - seconds[0]) / bin_s) for each in seconds)
    full = [count for place, count in counts.items() if place < bins]  # the others are 0, however many they are
    mean = sum(full) / bins
    squares = math.fsum((count - mean) ** 2 for count in full) + (bins - len(full)) * mean * mean
    return math.sqrt(squares / bins) / mean if mean else None
