"""Block digests: sent from source to target beside the blocks and compared after the copy.

The cores do not know about digests. The source's host adds them to each Ready message, the target's host adds them to
the Pull, and its Connector compares. Without a key they are not cryptographic: they detect accidents, such as a link
that delivers stale bytes or memory that was freed too early, but no forgery. With the key of a pipeline, which its
instances in processes have, they are keyed BLAKE2b (RFC 7693) of the same rows, bound to the offer and to the block's
number at the source, and detect that too. Sides that differ in this find every block wrong.

A step that fails half-way is run again row by row and rewrites blocks that may already be in transit. Verification then
finds the first copy wrong and ends its request; without verification it would be copied again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import numpy as np
from msgspec.structs import replace

from trinity.core.messages import (
    STATE,
    Fetched,
    Forget,
    Offer,
    PeerDown,
    Pull,
    Ready,
    Release,
    Send,
    Value,
)
from trinity.errors import ConfigError, IntegrityError
from trinity.memory.block_memory import BlockMemory, FilledRanges, PullRanges, find_filled, list_units, view_units
from trinity.memory.native import compute_digests, read_blocks

Verify = Literal["always", "network", "never"]
PieceKey = tuple[str, int, tuple[int, int] | None]  # kind, source block and its layers [first, end); None: all
STALE_OFFERS_KEPT = 64  # ended offers whose blocks may still be remembered
DIGEST_BYTES = 8  # digests travel as signed integers of 64 bits


class Sealed(NamedTuple):
    """Key of digests (b"": none, which is faster), and what they are bound to: the offer, and blocks of the source."""

    key: bytes
    offer: str
    source_blocks: Sequence[int]


def check_verify(verify: str) -> Verify:
    """Return ``verify`` as a checked setting. Raises ``ConfigError`` if it is unknown."""
    for known in get_args(Verify):
        if verify == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"verify must be one of {', '.join(get_args(Verify))}, got {verify!r}")


def should_verify(verify: Verify, transport: object) -> bool:
    """Tell if blocks that arrive by ``transport`` are verified; one without ``network`` counts as a network."""
    return verify == "always" or (verify == "network" and leaves_host(transport))


def leaves_host(transport: object) -> bool:
    """Tell if blocks may leave the host by ``transport``; one that does not say so counts as a network."""
    return bool(getattr(transport, "network", True))


def digest_rows(
    memory: BlockMemory,
    blocks: Sequence[int],
    filled: FilledRanges,
    sealed: Sealed | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[int]:
    """Compute a digest of each block's bytes that are ``filled``.

    A digest of rows is one of the digests of their pieces. ``sealed``: with a key, digests are BLAKE2b under it, and
    ``advance`` is called after each.
    """
    if sealed is not None and sealed.key:
        return _seal_rows(memory, blocks, filled, sealed, advance)
    found = compute_digests(memory.pool, blocks, filled.within)
    for place, rows in filled.tails.items():
        pieces = view_units(memory.pool, rows.stride), list_units([blocks[place]], rows, memory.block_bytes)
        each = np.array(compute_digests(*pieces, (0, rows.length)), np.int64)
        found[place] = compute_digests(each.reshape(1, -1), [0])[0]
    return found


def _seal_rows(
    memory: BlockMemory,
    blocks: Sequence[int],
    filled: FilledRanges,
    sealed: Sealed,
    advance: Callable[[], None],
) -> list[int]:
    """Compute keyed digests of the same rows, on the host: those of a pool on a GPU are gathered there and copied."""
    offset, length = filled.within or (0, memory.block_bytes)
    found: list[int] = []
    held = read_blocks(memory.pool, blocks, (offset, length))
    for place, (number, rows) in enumerate(zip(sealed.source_blocks, held, strict=True)):
        tail, last = 0, filled.tails.get(place)
        if last is not None:
            tail = last.length * memory.shape.rows // last.stride  # ``stride`` is the bytes of all rows
            rows = rows.reshape(last.runs, last.stride)[:, : last.length]
        which = repr((memory.kind, sealed.offer, number, offset, length, tail)).encode()  # its end is its own
        keyed = hashlib.blake2b(which, key=sealed.key, digest_size=DIGEST_BYTES)
        keyed.update(np.ascontiguousarray(rows).reshape(-1).data)
        found.append(int.from_bytes(keyed.digest(), "little", signed=True))
        advance()
    return found


def verify_pull(memory: BlockMemory, pull: Pull, ranges: PullRanges, key: bytes = b"") -> float:
    """Compare the blocks that ``pull`` wrote, of ``ranges``, with its source's digests; returns the seconds it took.

    ``key``: that of the source's digests, b"" for none. Raises ``IntegrityError`` if a digest is missing or differs.
    """
    started, expected = time.perf_counter(), pull.digests or ()
    if len(expected) != len(pull.target_blocks):
        text = f"{pull.source} sent {len(expected)} digests for {len(pull.target_blocks)} blocks: is verify= the same?"
        raise IntegrityError(text, peer=pull.source)
    sealed = Sealed(key, pull.offer, pull.source_blocks)
    found = digest_rows(memory, pull.target_blocks, ranges.filled, sealed)
    pairs = zip(pull.source_blocks, expected, found, strict=True)
    wrong = [block for block, sent, arrived in pairs if sent != arrived]
    if wrong:
        text = f"{len(wrong)} of {len(found)} {pull.kind} blocks are not what {pull.source} sent (its {wrong[:4]})"
        raise IntegrityError(text, peer=pull.source)
    return time.perf_counter() - started


class Digests:
    """Digests of one instance: of its own blocks for its targets, and of its sources' blocks for its pulls.

    ``memories``: its pools of the kinds that are verified. ``keys``: by kind, for those whose digests are keyed.

    The core's thread passes it every event and command of the core, in order.
    """

    def __init__(self, memories: Mapping[str, BlockMemory], keys: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self._memories, self._keys = memories, keys
        self.computed = 0  # keyed digests, so that others can see that their computation goes on
        self._offered: dict[str, tuple[str, Offer]] = {}  # with the target
        self._ahead: dict[str, tuple[str, tuple[int, ...]]] = {}  # by request: the target that has these blocks of it
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
            target, offer = self._offered.pop(event.id, ("", None))
            if offer is not None and offer.copies and event.outcome in ("pulled", "cached"):
                self._ahead[offer.work.request] = target, offer.parts[0].blocks
        elif isinstance(event, Forget):
            self._ahead.pop(event.request, None)
        elif isinstance(event, PeerDown):
            self._ahead = {key: each for key, each in self._ahead.items() if each[0] != event.name}
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
            if message.kind in self._memories or (message.state and STATE in self._memories):
                self._offered[message.id] = send.to, message
        elif isinstance(message, Ready) and message.id in self._offered:
            return self._with_digests(message)
        elif isinstance(message, Fetched) and message.blocks and message.kind in self._memories:
            started, memory = time.perf_counter(), self._memories[message.kind]
            filled = find_filled(memory, None, {len(message.blocks) - 1: message.tail} if message.tail else {})
            sealed = self._seal(message.kind, message.id.rpartition("/")[0], message.blocks)
            found = digest_rows(memory, message.blocks, filled, sealed, self._advance)
            return replace(message, digests=tuple(found), digest_s=time.perf_counter() - started)
        elif isinstance(message, Release):
            self._expected.pop(message.id, None)
            self._fetched.pop(message.id, None)
        return message

    def add_expected(self, pull: Pull) -> Pull:
        """Return ``pull`` with the digests that its source sent. Missing ones stay missing, so that the check fails."""
        if pull.kind not in self._memories:
            return pull
        answer = self._fetched.pop(f"{pull.offer}/{pull.part}", None)
        if answer is not None:
            told = dict(zip(answer.blocks, answer.digests, strict=False))  # fewer may be pulled than were leased
            found = tuple(told[block] for block in pull.source_blocks if block in told)
            return replace(pull, digests=found, digest_s=answer.digest_s)
        if pull.offer not in self._expected:
            return replace(pull, digests=())
        _, known, seconds = self._expected[pull.offer]
        keys = [(pull.kind, block, self._normalize_layers(pull.kind, pull.layers)) for block in pull.source_blocks]
        self._expected[pull.offer] = (
            *self._expected[pull.offer][:2],
            0.0,
        )  # its seconds go into one pull's record only
        return replace(pull, digests=tuple(known[key] for key in keys if key in known), digest_s=seconds)

    def _with_digests(self, ready: Ready) -> Ready:
        started = time.perf_counter()
        target, offer = self._offered[ready.id]
        kind, blocks, tails = _list_blocks(offer, ready)
        if kind not in self._memories:
            return ready
        there = 0 if ready.state else self._take_ahead(target, offer)
        blocks, tails = blocks[there:], {place - there: tail for place, tail in tails.items()}
        sealed, memory = self._seal(kind, ready.id, blocks), self._memories[kind]
        found = digest_rows(memory, blocks, find_filled(memory, ready.layers, tails), sealed, self._advance)
        return replace(ready, digests=tuple(found), digest_s=time.perf_counter() - started)

    def _take_ahead(self, target: str, offer: Offer) -> int:
        """Count the first blocks of a decode that moves which went ahead of it: its target has compared them already.

        They have no digest here. A target that has lost them meanwhile fails to pull them, and leaves it where it is.
        """
        if not offer.moves or offer.copies:
            return 0
        to, blocks = self._ahead.pop(offer.work.request, ("", ()))
        return len(blocks) if to == target and offer.parts[0].blocks[: len(blocks)] == blocks else 0

    def _advance(self) -> None:
        self.computed += 1

    def _seal(self, kind: str, offer: str, blocks: Sequence[int]) -> Sealed:
        return Sealed(self._keys.get(kind, b""), offer, blocks)

    def _expect(self, ready: Ready) -> None:
        offer, known, seconds = self._expected[ready.id]
        kind, blocks, _ = _list_blocks(offer, ready)
        layers = self._normalize_layers(kind, ready.layers)
        last = blocks[len(blocks) - len(ready.digests) :]  # those ahead of them went ahead, or none is verified
        known.update(zip(((kind, block, layers) for block in last), ready.digests, strict=True))
        self._expected[ready.id] = (offer, known, seconds + ready.digest_s)

    def _normalize_layers(self, kind: str, layers: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return None for all layers, whichever way they are given."""
        memory = self._memories.get(kind)
        return None if memory is None or layers == (0, memory.shape.shape[0]) else layers


def _list_blocks(offer: Offer, ready: Ready) -> tuple[str, list[int], dict[int, int]]:
    """List the source blocks that ``ready`` names, with their kind, and the rows of those not full, by place."""
    if ready.state:
        return STATE, list(offer.state), {}
    blocks: list[int] = []
    tails: dict[int, int] = {}
    parts = offer.parts
    for part in [parts[0]] if ready.blocks is not None else [parts[number] for number in ready.parts]:
        blocks += part.blocks if ready.blocks is None else part.blocks[slice(*ready.blocks)]
        if part.tail and part.blocks and (ready.blocks is None or ready.blocks[1] == len(part.blocks)):
            tails[len(blocks) - 1] = part.tail
    return offer.kind, blocks, tails
