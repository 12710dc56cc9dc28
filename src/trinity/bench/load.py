"""Requests of a benchmark: a trace's rows made into requests that are equal for every engine, drawn by a seed."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from trinity import traces
from trinity.bench.lookalike import Lookalikes
from trinity.bench.servers import BenchRequest
from trinity.errors import ConfigError
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request
from trinity.traces.trace import Trace, TraceImage, TraceRow

IMAGE_SIDE = 336  # pixels: images are small, since how engines resize photographs is not what is measured
RequestMaker = Callable[[TraceRow, int], BenchRequest]
_MARKER, _APART = "<image>", "<image>\n"  # as LLaVA's prompts have it; some engines put the line break there anyway


class CheckpointRequests:
    """Makes requests for a checkpoint: text and images of a row's sizes, checked by the model's own processor."""

    def __init__(self, checkpoint: Path, salt: str = "") -> None:
        self._processor = RequestProcessor(checkpoint)
        self._make = Lookalikes(self._processor, salt)

    def __enter__(self) -> CheckpointRequests:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processor.close()

    @property
    def takes_images(self) -> bool:
        return self._processor.multimodal

    def __call__(self, row: TraceRow, number: int) -> BenchRequest:
        """Make a row's request. Raises the processor's error for a request that the model does not take."""
        like = self._make(row, number)
        text = (like.prompt or "").replace(_MARKER, _APART)
        work = self._processor.process(Request(text, media=like.media, max_tokens=like.max_tokens)).work
        spans = [(span.offset, span.length) for span in work.media]
        images = [base64.b64encode(each.source).decode() for each in like.media]
        return BenchRequest(text, list(work.prompt), spans, images, work.max_tokens)


async def make_requests(make: RequestMaker, rows: Iterable[TraceRow]) -> list[BenchRequest]:
    """Make the rows' requests on a thread."""
    return await asyncio.to_thread(lambda: [make(row, number) for number, row in enumerate(rows)])


def shrink_trace(trace: Trace, *, text: int, output: int, images: int, side: int = IMAGE_SIDE) -> Trace:
    """Shrink a trace's requests for a small model: sizes in proportion, times as they are.

    The median text becomes ``text`` tokens and the median output ``output``, none more than four times that; the first
    ``images`` images are kept, as squares of ``side`` pixels. Raises ``ConfigError`` for an empty trace.
    """
    if not len(trace):
        raise ConfigError("a trace without requests cannot be served: give another one, or another window")
    words, outputs = _median([row.text_tokens for row in trace]), _median([row.output_length for row in trace])
    kept = [
        msgspec.structs.replace(
            row.request_at(row.timestamp),
            text_length=_scale_count(row.text_tokens, text / words, 4 * text),
            input_length=0,
            output_length=_scale_count(row.output_length, output / outputs, 4 * output),
            images=[TraceImage(width=side, height=side, content=each.content) for each in row.images[:images]],
            hash_ids=[],
        )
        for row in trace
    ]
    return Trace(kept)


def _median(counts: Sequence[int]) -> float:
    return max(1, sorted(counts)[len(counts) // 2])


def _scale_count(count: int, by: float, most: int) -> int:
    return max(1, min(most, round(count * by)))


def draw_stretch(trace: Trace, requests: int, seed: int) -> Trace:
    """Draw a stretch of ``requests`` rows by the seed; a shorter trace is resampled in blocks."""
    rows = trace.by_arrival()
    if len(rows) <= requests:
        span = (rows[-1].timestamp - rows[0].timestamp) / 1000
        return traces.resample(trace, requests, seed=seed, block_s=max(span / 4, 1e-3))
    first = random.Random(seed).randrange(len(rows) - requests)
    stretch = rows[first : first + requests]
    return Trace(row.request_at(row.timestamp - stretch[0].timestamp) for row in stretch)


def burst_row(images: int, prompt: int, output: int) -> TraceRow:
    """Make a row of ``prompt`` text tokens, ``images`` square images and ``output`` tokens."""
    pictures = [TraceImage(width=IMAGE_SIDE, height=IMAGE_SIDE, content=None)] * images
    return TraceRow(timestamp=0, input_length=prompt, text_length=prompt, output_length=output, images=pictures)
