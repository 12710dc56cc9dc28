"""Events, messages between cores, and commands: all inputs and outputs of a core.

Immutable values: no tensor, no clock, no socket. Times are durations in seconds, because the clocks of two hosts
differ: messages carry the time that remains or was spent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from trinity.core.values import ENCODED as ENCODED
from trinity.core.values import FRONTEND as FRONTEND
from trinity.core.values import IMAGE as IMAGE
from trinity.core.values import KV as KV
from trinity.core.values import NOWHERE as NOWHERE
from trinity.core.values import PREEMPTED as PREEMPTED
from trinity.core.values import STATE as STATE
from trinity.core.values import UNFIT as UNFIT
from trinity.core.values import Failure as Failure
from trinity.core.values import MediaSpan as MediaSpan
from trinity.core.values import PeerEmpty as PeerEmpty
from trinity.core.values import PeerReserved as PeerReserved
from trinity.core.values import PeerSuspect as PeerSuspect
from trinity.core.values import ResolvedSampling as ResolvedSampling
from trinity.core.values import Sampled as Sampled
from trinity.core.values import Value as Value
from trinity.core.values import Work as Work

Said = Literal["want", "have", "take", "no", "sent", "none"]
WORK = ""  # kind of what is computed next where it goes: requests, and features for them

# ---------------------------------------------------------------- front end → instance


class Submit(Value, frozen=True):
    """A new request.

    ``inputs[i]`` is the processor's output for media item i, opaque to the cores. ``route``: instances that it has
    visited. ``tokens``: its outputs so far, if it was preempted where it cannot be recomputed. ``input_bytes``: of its
    inputs, for the front end, which bounds what waits. ``helpers[i]``: instance that was asked to encode media item i,
    "" for none. ``asker``: this is such an item, for a request that is at that instance; it hears ``Helped`` of it.
    ``target_epoch``: as an Offer has it. ``spans``: seconds that it has waited at those that passed it on.
    """

    work: Work
    inputs: tuple[Any, ...] = ()
    route: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    input_bytes: int = 0
    helpers: tuple[str, ...] = ()
    asker: str = ""
    target_epoch: int | None = None
    spans: dict[str, float] = msgspec.field(default_factory=dict)


class Cancel(Value, frozen=True):
    """Stop this request; forwarded along its route, on the channel of its Offers.

    ``asker``: it is a media item that this instance was to encode for that one, which hears ``Helped`` unless it has.
    """

    request: str
    asker: str = ""


class Move(Value, frozen=True):
    """Have this attempt of a request, which decodes here, go on at ``to``; its ``owner`` hears Moved or NotMoved."""

    request: str
    attempt: int
    to: str
    owner: str = FRONTEND


class Forget(Value, frozen=True):
    """This attempt of the request, and all before it, have ended everywhere: drop what is left of them."""

    request: str
    attempt: int = 0


# ---------------------------------------------------------------- instance ↔ instance (pull migration, TriInfer 4.3)


class Part(Value, frozen=True):
    """A piece of an offer: source blocks, in order. For images a part is one media item; for KV a run of blocks.

    ``holder``: instance that reported these features in its encoder cache, so they were not encoded for this offer.
    ``tail``: rows in the last block if that is not full, else 0.
    """

    blocks: tuple[int, ...]
    holder: str = ""
    tail: int = 0


class Offer(Value, frozen=True, kw_only=True):
    """Source to target, step 1: offers blocks to pull.

    ``generation`` is the source's count of revocations: a block with a higher one is no longer part of this offer.
    ``epoch``: which life of the source it is. ``moves``: of a decode, which goes on at the source unless the target has
    all of it (``Caught``). ``copies``: ahead of a move, of blocks to be cached there, from which nothing goes on.
    ``tokens``: outputs that such blocks hold. ``target_epoch`` (None: any): life of the target that alone takes it.
    ``passed``: its first target had no room, and named this one, which had (``Release.to``); it does not name another.
    ``state``: beside KV, the block of the request's states, where the model's layers keep some.
    """

    id: str
    kind: str
    source: str
    work: Work
    parts: tuple[Part, ...]
    route: tuple[str, ...] = ()
    generation: int = 0
    epoch: int = 0
    moves: bool = False
    copies: bool = False
    tokens: tuple[int, ...] = ()
    target_epoch: int | None = None
    passed: bool = False
    state: tuple[int, ...] = ()


class Ready(Value, frozen=True):
    """Source to target: these parts hold their content.

    Of KV (part 0), layers [layers[0], layers[1]) of blocks [blocks[0], blocks[1]) of the block table; None means all.
    ``again``: these blocks were written again after an earlier Ready and must be pulled again. ``digests``: one per
    block, in order, where the transport verifies blocks; computing them took ``digest_s`` seconds. ``state``: it is the
    block of states alone that holds its content, once: as all prefill, or all decode, that changes it here is over.
    """

    id: str
    parts: tuple[int, ...]
    layers: tuple[int, int] | None = None
    blocks: tuple[int, int] | None = None
    again: bool = False
    digests: tuple[int, ...] = ()
    digest_s: float = 0.0
    state: bool = False


class Caught(Value, frozen=True):
    """Target to source, once: all blocks of an offer that ``moves`` are here. Answered by Commit, else by Withdraw."""

    id: str
    target: str


class Commit(Value, frozen=True):
    """Source to target, once: no part will follow. ``tokens`` are the outputs so far.

    ``ending``: stop or length, where these outputs ended the request; the target drains its pulls, reports, releases.
    """

    id: str
    tokens: tuple[int, ...] = ()
    cached_tokens: int = 0
    spans: dict[str, float] = msgspec.field(default_factory=dict)
    transfers: tuple[dict[str, Any], ...] = ()
    deadline_s: float | None = None
    ending: str = ""


class Withdraw(Value, frozen=True):
    """Source to target: drain the pulls in flight, then Release."""

    id: str
    failure: Failure | None = None


class Release(Value, frozen=True):
    """Target to source, once, step 4: the lease ends.

    ``outcome``: pulled, cached, cancelled, failed, refused (without Commit), untaken (of an owner that the target is
    not in touch with), missing (the holder ``lacks`` them), or passed: it has waited here for ``waited_s`` seconds, and
    the sibling ``to`` has room.
    ``cost``: measured time of pulls from the source, (seconds per pull, seconds per layer of a block).
    """

    id: str
    outcome: str
    cost: tuple[float, float] | None = None
    lacks: str = ""
    to: str = ""
    waited_s: float = 0.0


class Fetch(Value, frozen=True):
    """To a holder of image features, or of KV: requests a lease of the blocks with these keys. Answered by Fetched.

    Of KV it leases what it has up to the first that it lacks. ``tail``: rows in the last block if not full, else 0.
    """

    id: str
    requester: str
    kind: str
    keys: tuple[bytes, ...]
    tail: int = 0


class Fetched(Value, frozen=True):
    """The answer: blocks leased until Release(id), none where it lacks them. ``tail`` and ``kind``: as in the Fetch."""

    id: str
    holder: str
    blocks: tuple[int, ...] = ()
    generation: int = 0
    digests: tuple[int, ...] = ()
    digest_s: float = 0.0
    tail: int = 0
    kind: str = IMAGE


class Helped(Value, frozen=True):
    """Helper to asker, of the item that it encodes under the name ``help``, in its life ``epoch``.

    ``said``: begun (it is in a step), ready (its features are in my encoder cache), or no (encode it yourself).
    """

    help: str
    helper: str
    said: Literal["begun", "ready", "no"]
    epoch: int = 0


class Spare(Value, frozen=True):
    """Instance ``name`` to a sibling, of what has not begun: requests and features (``WORK``), or offered decodes (KV).

    ``said``: want (I have nothing to do, or room: tell me once something waits), have (something waits here, of so
    many ``blocks``), take (I still do, and have so many ``blocks``: hand it over), no (I do not by now), or none
    (nothing waits here any more, or what I was to offer you is not to come). A Submit answers take, too; of an offer,
    sent: ``source``, in its life ``epoch``, is to make it to you.
    """

    name: str
    said: Said
    kind: str = WORK
    blocks: int = 0
    source: str = ""
    epoch: int = 0


class PeerUp(Value, frozen=True):
    """An instance is up, with these roles ("EP") and pools, on this ``host``, "" where nobody says.

    ``returns``: it may send preempted requests back.
    """

    name: str
    roles: str
    epoch: int = 0
    pools: dict[str, int] = msgspec.field(default_factory=dict)
    image_block_size: int = 576
    kv_block_size: int = 16
    returns: bool = False
    host: str = ""


class PeerLoad(Value, frozen=True):
    """Load report of an instance, also its heartbeat.

    - ``free`` (blocks): available ones by kind. ``pull_s`` (seconds, None): measured of a KV pull, and of each block.
    - ``predicted_s`` (seconds): predicted time of the work at each stage (D: of a step).
    - ``unit_s`` (seconds): predicted time of one more visual token (E), prompt position (P) or row (D).
    - ``cached``: 8 bytes of the key of each cached block, by kind.
    - ``preemptions``: count since the start.
    - ``newest``: highest ``Work.number`` that it has had, where it has several front ends.
    - ``running``: by lane, the number of the oldest step that is running.
    """

    name: str
    epoch: int = 0
    free: dict[str, int] = msgspec.field(default_factory=dict)
    predicted_s: dict[str, float] = msgspec.field(default_factory=dict)
    unit_s: dict[str, float] = msgspec.field(default_factory=dict)
    cached: dict[str, bytes] = msgspec.field(default_factory=dict)
    preemptions: int = 0
    newest: int = 0
    pull_s: tuple[float, float] | None = None
    running: dict[str, int] = msgspec.field(default_factory=dict)


class PeerDown(Value, frozen=True):
    """An instance or front end is gone, or was not started again: ``why``; ``planned``: to begin with other roles."""

    name: str
    why: str = ""
    planned: bool = False


class PeerLeaving(Value, frozen=True):
    """An instance is to end once it is empty, or no longer. Requests go past one that leaves if they can."""

    name: str
    epoch: int
    leaving: bool


class PeerRemoved(Value, frozen=True):
    """An instance does not come back after this life, of whose end was told before: nobody waits for it any more."""

    name: str
    epoch: int


class Moved(Value, frozen=True):
    """Instance to front end, ahead of all else of this request: another instance has handed it on to me.

    ``to`` is my name and ``epoch`` my life; ``hop`` counts instances from 0: channels may reorder hops. ``source``: the
    instance that sends the token before my first, in its life ``source_epoch``; "" for none. ``start``: the index of my
    first, where it decoded there; 0 where that instance only prefilled it. ``passed``: I have it again, as the instance
    before me, where it only waited, has named another.
    """

    request: str
    attempt: int
    to: str
    hop: int
    epoch: int = 0
    source: str = ""
    source_epoch: int = 0
    start: int = 0
    passed: bool = False


class Gone(Value, frozen=True):
    """Instance to front end: I handed the request on, or offered it, to ``to``, and that life of it is lost.

    ``source`` is my name; ``epoch`` and ``hop`` are those of ``to``. It may have gone on from there, or never arrived.
    """

    request: str
    attempt: int
    source: str
    to: str
    hop: int
    epoch: int = 0


class NotMoved(Value, frozen=True):
    """Instance to front end: a request that was to ``Move`` has not, and goes on here if it is here."""

    request: str
    attempt: int
    failure: Failure


# ---------------------------------------------------------------- instance → front end


class Emit(Value, frozen=True):
    """All tokens of one step, in columns: request, attempt, index among its outputs, and sample.

    The index is ``starts[i] + behind``: most steps share ``starts`` with the step before.
    """

    requests: tuple[str, ...]
    attempts: tuple[int, ...]
    starts: tuple[int, ...]
    sampled: tuple[Sampled, ...]
    behind: int = 0

    def rows(self) -> Iterator[tuple[str, int, int, Sampled]]:
        """Yield request, attempt, index and sample of each row. Raises ``ValueError`` for columns of unequal length."""
        behind = self.behind
        for request, attempt, start, sampled in zip(
            self.requests, self.attempts, self.starts, self.sampled, strict=True
        ):
            yield request, attempt, start + behind, sampled


class Finished(Value, frozen=True, kw_only=True):
    """A request ended on this instance and holds nothing here.

    ``reason``: stop, length, encoded, cancelled, error, or preempted (it must be recomputed elsewhere). ``count``: its
    tokens, some of which another instance has sent, on another channel. ``cut``: a message about it could not be sent,
    so that missing tokens will not come. ``rows``: of one that was encoded, as in Collected.
    """

    request: str
    attempt: int
    reason: str
    failure: Failure | None = None
    count: int = 0
    spans: dict[str, float] = msgspec.field(default_factory=dict)
    cached_tokens: int = 0
    transfers: tuple[dict[str, Any], ...] = ()
    route: tuple[str, ...] = ()
    preemptions: int = 0
    cut: bool = False
    rows: tuple[Any, ...] = ()


# ---------------------------------------------------------------- core → its shell (commands)


class Send(Value, frozen=True):
    """Give ``message`` to the core named ``to``; one channel per pair, in order."""

    to: str
    message: Value


class Open(Value, frozen=True, kw_only=True):
    """A request's KV blocks are reserved here: rows of its prefill and decode follow.

    ``images[i]`` are the image-cache blocks of media item i (empty where its features are not needed, because
    cached KV covers it). ``cached`` tokens of the prompt are already in ``blocks``. ``tokens`` are the outputs
    so far: all KV but the last token's is then in ``blocks``; with ``again`` they are prefilled behind the prompt.
    ``state``: its block of states, where the model's layers keep some.
    """

    work: Work
    blocks: tuple[int, ...]
    images: tuple[tuple[int, ...], ...] = ()
    cached: int = 0
    tokens: tuple[int, ...] = ()
    again: bool = False
    state: tuple[int, ...] = ()


class Grow(Value, frozen=True):
    """Append these blocks to the block tables of open requests (slot allocation), before any later step."""

    blocks: dict[str, tuple[int, ...]]


class Close(Value, frozen=True):
    """Drop the rows of a request: no step or pull of it is in flight."""

    request: str


class Encode(Value, frozen=True):
    """Encode media item ``item`` of a request into ``blocks`` of the encoder cache."""

    request: str
    item: int
    span: MediaSpan
    blocks: tuple[int, ...]
    inputs: Any


class Collect(Value, frozen=True):
    """Copy features out of the encoder cache, for a reader; answered by one Collected.

    ``items[i]`` are the blocks of media item i, and the rows in them.
    """

    request: str
    items: tuple[tuple[tuple[int, ...], int], ...]


class Prefill(Value, frozen=True):
    """Run prompt positions [start, start + length), a chunk of a chunked prefill; ``last`` samples the first token."""

    request: str
    start: int
    length: int
    last: bool


class Step(Value, frozen=True):
    """Run this batch on a lane; answered by one Stepped. ``decodes`` name requests: one row each.

    ``group``: report each time this many more layers of the prefills' KV are written; 0 for no report.
    """

    id: int
    lane: str
    encodes: tuple[Encode, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    decodes: tuple[str, ...] = ()
    group: int = 0


class Revoke(Value, frozen=True):
    """Set the generation of these blocks before any later command: their lease was revoked and they get new content."""

    kind: str
    blocks: tuple[int, ...]
    generation: int


class Pull(Value, frozen=True):
    """Read blocks of a peer's pool into our own; answered by one Pulled.

    Fails where, after the copy, a source block has a higher generation than the offer's ``generation``, or a block
    differs from its ``digests`` (added by the host where blocks are verified, else None; computing them took
    ``digest_s`` seconds). ``part`` is the offer's part, or for KV the number of the pull. ``layers``: [first, end) of
    each block, None for all. ``tail``: rows in the last block if that is not full, else 0; the others need not move.
    """

    offer: str
    part: int
    source: str
    kind: str
    request: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    generation: int = 0
    layers: tuple[int, int] | None = None
    digests: tuple[int, ...] | None = None
    digest_s: float = 0.0
    tail: int = 0


# ---------------------------------------------------------------- shell → its core (results)


class Tick(Value, frozen=True):
    """A timer is due."""


class Stepped(Value, frozen=True):
    """A step ended after ``seconds``: its samples and its failures, by request."""

    id: int
    lane: str
    sampled: dict[str, Sampled] = msgspec.field(default_factory=dict)
    failed: dict[str, Failure] = msgspec.field(default_factory=dict)
    seconds: float = 0.0


class LayersWritten(Value, frozen=True):
    """A running step has written these layers, [first, end), of the KV of all its prefill rows.

    None: the step failed and runs again row by row; what it wrote before is void.
    """

    step: int
    lane: str
    layers: tuple[int, int] | None


class Pulled(Value, frozen=True):
    """A pull ended."""

    offer: str
    part: int
    failure: Failure | None = None
    record: dict[str, Any] = msgspec.field(default_factory=dict)


class Collected(Value, frozen=True):
    """The features of an encode-only request were copied: ``rows[i]`` of media item i, opaque to the cores."""

    request: str
    rows: tuple[Any, ...] = ()
    failure: Failure | None = None
