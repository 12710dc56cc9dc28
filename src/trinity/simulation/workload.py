"""Turns a trace's rows into requests for the cores: counts of tokens, and only as much content as requests share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from trinity.core.image_strips import cut_span
from trinity.core.messages import IMAGE, MediaSpan, Work
from trinity.costs.model_shape import ModelShape
from trinity.errors import ConfigError
from trinity.traces.cut_short import fill_cut_outputs
from trinity.traces.trace import Trace, TraceImage, TraceRow

Counts = npt.NDArray[np.int64]
HASH_TOKENS = 512  # of the prompt, in one hash of a Mooncake trace
OUTPUT = 0  # every output token; its value means nothing


class Job(msgspec.Struct, frozen=True, gc=False):
    """A trace's row as a model sees it: images first, then text.

    - ``at`` (seconds): arrival.
    - ``prompt`` (tokens): length with images.
    - ``images``: (visual tokens, content) of each.
    - ``max_tokens`` (tokens): length of the output.
    - ``hash_ids``: of the prompt's blocks of ``HASH_TOKENS`` tokens.
    - ``refused``: the reason why the model cannot take it; "" where it can.
    - ``asked`` (tokens, 0: unknown): the request's own limit of its output.
    - ``tiles`` (tokens): of each image, its tiles that are encoded by themselves; empty where nobody asked for them.
    """

    at: float
    prompt: int
    images: tuple[tuple[int, str], ...]
    max_tokens: int
    hash_ids: tuple[int, ...] = ()
    refused: str = ""
    asked: int = 0
    tiles: tuple[tuple[int, ...], ...] = ()


def jobs_of(trace: Trace, model: ModelShape, *, tiled: bool = False) -> list[Job]:
    """Make one job for each row, in the trace's order; with the tiles of its images where ``tiled``.

    An image of unknown tokens has those of the model's rule for its size, or of a usual image. An image without a name
    for its content is equal to no other. The output has ``output_length`` tokens, at least one and at most what the
    context leaves. A row that was cut short has those expected of it (``fill_cut_outputs``).
    """
    return [_job(row, number, model, tiled) for number, row in enumerate(fill_cut_outputs(trace))]


def _job(row: TraceRow, number: int, model: ModelShape, tiled: bool) -> Job:
    at = row.timestamp / 1000
    try:
        tokens = [image.tokens or _tokens(image, model) for image in row.images]
    except ConfigError:  # the model's rule has no answer for an image of this size
        return Job(at, 0, (), 1, refused="with an image of a size that it has no rule for")
    visual = sum(tokens)
    text = row.text_length if row.text_length is not None else row.input_length - visual
    prompt = visual + max(1, text)
    contents = [image.content or f"{number}.{place}" for place, image in enumerate(row.images)]
    images = tuple(zip(tokens, contents, strict=True))
    refused = "with images, and it takes text alone" if images and model.vision is None else ""
    if not refused and prompt >= model.context:
        refused = f"with prompts of its context of {model.context:,} tokens or longer"
    most = max(1, min(row.output_length, model.context - prompt))
    tiles = tuple(map(partial(_tiles, model), row.images, tokens)) if tiled and not refused else ()
    return Job(at, prompt, images, most, tuple(row.hash_ids), refused, row.max_tokens or 0, tiles)


def _tiles(model: ModelShape, image: TraceImage, tokens: int) -> tuple[int, ...]:
    return model.tiles(tokens, image.width or 0, image.height or 0)


def asked_tokens(job: Job, ask: int, context: int) -> int:
    """Return the tokens that a job asks for: its own limit or ``ask``, within the context; at least its output."""
    return max(job.max_tokens, min(max(ask, job.asked), context - job.prompt))


class Sizes(NamedTuple):
    """Sizes of requests as arrays [requests].

    - ``prompt``, ``output``, ``visual`` (tokens).
    - ``images``: number of images.
    - ``squares``: squares of each image's visual tokens, summed.
    - ``taken``: true if the model takes the request.
    - ``hashed``: true if any request has hashes of its prefix.
    """

    prompt: Counts
    output: Counts
    visual: Counts
    images: Counts
    squares: Counts
    taken: npt.NDArray[np.bool_]
    hashed: bool


def sizes_of(jobs: Sequence[Job]) -> Sizes:
    """Collect the sizes, in the jobs' order."""
    count = len(jobs)
    return Sizes(
        np.fromiter((job.prompt for job in jobs), np.int64, count),
        np.fromiter((job.max_tokens for job in jobs), np.int64, count),
        np.fromiter((sum([tokens for tokens, _ in job.images]) for job in jobs), np.int64, count),
        np.fromiter((len(job.images) for job in jobs), np.int64, count),
        np.fromiter((0 if job.refused else sum([n * n for n, _ in job.images]) for job in jobs), np.int64, count),
        np.fromiter((not job.refused for job in jobs), np.bool_, count),
        any(job.hash_ids for job in jobs),
    )


def _tokens(image: TraceImage, model: ModelShape) -> int:
    if image.width and image.height:
        return model.visual_tokens(image.width, image.height)
    return model.image_tokens


def has_shared_content(jobs: Iterable[Job]) -> bool:
    """Check if two requests, or two images of one, have content in common: otherwise no cache can hit."""
    seen: set[str | int] = set()
    for job in jobs:
        named: list[str | int] = [content for _, content in job.images]
        for name in [*named, *job.hash_ids[:1]]:  # prefixes are equal from their first hash on, or not at all
            if name in seen:
                return True
            seen.add(name)
    return False


def work_of(job: Job, number: int, shared: bool, strips: int = 1) -> Work:
    """Build the request for the cores. Unless content is ``shared``, only the length of its prompt has a meaning.

    An image whose tiles are known is cut into at most ``strips``, as a pipeline's are with that ``spread``.
    """
    spans: list[MediaSpan] = []
    offset = 0
    for place, (count, content) in enumerate(job.images):
        image = MediaSpan(IMAGE, count, offset, count, f"{content}:{count}")
        spans += cut_span(image, job.tiles[place] if job.tiles else (count,), strips)
        offset += count
    prompt = tuple(_identities(job, number, offset)) if shared else _blank(job.prompt)
    return Work(request=str(number), prompt=prompt, media=tuple(spans), max_tokens=job.max_tokens)


@lru_cache(maxsize=64)
def _blank(length: int) -> tuple[int, ...]:
    return (0,) * length


def _identities(job: Job, number: int, visual: int) -> Iterator[int]:
    """Yield prompt tokens that are equal for equal content: by hash where there is one, else by request.

    Positions of images all have token 0, as placeholders; their content is in the spans.
    """
    yield from repeat(0, visual)
    hashes = chain.from_iterable(repeat(1 + each, HASH_TOKENS) for each in job.hash_ids)
    named = chain(hashes, repeat(-1 - number))
    for at, identity in zip(range(job.prompt), named, strict=False):
        if at >= visual:
            yield identity
