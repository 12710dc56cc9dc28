"""Needs of a request at a stage: units of work, blocks of the pools, and which instances could ever hold these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trinity.core.block_pool import blocks_for
from trinity.core.messages import IMAGE, KV, PeerUp, Work

InstanceKind = tuple[
    str, int, int
]  # roles, rows of an image block, rows of a KV block: they decide what a request needs


def kind_of(peer: PeerUp) -> InstanceKind:
    return peer.roles, peer.image_block_size, peer.kv_block_size


def fitting(letter: str, work: Work, peers: Iterable[PeerUp]) -> Iterator[PeerUp]:
    """Yield the instances with the stage whose pools could ever hold the request."""
    known: dict[InstanceKind, dict[str, int]] = {}
    for peer in peers:
        if letter in peer.roles:
            kind = kind_of(peer)
            need = known.get(kind)
            if need is None:
                need = known[kind] = needs(letter, work, *kind)
            for wanted, count in need.items():
                if count > peer.pools.get(wanted, 0):
                    break
            else:
                yield peer


def units_of(letter: str, work: Work) -> int:
    """Count the units that a request adds to a stage: visual tokens (E), prompt positions (P), a row (D)."""
    if letter == "E":
        return sum(span.tokens for span in work.media)
    return len(work.prompt) if letter == "P" else 1


def needs(letter: str, work: Work, roles: str, image_block_size: int, kv_block_size: int) -> dict[str, int]:
    """Blocks by kind that a request holds at stage ``letter`` (and at those that follow on the same instance)."""
    stages = stages_here(letter, work, roles)
    need: dict[str, int] = {}
    for span in work.media if stages & {"E", "P"} else ():
        need[IMAGE] = need.get(IMAGE, 0) + blocks_for(span.tokens, image_block_size)
    if stages & {"P", "D"}:
        need[KV] = blocks_for(kv_tokens(work, decodes="D" in stages), kv_block_size)
    return need


def stages_here(letter: str, work: Work, roles: str) -> set[str]:
    """Letters of this stage, and of those that follow on an instance with these roles."""
    stages = {letter}
    for following in "" if work.encode_only else "EPD"["EPD".index(letter) + 1 :]:
        if following not in roles:
            break
        stages.add(following)
    return stages


def kv_tokens(work: Work, decodes: bool) -> int:
    """KV entries to reserve: the text, and where decoding happens one for every output but the last."""
    return len(work.prompt) + (work.max_tokens - 1 if decodes else work.outputs)
