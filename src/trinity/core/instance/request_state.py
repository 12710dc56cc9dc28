"""State of one request on an instance, of a transfer in either direction, and of media under way.

Each has methods for what is done to it from several places, so that few modules write a field (decision 0034).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from trinity.core.block_pool import Key
from trinity.core.instance.columns import Columns
from trinity.core.instance.phases import SPAN, Phase
from trinity.core.messages import IMAGE, KV, Commit, Failure, Fetched, Finished, MediaSpan, Offer, Ready, Work
from trinity.core.migration.layer_blocks import Cells, Piece

MISSING = "missing"  # how a target ends an offer whose features are not where it said


@dataclass(slots=True)
class MediaSlot:
    """One media item of a request here: its image-cache blocks once reserved, and whether they hold the features."""

    span: MediaSpan
    keys: list[Key]
    blocks: tuple[int, ...] = ()
    ready: bool = False
    holder: str = ""  # another instance has the features: they are ready there, and no blocks are reserved here

    def hold(self, blocks: tuple[int, ...], *, ready: bool) -> None:
        """Take these blocks; ``ready``: they have the features already."""
        self.blocks, self.ready = blocks, ready

    def fill(self) -> None:
        """Note that the features are in its blocks."""
        self.ready = True

    def empty(self) -> None:
        """Forget its blocks, which were given back."""
        self.blocks, self.ready = (), False

    def find_at(self, holder: str) -> None:
        """Note which other instance has the features, "" where none is known to."""
        self.holder, self.ready = holder, bool(holder)


@dataclass(slots=True)
class RequestState:
    """A request that lives here. ``written``: its outputs, but for those that ``columns`` has."""

    work: Work
    since: float
    inputs: tuple[Any, ...] = ()
    phase: Phase = Phase.NEW
    ending: Finished | None = None
    written: list[int] = field(default_factory=list)
    columns: Columns | None = None
    attempt: int = field(init=False)
    max_tokens: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    deadline: float = float("inf")
    media: list[MediaSlot] = field(default_factory=list)
    kv: tuple[int, ...] = ()
    keys: list[Key] = field(default_factory=list)
    published: int = 0
    cached: int = 0
    reused: int | None = None  # as ``cached``, of the first time
    done: int = 0
    scheduled: int = 0  # positions of the text that are prefilled or in a step
    text: int = field(init=False)  # positions that a prefill fills: the prompt, and outputs that are recomputed
    preemptions: int = 0
    firm: bool = False  # has its whole KV need and is not preempted, where others grow
    pulls: int = 0
    opened: bool = False
    skip_media: bool = False  # cached KV covers every image: none is asked for
    first_decode: bool = False
    incoming: Incoming | None = None
    outgoing: str | None = None
    stream: Stream | None = None
    spans: dict[str, float] = field(default_factory=dict)
    transfers: list[dict[str, Any]] = field(default_factory=list)
    route: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.attempt, self.max_tokens, self.stop_ids = self.work.attempt, self.work.max_tokens, self.work.stop_ids
        self.text = len(self.work.prompt) + len(self.written)

    @property
    def tokens(self) -> list[int]:
        """Its outputs so far."""
        self.write()
        return self.written

    @property
    def outputs(self) -> int:
        """Count of its outputs so far."""
        return len(self.written) if self.columns is None else self.columns.tokens(self.work.request)

    def write(self) -> None:
        """Take what ``columns`` has of it."""
        if self.columns is not None:
            self.written += self.columns.news(self.work.request)

    def join_columns(self, columns: Columns) -> None:
        """It decodes together with others from now on."""
        columns.join(self.work.request, self.attempt, len(self.written), self.max_tokens, self.stop_ids)
        self.columns = columns

    def leave_columns(self) -> None:
        if self.columns is not None:
            self.write()
            self.columns.leave(self.work.request)
            self.columns = None

    def take_token(self, token: int) -> None:
        """Add the token that its prefill sampled."""
        self.written.append(token)

    def take_over(self, said: Commit, kind: str) -> None:
        """Take over what its source says of it, at the end of a transfer of this kind of block."""
        self.written = list(said.tokens)
        self.reused = said.cached_tokens if kind == KV else None
        if said.tokens and kind == IMAGE:
            self.extend_text()
        self.transfers.extend(said.transfers)
        for name, seconds in said.spans.items():
            self.spans[name] = self.spans.get(name, 0.0) + seconds

    def extend_text(self) -> None:
        """Add its outputs so far to what a prefill fills."""
        self.text, self.keys = len(self.work.prompt) + len(self.tokens), []

    def record(self, transfer: dict[str, Any]) -> None:
        """Add a line of what moved for it, or did not have to."""
        self.transfers.append(transfer)

    def cover(self, covered: bool) -> bool:
        """Note whether cached KV covers all its media, so that it asks for none. Returns that."""
        self.skip_media = covered
        return covered

    def hold_kv(self, blocks: tuple[int, ...], published: int) -> None:
        """Take its KV blocks; so many of them, the first, are matchable already."""
        self.kv, self.published = blocks, published

    def grow(self, blocks: tuple[int, ...]) -> None:
        """Append KV blocks."""
        self.kv += blocks

    def start_behind(self, cached: int) -> None:
        """Begin prefill behind so many cached positions."""
        self.done = self.scheduled = self.cached = cached
        if self.reused is None:
            self.reused = cached

    def schedule(self, end: int) -> None:
        """Note that a step prefills the text up to this position."""
        self.scheduled = end

    def begin_to_decode(self, now: float) -> None:
        """Note that its first decode step begins."""
        self.book(now)
        self.first_decode = True

    def preempt(self) -> None:
        """Forget its KV, which was given up: its text begins anew."""
        self.kv, self.first_decode = (), False
        self.done = self.scheduled = self.published = 0
        self.preemptions += 1

    @property
    def age(self) -> tuple[int, str]:
        return self.work.number, self.work.request

    def book(self, now: float) -> None:
        """Add the time since the last change to the span that it belongs to.

        What passes before the source of a transfer has committed is the source's: its spans say what it did meanwhile.
        """
        since, self.since = self.since, now
        if self.incoming is not None and self.incoming.commit is None:
            return
        name = "decode_queue" if self.phase is Phase.DECODING and not self.first_decode else SPAN[self.phase]
        self.spans[name] = self.spans.get(name, 0.0) + now - since


@dataclass(slots=True)
class Stream:
    """Part of a request's KV that its target knows to be ready while prefill runs.

    The first ``announced`` blocks, and ``layers`` layers of those that the running chunk completes. ``again``: the
    chunk's step failed in its middle, so that these layers were void.
    """

    announced: int
    layers: int = 0
    again: bool = False


@dataclass(slots=True)
class Incoming:
    """A transfer of which this instance is the target, ``since`` when.

    Of KV: what is ready and not asked for, which ``cells`` are missing, pulls ``running`` with their start, whether all
    of it was ``firm`` (of ended steps), layers in the largest piece, the seconds in which a pull was under way, and
    ``doubts``: pieces that did not match their digests, a failure at Commit unless they come again before.
    """

    offer: Offer
    since: float = 0.0
    ready: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    pulled: set[int] = field(default_factory=set)
    commit: Commit | None = None
    moved: bool = False
    released: bool = False
    ready_kv: deque[Ready] = field(default_factory=deque)
    cells: Cells | None = None
    running: dict[int, tuple[Piece, float]] = field(default_factory=dict)
    firm: bool = True
    group: int = 0
    busy: float = 0.0
    busy_since: float = 0.0
    last: float = 0.0
    prefilled: float | None = None
    doubts: list[tuple[Piece, Failure]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    fetched: dict[int, Fetched] = field(default_factory=dict)  # parts that come from a holder


@dataclass(slots=True)
class Outgoing:
    """A transfer of which this instance is the source: a lease on ``blocks``, ``since`` when, until Release.

    ``attempt``, ``route`` and ``count`` of tokens are what the front end is told where the lease ends otherwise.
    """

    id: str
    request: str
    target: str
    kind: str
    blocks: tuple[int, ...]
    since: float = 0.0
    attempt: int = 0
    route: tuple[str, ...] = ()
    count: int = 0


@dataclass(slots=True)
class Spared:
    """A request offered with features that others hold: what encoding them after all would need."""

    work: Work
    inputs: tuple[Any, ...]
    route: tuple[str, ...]
    deadline: float
    tokens: list[int]
    cancelled: bool = False


@dataclass(slots=True)
class Fetching:
    """Features asked of their holder, for a part of an offer."""

    request: str
    offer: str
    part: int
    holder: str
    since: float


@dataclass(slots=True)
class PendingMedia:
    """Media that several requests here may be waiting for: encoded once, by its first provider's inputs."""

    blocks: tuple[int, ...]
    providers: list[tuple[str, int]]
    in_step: bool = False
