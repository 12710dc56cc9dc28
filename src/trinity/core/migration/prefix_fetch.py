"""Fetches KV of a request's text by content, from an instance that has it, ahead of a prefill (decision 0094).

What a lost prefill instance had streamed is in the prefix cache of its target, which may only decode. So the front end
names that one (``Work.holder``) to whoever prefills the request next. That one asks it for the blocks under the keys
of what is not cached here, pulls them into its own prefix cache, and prefills the rest. A holder leases what it has of
them, from the first on. What it has not, or what there is no room for just now, is prefilled.

Nobody waits for ever: who waits for an answer holds no block for it, and the answer needs none. Blocks are held from
the answer to the end of the pull, here and there, and a pull waits for nobody. What does not fit at once is let go of.
"""

from __future__ import annotations

from math import inf

from trinity.core.instance.lifecycle import decode_headroom
from trinity.core.instance.peer_questions import PrefixFetch
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, Fetch, Fetched, Pull, Pulled, Release
from trinity.core.migration.source import name_offer


def begin_fetch(s: State, state: RequestState, now: float) -> bool:
    """Ask for what the holder of its text has, and this instance has not. True where that covers all its media."""
    work, block = state.work, s.settings.kv_block_size
    if not s.does.prefills or work.holder not in s.router.peers or work.holder == s.settings.name:
        return False
    keys = s.prefix_keys(state)[: (state.prefill_end - 1) // block]
    start = len(s.kv.match(keys))
    asked = tuple(keys[start : work.held // block])
    if not asked:
        return False
    id = f"{name_offer(s)}/0"
    s.prefix_fetches[id] = PrefixFetch(work.request, state.attempt, work.holder, start, asked, now)
    s.watch_lease(now)
    s.send(work.holder, Fetch(id, s.settings.name, KV, asked))
    return all(span.end <= work.held for span in work.media)


def take_fetched(s: State, event: Fetched, now: float) -> bool:
    """Pull what a holder has leased of a text, as far as there is room at once. False for another's answer."""
    asked = s.prefix_fetches.get(event.id)
    if asked is None:
        return False
    s.renew_leases(event.holder, now)
    sources = _reserve(s, asked, event.blocks) if event.blocks else ()
    if sources:
        offer, _, part = event.id.rpartition("/")
        told = (asked.request, sources, asked.places, event.generation)
        s.command(Pull(offer, int(part), event.holder, KV, *told))
        return True
    del s.prefix_fetches[event.id]
    if event.blocks:
        s.send(event.holder, Release(event.id, "cancelled"))
    return True


def _reserve(s: State, asked: PrefixFetch, leased: tuple[int, ...]) -> tuple[int, ...]:
    """Hold new blocks to pull into, and the cached ones before them. Returns which blocks are to be pulled.

    None where its request has ended, or all of these have come by another way, or there is no room just now.
    """
    state = s.requests.get(asked.request)
    if state is None or state.ending is not None or state.attempt != asked.attempt:
        return ()
    hits = s.kv.match(s.prefix_keys(state))
    first = len(hits) - asked.start
    s.kv.hold(hits)
    count = min(len(leased) - first, s.kv.available - decode_headroom(s))
    if first < 0 or count <= 0:
        s.kv.drop(reversed(hits))
        return ()
    asked.keys = asked.keys[first : first + count]
    asked.ahead, asked.places = hits, s.allocate(KV, count)
    return leased[first : first + count]


def take_pulled(s: State, event: Pulled) -> bool:
    """Publish what a pull has brought, and let go of it: the prefill that waits for it finds it like any prefix.

    False for a pull of anything else.
    """
    id = f"{event.offer}/{event.part}"
    asked = s.prefix_fetches.pop(id, None)
    if asked is None:
        return False
    if event.failure is None and not asked.void:
        for block, key in zip(asked.places, asked.keys, strict=True):
            s.kv.publish(block, key)
    s.kv.drop(reversed((*asked.ahead, *asked.places)))
    s.send(asked.holder, Release(id, "failed" if event.failure else "pulled"))
    state = s.requests.get(asked.request)
    if event.record and state is not None and state.attempt == asked.attempt:
        state.record({**event.record, "outcome": "failed" if event.failure else "store"})
    return True


def give_up_prefixes(s: State, lost: str | None, now: float) -> float:
    """Give up what a lost holder, or (None) silent ones, have not answered. Returns the clock time of the next check.

    What a pull may still write stays until that has ended; of a lost holder it counts for nothing.
    """
    left = inf
    for id, asked in list(s.prefix_fetches.items()):
        due = s.lease_end(asked.since, asked.holder)
        if asked.places:
            asked.void = asked.void or asked.holder == lost
        elif asked.holder == lost or (lost is None and due <= now):
            del s.prefix_fetches[id]
        else:
            left = min(left, due)
    return left
