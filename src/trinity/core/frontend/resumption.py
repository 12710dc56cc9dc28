"""Resumption of a request after a life that was lost: at the prefill instance that has most of its KV cached.

Where another instance has more, such as a decode instance to which a lost one had streamed, that one is named to it.

Its own routing policy may know nothing of caches, and what a prefill instance has handed over stays in its prefix cache
until it is evicted. So a request whose decode instance died comes back to who prefilled it, and only its outputs are
computed anew (decision 0085).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from trinity.core.messages import KV, PeerUp, Work
from trinity.core.routing.router import Router
from trinity.stage_kinds import PREFILL, encoder_of

LEAST_SHARE = 0.5  # of the text that must be cached there: for less, the choice among all instances is worth more


class Prefilled(NamedTuple):
    """The life of an instance that a request was prefilled at last, and how many ``positions``."""

    name: str
    epoch: int
    positions: int


def find_cached(router: Router, work: Work, tokens: Sequence[int], last: Prefilled | None, but: str = "") -> str | None:
    """Name of the prefill instance that has most of prompt and ``tokens`` cached, None where none has half of it.

    It must need no encoder besides: what is cached covers all media, or their features are there, or it encodes itself.
    What it reported counts, and that it was the ``last`` to prefill the request, which it may not have reported yet. If
    it has evicted that since, it sends the request on to an encoder, or prefills all of it. ``but``: an instance that
    another one said is lost, as may not have been heard here yet.
    """
    text = (*work.prompt, *tokens)
    peers = [peer for peer in router.trusted(router.fitting(PREFILL.letter, work)) if peer.name != but]
    found = [(_cached(router, peer, work, text, last), peer) for peer in peers]
    cached, best = max(found, key=lambda each: each[0], default=(0, None))
    if best is None or cached < LEAST_SHARE * len(text) or not _has_media(router, best, work, cached):
        return None
    router.count(best.name, PREFILL.letter, len(text) - cached)
    return best.name


def name_holder(
    router: Router, work: Work, tokens: Sequence[int], first: str | None, but: str = ""
) -> tuple[Work, str | None]:
    """The work, with the instance that has most of its text where that is more than the ``first`` one has, and where
    to send it: past every encoder, if what is cached at the holder covers all media.

    One that is reserved is left alone, and one that runs alone has nothing to do with others.
    """
    text, work = (*work.prompt, *tokens), replace(work, holder="", held=0)
    peers = [] if work.alone else [peer for peer in router.peers.values() if _may_hold(router, peer, but)]
    held, best = max(((router.cached_prefix(peer, work, text), peer.name) for peer in peers), default=(0, ""))
    own = router.cached_prefix(router.peers[first], work, text) if first is not None else 0
    if best == first or held <= own:
        return work, first
    if first is None and all(span.end <= held for span in work.media):
        first = router.choose(PREFILL.letter, work)
    return replace(work, holder=best, held=held), first


def _may_hold(router: Router, peer: PeerUp, but: str) -> bool:
    away = peer.name == but or peer.name in router.suspects or router.is_reserved(peer.name, peer.epoch)
    return KV in peer.pools and not away


def _cached(router: Router, peer: PeerUp, work: Work, text: Sequence[int], last: Prefilled | None) -> int:
    """Positions of the text that an instance has, as far as is known. One that reports no block at all caches none."""
    reported = router.cached_prefix(peer, work, text)
    is_last = last is not None and (peer.name, peer.epoch) == last[:2]
    if last is None or not is_last or (peer.name in router.loads and not router.content.has_any(peer.name, KV)):
        return reported
    return max(reported, last.positions // peer.kv_block_size * peer.kv_block_size)


def _has_media(router: Router, peer: PeerUp, work: Work, cached: int) -> bool:
    return (
        encoder_of(work) in peer.roles or all(span.end <= cached for span in work.media) or router.has_media(peer, work)
    )
