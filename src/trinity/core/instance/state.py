"""What an instance core remembers: its requests, offers in both directions, queues, pools and lanes."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any

from trinity.core.block_pool import BlockPool, Key, blocks_for, media_keys, prefix_keys
from trinity.core.instance.columns import Columns
from trinity.core.instance.lanes import Flights
from trinity.core.instance.phases import SPAN
from trinity.core.instance.phases import Phase as Phase
from trinity.core.instance.queues import Queue
from trinity.core.instance.rates import StepRates
from trinity.core.instance.settings import Settings as Settings
from trinity.core.messages import (
    IMAGE,
    KV,
    Commit,
    Failure,
    Fetched,
    Finished,
    MediaSpan,
    Offer,
    PeerLoad,
    Ready,
    Revoke,
    Send,
    Value,
    Work,
)
from trinity.core.migration.layer_blocks import Cells, Piece
from trinity.core.routing import Router
from trinity.core.transfers import PullTimes, TokenRate

MISSING = "missing"  # how a target ends an offer whose features are not where it said


@dataclass(slots=True)
class MediaSlot:
    """One media item of a request here: its image-cache blocks once reserved, and whether they hold the features."""

    span: MediaSpan
    keys: list[Key]
    blocks: tuple[int, ...] = ()
    ready: bool = False
    holder: str = ""  # another instance has the features: they are ready there, and no blocks are reserved here


@dataclass(slots=True)
class RequestState:
    """A request that lives here. ``written``: its outputs, but for those that ``columns`` has."""

    work: Work
    phase: Phase
    since: float
    inputs: tuple[Any, ...] = ()
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
        """How many those are."""
        return len(self.written) if self.columns is None else self.columns.tokens(self.work.request)

    def write(self) -> None:
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

    @property
    def age(self) -> tuple[int, str]:
        return self.work.number, self.work.request

    def enter(self, phase: Phase, now: float) -> None:
        self.book(now)
        self.phase = phase

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
    """What the target of a KV transfer knows to be ready while prefill runs.

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


class State:
    """All that an instance core remembers. Commands of the event at hand collect in ``out``."""

    def __init__(self, settings: Settings, router: Router) -> None:
        self.settings, self.router = settings, router
        self.pools = {kind: BlockPool(kind, size) for kind, size in settings.pools.items()}
        self.requests: dict[str, RequestState] = {}
        self.encode_queue = Queue(self._order(lambda state: sum(span.tokens for span in state.work.media)))
        self.prefill_queue = Queue(self._order(lambda state: len(state.work.prompt)))
        self.paused: set[str] = set()  # have no row in the next step: they are to be preempted when none is in flight
        self.preempted = Queue(lambda request: self.requests[request].age)  # ahead of all others, the oldest first
        self.migrated_queue = Queue()  # after an image migration: ahead of new arrivals, first in first out
        self.image_offers = Queue()
        self.kv_offers = Queue()
        self.arriving = {Phase.IMAGE_PULL: 0, Phase.KV_PULL: 0}  # whose blocks are on their way here, not released yet
        self.encoding: dict[str, RequestState] = {}
        self.prefilling: dict[str, RequestState] = {}
        self.decoding: dict[str, RequestState] = {}
        self.columns = Columns()
        self.fresh: list[str] = []  # decode from the next step on
        self.leaving: set[str] = set()  # marked as ending while a step or a pull of theirs is in flight
        self.pending: dict[str, PendingMedia] = {}
        self.incoming: dict[str, str] = {}
        self.outgoing: dict[str, Outgoing] = {}
        self.tombstones: dict[str, str] = {}
        # whether requests grow here: those that do not decode here need no more than their text
        self.grows = settings.reservation == "optimistic" and "D" in settings.roles
        self.lanes: Flights = {lane: deque() for lane in settings.lanes}
        self.out: list[Value] = []
        self.steps = 0
        self.offers = 0
        self.preemptions = 0
        self.generation = 0
        self.doubtful: dict[str, set[int]] = {kind: set() for kind in settings.pools}  # a former target may read these
        self.spared: dict[str, Spared] = {}
        self.fetches: dict[str, Fetching] = {}
        self.heard: dict[str, float] = {}
        self.awake = -inf
        self.lease_check = inf
        self.deadlines: list[tuple[float, str]] = []
        self.report_at = self.reported_at = inf
        self.reported: PeerLoad | None = None
        self.followed = False  # whether peers act on what changes here
        self.rates = StepRates(settings.rules, settings.roles)
        self.rest = TokenRate()  # of prefill here, what is left of a step when the last layer's KV is written
        self.pull_times: dict[str, PullTimes] = {}  # of our pulls of KV, by source
        self.pull_cost: tuple[float, float] | None = None  # of others' pulls from here, as last reported

    def _order(self, size: Callable[[RequestState], float]) -> Callable[[str], float] | None:
        """The waiting queue in the order of the rules: first come, shortest job, or earliest deadline first."""
        order = self.settings.rules.order
        if order == "fcfs":
            return None
        key = size if order == "sjf" else lambda state: state.deadline
        return lambda request: key(self.requests[request])

    @property
    def image(self) -> BlockPool:
        return self.pools[IMAGE]

    @property
    def kv(self) -> BlockPool:
        return self.pools[KV]

    def send(self, to: str, message: Value) -> None:
        self.out.append(Send(to, message))

    def allocate(self, kind: str, count: int) -> tuple[int, ...]:
        """Blocks for new content: those of a lease that was taken back get a new generation first."""
        blocks = self.pools[kind].allocate(count)
        doubtful = self.doubtful[kind]
        if doubtful:
            taken = tuple(block for block in blocks if block in doubtful)
            if taken:
                doubtful.difference_update(taken)
                self.generation += 1
                self.out.append(Revoke(kind, taken, self.generation))
        return blocks

    def hear(self, peer: str, now: float) -> None:
        """Any word from a peer renews the leases between the two."""
        self.heard[peer] = now

    def lease_end(self, since: float, peer: str) -> float:
        return max(since, self.heard.get(peer, -inf), self.awake) + self.settings.lease_s

    def watch(self, now: float) -> None:
        """A lease begins."""
        self.lease_check = min(self.lease_check, now + self.settings.lease_s)

    def set_deadline(self, state: RequestState, seconds: float | None, now: float) -> None:
        """``seconds`` are left of the request's time; None: as much as it likes."""
        if seconds is not None:
            state.deadline = now + seconds
            heapq.heappush(self.deadlines, (state.deadline, state.work.request))

    def stir(self, now: float) -> None:
        """Work comes in: the next report is due soon, where peers act on it."""
        if self.followed:
            self.report_at = min(self.report_at, now + self.settings.report_s)

    def in_step(self, request: str) -> bool:
        return any(request in running.requests for flight in self.lanes.values() for running in flight)

    def flying(self) -> Counter[str]:
        """How many steps in flight have rows of a request."""
        flights = chain.from_iterable(self.lanes.values())
        return Counter(chain.from_iterable(running.requests for running in flights))

    def idle(self) -> bool:
        """Whether nothing lives, runs or is leased here."""
        return not (self.requests or self.outgoing or self.fetches or any(self.lanes.values()))

    def slots(self, work: Work) -> list[MediaSlot]:
        return [MediaSlot(span, media_keys(span, self.settings.media_block)) for span in work.media]

    def cached_media(self, keys: list[Key]) -> tuple[int, ...]:
        """The cached blocks of a media item, if all of them are here."""
        hits = self.image.match(keys) if self.settings.image_cache else ()
        return hits if len(hits) == len(keys) else ()

    def prefix_keys(self, state: RequestState) -> list[Key]:
        """Keys of the text's full blocks, computed once per request and instance."""
        if not state.keys and self.settings.prefix_cache:
            text = (*state.work.prompt, *state.tokens)[: state.text]
            state.keys = prefix_keys(text, state.work.media, self.settings.kv_block)
        return state.keys

    def prefix_hits(self, state: RequestState) -> tuple[int, ...]:
        """Cached KV blocks a prefill can start from: whole blocks, at most text - 1 tokens, no atomic span cut."""
        keys = self.prefix_keys(state)
        block = self.settings.kv_block
        hits = self.kv.match(keys[: (state.text - 1) // block])
        usable = len(hits)
        for span in reversed(state.work.media):
            if span.atomic and span.offset < usable * block < span.end:
                usable = span.offset // block
        return hits[:usable]

    def needs_media(self, state: RequestState) -> bool:
        """Whether prefill still needs image features that cached KV does not cover."""
        covered = len(self.prefix_hits(state)) * self.settings.kv_block
        return any(span.end > covered for span in state.work.media)

    def text_blocks(self, state: RequestState) -> int:
        return blocks_for(state.text, self.settings.kv_block)


def failure(error: str, message: str, **fields: str) -> Failure:
    return Failure(error, message, fields)
