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
from trinity.costs.media_tokens import MeasuredClip
from trinity.costs.model_shape import ModelShape
from trinity.errors import ConfigError
from trinity.traces.cut_short import fill_cut_outputs
from trinity.traces.trace import Trace, TraceImage, TraceRow

Counts = npt.NDArray[np.int64]
HASH_TOKENS = 512  # of the prompt, in one hash of a Mooncake trace
OUTPUT = 0  # every output token; its value means nothing


class Job(msgspec.Struct, frozen=True, gc=False):
    """A trace's row as a model sees it: images first, then videos, then audio, then text.

    - ``at`` (seconds): arrival.
    - ``prompt`` (tokens): length with media.
    - ``images``: (visual tokens, content) of each item: an image, one or some frames of a video, an audio clip.
    - ``kinds``: of each item; empty where all are images.
    - ``work`` (visual tokens): cost of encoding each item; empty where it is that of its tokens.
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
    kinds: tuple[str, ...] = ()
    work: tuple[int, ...] = ()

    def kind(self, place: int) -> str:
        """Return the kind of an item."""
        return self.kinds[place] if self.kinds else IMAGE

    @property
    def works(self) -> Sequence[int]:
        """Cost of encoding each item, in visual tokens."""
        return self.work or [tokens for tokens, _ in self.images]


def jobs_of(trace: Trace, model: ModelShape, *, tiled: bool = False) -> list[Job]:
    """Make one job for each row, in the trace's order; with the tiles of its images where ``tiled``.

    A medium of unknown tokens has those of the model's rule for its size, or of a usual one. One without a name for its
    content is equal to no other. The output has ``output_length`` tokens, at least one and at most what the context
    leaves. A row that was cut short has those expected of it (``fill_cut_outputs``).
    """
    return [_job(row, number, model, tiled) for number, row in enumerate(fill_cut_outputs(trace))]


def _job(row: TraceRow, number: int, model: ModelShape, tiled: bool) -> Job:
    at = row.timestamp / 1000
    if why := _untaken(row, model):
        return Job(at, 0, (), 1, refused=why)
    try:
        tokens = [image.tokens or _tokens(image, model) for image in row.images]
        clips = [model.media.measure(each) for each in row.clips]
    except ConfigError:  # the model's rule has no answer for an image of this size
        return Job(at, 0, (), 1, refused="with an image of a size that it has no rule for")
    visual = sum(tokens) + sum([clip.tokens for clip in clips])
    text = row.text_length if row.text_length is not None else row.input_length - visual
    prompt = visual + max(1, text)
    if prompt >= model.context:
        return Job(at, prompt, (), 1, refused=f"with prompts of its context of {model.context:,} tokens or longer")
    contents = [image.content or f"{number}.{place}" for place, image in enumerate(row.images)]
    images = tuple(zip(tokens, contents, strict=True))
    most = max(1, min(row.output_length, model.context - prompt))
    tiles = tuple(map(partial(_tiles, model), row.images, tokens)) if tiled else ()
    job = Job(at, prompt, images, most, tuple(row.hash_ids), "", row.max_tokens or 0, tiles)
    return _add_clips(job, row, number, clips, model) if clips else job


def _untaken(row: TraceRow, model: ModelShape) -> str:
    """Return the reason why the model does not take a row's media; "" where it does."""
    media, other = model.media, "text alone" if model.encoder is None else "none"
    given = (
        ("images", row.images, model.vision),
        ("videos", row.videos, media.video),
        ("audio", row.audio, media.audio),
    )
    return next((f"with {kind}, and it takes {other}" for kind, there, taken in given if there and taken is None), "")


def _add_clips(job: Job, row: TraceRow, number: int, clips: Sequence[MeasuredClip], model: ModelShape) -> Job:
    """Add the items of videos and audio clips to a job with the row's images."""
    items, kinds = list(job.images), [IMAGE] * len(job.images)
    for place, (clip, given) in enumerate(zip(clips, row.clips, strict=True)):
        content = given.content or f"{number}.{len(row.images) + place}"
        items += [(tokens, clip.name_item(content, at)) for at, tokens in enumerate(clip.list_tokens())]
        kinds += [clip.kind] * clip.items
    work = tuple(model.media.encode_work(kind, tokens) for kind, (tokens, _) in zip(kinds, items, strict=True))
    tiles = (*job.tiles, *((tokens,) for tokens, _ in items[len(job.images) :])) if job.tiles or not job.images else ()
    plain = all(each == tokens for each, (tokens, _) in zip(work, items, strict=True))
    return msgspec.structs.replace(
        job, images=tuple(items), kinds=tuple(kinds), work=() if plain else work, tiles=tiles
    )


def _tiles(model: ModelShape, image: TraceImage, tokens: int) -> tuple[int, ...]:
    return model.tiles(tokens, image.width or 0, image.height or 0)


def asked_tokens(job: Job, ask: int, context: int) -> int:
    """Return the tokens that a job asks for: its own limit or ``ask``, within the context; at least its output."""
    return max(job.max_tokens, min(max(ask, job.asked), context - job.prompt))


class Sizes(NamedTuple):
    """Sizes of requests as arrays [requests].

    - ``prompt``, ``output``, ``visual`` (tokens).
    - ``images``: number of items of media.
    - ``work`` (visual tokens): cost of encoding all of them.
    - ``squares``: visual tokens of each item times its work, summed.
    - ``taken``: true if the model takes the request.
    - ``hashed``: true if any request has hashes of its prefix.
    """

    prompt: Counts
    output: Counts
    visual: Counts
    images: Counts
    work: Counts
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
        np.fromiter((sum(job.works) for job in jobs), np.int64, count),
        np.fromiter((0 if job.refused else _squares(job) for job in jobs), np.int64, count),
        np.fromiter((not job.refused for job in jobs), np.bool_, count),
        any(job.hash_ids for job in jobs),
    )


def _squares(job: Job) -> int:
    return sum([tokens * work for (tokens, _), work in zip(job.images, job.works, strict=True)])


def has_own_work(jobs: Iterable[Job]) -> bool:
    """Check if encoding any item costs other than its tokens do; the compiled engine knows no such items."""
    return any(job.work for job in jobs)


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
        image = MediaSpan(job.kind(place), count, offset, count, f"{content}:{count}")
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
