"""Invariants of the cores (the rules of trinity.core) as observers of whatever drives them.

``Bookkeeping`` recounts what every core remembers, ``Conversation`` follows the messages, ``Shadow`` the content of
every block. Each raises ``AssertionError`` with what broke.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from support.virtual.conversation import Conversation, ends_lease_early
from support.virtual.lives import Lives
from support.virtual.move_rules import FrontEnds, MoveRules, map_frontends
from support.virtual.prefix_rules import FetchRules, Matchable
from support.virtual.shadow import Shadow
from support.virtual.spare_rules import SpareRules
from trinity.core import InstanceCore
from trinity.core.instance.lanes import count_in_flight
from trinity.core.instance.phases import Phase
from trinity.core.instance.queues import AWAITS_FEATURES
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.settings import Settings
from trinity.core.instance.state import State
from trinity.core.messages import (
    KV,
    STATE,
    Collect,
    Collected,
    Forget,
    PeerDown,
    Pull,
    Pulled,
    Send,
    Step,
    Stepped,
    Value,
)


class Observer(Protocol):
    """Sees everything that happens among cores, in order."""

    def event(self, name: str, event: Value) -> None:
        """Take an event that ``name`` is about to handle."""

    def command(self, name: str, command: Value) -> None:
        """Take a command that ``name`` answered with."""

    def after_event(self, name: str) -> None:
        """Check after ``name`` has handled the event and all its commands were seen."""

    def lost(self, name: str) -> None:
        """Take the death of an instance, whose core is still what it was: what it had in flight never ends."""

    def at_end(self) -> None:
        """Check at the end, when nothing is under way any more."""


def make_checks(
    cores: Mapping[str, InstanceCore], frontend: FrontEnds, lives: Lives | None = None
) -> Sequence[Observer]:
    """Make every known check for cores that one driver runs; ``lives`` where instances may die there."""
    settings = _SettingsOf(cores)
    shadow = Shadow(settings, lives.is_deaf) if lives is not None else Shadow(settings)
    return [
        Conversation(cores),
        MoveRules(cores, frontend),
        SpareRules(cores),
        FetchRules(cores),
        shadow,
        Matchable(cores, shadow),
        Bookkeeping(cores, frontend),
    ]


class _SettingsOf(Mapping[str, Settings]):
    """Settings of the present cores, by name: another life of an instance may have others."""

    def __init__(self, cores: Mapping[str, InstanceCore]) -> None:
        self._cores = cores

    def __getitem__(self, name: str) -> Settings:
        return self._cores[name].settings

    def __iter__(self) -> Iterator[str]:
        return iter(self._cores)

    def __len__(self) -> int:
        return len(self._cores)


class Bookkeeping:
    """Checks after every event that the cores' state adds up and blocks in flight are held; at the end none is."""

    def __init__(self, cores: Mapping[str, InstanceCore], frontend: FrontEnds) -> None:
        self.cores, self.frontends = cores, map_frontends(frontend)
        self._steps: dict[tuple[str, str], list[Step]] = {}
        self._pulls: dict[tuple[str, str, int], Pull] = {}
        self._copies: dict[tuple[str, str], Collect] = {}
        self._revoked: set[str] = set()
        self._over: dict[str, Forget] = {}  # that an instance handles just now

    def event(self, name: str, event: Value) -> None:
        if isinstance(event, Stepped):
            ended = self._steps[name, event.lane].pop(0)
            assert ended.id == event.id, f"{name}: step {event.id} overtook {ended.id} on lane {event.lane}"
        elif isinstance(event, Pulled):
            del self._pulls[name, event.offer, event.part]
        elif isinstance(event, Collected):
            del self._copies[name, event.request]
        elif isinstance(event, Forget):
            self._over[name] = event
        elif isinstance(event, PeerDown) and name in self.cores:  # their next life may have been offered these as well
            leases = self.cores[name].state.outgoing.items()
            self._revoked.update(id for id, lease in leases if lease.target == event.name)

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Step):
            flight = self._steps.setdefault((name, command.lane), [])
            now, depth = len(flight) + 1, self.cores[name].settings.steps_in_flight
            assert now <= depth, f"{name}: {now} steps at once on lane {command.lane}"
            flight.append(command)
        elif isinstance(command, Pull):
            self._pulls[name, command.offer, command.part] = command
        elif isinstance(command, Collect):
            self._copies[name, command.request] = command
        elif isinstance(command, Send) and ends_lease_early(command.message):
            self._revoked.add(command.message.id)

    def lost(self, name: str) -> None:
        self._steps = {key: flight for key, flight in self._steps.items() if key[0] != name}
        self._pulls = {key: pull for key, pull in self._pulls.items() if key[0] != name}
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] != name}
        if name not in self.cores:
            return
        self._revoked.update(self.cores[name].state.outgoing)  # no lease of its next life
        self._revoked.update(pull.offer for pull in self._pulls.values() if pull.source == name)

    def after_event(self, name: str) -> None:
        if name in self.cores:
            check_state(self.cores[name].state)
            self._check_in_flight(name)
            over = self._over.pop(name, None)
            if over is not None:
                _check_called_off(self.cores[name].state, over)

    def at_end(self) -> None:
        for name, core in self.cores.items():
            check_forgotten(name, core.state)
        for name, frontend in self.frontends.items():
            assert not frontend.entries, f"{name} still waits for {sorted(frontend.entries)}"
            assert not frontend.lives, f"{name} still knows the lives {sorted(frontend.lives)}"
            assert frontend.waiting == 0, f"{name} counts {frontend.waiting} waiting requests"
            assert frontend.next_timer() is None, "a deadline outlived its request"

    def _check_in_flight(self, name: str) -> None:
        """Check that blocks of steps and pulls are held for their request, and written ones cannot be matched."""
        s = self.cores[name].state
        for (instance, lane), flight in self._steps.items():
            if instance == name:
                assert [each.step for each in s.lanes[lane]] == flight, f"{name} counts other steps on lane {lane}"
                for step in flight:
                    _check_step(s, step)
                _check_order(s, flight)
        for (instance, _), copy in self._copies.items():
            if instance == name:
                _check_copy(s, copy)
        for (target, _, _), pull in self._pulls.items():
            if target == name:
                _check_target(s, pull)
            if pull.source == name:
                names = (pull.offer, f"{pull.offer}/{pull.part}")
                lease = s.outgoing.get(names[0]) or s.outgoing.get(names[1])
                if lease is None and self._revoked & set(names):
                    continue  # the generation of its blocks tells the reader
                assert lease is not None, f"{name}: no lease of {pull.offer} during its pull"
                leased = dict(lease.by_kind).get(pull.kind, ())
                assert set(pull.source_blocks) <= set(leased), f"{name}: {pull} reads beyond its lease"


def _check_step(s: State, step: Step) -> None:
    for row in step.encodes:
        state = s.requests.get(row.request)
        assert state is not None, f"{row.request} is gone while a step encodes for it"
        assert state.media[row.item].blocks == row.blocks, f"image blocks of {row.request} changed in flight"
        _check_unmatchable(s, state.media[row.item].kind, row.blocks)
    for prefill in step.prefills:
        state = s.requests.get(prefill.request)
        assert state is not None, f"{prefill.request} is gone while a step prefills it"
        _check_unmatchable(s, KV, _blocks_of(s, state, prefill.start, prefill.start + prefill.length))
    for request in step.decodes:
        assert request in s.requests, f"{request} is gone while a step decodes it"


def _check_order(s: State, flight: Sequence[Step]) -> None:
    """Check that the steps of a lane run each request's prompt without a gap, then one position after the other."""
    prompts: dict[str, int] = {}
    sampled: Counter[str] = Counter()
    for step in flight:
        for row in step.prefills:
            state = s.requests[row.request]
            assert row.start == prompts.get(row.request, row.start), f"a step in flight leaves out some of {row}"
            assert row.start >= state.prefilled or state.ending is not None, f"{row} runs twice"
            prompts[row.request] = row.start + row.length
            sampled[row.request] += row.last
        for request in step.decodes:
            state = s.requests[request]
            position = len(state.work.prompt) + state.outputs + sampled[request] - 1
            sampled[request] += 1
            _check_unmatchable(s, KV, _blocks_of(s, state, position, position + 1))


def _check_target(s: State, pull: Pull) -> None:
    fetch = s.prefix_fetches.get(f"{pull.offer}/{pull.part}")
    if fetch is not None:
        assert fetch.places == pull.target_blocks, f"{pull} writes other blocks than are held for it"
        _check_unmatchable(s, KV, pull.target_blocks)
        return
    state = s.requests.get(pull.request)
    assert state is not None, f"{pull.request} is gone while {pull} runs"
    tables = {KV: state.block_table, STATE: state.state_block}
    held = tables[pull.kind] if pull.kind in tables else state.media[pull.part].blocks
    assert set(pull.target_blocks) <= set(held), f"{pull} writes blocks that {pull.request} does not hold"
    _check_unmatchable(s, pull.kind, pull.target_blocks)


def _check_copy(s: State, copy: Collect) -> None:
    state = s.requests.get(copy.request)
    assert state is not None, f"{copy.request} is gone while its features are copied"
    held = tuple(slot.blocks for slot in state.media)
    assert held == tuple(blocks for blocks, _ in copy.items), f"{copy} of blocks that {copy.request} does not hold"
    assert state.collecting, f"{copy.request} may go before its copy has ended"


def _blocks_of(s: State, state: RequestState, start: int, end: int) -> tuple[int, ...]:
    size = s.settings.kv_block_size
    assert end <= len(state.block_table) * size, f"{state.work.request} writes position {end - 1} beyond its blocks"
    return state.block_table[start // size : -(-end // size)]


def _check_unmatchable(s: State, kind: str, blocks: Sequence[int]) -> None:
    for block in blocks:
        assert not s.pools[kind].published(block), f"{s.settings.name}: {kind} block {block} is written and matchable"


def check_state(s: State) -> None:
    """Check that every block has one reference for each holder, and every request is in its phase's queue."""
    for kind, pool in s.pools.items():
        pool.check()
        holders = count_holders(s, kind)
        counts = {block: count for block in range(pool.size) if (count := pool.references(block))}
        assert counts == dict(holders), f"{s.settings.name}: {kind} references {counts}, holders {dict(holders)}"
    _check_places(s)
    check_states(s)
    assert s.leaving == {request for request, state in s.requests.items() if state.ending is not None}
    assert count_in_flight(s.lanes).keys() <= s.requests.keys(), "a step has rows of a request that is gone"
    coming = Counter(s.requests[request].phase for request in s.incoming.values())
    assert s.arriving == {phase: coming[phase] for phase in s.arriving}, f"{s.arriving} are counted, {coming} arrive"
    _check_pending(s)
    _check_leading(s)
    _check_counts(s)
    _check_owners(s)
    for offer, request in s.incoming.items():
        incoming = s.requests[request].incoming
        assert incoming is not None, f"{request} is no target of {offer}"
        assert incoming.offer.id == offer, f"{request} is the target of {incoming.offer.id}, not {offer}"
        assert not incoming.released, f"{offer} is released and still known"


def check_states(s: State) -> None:
    """Check that a request holds one block of states while it holds KV, and none before or after; or never any."""
    for request, state in s.requests.items():
        due = STATE in s.pools and bool(state.block_table)
        assert len(state.state_block) == due, f"{s.settings.name}: {request} holds {state.state_block} beside its KV"


def count_holders(s: State, kind: str) -> Counter[int]:
    """Count the holders of each block of a kind: requests, leases, and fetches of a prefix."""
    holders: Counter[int] = Counter()
    for state in s.requests.values():
        features = [block for slot in state.media if slot.kind == kind for block in slot.blocks]
        holders.update({KV: state.block_table, STATE: state.state_block}.get(kind, features))
    for lease in s.outgoing.values():
        holders.update(dict(lease.by_kind).get(kind, ()))
    for fetch in s.prefix_fetches.values():
        holders.update((*fetch.ahead, *fetch.places) if kind == KV else ())
    return holders


PHASE_QUEUES = {
    Phase.IMAGE_QUEUE: "encode_queue",
    Phase.ENCODING: "encoding",
    Phase.IMAGE_OFFER: "image_offers",
    Phase.KV_QUEUE: "prefill_queue",
    Phase.MIGRATED_QUEUE: "migrated_queue",
    Phase.PREEMPTED_QUEUE: "preempted",
    Phase.PREFILLING: "prefilling",
    Phase.KV_OFFER: "kv_offers",
    Phase.DECODING: "decoding",
    Phase.MOVING: "moving",
}


# phases in which a request holds KV blocks, whoever else may wait for them
HOLDS_KV = {Phase.PREFILLING, Phase.KV_PULL, Phase.DECODING, Phase.MOVING}


def _check_places(s: State) -> None:
    """Check that every queue and batch has exactly the requests of its phase, once each, and none that is ending."""
    name = s.settings.name
    for phase, place in PHASE_QUEUES.items():
        found = sorted(getattr(s, place))
        right = sorted(each for each, state in s.requests.items() if state.phase is phase and state.ending is None)
        assert found == right, f"{name}: {found} in {place}, where {right} should be"
    for request, state in s.requests.items():
        assert state.phase not in (Phase.NEW, Phase.GONE), f"{name}: {request} is here and {state.phase}"
        _check_history(state)
    for batch in (s.encoding, s.prefilling, s.decoding, s.moving):
        assert all(s.requests[request] is state for request, state in batch.items()), f"{name}: {batch} is not of here"


def _check_counts(s: State) -> None:
    """Check that the running counts, which save a step from counting, equal the lengths of the queues."""
    queued = sum(len(queue) for queue in (s.encode_queue, s.prefill_queue, s.migrated_queue, s.preempted))
    before = queued + len(s.encoding) + len(s.prefilling)
    assert s.before_decode == before, f"{s.settings.name}: {s.before_decode} before decode are counted, not {before}"
    offers = len(s.image_offers) + len(s.kv_offers)
    assert s.waiting_offers == offers, f"{s.settings.name}: {s.waiting_offers} offers are counted, not {offers}"


def _check_owners(s: State) -> None:
    """Check that all that goes on, and all that is remembered, is of front ends that the instance is in touch with."""
    going = {request: state.work.owner for request, state in s.requests.items() if state.ending is None}
    spared = {request: each.work.owner for request, each in s.skipped_encodes.items()}
    stones = {request: stone.owner for request, stone in s.tombstones.items()}
    for owned in (going, spared, stones):
        left = {request: owner for request, owner in owned.items() if owner not in s.frontends}
        assert not left, f"{s.settings.name} is not in touch with the owners of {left}"


def _check_history(state: RequestState) -> None:
    """Check that the phase fits the request's past: three queues lead to prefill, and one phase waits for a Commit."""
    again, came = bool(state.preemptions or state.attempt), state.incoming is not None
    fits = {
        Phase.KV_QUEUE: not again and not came,
        Phase.MIGRATED_QUEUE: not again and came,
        Phase.PREEMPTED_QUEUE: again,
        Phase.COVERED: came and state.skip_media,
        Phase.IMAGE_OFFER: came and not state.skip_media,
    }
    assert fits.get(state.phase, True), f"{state.work.request} is {state.phase}, but {again=}, {came=}"


def _check_pending(s: State) -> None:
    """Check that requests that wait for features hold their blocks, and that there is at least one."""
    running = [row.span.content for flight in s.lanes.values() for each in flight for row in each.step.encodes]
    assert len(set(running)) == len(running), f"{s.settings.name}: encoded twice at once: {running}"
    for content, pending in s.pending.items():
        assert pending.providers, f"{s.settings.name}: nobody waits for {content}"
        assert pending.in_step == (content in running), f"{content} is in a step: {not pending.in_step}"
        for request, item in pending.providers:
            slot = s.requests[request].media[item]
            assert slot.blocks == pending.blocks, f"{request} waits for {content} in other blocks"
            assert not slot.ready, f"{request} waits for {content}, which it has"


def _check_leading(s: State) -> None:
    """Check that who waits holds no KV block, save the one of whose leading text a step in flight writes.

    So nobody who waits for features keeps a KV block from somebody else for longer than a step takes.
    """
    name, running = s.settings.name, s.leading.running
    for request, state in s.requests.items():
        if state.block_table and request != running:
            assert state.phase in HOLDS_KV, f"{name}: {request} holds KV blocks while it is {state.phase}"
    rows = [row for flight in s.lanes.values() for each in flight for row in each.step.prefills]
    ahead = [row for row in rows if s.requests[row.request].phase is not Phase.PREFILLING]
    ahead = [row for row in ahead if row.request == running or s.requests[row.request].ending is None]
    assert [row.request for row in ahead] == ([running] if running else []), f"{name}: {ahead}, and {running=}"
    for state in s.leading.requests():
        waits = state.phase in AWAITS_FEATURES and state.ending is None and s.requests.get(state.work.request) is state
        assert waits, f"{name}: {state.work.request} is {state.phase}, and its leading text would be prefilled"


def _check_called_off(s: State, over: Forget) -> None:
    """Check that a request that has ended everywhere ends here too: nobody reads what its steps would bring."""
    state = s.requests.get(over.request)
    going = state is not None and state.attempt <= over.attempt and state.ending is None
    assert not going, f"{s.settings.name} goes on with {over.request}, which it was told to forget"


def check_forgotten(name: str, s: State) -> None:
    """Check that nothing of any request is left."""
    left = {
        "requests": s.requests,
        "tombstones": s.tombstones,
        "incoming": s.incoming,
        "outgoing": s.outgoing,
        "pending": s.pending,
        "spared": s.skipped_encodes,
        "fetches": s.fetches,
        "home fetches": [*s.home_fetches, *s.prefix_fetches],
        "steps": {lane: running for lane, running in s.lanes.items() if running},
        "queues": [*s.encode_queue, *s.prefill_queue, *s.preempted, *s.migrated_queue, *s.image_offers, *s.kv_offers],
        "batches": [*s.encoding, *s.prefilling, *s.decoding, *s.moving],
        "blocks": {kind: pool.held for kind, pool in s.pools.items() if pool.held},
    }
    kept = {what: each for what, each in left.items() if each}
    assert not kept, f"{name} is quiet and still has {kept}"
