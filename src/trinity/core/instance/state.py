"""Holds the state of an instance: its requests, offers in both directions, queues, pools and lanes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import inf

from trinity.core.block_pool import BlockPool
from trinity.core.instance.lanes import DecodeBatch, Flights, StepInFlight
from trinity.core.instance.peer_questions import HomeFetch, PrefixFetches, Siblings
from trinity.core.instance.phases import BEFORE_DECODE, MOVES, OFFERED, Phase
from trinity.core.instance.queues import LeadingQueue, Queue
from trinity.core.instance.request_state import (
    FeatureFetch,
    Lease,
    MediaSlot,
    PendingMedia,
    RequestState,
    SkippedEncode,
    Tombstone,
)
from trinity.core.instance.settings import Settings as Settings
from trinity.core.messages import (
    FRONTEND,
    KV,
    Close,
    Failure,
    Finished,
    Moved,
    Open,
    PeerLoad,
    Pull,
    Revoke,
    Send,
    Value,
    Work,
)
from trinity.core.prefix_cache import Key, media_keys, prefix_keys, uncut_blocks
from trinity.core.routing.router import Router
from trinity.core.scheduler import StepRates
from trinity.core.transfers import PullTimes, TokenRate
from trinity.core.values import blocks_for
from trinity.stage_kinds import encoder_of, roles_of


class State:
    """All that an instance core remembers. Commands of the event at hand collect in ``out``."""

    def __init__(self, settings: Settings, router: Router) -> None:
        self.settings, self.router = settings, router
        self.does = roles_of(settings.roles)
        self.pools = {kind: BlockPool(kind, size) for kind, size in settings.pools.items()}
        self.feature_pools = {kind: pool for kind, pool in self.pools.items() if kind in self.does.features}
        self.depth = settings.steps_in_flight
        self.requests: dict[str, RequestState] = {}
        self.encode_queue = Queue(self._order(lambda state: sum(span.tokens for span in state.work.media)))
        self.prefill_queue = Queue(self._order(lambda state: len(state.work.prompt)))
        self.paused: set[str] = set()  # no row in the next step: wait for a block, or to be preempted
        self.preempted = Queue(lambda request: self.requests[request].age)  # ahead of all others, the oldest first
        self.migrated_queue = Queue()  # after an image migration: ahead of new arrivals, first in first out
        self.image_offers = Queue()
        self.kv_offers = Queue()
        self.encoding: dict[str, RequestState] = {}
        self.prefilling: dict[str, RequestState] = {}
        self.decoding: dict[str, RequestState] = {}
        self.moving: dict[str, RequestState] = {}
        self.arriving = {Phase.IMAGE_PULL: 0, Phase.KV_PULL: 0}  # requests whose blocks are being pulled
        self._queues, self._batches = self._places()
        self.waiting_offers = self.before_decode = 0  # requests in ``OFFERED`` and in ``BEFORE_DECODE``
        self.leading = LeadingQueue(settings)
        self.decode_batch = DecodeBatch()
        self.new_decodes: list[str] = []  # their first decode step is the next
        self.leaving: set[str] = set()  # ending, but with a step or a pull in flight
        self.pending: dict[str, PendingMedia] = {}
        self.incoming: dict[str, str] = {}
        self.outgoing: dict[str, Lease] = {}
        self.tombstones: dict[str, Tombstone] = {}
        # block tables grow as requests decode; without decode here none needs more than its prefill
        self.grows = settings.reservation == "optimistic" and self.does.decodes
        self.lanes: Flights = {lane: deque() for lane in settings.lanes}
        self.out: list[Value] = []
        self.steps = self.offers = self.preemptions = self.generation = 0
        # taken back from a lease: a former target may still read them
        self.revoked_blocks: dict[str, set[int]] = {kind: set() for kind in settings.pools}
        self.reserved_as: int | None = None  # number of the PeerReserved for one that runs alone here
        self.said_empty, self.siblings = False, Siblings()
        self.frontends = [FRONTEND]  # in touch with this instance: it has requests of no other
        self.newest = 0  # highest number of a request that came here
        self.skipped_encodes: dict[str, SkippedEncode] = {}
        self.fetches, self.prefix_fetches = dict[str, FeatureFetch](), PrefixFetches()
        self.home_fetches: dict[str, HomeFetch] = {}
        self.last_heard: dict[str, float] = {}
        self.awake_since = -inf
        self.deadlines: list[tuple[float, str]] = []
        self.lease_check = self.report_at = self.reported_at = inf
        self.reported: PeerLoad | None = None
        self.has_load_listeners = False  # peers that act on this load: see ``loads.followers``
        self.rates = StepRates(settings.rules, settings.roles)
        self.step_tail = TokenRate()  # seconds of a prefill step behind its last layer's KV
        self.pull_times: dict[str, PullTimes] = {}  # of this instance's KV pulls, by source
        self.pull_cost: tuple[float, float] | None = None  # of others' KV pulls from here, as last reported

    def _places(self) -> tuple[dict[Phase, Queue], dict[Phase, dict[str, RequestState]]]:
        """List the queue or the batch of each phase that has one."""
        queues = {
            Phase.IMAGE_QUEUE: self.encode_queue,
            Phase.IMAGE_OFFER: self.image_offers,
            Phase.KV_QUEUE: self.prefill_queue,
            Phase.MIGRATED_QUEUE: self.migrated_queue,
            Phase.PREEMPTED_QUEUE: self.preempted,
            Phase.KV_OFFER: self.kv_offers,
        }
        batches = {
            Phase.ENCODING: self.encoding,
            Phase.PREFILLING: self.prefilling,
            Phase.DECODING: self.decoding,
            Phase.MOVING: self.moving,
        }
        return queues, batches

    def _order(self, size: Callable[[RequestState], float]) -> Callable[[str], float] | None:
        """Sort key of the waiting queues under ``BatchRules.order``; None for first come, first served."""
        order = self.settings.rules.order
        if order == "fcfs":
            return None
        key = size if order == "sjf" else lambda state: state.deadline
        return lambda request: key(self.requests[request])

    def take_in(self, state: RequestState) -> None:
        """Add a request that arrived or came back."""
        request = state.work.request
        assert request not in self.requests, f"{request} is here already"
        self.requests[request] = state
        if state.incoming is not None:
            self.incoming[state.incoming.offer.id] = request
        if not state.uncommitted:
            self._claim(state)

    def adopt(self, state: RequestState) -> None:
        """Add a decode that moved here under its own name, in place of that of its offer: it is committed."""
        assert state.incoming is not None
        del self.requests[state.work.request]
        state.work = state.incoming.offer.work
        self.take_in(state)

    def _claim(self, state: RequestState) -> None:
        """Tell its owner that it is here. Drops its tombstone: two would pass a late Cancel in a circle."""
        self.tombstones.pop(state.work.request, None)
        if len(state.route) > 1:
            self.send(state.work.owner, self._moved(state, len(state.route) - 1))

    def _moved(self, state: RequestState, hop: int) -> Moved:
        own, offer = self.settings, state.incoming.offer if state.incoming is not None else None
        source = (offer.source, offer.epoch) if offer is not None and offer.kind == KV else ("", 0)
        start = len(state.stored_tokens) if offer and offer.moves else 0
        return Moved(state.work.request, state.attempt, own.name, hop, own.epoch, *source, start)

    def leave_tombstone(self, state: RequestState, target: str) -> None:
        """Send a Cancel of this request there from now on, and tell its owner if the target is lost."""
        work = state.work
        self.tombstones[work.request] = Tombstone(target, state.attempt, len(state.route), work.owner)

    def forget(self, request: str, attempt: int) -> None:
        """Drop the tombstone and the skipped encode of a request that has ended everywhere, up to this attempt."""
        if request in self.tombstones and self.tombstones[request].attempt <= attempt:
            del self.tombstones[request]
        if request in self.skipped_encodes and self.skipped_encodes[request].work.attempt <= attempt:
            del self.skipped_encodes[request]

    def move(self, state: RequestState, phase: Phase, now: float, *, ahead: bool = False) -> None:
        """Move it to a phase, ``ahead`` of all waiting there. Raises ``AssertionError`` for a move not in ``MOVES``."""
        before, request = state.phase, state.work.request
        if phase not in MOVES[before] or (state.ending is not None and phase is not Phase.GONE):
            raise AssertionError(f"{self.settings.name}: {request} cannot move from {before.name} to {phase.name}")
        if state.ending is None:
            self._leave_place(state)
        if before in self.arriving:
            self.arriving[before] -= 1
        if phase is Phase.GONE:
            del self.requests[request]
            self.leaving.discard(request)
        else:
            state.book_time(now)
            self._take_place(state, phase, ahead)
        state.phase = phase
        self.leading.follow(state, before)

    def start(self, running: StepInFlight, now: float) -> None:
        """Run a step on its lane."""
        step = running.step
        if self.new_decodes and step.decodes:
            self._begin_to_decode(now)
        self.steps += 1
        self.lanes[step.lane].append(running)
        self.out.append(step)

    def _begin_to_decode(self, now: float) -> None:
        for request in self.new_decodes:
            state = self.decoding.get(request)
            if state is not None:
                state.begin_to_decode(now)
        self.new_decodes.clear()

    def start_decoding(self, state: RequestState, now: float) -> None:
        """Give it a row in every decode step from now on."""
        self.move(state, Phase.DECODING, now)
        if self.in_step(state.work.request):
            state.decode_started = True  # behind its last chunk
        else:
            self.new_decodes.append(state.work.request)

    def begin_to_end(self, state: RequestState, ending: Finished) -> None:
        """Take it out of its queue or batch: no further step or transfer includes it. Its phase stays until GONE."""
        if state.ending is None:
            self._leave_place(state)
        self.leading.leave(state)
        state.ending = ending
        self.leaving.add(state.work.request)
        state.leave_decode_batch()

    def _take_place(self, state: RequestState, phase: Phase, ahead: bool) -> None:
        request = state.work.request
        self._count(phase, 1)
        if phase in self._queues:
            queue = self._queues[phase]
            queue.appendleft(request) if ahead else queue.append(request)
        elif phase in self._batches:
            self._batches[phase][request] = state
        elif phase in self.arriving:
            self.arriving[phase] += 1

    def _count(self, phase: Phase, change: int) -> None:
        if phase in BEFORE_DECODE:
            self.before_decode += change
        elif phase in OFFERED:
            self.waiting_offers += change

    def _leave_place(self, state: RequestState) -> None:
        self._count(state.phase, -1)
        if state.phase in self._queues:
            self._queues[state.phase].remove(state.work.request)
        elif state.phase in self._batches:
            del self._batches[state.phase][state.work.request]

    @property
    def kv(self) -> BlockPool:
        return self.pools[KV]

    def command(self, command: Value) -> None:
        """Add a command to the answer to the event at hand."""
        self.out.append(command)

    def send(self, to: str, message: Value) -> None:
        self.out.append(Send(to, message))

    def send_ahead(self, place: int, to: str, message: Value) -> None:
        """Send it ahead of all commands but the first ``place`` of them."""
        self.out.insert(place, Send(to, message))

    def open(self, state: RequestState, opened: Open) -> None:
        """Command the language stage to open it."""
        self.command(opened)
        state.opened = True

    def close(self, state: RequestState) -> None:
        """Command the language stage to drop its rows."""
        if state.opened:
            self.command(Close(state.work.request))
            state.opened = False

    def pull(self, state: RequestState, pull: Pull) -> None:
        """Command a pull of blocks of its transfer."""
        state.pulls_in_flight += 1
        if state.incoming is not None:
            state.incoming.moved = True
        self.command(pull)

    def allocate(self, kind: str, count: int) -> tuple[int, ...]:
        """Allocate blocks for new content. Those of a revoked lease get a higher generation first (decision 0011)."""
        blocks = self.pools[kind].allocate(count)
        doubtful = self.revoked_blocks[kind]
        if doubtful:
            taken = tuple(block for block in blocks if block in doubtful)
            if taken:
                doubtful.difference_update(taken)
                self.generation += 1
                self.command(Revoke(kind, taken, self.generation))
        return blocks

    def renew_leases(self, peer: str, now: float) -> None:
        """Renew the leases shared with a peer, as any message from it does."""
        self.last_heard[peer] = now

    def lease_end(self, since: float, peer: str) -> float:
        return max(since, self.last_heard.get(peer, -inf), self.awake_since) + self.settings.lease_s

    def lend(self, lease: Lease) -> None:
        """Begin a lease, with a reference of its own to each of its blocks."""
        for kind, blocks in lease.by_kind:
            self.pools[kind].hold(blocks)
        self.outgoing[lease.id] = lease
        self.watch_lease(lease.since)

    def watch_lease(self, now: float, within_s: float = inf) -> None:
        """Check leases no later than ``lease_s`` from now, or ``within_s``."""
        self.lease_check = min(self.lease_check, now + min(within_s, self.settings.lease_s))

    def set_deadline(self, state: RequestState, seconds: float | None, now: float) -> None:
        """Set the deadline to ``seconds`` from now; None leaves the request without one."""
        if seconds is not None:
            self.keep_deadline(state, now + seconds)

    def keep_deadline(self, state: RequestState, deadline: float) -> None:
        """Set the clock time at which the request ends here."""
        state.deadline = deadline
        heapq.heappush(self.deadlines, (deadline, state.work.request))

    def report_soon(self, now: float) -> None:
        """Report the load within ``report_s``, where a peer acts on it: work has arrived."""
        if self.has_load_listeners:
            self.schedule_report(now)

    def schedule_report(self, now: float) -> None:
        """Make the next report due in ``report_s`` at the latest."""
        self.report_at = min(self.report_at, now + self.settings.report_s)

    def begin_reports(self, now: float) -> None:
        """Start reporting the load: a peer is up."""
        if self.reported is None:
            self.reported_at = now
            self.schedule_report(now)

    def in_step(self, request: str) -> bool:
        return any(request in running.requests for flight in self.lanes.values() for running in flight)

    def idle(self) -> bool:
        """True where no request, step, transfer or lease is here."""
        under_way = self.outgoing or self.fetches or self.prefix_fetches
        return not (self.requests or under_way or any(self.lanes.values()))

    def list_media(self, state: RequestState) -> None:
        """Give it a slot for each media item, unless it has them: its KV may have arrived without its features."""
        state.media = state.media or self.slots(state.work)

    def slots(self, work: Work) -> list[MediaSlot]:
        return [MediaSlot(span, media_keys(span, self.settings.image_block_size)) for span in work.media]

    def await_media(self, slot: MediaSlot, provider: tuple[str, int]) -> None:
        """Share the blocks of features being encoded, or allocate them and be the first provider."""
        pending = self.pending.get(slot.span.content)
        if pending is None:
            pending = self.pending[slot.span.content] = PendingMedia(self.allocate(slot.kind, len(slot.keys)), [])
        else:
            self.pools[slot.kind].hold(pending.blocks)
        slot.hold(pending.blocks, ready=False)
        pending.providers.append(provider)

    def await_no_more(self, slot: MediaSlot, provider: tuple[str, int]) -> None:
        """Stop waiting for the content, if this request is among its providers."""
        pending = self.pending.get(slot.span.content)
        if pending is not None and provider in pending.providers:
            pending.providers.remove(provider)
            if not pending.providers:
                del self.pending[slot.span.content]

    def cached_media(self, slot: MediaSlot) -> tuple[int, ...]:
        """Encoder-cache blocks of a media item; none unless all of them are here."""
        hits = self.pools[slot.kind].match(slot.keys) if self.settings.image_cache else ()
        return hits if len(hits) == len(slot.keys) else ()

    def encodes(self, work: Work) -> bool:
        """True where this instance has the stage that encodes a request's media."""
        return bool(work.media) and encoder_of(work) in self.settings.roles

    def prefix_keys(self, state: RequestState) -> list[Key]:
        """Prefix-cache keys of the full blocks to prefill, computed once per request and instance."""
        if not state.keys and self.settings.prefix_cache:
            text = (*state.work.prompt, *state.tokens)[: state.prefill_end]
            state.keys = prefix_keys(text, state.work.media, self.settings.kv_block_size, state.work.salt)
        return state.keys

    def prefix_hits(self, state: RequestState) -> tuple[int, ...]:
        """Prefix-cache hits: whole KV blocks of at most ``prefill_end`` - 1 positions that cut no atomic span."""
        keys = self.prefix_keys(state)
        block = self.settings.kv_block_size
        hits = self.kv.match(keys[: (state.prefill_end - 1) // block])
        return hits[: uncut_blocks(len(hits), state.work.media, block)]

    def needs_media(self, state: RequestState) -> bool:
        """True where prefill still needs image features that cached KV does not cover."""
        covered = len(self.prefix_hits(state)) * self.settings.kv_block_size
        return any(span.end > covered for span in state.work.media)

    def prefill_blocks(self, state: RequestState) -> int:
        return blocks_for(state.prefill_end, self.settings.kv_block_size)


def failure(error: str, message: str, **fields: str) -> Failure:
    return Failure(error, message, fields)
