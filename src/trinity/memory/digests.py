"""Integrity: digests of blocks go from source to target beside the blocks, and are compared after the copy.

The cores know nothing of it. The source's host adds digests to each Ready that it sends, the target's host hands them
on with the Pull, and its Connector compares. Not cryptographic: it finds accidents, such as a link that delivers what
was there before or memory that was given back too early, and not forgers.

A step that fails in its middle is run again row by row, and writes blocks anew that may be on their way already. Then
the copy of the first version is found wrong and ends its request, where without verification it would be copied again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, get_args

from msgspec.structs import replace

from trinity.core.messages import IMAGE, Fetched, Offer, PeerLost, Pull, Ready, Release, Send, Value
from trinity.errors import ConfigError, IntegrityError
from trinity.memory.block_memory import BlockMemory
from trinity.memory.native import digests

Verify = Literal["always", "network", "never"]
Key = tuple[int, tuple[int, int] | None]  # a source block and which layers of it; None: all
KEPT = 64  # offers that may be forgotten late


def check_verify(verify: str) -> Verify:
    """Raises ``ConfigError`` for an unknown setting."""
    for known in get_args(Verify):
        if verify == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"verify must be one of {', '.join(get_args(Verify))}, got {verify!r}")


def verifies(verify: Verify, transport: object) -> bool:
    """Whether blocks that come by this transport are checked; one that does not say counts as a network."""
    return verify == "always" or (verify == "network" and bool(getattr(transport, "network", True)))


def piece_of(memory: BlockMemory, layers: tuple[int, int] | None) -> tuple[int, int] | None:
    """(offset, length) in bytes of these layers in each block [layers, ...]; None: all of it."""
    if layers is None:
        return None
    each = memory.block_bytes // memory.shape.shape[0]
    return layers[0] * each, (layers[1] - layers[0]) * each


def check_arrived(memory: BlockMemory, pull: Pull, expected: Collection[int]) -> float:
    """Compare what a pull has written with what the source had; the seconds it took. Raises ``IntegrityError``."""
    started = time.perf_counter()
    if len(expected) != len(pull.target_blocks):
        text = f"{pull.source} sent {len(expected)} digests for {len(pull.target_blocks)} blocks: is verify= the same?"
        raise IntegrityError(text, peer=pull.source)
    found = digests(memory.pool, pull.target_blocks, piece_of(memory, pull.layers))
    pairs = zip(pull.source_blocks, expected, found, strict=True)
    wrong = [block for block, sent, arrived in pairs if sent != arrived]
    if wrong:
        text = f"{len(wrong)} of {len(found)} {pull.kind} blocks are not what {pull.source} sent (its {wrong[:4]})"
        raise IntegrityError(text, peer=pull.source)
    return time.perf_counter() - started


class Digests:
    """An instance's digests: of its own blocks, for those that it offers them to, and of others', for its pulls.

    Driven by the core's thread with every event and command of the core, in their order.
    """

    def __init__(self, memories: Mapping[str, BlockMemory]) -> None:
        self._memories = memories
        self._offered: dict[str, tuple[str, str, tuple[tuple[int, ...], ...]]] = {}  # target, kind, blocks by part
        self._expected: dict[str, tuple[Offer, dict[Key, int], float]] = {}
        self._fetched: dict[str, Fetched] = {}

    def heard(self, event: Value) -> None:
        """An event that the core is about to handle."""
        if isinstance(event, Offer):
            self._expected[event.id] = (event, {}, 0.0)
        elif isinstance(event, Ready) and event.id in self._expected:
            self._expect(event)
        elif isinstance(event, Fetched) and event.blocks:
            self._fetched[event.id] = event
        elif isinstance(event, Release):
            self._offered.pop(event.id, None)
        elif isinstance(event, PeerLost):
            self._offered = {key: each for key, each in self._offered.items() if each[0] != event.name}
            self._expected = {key: each for key, each in self._expected.items() if each[0].source != event.name}

    def sending(self, send: Send, leased: Collection[str]) -> Value:
        """The message as it is to travel. ``leased``: the offers that the core still knows."""
        message = send.message
        if isinstance(message, Offer):
            if len(self._offered) > KEPT + 2 * len(leased):
                self._offered = {key: each for key, each in self._offered.items() if key in leased}
            self._offered[message.id] = (send.to, message.kind, tuple(part.blocks for part in message.parts))
        elif isinstance(message, Ready) and message.id in self._offered:
            return self._with_digests(message)
        elif isinstance(message, Fetched) and message.blocks:
            started = time.perf_counter()
            found = tuple(digests(self._memories[IMAGE].pool, message.blocks))
            return replace(message, digests=found, digest_s=time.perf_counter() - started)
        elif isinstance(message, Release):
            self._expected.pop(message.id, None)
            self._fetched.pop(message.id, None)
        return message

    def pulling(self, pull: Pull) -> Pull:
        """The pull with what its blocks must be. Missing digests stay missing: the check fails, and says so."""
        answer = self._fetched.pop(f"{pull.offer}/{pull.part}", None) if pull.kind == IMAGE else None
        if answer is not None:
            return replace(pull, digests=answer.digests, digest_s=answer.digest_s)
        if pull.offer not in self._expected:
            return replace(pull, digests=())
        _, known, seconds = self._expected[pull.offer]
        keys = [(block, self._all_or(pull.kind, pull.layers)) for block in pull.source_blocks]
        self._expected[pull.offer] = (*self._expected[pull.offer][:2], 0.0)  # told once: records are added up
        return replace(pull, digests=tuple(known[key] for key in keys if key in known), digest_s=seconds)

    def _with_digests(self, ready: Ready) -> Ready:
        started = time.perf_counter()
        _, kind, parts = self._offered[ready.id]
        memory = self._memories[kind]
        found = digests(memory.pool, _blocks(parts, ready), piece_of(memory, ready.layers))
        return replace(ready, digests=tuple(found), digest_s=time.perf_counter() - started)

    def _expect(self, ready: Ready) -> None:
        offer, known, seconds = self._expected[ready.id]
        layers = self._all_or(offer.kind, ready.layers)
        blocks = _blocks([part.blocks for part in offer.parts], ready)
        known.update(zip(((block, layers) for block in blocks), ready.digests, strict=False))
        self._expected[ready.id] = (offer, known, seconds + ready.digest_s)

    def _all_or(self, kind: str, layers: tuple[int, int] | None) -> tuple[int, int] | None:
        """All layers are None, however they are said."""
        memory = self._memories.get(kind)
        return None if memory is None or layers == (0, memory.shape.shape[0]) else layers


def _blocks(parts: Iterable[tuple[int, ...]], ready: Ready) -> list[int]:
    """The source blocks that a Ready is about, in order."""
    table = list(parts)
    if ready.blocks is not None:
        return list(table[0][slice(*ready.blocks)])
    return [block for part in ready.parts for block in table[part]]
