"""Offers between two cores, as they are seen from outside: which pieces are ready, asked for, and being pulled."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity.core.messages import Offer


@dataclass
class Transfer:
    """One offer, as seen from outside."""

    offer: Offer
    target: str
    layers: int = 1
    ready: set[object] = field(default_factory=set)  # parts; of KV (block, layer)
    asked: set[object] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    committed: bool = False
    outcome: str | None = None
    void: bool = False  # one of the two has died


def list_pieces(
    transfer: Transfer, layers: tuple[int, int] | None, blocks: tuple[int, int] | None
) -> list[tuple[int, int]]:
    """List the (block, layer) cells of a KV offer, all of them where None."""
    first, end = layers or (0, transfer.layers)
    start, stop = blocks or (0, len(transfer.offer.parts[0].blocks))
    return [(block, layer) for block in range(start, stop) for layer in range(first, end)]
