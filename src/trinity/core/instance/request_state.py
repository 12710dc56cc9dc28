"""Records the state of a request on an instance, of a transfer in either direction, and of media being encoded.

Each has methods for what is done to it from several places, so that few modules write a field (decision 0034).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from trinity.core.instance.lanes import DecodeBatch
from trinity.core.instance.phases import SPAN, Phase
from trinity.core.messages import (
    KV,
    STATE,
    Collect,
    Commit,
    Failure,
    Fetched,
    Finished,
    MediaSpan,
    Offer,
    Ready,
    Work,
)
from trinity.core.prefix_cache import Key
from trinity.stage_kinds import features_of

COPIED = "copied"  # end of what was offered to be cached alone
UNTAKEN = "untaken"  # outcome of an offer whose target is not in touch with the owner
REFUSED, UNPULLED = "refused", "unpulled"  # outcomes of an offer of a decode that stays where it is: no room, a failure
PASSED = "passed"  # outcome of an offer that a sibling has room for
FEATURES_GONE = "missing"  # outcome of an offer whose named holder no longer has the features


@dataclass(slots=True)
class MediaSlot:
    """One media item of a request: its blocks in the encoder cache once reserved; ``ready`` once they hold features.

    ``helper``: instance that was asked to encode it meanwhile; ``begun``: it does so just now, and this one waits;
    ``recalled``: this one would rather do it itself, unless it has begun. ``kept``: features come home by ``fetch``.
    """

    span: MediaSpan
    keys: list[Key]
    blocks: tuple[int, ...] = ()
    ready: bool = False
    holder: str = ""  # another instance has the features: they are ready there, and no blocks are reserved here
    helper: str = ""
    begun: bool = False
    recalled: bool = False
    kept: bool = False
    fetch: str = ""
    kind: str = field(init=False)  # of its blocks

    def __post_init__(self) -> None:
        self.kind = features_of(self.span.kind)

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

    def leave_to(self, helper: str, *, begun: bool = False, kept: bool = False) -> None:
        """Leave it to another instance, "" for none: it is encoded here. One that has ``kept`` it has begun, too."""
        self.helper, self.begun, self.kept, self.recalled, self.fetch = helper, begun or kept, kept, False, ""

    def bring(self, fetch: str) -> None:
        """Note that its features come home by this Fetch."""
        self.fetch = fetch

    def recall(self) -> None:
        """Note that its helper was asked to leave it, unless it has begun."""
        self.recalled = True


@dataclass(slots=True)
class RequestState:
    """A request on this instance.

    Its prefill, in positions of prompt and recomputed outputs (0 <= ``prefill_start`` <= ``prefilled`` <= ``scheduled``
    <= ``prefill_end``):

    - ``prefill_start``: first position computed; those before it came from the prefix cache.
    - ``prefilled``: positions whose KV is written (vLLM's ``num_computed_tokens``).
    - ``scheduled``: the same, with those of the steps in flight (chunked prefill adds a chunk at a time).
    - ``prefill_end``: positions to fill: the prompt, and after a preemption the outputs so far.

    Its blocks and outputs:

    - ``block_table``: its KV blocks in order; slot i of it belongs to position i. ``state_block``: of its states.
    - ``published_blocks``: how many of these, from the first on, are matchable in the prefix cache.
    - ``stored_tokens``: its outputs, except those that ``decode_batch`` still holds. ``tokens`` collects these first.
    - ``cached_tokens``: ``prefill_start`` of its first prefill, less what it has ``led``, as ``Finished`` reports it.
    - ``led``: [start, end) of each chunk of its leading text that was prefilled while it waited for features.
    - ``rows``: features that were collected for its reader, by media item.
    - ``asker``: it is one media item, encoded for a request that is at this instance; "" for none.
    """

    work: Work
    since: float
    inputs: tuple[Any, ...] = ()
    phase: Phase = Phase.NEW
    ending: Finished | None = None
    stored_tokens: list[int] = field(default_factory=list)
    decode_batch: DecodeBatch | None = None
    attempt: int = field(init=False)
    max_tokens: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    deadline: float = float("inf")
    media: list[MediaSlot] = field(default_factory=list)
    block_table: tuple[int, ...] = ()
    state_block: tuple[int, ...] = ()
    keys: list[Key] = field(default_factory=list)
    published_blocks: int = 0
    prefill_start: int = 0
    cached_tokens: int | None = None
    led: tuple[tuple[int, int], ...] = ()
    prefilled: int = 0
    scheduled: int = 0
    prefill_end: int = field(init=False)
    preemptions: int = 0
    never_preempted: bool = False  # its whole KV need is reserved at once, so no step waits for a block
    pulls_in_flight: int = 0
    collecting: bool = False  # its blocks are being copied for its reader
    opened: bool = False
    skip_media: bool = False  # the prefix cache covers every image: none is pulled
    decode_started: bool = False
    incoming: IncomingTransfer | None = None
    outgoing: str | None = None
    kv_stream: KvStream | None = None
    spans: dict[str, float] = field(default_factory=dict)
    transfers: list[dict[str, Any]] = field(default_factory=list)
    route: tuple[str, ...] = ()
    rows: tuple[Any, ...] = ()
    asker: str = ""
    target: str = ""  # instance that its decode moves to
    copy: str = ""  # offer of its full blocks, ahead of that
    tried: frozenset[str] = frozenset()  # holders named for its features where some turned out to be gone

    def __post_init__(self) -> None:
        self.attempt, self.max_tokens, self.stop_ids = self.work.attempt, self.work.max_tokens, self.work.stop_ids
        self.prefill_end = len(self.work.prompt) + len(self.stored_tokens)

    @property
    def uncommitted(self) -> bool:
        """True of a decode that moves here: until its Commit it is its source's, and has its offer's name here."""
        return self.incoming is not None and self.incoming.offer.moves and self.incoming.commit is None

    @property
    def tokens(self) -> list[int]:
        """Token ids of its outputs so far."""
        self.store_tokens()
        return self.stored_tokens

    @property
    def outputs(self) -> int:
        """Count of its outputs so far."""
        return len(self.stored_tokens) if self.decode_batch is None else self.decode_batch.num_tokens(self.work.request)

    def store_tokens(self) -> None:
        """Collect the tokens that ``decode_batch`` still holds."""
        if self.decode_batch is not None:
            self.stored_tokens += self.decode_batch.new_tokens(self.work.request)

    def collect(self) -> Collect:
        """Note that its features are being copied from now on. Returns the command that does it."""
        self.collecting = True
        return Collect(self.work.request, tuple((slot.blocks, slot.span.tokens) for slot in self.media))

    def end_pull(self) -> None:
        """Note that a pull into its blocks has ended."""
        self.pulls_in_flight -= 1

    def take_rows(self, rows: tuple[Any, ...]) -> None:
        """Take the copies of its features."""
        self.collecting, self.rows = False, rows

    def join_decode_batch(self, columns: DecodeBatch) -> None:
        """Decode together with the requests of this batch from now on."""
        columns.join(
            self.work.request,
            self.attempt,
            len(self.stored_tokens),
            self.max_tokens,
            self.stop_ids,
            self.work.owner,
        )
        self.decode_batch = columns

    def leave_decode_batch(self) -> None:
        if self.decode_batch is not None:
            self.store_tokens()
            self.decode_batch.leave(self.work.request)
            self.decode_batch = None

    def take_token(self, token: int) -> None:
        """Add the token that its prefill sampled."""
        self.stored_tokens.append(token)

    def take_over(self, said: Commit, kind: str) -> None:
        """Continue from the state that its source sends at the end of a transfer of this kind of block."""
        self.stored_tokens = list(said.tokens)
        self.cached_tokens = said.cached_tokens if kind == KV else None
        if said.tokens and kind != KV:
            self.extend_prefill()
        self.transfers.extend(said.transfers)
        for name, seconds in said.spans.items():
            self.spans[name] = self.spans.get(name, 0.0) + seconds

    def extend_prefill(self) -> None:
        """Have the next prefill fill the prompt and the outputs so far (recomputation)."""
        self.prefill_end, self.keys = len(self.work.prompt) + len(self.tokens), []

    def record(self, transfer: dict[str, Any]) -> None:
        """Add the record of one transfer, or of one that a cache made needless."""
        self.transfers.append(transfer)

    def cover(self, covered: bool) -> bool:
        """Note whether cached KV covers all its media, so that none is pulled. Returns ``covered``."""
        self.skip_media = covered
        return covered

    def hold_kv(self, blocks: tuple[int, ...], published: int) -> None:
        """Set its block table, whose first ``published`` blocks are in the prefix cache already."""
        self.block_table, self.published_blocks = blocks, published

    def hold_state(self, blocks: tuple[int, ...]) -> None:
        """Set the block of its states; none where it has none."""
        self.state_block = blocks

    def grow(self, blocks: tuple[int, ...]) -> None:
        """Append KV blocks to its block table."""
        self.block_table += blocks

    def start_prefill(self, cached: int) -> None:
        """Begin prefill behind the first ``cached`` positions, which the prefix cache had."""
        self.prefilled = self.scheduled = self.prefill_start = cached
        if self.cached_tokens is None:
            self.cached_tokens = cached - sum(max(0, min(cached, end) - start) for start, end in self.led)

    def lead(self, start: int, end: int) -> None:
        """Note that positions [start, end) of its leading text are prefilled, and in the prefix cache."""
        self.led += ((start, end),)

    @property
    def led_to(self) -> int:
        """End of the leading text that was prefilled while it waited; 0 for none."""
        return self.led[-1][1] if self.led else 0

    def schedule(self, end: int) -> None:
        """Note that a step in flight prefills up to this position."""
        self.scheduled = end

    def begin_to_decode(self, now: float) -> None:
        """Note that its first decode step begins."""
        self.book_time(now)
        self.decode_started = True

    def preempt(self) -> None:
        """Clear its block table, whose blocks were dropped: its prefill starts over."""
        self.block_table, self.decode_started = (), False
        self.prefilled = self.scheduled = self.published_blocks = 0
        self.preemptions += 1

    @property
    def age(self) -> tuple[int, str]:
        return self.work.number, self.work.request

    def come_back(self, target: str, own: str) -> None:
        """Note that it is here again: the instance that it was offered to is lost."""
        self.route += (target, own)

    def book_time(self, now: float) -> None:
        """Add the seconds since the last change to the span of the present phase.

        Time before the source of a transfer has committed counts there: the spans of its Commit include it.
        """
        since, self.since = self.since, now
        if self.incoming is not None and self.incoming.commit is None:
            return
        name = "decode_queue" if self.phase is Phase.DECODING and not self.decode_started else SPAN[self.phase]
        self.spans[name] = self.spans.get(name, 0.0) + now - since


@dataclass(slots=True)
class KvStream:
    """KV of a request announced to its target while prefill runs.

    The first ``announced_blocks`` blocks, and ``layers`` layers of those that the running chunk completes. ``again``:
    the chunk's step failed midway, so these layers are written and announced again. ``first_step``: the step that the
    stream began with; what one before it writes is announced as it ends.
    """

    announced_blocks: int
    first_step: int
    layers: int = 0
    again: bool = False


@dataclass(slots=True)
class IncomingTransfer:
    """A transfer of which this instance is the target, since clock time ``since``.

    ``ready_parts``, ``asked_parts`` and ``pulled_parts`` are indices of parts; of KV, pulls are numbered instead, and:

    - ``ready_queue``: pieces announced and not pulled yet; ``progress``: which layers of which blocks are here.
    - ``kv_pulls``: pieces being pulled, with the clock time at which each pull began.
    - ``from_ended_steps``: every piece was announced by an ended step, so that nothing can be written again.
    - ``largest_group`` (layers): of the largest piece; ``busy_s`` (seconds): time with at least one pull in flight.
    - ``busy_since``, ``last_pull_at``, ``prefill_ended_at``: clock times.
    - ``mismatches``: pieces that differ from their digests. At Commit they fail the request, unless sent again before.
    - ``fetched_parts``: answers of holders, by part.
    - ``caught``: its source was told that all is here.
    - ``lacks``: the named holder that had features no more.
    - ``states``: of states that go with KV: "" (not there yet), ready, asked, here.
    """

    offer: Offer
    since: float = 0.0
    ready_parts: set[int] = field(default_factory=set)
    asked_parts: set[int] = field(default_factory=set)
    pulled_parts: set[int] = field(default_factory=set)
    commit: Commit | None = None
    moved: bool = False
    released: bool = False
    ready_queue: deque[Ready] = field(default_factory=deque)
    progress: PullProgress | None = None
    kv_pulls: dict[int, tuple[Piece, float]] = field(default_factory=dict)
    from_ended_steps: bool = True
    largest_group: int = 0
    busy_s: float = 0.0
    busy_since: float = 0.0
    last_pull_at: float = 0.0
    prefill_ended_at: float | None = None
    mismatches: list[tuple[Piece, Failure]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    fetched_parts: dict[int, Fetched] = field(default_factory=dict)
    caught: bool = False
    lacks: str = ""
    states: Literal["", "ready", "asked", "here"] = ""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A request that was handed on to ``target``, which is instance number ``hop`` on its route, counted from 0."""

    target: str
    attempt: int
    hop: int
    owner: str


@dataclass(slots=True)
class SkippedEncode:
    """A request offered with features that others hold: all that encoding them here would need."""

    work: Work
    inputs: tuple[Any, ...]
    route: tuple[str, ...]
    deadline: float
    tokens: list[int]
    tried: frozenset[str]
    cancelled: bool = False


@dataclass(slots=True)
class FeatureFetch:
    """Features requested from their holder, for a part of an offer, at clock time ``since``."""

    request: str
    offer: str
    part: int
    holder: str
    since: float


@dataclass(slots=True)
class PendingMedia:
    """Media that several requests may wait for: encoded once, from the inputs of the first provider."""

    blocks: tuple[int, ...]
    providers: list[tuple[str, int]]
    in_step: bool = False


@dataclass(slots=True)
class Lease:
    """A lease on ``blocks`` for a transfer of which this instance is the source, from clock time ``since`` to Release.

    ``attempt``, ``route`` and ``count`` (output tokens) go to the front end where the lease ends without a Release.
    ``state``: block of states that goes with KV.
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
    state: tuple[int, ...] = ()
    copies: bool = False  # ahead of a move: its request decodes on meanwhile
    offer: Offer | None = None  # and what it was told at the end: to be said again to another, if this one is lost
    said: Commit | None = None
    deadline: float = float("inf")

    @property
    def by_kind(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Its blocks by kind."""
        own = (self.kind, self.blocks)
        return (own, (STATE, self.state)) if self.state else (own,)


class Piece(NamedTuple):
    """Layers [layers[0], layers[1]) of blocks [blocks[0], blocks[1]) of a block table."""

    layers: tuple[int, int]
    blocks: tuple[int, int]

    @property
    def cells(self) -> int:
        return (self.layers[1] - self.layers[0]) * max(0, self.blocks[1] - self.blocks[0])


class PullProgress:
    """Progress of pulling a block table, in cells (one layer of one block). The first ``cached`` blocks are here.

    ``missing`` counts the cells that are not here. The first ``final`` blocks are written no more, as far as is known:
    the steps that wrote them have ended. ``AssertionError`` for a cell announced twice, or out of range.
    """

    def __init__(self, blocks: int, layers: int, cached: int) -> None:
        self.blocks, self.layers, self.cached = blocks, layers, min(cached, blocks)
        self.missing = (self.blocks - self.cached) * layers
        self.final = 0
        self._asked = [0] * blocks  # the layers of each block, as bits
        self._here = [0] * blocks

    def request(self, ready: Ready) -> Piece:
        """Mark the cells of a Ready as requested. Returns the piece to pull; it has no blocks where all are cached.

        A step announces all layers of its blocks at once when it has ended, and a later one begins behind these.
        """
        layers, (start, end) = ready.layers or (0, self.layers), ready.blocks or (0, self.blocks)
        assert 0 <= layers[0] < layers[1] <= self.layers, f"{ready} of {self.layers} layers"
        assert 0 <= start <= end <= self.blocks, f"{ready} of {self.blocks} blocks"
        piece = Piece(layers, (max(start, self.cached), end))
        bits = (1 << layers[1]) - (1 << layers[0])
        for block in range(*piece.blocks):
            assert not self._asked[block] & bits, f"{ready} names what was ready before"
            self._asked[block] |= bits
        self.final = max(self.final, end if ready.layers is None else start)
        return piece

    def count_whole(self) -> int:
        """Count the first blocks of which all layers are here, and are not written again.

        Who announces a block again says so ahead of all that it says of later blocks.
        """
        every, final = (1 << self.layers) - 1, max(self.cached, self.final)
        return next((block for block in range(self.cached, final) if self._here[block] != every), final)

    def note_arrival(self, piece: Piece) -> None:
        self.missing -= piece.cells
        bits = (1 << piece.layers[1]) - (1 << piece.layers[0])
        for block in range(*piece.blocks):
            self._here[block] |= bits

    def note_loss(self, piece: Piece) -> None:
        """Mark a piece whose pull failed as not requested."""
        bits = (1 << piece.layers[1]) - (1 << piece.layers[0])
        for block in range(*piece.blocks):
            self._asked[block] &= ~bits

    def invalidate(self, blocks: tuple[int, int]) -> None:
        """Mark blocks that the source writes again as missing. No pull of them may be in flight."""
        for block in range(max(blocks[0], self.cached), blocks[1]):
            self.missing += self._asked[block].bit_count()
            self._asked[block] = self._here[block] = 0
