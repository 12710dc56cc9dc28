"""Values that messages carry: media, requests, failures, samples."""

from __future__ import annotations

from typing import Any

import msgspec

from trinity.request import Sampling


class Value(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Base of all values and messages."""


FRONTEND = "frontend"  # the name under which every instance reaches the front end
PREEMPTED = "preempted"  # reason of the end of a request that must be recomputed elsewhere
IMAGE, KV = "image", "kv"  # the kinds of block built in; an audio cache is one more


class MediaSpan(Value, frozen=True):
    """One media item as the cores see it.

    ``tokens`` rows in the image cache; ``offset`` and ``length`` in prompt positions (a span may hold separator
    tokens besides its placeholders). ``content`` identifies the features: content hash, processor fingerprint
    and size parameters. ``atomic``: a chunk or prefix hit must not cut it (bidirectional attention inside).
    ``meta`` is what the model needs for positions, such as ``{"image_grid_thw": [1, 8, 12]}``. ``width`` and ``height``
    are the image's own, in pixels, for traces; 0 where there are none.
    """

    kind: str
    tokens: int
    offset: int
    length: int
    content: str
    atomic: bool = False
    meta: dict[str, Any] = {}
    width: int = 0
    height: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.length


class Work(Value, frozen=True, kw_only=True):
    """A processed request: ``prompt`` has every placeholder expanded; ``sampling.seed`` is set.

    ``number`` counts requests in order of arrival at the front end: a lower number is an older request.
    ``outputs``: tokens that it had when it was sent back; they are prefilled behind its prompt.
    """

    request: str
    prompt: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()
    max_tokens: int = 256
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    deadline_s: float | None = None
    attempt: int = 0
    number: int = 0
    outputs: int = 0


class Failure(Value, frozen=True):
    """An error in plain words: ``error`` names a class of trinity.errors, ``fields`` its attributes."""

    error: str
    message: str
    fields: dict[str, str] = {}


class Sampled(Value, frozen=True):
    """Output of the sampler for one row: token id and, on request, log probabilities."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
