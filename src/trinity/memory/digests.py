"""Block digests: sent from source to target beside the blocks and compared after the copy.

The cores do not know about digests. The source's host adds them to each Ready message, the target's host adds them to
the Pull, and its Connector compares. They are not cryptographic: they detect accidents, such as a link that delivers
stale bytes or memory that was freed too early, but no forgery.

A step that fails half-way is run again row by row and rewrites blocks that may already be in transit. Verification then
finds the first copy wrong and ends its request; without verification it would be copied again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, get_args

from msgspec.structs import replace

from trinity.core.messages import IMAGE, Fetched, Offer, PeerDown, Pull, Ready, Release, Send, Value
from trinity.errors import ConfigError, IntegrityError
from trinity.memory.block_memory import BlockMemory
from trinity.memory.native import compute_digests

Verify = Literal["always", "network", "never"]
PieceKey = tuple[int, tuple[int, int] | None]  # a source block and its layers [first, end); None: all layers
STALE_OFFERS_KEPT = 64  # ended offers whose blocks may still be remembered


def check_verify(verify: str) -> Verify:
    """Return ``verify`` as a checked setting. Raises ``ConfigError`` if it is unknown."""
    for known in get_args(Verify):
        if verify == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"verify must be one of {', '.join(get_args(Verify))}, got {verify!r}")


def should_verify(verify: Verify, transport: object) -> bool:
    """Tell if blocks that arrive by ``transport`` are verified; one without ``network`` counts as a network."""
    return verify == "always" or (verify == "network" and bool(getattr(transport, "network", True)))


def layer_byte_range(memory: BlockMemory, layers: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (offset, length) in bytes of ``layers`` [first, end) in each block [layers, ...]; None: all of it."""
    if layers is None:
        return None
    each = memory.block_bytes // memory.shape.shape[0]
    return layers[0] * each, (layers[1] - layers[0]) * each


def verify_pull(memory: BlockMemory, pull: Pull, expected: Collection[int]) -> float:
    """Compare the blocks that ``pull`` wrote with the source's digests ``expected``; returns the seconds it took.

    Raises ``IntegrityError`` if a digest is missing or differs.
    """
    started = time.perf_counter()
    if len(expected) != len(pull.target_blocks):
        text = f"{pull.source} sent {len(expected)} digests for {len(pull.target_blocks)} blocks: is verify= the same?"
        raise IntegrityError(text, peer=pull.source)
    found = compute_digests(memory.pool, pull.target_blocks, layer_byte_range(memory, pull.layers))
    pairs = zip(pull.source_blocks, expected, found, strict=True)
    wrong = [block for block, sent, arrived in pairs if sent != arrived]
    if wrong:
        text = f"{len(wrong)} of {len(found)} {pull.kind} blocks are not what {pull.source} sent (its {wrong[:4]})"
        raise IntegrityError(text, peer=pull.source)
    return time.perf_counter() - started


class Digests:
    """Digests of one instance: of its own blocks for its targets, and of its sources' blocks for its pulls.

    The core's thread passes it every event and command of the core, in order.
    """

    def __init__(self, memories: Mapping[str, BlockMemory]) -> None:
        self._memories = memories
        self._offered: dict[str, tuple[str, str, tuple[tuple[int, ...], ...]]] = {}  # target, kind, blocks by part
        self._expected: dict[str, tuple[Offer, dict[PieceKey, int], float]] = {}
        self._fetched: dict[str, Fetched] = {}

    def observe(self, event: Value) -> None:
        """Take note of an event that the core is about to handle."""
        if isinstance(event, Offer):
            self._expected[event.id] = (event, {}, 0.0)
        elif isinstance(event, Ready) and event.id in self._expected:
            self._expect(event)
        elif isinstance(event, Fetched) and event.blocks:
            self._fetched[event.id] = event
        elif isinstance(event, Release):
            self._offered.pop(event.id, None)
        elif isinstance(event, PeerDown):
            self._offered = {key: each for key, each in self._offered.items() if each[0] != event.name}
            self._expected = {key: each for key, each in self._expected.items() if each[0].source != event.name}

    def add_digests(self, send: Send, leased: Collection[str]) -> Value:
        """Return the message to send, with digests of the blocks that it says are ready.

        ``leased``: ids of the offers that the core still knows.
        """
        message = send.message
        if isinstance(message, Offer):
            if len(self._offered) > STALE_OFFERS_KEPT + 2 * len(leased):
                self._offered = {key: each for key, each in self._offered.items() if key in leased}
            self._offered[message.id] = (send.to, message.kind, tuple(part.blocks for part in message.parts))
        elif isinstance(message, Ready) and message.id in self._offered:
            return self._with_digests(message)
        elif isinstance(message, Fetched) and message.blocks:
            started = time.perf_counter()
            found = tuple(compute_digests(self._memories[IMAGE].pool, message.blocks))
            return replace(message, digests=found, digest_s=time.perf_counter() - started)
        elif isinstance(message, Release):
            self._expected.pop(message.id, None)
            self._fetched.pop(message.id, None)
        return message

    def add_expected(self, pull: Pull) -> Pull:
        """Return ``pull`` with the digests that its source sent. Missing ones stay missing, so that the check fails."""
        answer = self._fetched.pop(f"{pull.offer}/{pull.part}", None) if pull.kind == IMAGE else None
        if answer is not None:
            return replace(pull, digests=answer.digests, digest_s=answer.digest_s)
        if pull.offer not in self._expected:
            return replace(pull, digests=())
        _, known, seconds = self._expected[pull.offer]
        keys = [(block, self._normalize_layers(pull.kind, pull.layers)) for block in pull.source_blocks]
        self._expected[pull.offer] = (
            *self._expected[pull.offer][:2],
            0.0,
        )  # its seconds go into one pull's record only
        return replace(pull, digests=tuple(known[key] for key in keys if key in known), digest_s=seconds)

    def _with_digests(self, ready: Ready) -> Ready:
        started = time.perf_counter()
        _, kind, parts = self._offered[ready.id]
        memory = self._memories[kind]
        found = compute_digests(memory.pool, _blocks(parts, ready), layer_byte_range(memory, ready.layers))
        return replace(ready, digests=tuple(found), digest_s=time.perf_counter() - started)

    def _expect(self, ready: Ready) -> None:
        offer, known, seconds = self._expected[ready.id]
        layers = self._normalize_layers(offer.kind, ready.layers)
        blocks = _blocks([part.blocks for part in offer.parts], ready)
        known.update(zip(((block, layers) for block in blocks), ready.digests, strict=False))
        self._expected[ready.id] = (offer, known, seconds + ready.digest_s)

    def _normalize_layers(self, kind: str, layers: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return None for all layers, whichever way they are given."""
        memory = self._memories.get(kind)
        return None if memory is None or layers == (0, memory.shape.shape[0]) else layers


def _blocks(parts: Iterable[tuple[int, ...]], ready: Ready) -> list[int]:
    """List the source blocks that ``ready`` names, in order."""
    table = list(parts)
    if ready.blocks is not None:
        return list(table[0][slice(*ready.blocks)])
    return [block for part in ready.parts for block in table[part]]
