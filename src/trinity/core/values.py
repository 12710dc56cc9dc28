"""Values that messages carry: media, requests, failures, samples, and the names of a request's lives.

Of two front ends neither knows the other's ids. All but the first put their own name into each name of a life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from trinity.request import DEFAULT_MAX_TOKENS
from trinity.request import ENCODED as ENCODED
from trinity.stage_kinds import IMAGE as IMAGE
from trinity.stage_kinds import KV as KV
from trinity.stage_kinds import STATE as STATE

FRONTEND = "frontend"  # the name of the first front end: any other one has a colon and a word of its own behind it
UNFIT = "unfit"  # field of a failure: what an encoder says of media that it cannot take
PREEMPTED = "preempted"  # reason of the end of a request that must be recomputed elsewhere
NOWHERE = "Nowhere"  # cause of a failure: no instance has the next stage just now, as far as this one knows
VIDEO = "video"  # a kind of media whose items are groups of frames
MARK = "~"
MOST_IDS = 65_536  # that are remembered; beyond them every id counts as used


class Value(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Base of all values and messages."""


def is_frontend(name: str) -> bool:
    """True for the name of a front end, which no instance has."""
    return name == FRONTEND or name.startswith(f"{FRONTEND}:")


class MediaSpan(Value, frozen=True):
    """One media item as the cores see it.

    ``tokens`` rows in the image cache; ``offset`` and ``length`` in prompt positions (a span may hold separator
    tokens besides its placeholders). ``content`` identifies the features: content hash, processor fingerprint
    and size parameters. ``atomic``: a chunk or prefix hit must not cut it (bidirectional attention inside). ``whole``:
    positions of the prompt, from the first on, that see each other because of it and may not be cut; 0 for none.
    ``meta`` is what the model needs for positions, such as ``{"image_grid_thw": [1, 8, 12]}``. ``width`` and ``height``
    are the image's own, in pixels, for traces; 0 where there are none. ``strip``: its place among the strips of one
    image that is encoded in several, each an item of its own, or among the groups of frames of a video; 0 for
    the first and for an image in one.
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
    strip: int = 0
    whole: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def uncut(self) -> tuple[int, int]:
        """Positions [start, end) that no chunk and no prefix hit may cut; empty if they may be cut everywhere."""
        if self.whole:
            return 0, self.whole
        return (self.offset, self.end) if self.atomic else (self.offset, self.offset)


def join_strips(media: Sequence[MediaSpan]) -> tuple[MediaSpan, ...]:
    """Join the strips of each image to one span, named by the first of them: the images that a reader has given."""
    joined: list[MediaSpan] = []
    for span in media:
        if span.strip and joined:
            whole = joined.pop()
            span = replace(whole, tokens=whole.tokens + span.tokens, length=span.end - whole.offset)
        joined.append(span)
    return tuple(joined)


class ResolvedSampling(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A request's ``Sampling`` where it sets something, elsewhere its checkpoint's generation config.

    Fields are those of ``Sampling`` that an instance needs. A row that draws needs ``seed``. ``logit_bias``: token ids
    and their biases, in ascending order. ``structured``: kind and text of a grammar, "" for none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_eos_token_id: tuple[int, ...] = ()
    seed: int | None = None
    logits_processor: str | None = None
    structured: str = ""
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """True if each token is the most likely one of those allowed."""
        return self.temperature == 0.0

    @property
    def bans_tokens(self) -> bool:
        """True if some tokens may not be sampled, whatever their logits."""
        lists = self.suppress_tokens or self.begin_suppress_tokens or self.bad_words_ids or self.forced_eos_token_id
        return bool(lists or self.no_repeat_ngram_size or self.min_tokens)

    @property
    def needs_host(self) -> bool:
        """True if the host changes logits before a token is taken, which it can once it knows those before."""
        return self.logits_processor is not None or self.structured != ""

    @property
    def discounts(self) -> bool:
        """True if tokens that the output has already lose a part of their logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Work(Value, frozen=True, kw_only=True):
    """A processed request: ``prompt`` has every placeholder expanded; ``sampling.seed`` is set.

    ``owner``: the front end that it came to, which alone hears of it. ``number`` counts requests in order of arrival,
    as far as front ends hear of each other's: a lower number is an older request, and of equal ones the name decides.
    ``outputs``: tokens that it had when it was sent back; they are prefilled behind its prompt.
    ``named_stop_ids``: those of ``stop_ids`` that a stop string alone names; no ``min_tokens`` delays them.
    ``salt``: requests of different salts share no prefix; ``content`` of its media has it too.
    ``encode_only``: it ends with the features of its media, which its reader gets; its prompt is empty.
    ``holder``: instance that reported the first ``held`` positions of its text as cached, for whoever prefills it.
    ``alone``: stages ("PD") at which it runs with no other request on the instance, to see whether that dies of it.
    """

    request: str
    prompt: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()
    max_tokens: int = DEFAULT_MAX_TOKENS
    sampling: ResolvedSampling = ResolvedSampling()
    stop_ids: frozenset[int] = frozenset()
    named_stop_ids: frozenset[int] = frozenset()
    deadline_s: float | None = None
    attempt: int = 0
    owner: str = FRONTEND
    number: int = 0
    outputs: int = 0
    salt: str = ""
    encode_only: bool = False
    alone: str = ""
    holder: str = ""
    held: int = 0

    @property
    def given_media(self) -> tuple[MediaSpan, ...]:
        """Its media as its reader gave them: the strips of an image are one."""
        return join_strips(self.media)

    def is_alone_at(self, roles: str) -> bool:
        """True where it runs alone on an instance with these roles."""
        return any(letter in roles for letter in self.alone)


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


class PeerReserved(Value, frozen=True):
    """Front end to all instances: a life of an instance, from this epoch on, is for one that runs alone; or no more.

    ``number`` counts them: the instance answers with it once it is empty.
    """

    name: str
    epoch: int
    reserved: bool
    number: int = 0


class PeerEmpty(Value, frozen=True):
    """Instance to front end: I am reserved by the PeerReserved of this number, and have no request and no lease."""

    name: str
    epoch: int
    number: int


class PeerSuspect(Value, frozen=True):
    """An instance has been silent for seconds, or speaks again. Requests go past one that is suspected if they can."""

    name: str
    epoch: int
    suspected: bool


class FrontendUp(Value, frozen=True):
    """A front end is in touch with this instance from now on, until a PeerDown of it."""

    name: str


class NotTaken(Value, frozen=True):
    """Instance to the one that passed this attempt of a request on: I am not in touch with its owner."""

    request: str
    attempt: int


def blocks_for(tokens: int, block: int) -> int:
    """Count the blocks of ``block`` rows that ``tokens`` rows need."""
    return -(-tokens // block)


def name_life(request: str, number: int, attempt: int, owner: str = FRONTEND) -> str:
    """Name a life: behind the mark stands which request of its owner it is, by the ``number``, and which attempt."""
    whose = "" if owner == FRONTEND else f"{owner}."
    return f"{request}{MARK}{whose}{number}.{attempt}"


def id_of(name: str) -> str:
    """Read the reader's id from the name of a life. The name of a first life may be the id itself."""
    return name.rpartition(MARK)[0] or name


def check_owner(name: str) -> str:
    """Return a front end's name. Raises ``ValueError`` for one that could make the names of two lives equal."""
    if not is_frontend(name) or MARK in name:
        raise ValueError(f"a front end is called {FRONTEND!r} or {FRONTEND + ':'!r} and a word, not {name!r}")
    return name


def name_help(request: str, attempt: int, item: int) -> str:
    """Name a media item that another instance encodes for this attempt; no life of a request has such a name."""
    return f"{request}{MARK}{attempt}+{item}"


def read_help(name: str) -> tuple[str, int, int]:
    """Read life, attempt and media item from such a name."""
    request, _, rest = name.rpartition(MARK)
    attempt, _, item = rest.partition("+")
    return request, int(attempt), int(item)


class LifeNames:
    """Names first lives by their ids, where no other life can have or have had that name.

    An instance may still have a request that has ended for the front end: a step is in flight, or a message on its way.
    ``most`` (ids, 65,536): how many are remembered. ``owner``: the front end.
    """

    def __init__(self, most: float = MOST_IDS, owner: str = FRONTEND) -> None:
        self.most, self.owner = most, owner
        self._used: set[str] = set()

    def name_first(self, request: str, number: int) -> str:
        """Name the first life of a request. An id with the mark in it could be the name of another life."""
        if self.owner != FRONTEND:
            return name_life(request, number, 0, self.owner)
        fresh = MARK not in request and len(self._used) < self.most and request not in self._used
        if not fresh:
            return name_life(request, number, 0)
        self._used.add(request)
        return request
