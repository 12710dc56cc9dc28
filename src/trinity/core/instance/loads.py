"""What an instance says of itself to its peers and the front end: work that waits, free blocks, what it has cached."""

from __future__ import annotations

from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import FRONTEND, IMAGE, PeerLoad

WAITING = {
    Phase.IMAGE_QUEUE: "E",
    Phase.ENCODING: "E",
    Phase.IMAGE_OFFER: "P",
    Phase.COVERED: "P",
    Phase.IMAGE_PULL: "P",
    Phase.KV_QUEUE: "P",
    Phase.MIGRATED_QUEUE: "P",
    Phase.PREEMPTED_QUEUE: "P",
    Phase.PREFILLING: "P",
    Phase.KV_OFFER: "D",
    Phase.KV_PULL: "D",
    Phase.DECODING: "D",
}


def report(s: State, now: float) -> None:
    """Tell who listens how things stand: what has changed soon, what has not as a heartbeat."""
    own, load = s.settings, load_of(s)
    beat = min(own.heartbeat_s, own.lease_s / 4)
    if load != s.reported or now - s.reported_at >= beat:
        s.reported, s.reported_at = load, now
        for name in [*listeners(s), FRONTEND]:
            s.send(name, load)
    soon = (s.requests or s.outgoing) and s.has_load_listeners
    s.report_at = now + (min(own.report_s, beat) if soon else beat)


def listeners(s: State) -> list[str]:
    """The peers that do something with a report, in the order of their coming up.

    All where routing reads loads. Else those whose leases a word from here renews, and encoders that look for features
    here: were every instance to tell every other, 32 busy ones would send ten thousand messages a second.
    """
    wanted = {lease.target for lease in s.outgoing.values()} | {each.holder for each in s.fetches.values()}
    for incoming in (s.requests[request].incoming for request in s.incoming.values()):
        if incoming is not None:
            wanted.add(incoming.offer.source)
            wanted.update(each.holder for each in incoming.fetched_parts.values())
    wanted.update(followers(s))
    return [name for name in s.router.peers if name in wanted]


def followers(s: State) -> list[str]:
    """The peers that act on what changes here: all where routing reads loads, else encoders, which do not encode what
    they can find in an image cache."""
    own, others = s.settings, [peer for peer in s.router.peers.values() if peer.name != s.settings.name]
    if s.router.informed:
        return [peer.name for peer in others]
    if not (own.transfers.store and own.image_cache and IMAGE in s.pools):
        return []
    return [peer.name for peer in others if "E" in peer.roles and "P" not in peer.roles]


def load_of(s: State) -> PeerLoad:
    """How things stand here now."""
    own, rates = s.settings, s.rates
    return PeerLoad(
        name=own.name,
        epoch=own.epoch,
        free={kind: pool.available for kind, pool in s.pools.items()},
        predicted_s={letter: rates.seconds(letter, count) for letter, count in queued(s).items()},
        unit_s={letter: rates.unit_seconds(letter) for letter in own.roles},
        cached={kind: pool.digest(own.digest_keys) for kind, pool in s.pools.items()},
        preemptions=s.preemptions,
    )


def queued(s: State) -> dict[str, int]:
    """Units of work that wait or run at each stage here: visual tokens, prompt positions, rows that decode."""
    counts = dict.fromkeys(s.settings.roles, 0)
    for state in s.requests.values():
        letter = WAITING[state.phase]
        if state.ending is None:
            counts[letter] += _left(state, letter)
            if letter == "E" and "P" in counts:
                counts["P"] += state.prefill_end
    return counts


def _left(state: RequestState, letter: str) -> int:
    if letter == "E":
        return sum(slot.span.tokens for slot in state.media if not slot.ready)
    return state.prefill_end - state.prefilled if letter == "P" else 1
