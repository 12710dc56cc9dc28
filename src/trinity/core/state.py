"""What an instance core remembers: its requests, offers in both directions, queues, pools and lanes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trinity.blocks import BlockPool, Key, blocks_for, media_keys, prefix_keys
from trinity.messages import IMAGE, KV, Commit, Failure, Finished, MediaSpan, Offer, Send, Step, Value, Work
from trinity.routing import Router
from trinity.scheduler import Rules


class Phase(Enum):
    """Where a request stands on this instance."""

    IMAGE_QUEUE = "waits to be encoded"
    ENCODING = "its media are being encoded"
    IMAGE_OFFER = "waits for image blocks to pull into"
    IMAGE_PULL = "its features are on their way"
    KV_QUEUE = "waits for prefill"
    PREFILLING = "its prompt is being prefilled"
    KV_OFFER = "waits for KV blocks to pull into"
    KV_PULL = "its KV is on its way"
    DECODING = "decodes"


# The span of TriInfer's figure 11 that the time in each phase belongs to.
SPAN = {
    Phase.IMAGE_QUEUE: "encode_queue",
    Phase.ENCODING: "encode",
    Phase.IMAGE_OFFER: "ep_migration",
    Phase.IMAGE_PULL: "ep_migration",
    Phase.KV_QUEUE: "prefill_queue",
    Phase.PREFILLING: "prefill",
    Phase.KV_OFFER: "pd_migration",
    Phase.KV_PULL: "pd_migration",
    Phase.DECODING: "decode",
}


@dataclass(frozen=True)
class Settings:
    """An instance as its core sees it. ``pools``: blocks by kind. ``lanes``: ("joint",) or ("vision", "language")."""

    name: str
    roles: str
    pools: dict[str, int]
    rules: Rules = field(default_factory=Rules)
    lanes: tuple[str, ...] = ("joint",)
    media_block: int = 576
    kv_block: int = 16
    image_cache: bool = True
    prefix_cache: bool = True
    epoch: int = 0


@dataclass(slots=True)
class MediaSlot:
    """One media item of a request here: its image-cache blocks once reserved, and whether they hold the features."""

    span: MediaSpan
    keys: list[Key]
    blocks: tuple[int, ...] = ()
    ready: bool = False


@dataclass(slots=True)
class RequestState:
    """A request that lives here."""

    work: Work
    phase: Phase
    since: float
    inputs: tuple[Any, ...] = ()
    deadline: float = float("inf")
    media: list[MediaSlot] = field(default_factory=list)
    kv: tuple[int, ...] = ()
    keys: list[Key] = field(default_factory=list)
    published: int = 0
    cached: int = 0
    done: int = 0
    tokens: list[int] = field(default_factory=list)
    pulls: int = 0
    opened: bool = False
    skip_media: bool = False  # cached KV covers every image: none is asked for
    first_decode: bool = False
    ending: Finished | None = None
    incoming: Incoming | None = None
    outgoing: str | None = None
    spans: dict[str, float] = field(default_factory=dict)
    transfers: list[dict[str, Any]] = field(default_factory=list)
    route: tuple[str, ...] = ()

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
class Incoming:
    """A transfer of which this instance is the target."""

    offer: Offer
    ready: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    pulled: set[int] = field(default_factory=set)
    commit: Commit | None = None
    moved: bool = False
    released: bool = False


@dataclass(slots=True)
class Outgoing:
    """A transfer of which this instance is the source: a lease on ``blocks`` until Release."""

    id: str
    request: str
    target: str
    kind: str
    blocks: tuple[int, ...]


@dataclass(slots=True)
class PendingMedia:
    """Media that several requests here may be waiting for: encoded once, by its first provider's inputs."""

    blocks: tuple[int, ...]
    providers: list[tuple[str, int]]
    in_step: bool = False


@dataclass(slots=True)
class Running:
    """A step in flight on a lane, and whose rows it has (in order: a replay must not depend on hashes)."""

    step: Step
    requests: dict[str, None]


class State:
    """All that an instance core remembers. Commands of the event at hand collect in ``out``."""

    def __init__(self, settings: Settings, router: Router) -> None:
        self.settings, self.router = settings, router
        self.pools = {kind: BlockPool(kind, size) for kind, size in settings.pools.items()}
        self.requests: dict[str, RequestState] = {}
        self.encode_queue: deque[str] = deque()
        self.prefill_queue: deque[str] = deque()
        self.migrated_queue: deque[str] = deque()  # after an image migration: ahead of new arrivals, first in first out
        self.image_offers: deque[str] = deque()
        self.kv_offers: deque[str] = deque()
        self.encoding: dict[str, RequestState] = {}
        self.prefilling: dict[str, RequestState] = {}
        self.decoding: dict[str, RequestState] = {}
        self.pending: dict[str, PendingMedia] = {}
        self.incoming: dict[str, str] = {}
        self.outgoing: dict[str, Outgoing] = {}
        self.tombstones: dict[str, str] = {}
        self.lanes: dict[str, Running | None] = dict.fromkeys(settings.lanes)
        self.out: list[Value] = []
        self.steps = 0
        self.offers = 0

    @property
    def image(self) -> BlockPool:
        return self.pools[IMAGE]

    @property
    def kv(self) -> BlockPool:
        return self.pools[KV]

    def send(self, to: str, message: Value) -> None:
        self.out.append(Send(to, message))

    def in_step(self, request: str) -> bool:
        return any(running is not None and request in running.requests for running in self.lanes.values())

    def idle(self) -> bool:
        """Whether nothing lives, runs or is leased here."""
        return not (self.requests or self.outgoing or any(self.lanes.values()))

    def slots(self, work: Work) -> list[MediaSlot]:
        return [MediaSlot(span, media_keys(span, self.settings.media_block)) for span in work.media]

    def prefix_keys(self, state: RequestState) -> list[Key]:
        """Keys of the prompt's full blocks, computed once per request and instance."""
        if not state.keys and self.settings.prefix_cache:
            state.keys = prefix_keys(state.work.prompt, state.work.media, self.settings.kv_block)
        return state.keys

    def prefix_hits(self, state: RequestState) -> tuple[int, ...]:
        """Cached KV blocks a prefill can start from: whole blocks, at most prompt - 1 tokens, no atomic span cut."""
        keys = self.prefix_keys(state)
        block = self.settings.kv_block
        hits = self.kv.match(keys[: (len(state.work.prompt) - 1) // block])
        usable = len(hits)
        for span in reversed(state.work.media):
            if span.atomic and span.offset < usable * block < span.end:
                usable = span.offset // block
        return hits[:usable]

    def needs_media(self, state: RequestState) -> bool:
        """Whether prefill still needs image features that cached KV does not cover."""
        covered = len(self.prefix_hits(state)) * self.settings.kv_block
        return any(span.end > covered for span in state.work.media)

    def prompt_blocks(self, state: RequestState) -> int:
        return blocks_for(len(state.work.prompt), self.settings.kv_block)


def failure(error: str, message: str, **fields: str) -> Failure:
    return Failure(error, message, fields)
