"""What is served: a trace's rows as requests that every engine is given alike; arrivals drawn anew from a seed."""

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
from trinity.bench.servers import Asked
from trinity.errors import ConfigError
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request
from trinity.traces.trace import Trace, TraceImage, TraceRow

SIDE = 336  # pixels, where images are made small: what engines do to a photograph's size is not what is measured
Make = Callable[[TraceRow, int], Asked]
_MARKER, _APART = "<image>", "<image>\n"  # as LLaVA's prompts have it; some engines put the line break there anyway


class Maker:
    """Requests for a checkpoint: text and images of a row's sizes, checked by the model's own processor."""

    def __init__(self, checkpoint: Path, salt: str = "") -> None:
        self._processor = RequestProcessor(checkpoint)
        self._make = Lookalikes(self._processor, salt)

    def __enter__(self) -> Maker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processor.close()

    @property
    def sees(self) -> bool:
        return self._processor.multimodal

    def __call__(self, row: TraceRow, number: int) -> Asked:
        """Raises what the processor says of a request that the model does not take."""
        like = self._make(row, number)
        text = (like.prompt or "").replace(_MARKER, _APART)
        work = self._processor.process(Request(text, media=like.media, max_tokens=like.max_tokens)).work
        spans = [(span.offset, span.length) for span in work.media]
        images = [base64.b64encode(each.source).decode() for each in like.media]
        return Asked(text, list(work.prompt), spans, images, like.max_tokens)


async def made(make: Make, rows: Iterable[TraceRow]) -> list[Asked]:
    """The rows' requests, made on a thread."""
    return await asyncio.to_thread(lambda: [make(row, number) for number, row in enumerate(rows)])


def fitted(trace: Trace, *, text: int, output: int, images: int, side: int = SIDE) -> Trace:
    """A trace's rows made small enough for a small model: sizes in proportion, times as they are.

    The median text becomes ``text`` tokens and the median output ``output``, none more than four times that; the first
    ``images`` images are kept, as squares of ``side`` pixels. Raises ``ConfigError`` for an empty trace.
    """
    if not len(trace):
        raise ConfigError("a trace without requests cannot be served: give another one, or another window")
    words, outputs = _middle([row.text_tokens for row in trace]), _middle([row.output_length for row in trace])
    kept = [
        msgspec.structs.replace(
            row.request_at(row.timestamp),
            text_length=_scaled(row.text_tokens, text / words, 4 * text),
            input_length=0,
            output_length=_scaled(row.output_length, output / outputs, 4 * output),
            images=[TraceImage(width=side, height=side, content=each.content) for each in row.images[:images]],
            hash_ids=[],
        )
        for row in trace
    ]
    return Trace(kept)


def _middle(counts: Sequence[int]) -> float:
    return max(1, sorted(counts)[len(counts) // 2])


def _scaled(count: int, by: float, most: int) -> int:
    return max(1, min(most, round(count * by)))


def drawn(trace: Trace, requests: int, seed: int) -> Trace:
    """A stretch of so many requests, which one the seed says; stretches put in a row where the trace is shorter."""
    rows = trace.by_arrival()
    if len(rows) <= requests:
        span = (rows[-1].timestamp - rows[0].timestamp) / 1000
        return traces.resample(trace, requests, seed=seed, block_s=max(span / 4, 1e-3))
    first = random.Random(seed).randrange(len(rows) - requests)
    stretch = rows[first : first + requests]
    return Trace(row.request_at(row.timestamp - stretch[0].timestamp) for row in stretch)


def burst(images: int, prompt: int, output: int) -> TraceRow:
    """A request of ``prompt`` tokens of text besides its images, which come as squares."""
    pictures = [TraceImage(width=SIDE, height=SIDE, content=None)] * images
    return TraceRow(timestamp=0, input_length=prompt, text_length=prompt, output_length=output, images=pictures)
