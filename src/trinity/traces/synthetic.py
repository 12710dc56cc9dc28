"""Synthetic traces: TriInfer's five datasets by their parameters, and resampling of any trace."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import msgspec

from trinity.errors import ConfigError, TraceError, UnknownName
from trinity.traces.media import TraceAudio, TraceImage, TraceMedia, TraceVideo
from trinity.traces.statistics import BIN_S, arrival_rate
from trinity.traces.trace import Trace, TraceRow

Drawn = TypeVar("Drawn", TraceVideo, TraceAudio)

VisualTokenRule = Callable[[int, int], int]  # (width, height) of an image in pixels -> visual tokens
ClipMeasure = Callable[[TraceVideo | TraceAudio], int]  # a video or audio clip without tokens -> its tokens
MOST_CLIPS = 10_000  # of a request


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """Distributions that a dataset's requests are drawn from; each request has one image, one video, or audio clips.

    ``sizes``: (width in pixels, height in pixels, share) of images. ``videos``: (frames, width, height, share) of
    videos. ``clips``: audio clips of each request, of ``audio`` seconds: mean and standard deviation, drawn
    lognormally. ``prompt`` and ``output``: the same of their tokens, at least 1. A request has one of each that is
    given. Raises ``ConfigError`` for values out of range.
    """

    name: str
    sizes: tuple[tuple[int, int, float], ...] = ()
    prompt: tuple[float, float]
    output: tuple[float, float]
    videos: tuple[tuple[int, int, int, float], ...] = ()
    clips: int = 0
    audio: tuple[float, float] = (10.0, 0.0)

    def __post_init__(self) -> None:
        moments = all(1 <= mean < math.inf and 0 <= spread < math.inf for mean, spread in (self.prompt, self.output))
        sizes = all(min(each) > 0 for each in (*self.sizes, *self.videos)) and 0 <= self.clips <= MOST_CLIPS
        heard = 0 < self.audio[0] < math.inf and 0 <= self.audio[1] < math.inf
        if not ((self.sizes or self.videos or self.clips) and moments and sizes and heard):
            raise ConfigError(
                f"{self!r}: give sizes of images, videos or clips; sizes and shares must be positive, means at least 1 "
                "and spreads at least 0"
            )


_EMPTY_STRETCHES = 300  # in a row, before they are no longer drawn one by one
_PHOTOS = ((1024, 768, 0.62), (768, 1024, 0.14), (1024, 683, 0.14), (1024, 1024, 0.10))
_SMALL = ((640, 480, 0.40), (1024, 768, 0.25), (500, 375, 0.20), (300, 400, 0.15))
_PHONE = ((1224, 1632, 0.45), (720, 1280, 0.30), (480, 640, 0.25))
_CLIPS_8 = ((8, 640, 360, 0.5), (8, 640, 480, 0.5))
_CLIPS_64 = ((64, 640, 360, 0.8), (64, 480, 360, 0.2))
_COCO = ((640, 480, 0.55), (640, 427, 0.25), (480, 640, 0.20))
DATASETS: Mapping[str, Dataset] = {
    each.name: each
    for each in (  # sizes and lengths are assumed (TriInfer's figure 8 gives them as curves); the datasets are its own
        Dataset(name="TextCaps", sizes=_PHOTOS, prompt=(24, 0), output=(80, 35)),
        Dataset(name="POPE", sizes=_COCO, prompt=(22, 2), output=(10, 4)),
        Dataset(name="MME", sizes=_SMALL, prompt=(32, 8), output=(2, 0)),
        Dataset(name="TextVQA", sizes=_PHOTOS, prompt=(24, 3), output=(16, 12)),
        Dataset(name="VizWiz", sizes=_PHONE, prompt=(24, 4), output=(30, 25)),
        # EPDServe's videos (4.1): lengths of NextQA are its own, frames of both, sizes assumed
        Dataset(name="NextQA", videos=_CLIPS_8, prompt=(11.42, 4), output=(2.75, 1.5)),
        Dataset(name="Video-MME", videos=_CLIPS_64, prompt=(60, 20), output=(10, 0)),
    )
}


def synthesise(
    dataset: str | Dataset,
    requests: int,
    *,
    visual_tokens: VisualTokenRule,
    clip_tokens: ClipMeasure | None = None,
    rate: float | None = None,
    arrivals: Trace | None = None,
    seed: int = 0,
) -> Trace:
    """Draw requests like a dataset's (TriInfer 5.1); equal seeds give equal traces.

    dataset: a ``Dataset``, or the name of one in ``DATASETS``.
    requests (count): requests to draw, at least 1.
    visual_tokens: the model's rule, (width, height) in pixels to visual tokens.
    clip_tokens (None): the model's rule for videos and audio, such as ``ModelShape.clip_tokens``; without it their
        tokens are unknown.
    rate (requests/s, None): rate of a Poisson process; with ``arrivals``, the rate that these are scaled to.
    arrivals (trace, None): takes this trace's arrival times instead, repeated from its start where it is too short.
    seed (0): seed of all draws.

    Raises ``UnknownName`` for an unknown dataset, ``ConfigError`` where neither ``rate`` nor ``arrivals`` is given,
    ``TraceError`` where all ``arrivals`` come at once.
    """
    if isinstance(dataset, str):
        if dataset not in DATASETS:
            raise UnknownName("dataset", dataset, DATASETS)
        dataset = DATASETS[dataset]
    if requests < 1:
        raise ConfigError(f"a trace must have at least 1 request, got requests={requests}")
    noise = random.Random(seed)
    times = _draw_times(requests, rate, arrivals, noise)
    made = Trace(_draw_request(dataset, at, visual_tokens, clip_tokens, noise) for at in times)
    return made if arrivals is None or rate is None else made.scale(rate=rate)


def _draw_times(requests: int, rate: float | None, arrivals: Trace | None, noise: random.Random) -> list[float]:
    """Arrival times in ms."""
    if arrivals is not None:
        return _repeat_times(arrivals, requests)
    if rate is None or not 0 < rate < math.inf:
        raise ConfigError(f"give a positive rate in requests a second or arrivals= (a trace), got rate={rate!r}")
    return [1000 * at for at in accumulate(noise.expovariate(rate) for _ in range(requests))]


def _repeat_times(arrivals: Trace, requests: int) -> list[float]:
    times = [row.timestamp for row in arrivals.by_arrival()]
    rate = arrival_rate([at / 1000 for at in times])
    if rate is None:
        raise TraceError("arrivals that all come at once have no rate (nor has an empty trace): give a longer trace")
    lap = times[-1] - times[0] + 1000 / rate
    return [times[n % len(times)] - times[0] + n // len(times) * lap for n in range(requests)]


def _draw_request(
    dataset: Dataset, at: float, visual_tokens: VisualTokenRule, clip_tokens: ClipMeasure | None, noise: random.Random
) -> TraceRow:
    images = [_draw_image(dataset, visual_tokens, noise)] if dataset.sizes else []
    text = _draw_lognormal(*dataset.prompt, noise)
    output = _draw_lognormal(*dataset.output, noise)
    videos = [_with_tokens(_draw_video(dataset, noise), clip_tokens)] if dataset.videos else []
    audio = [_with_tokens(_draw_audio(dataset, noise), clip_tokens) for _ in range(dataset.clips)]
    media: list[TraceMedia] = [*images, *videos, *audio]
    tokens = sum([each.tokens or 0 for each in media])
    return TraceRow(
        timestamp=at,
        input_length=text + tokens,
        output_length=output,
        text_length=text,
        images=images,
        videos=videos,
        audio=audio,
    )


def _draw_image(dataset: Dataset, visual_tokens: VisualTokenRule, noise: random.Random) -> TraceImage:
    ((width, height, _),) = noise.choices(dataset.sizes, [share for _, _, share in dataset.sizes])
    return TraceImage(width=width, height=height, tokens=visual_tokens(width, height))


def _draw_video(dataset: Dataset, noise: random.Random) -> TraceVideo:
    ((frames, width, height, _),) = noise.choices(dataset.videos, [each[-1] for each in dataset.videos])
    return TraceVideo(frames=frames, width=width, height=height)


def _draw_audio(dataset: Dataset, noise: random.Random) -> TraceAudio:
    return TraceAudio(seconds=_draw_seconds(*dataset.audio, noise))


def _with_tokens(clip: Drawn, clip_tokens: ClipMeasure | None) -> Drawn:
    return clip if clip_tokens is None else msgspec.structs.replace(clip, tokens=clip_tokens(clip))


def _draw_seconds(mean: float, spread: float, noise: random.Random) -> float:
    """Draw a length with this mean and standard deviation."""
    variance = math.log1p((spread / mean) ** 2)
    return noise.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


def _draw_lognormal(mean: float, spread: float, noise: random.Random) -> int:
    """Draw a count of at least 1; mean and standard deviation hold before rounding."""
    return max(1, round(_draw_seconds(mean, spread, noise)))


def resample(trace: Trace, requests: int, *, rate: float | None = None, seed: int = 0, block_s: float = BIN_S) -> Trace:
    """Draw ``requests`` requests like a trace's: stretches of ``block_s`` seconds, drawn at random and joined.

    A block bootstrap: bursts and runs of large requests within a stretch are kept. The result is scaled to ``rate``
    requests/s where one is given. Raises ``TraceError`` for an empty trace, ``ConfigError`` for values out of range.
    """
    rows = trace.by_arrival()
    if not rows:
        raise TraceError("an empty trace cannot be resampled: serve or load some requests first")
    if requests < 1 or not 0 < block_s < math.inf:
        raise ConfigError(f"requests must be at least 1 and block_s positive, got {requests} and {block_s}")
    times, block, noise = [row.timestamp for row in rows], 1000 * block_s, random.Random(seed)
    drawn: list[TraceRow] = []
    for number, start in _draw_stretches(times, block, noise):
        for row in rows[bisect_left(times, start) : bisect_left(times, start + block)]:
            drawn.append(row.request_at(number * block + row.timestamp - start))
        if len(drawn) >= requests:
            break
    made = Trace(drawn[:requests])
    return made if rate is None else made.scale(rate=rate)


def _draw_stretches(times: Sequence[float], block: float, noise: random.Random) -> Iterator[tuple[int, float]]:
    """Draw starts of stretches, each with its number, without end.

    In a trace of long pauses, of which nearly every stretch is empty, the empty ones are counted and not drawn.
    """
    last = max(times[0], times[-1] - block)
    number = empty = 0
    while empty < _EMPTY_STRETCHES:
        start = noise.uniform(times[0], last)
        yield number, start
        empty = 0 if bisect_left(times, start) < bisect_left(times, start + block) else empty + 1
        number += 1
    spans: list[tuple[float, float]] = []  # starts in (begin, end] find a request
    for time in times:
        begin = max(times[0], time - block, spans[-1][1] if spans else times[0])
        spans.append((begin, max(begin, min(time, last))))
    reach = list(accumulate(end - begin for begin, end in spans))
    share = reach[-1] / (last - times[0])
    while True:
        number += int(math.log(1 - noise.random()) / math.log1p(-share))
        within = (1 - noise.random()) * reach[-1]
        at = bisect_left(reach, within)
        yield number, spans[at][1] - (reach[at] - within)
        number += 1


def densify(trace: Trace, factor: float, *, seed: int = 0, stretch_s: float = 60.0, within_s: float = 900.0) -> Trace:
    """Multiply the requests by about ``factor`` in the same time, to undo thinning to 1 / ``factor``.

    Every stretch of ``stretch_s`` seconds gets the requests of ``factor`` stretches that begin at most ``within_s``
    seconds before or after it, drawn at random; a fractional factor takes that share of the last one. Drifts slower
    than ``within_s`` are kept, and so are bursts within a stretch, damped as more of them overlap. Raises
    ``TraceError`` where all requests come at once, ``ConfigError`` for values out of range.
    """
    rows = trace.by_arrival()
    times = [row.timestamp for row in rows]
    if arrival_rate(times) is None:
        raise TraceError("requests that all come at once have no rate (nor has an empty trace): give a longer trace")
    if not (0 < factor < math.inf and 0 < stretch_s < math.inf and 0 <= within_s < math.inf):
        raise ConfigError(
            f"factor and stretch_s must be positive and within_s at least 0, got {factor}, {stretch_s} and {within_s}"
        )
    noise, stretch, within = random.Random(seed), 1000 * stretch_s, 1000 * within_s
    last = times[-1] - stretch
    drawn: list[TraceRow] = []
    for number in range(math.ceil((times[-1] - times[0]) / stretch)):
        here = times[0] + number * stretch
        for copy in range(math.ceil(factor)):
            start = min(max(last, here), max(times[0], here + noise.uniform(-within, within)))
            found = rows[bisect_left(times, start) : bisect_left(times, start + stretch)]
            kept = found if copy + 1 <= factor else [row for row in found if noise.random() < factor - copy]
            drawn += (row.request_at(here + row.timestamp - start) for row in kept)
    drawn.sort(key=lambda row: row.timestamp)
    return Trace(row for row in drawn if row.timestamp <= times[-1])
