"""Load reports to peers and front ends: waiting work, free blocks, cached content."""

from __future__ import annotations

import msgspec

from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import PeerLoad
from trinity.stage_kinds import DECODE, PREFILL, encoder_of, roles_of

AT_ENCODER = frozenset({Phase.IMAGE_QUEUE, Phase.ENCODING, Phase.COLLECTING})
AT_DECODE = frozenset({Phase.KV_OFFER, Phase.KV_PULL, Phase.DECODING, Phase.MOVING})


def report(s: State, now: float) -> None:
    """Send the load: soon after a change, else as a heartbeat."""
    own, load = s.settings, load_of(s)
    beat = min(own.heartbeat_s, own.lease_s / 4)
    if load != s.reported or now - s.reported_at >= beat:
        s.reported, s.reported_at = load, now
        for name in report_targets(s):
            s.send(name, load)
        running = {lane: flight[0].step.id for lane, flight in s.lanes.items() if flight}
        load = msgspec.structs.replace(load, running=running)  # no change of which makes a report: each step is one
        for name in s.frontends:
            s.send(name, load)
    soon = (s.requests or s.outgoing) and s.has_load_listeners
    s.report_at = now + (min(own.report_s, beat) if soon else beat)


def report_targets(s: State) -> list[str]:
    """List the peers that use a report, in the order in which they came up.

    All peers where routing reads loads. Else those that share a lease, which the report renews, and encoders that look
    for cached features: if 32 busy instances all reported to each other, they would send 10,000 messages a second.
    """
    wanted = {lease.target for lease in s.outgoing.values()} | {each.holder for each in s.fetches.values()}
    wanted |= {each.holder for each in s.home_fetches.values()} | {each.holder for each in s.prefix_fetches.values()}
    for incoming in (s.requests[request].incoming for request in s.incoming.values()):
        if incoming is not None:
            wanted.add(incoming.offer.source)
            wanted.update(each.holder for each in incoming.fetched_parts.values())
    wanted.update(followers(s))
    return [name for name in s.router.peers if name in wanted]


def tell_cached(s: State, state: RequestState) -> None:
    """Report what is cached here ahead of the news that a request ends here: who has it next need not compute that."""
    if state.published_blocks or any(slot.ready for slot in state.media):
        load = load_of(s)
        for name in [*followers(s), *s.frontends]:
            s.send(name, load)


def followers(s: State) -> list[str]:
    """List the peers that act on this load: all where routing reads loads, else encoders.

    Encoders skip images whose features are in another instance's encoder cache.
    """
    own, others = s.settings, [peer for peer in s.router.peers.values() if peer.name != s.settings.name]
    if s.router.informed:
        return [peer.name for peer in others]
    if not (own.transfers.store and own.image_cache):
        return []
    encoders = ((peer.name, roles_of(peer.roles)) for peer in others)
    return [name for name, does in encoders if not does.prefills and does.encoded & s.pools.keys()]


def load_of(s: State) -> PeerLoad:
    """Present load of this instance."""
    own, rates = s.settings, s.rates
    return PeerLoad(
        name=own.name,
        epoch=own.epoch,
        free={kind: pool.available for kind, pool in s.pools.items()},
        predicted_s={letter: rates.seconds(letter, count) for letter, count in queued(s).items()},
        unit_s={letter: rates.unit_seconds(letter) for letter in own.roles},
        cached={kind: pool.digest(own.digest_keys) for kind, pool in s.pools.items()},
        preemptions=s.preemptions,
        newest=s.newest if len(s.frontends) > 1 else 0,
        pull_s=find_pull_cost(s),
    )


def find_pull_cost(s: State) -> tuple[float, float] | None:
    """Seconds of a pull of KV to here and of each of its blocks, of the slowest source; None before the first."""
    costs = [cost for times in s.pull_times.values() if (cost := times.cost()) is not None]
    if not costs:
        return None
    return max(each.fixed for each in costs), max(each.cell for each in costs) * s.settings.layers


def queued(s: State) -> dict[str, int]:
    """Count the work waiting or running at each stage: visual tokens (E), prompt positions (P), decode rows (D)."""
    counts = dict.fromkeys(s.settings.roles, 0)
    for state in s.requests.values():
        if state.ending is not None:
            continue
        if state.phase in AT_DECODE:
            counts[DECODE.letter] += 1
        elif state.phase in AT_ENCODER:
            counts[encoder_of(state.work)] += _left_to_encode(state)
            if s.does.prefills:
                counts[PREFILL.letter] += state.prefill_end
        else:
            counts[PREFILL.letter] += state.prefill_end - state.prefilled
    return counts


def _left_to_encode(state: RequestState) -> int:
    return sum(slot.span.tokens for slot in state.media if not slot.ready and not slot.helper)
