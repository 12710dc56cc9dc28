"""Commands of a core to its shell: messages to send, rows to open and close, steps to run, blocks to pull."""

from __future__ import annotations

from typing import Any

from trinity.core.values import MediaSpan, Value, Work


class Send(Value, frozen=True):
    """Give ``message`` to the core named ``to``; one channel per pair, in order."""

    to: str
    message: Value


class Open(Value, frozen=True, kw_only=True):
    """A request's KV blocks are reserved here: rows of its prefill and decode follow.

    ``images[i]`` are the image-cache blocks of media item i (empty where its features are not needed, because
    cached KV covers it). ``cached`` tokens of the prompt are already in ``blocks``. ``tokens`` are the outputs
    so far: all KV but the last token's is then in ``blocks``; with ``again`` they are prefilled behind the prompt.
    ``state``: its block of states, where the model's layers keep some.
    """

    work: Work
    blocks: tuple[int, ...]
    images: tuple[tuple[int, ...], ...] = ()
    cached: int = 0
    tokens: tuple[int, ...] = ()
    again: bool = False
    state: tuple[int, ...] = ()


class Grow(Value, frozen=True):
    """Append these blocks to the block tables of open requests (slot allocation), before any later step."""

    blocks: dict[str, tuple[int, ...]]


class Close(Value, frozen=True):
    """Drop the rows of a request: no step or pull of it is in flight."""

    request: str


class Encode(Value, frozen=True):
    """Encode media item ``item`` of a request into ``blocks`` of the encoder cache."""

    request: str
    item: int
    span: MediaSpan
    blocks: tuple[int, ...]
    inputs: Any


class Collect(Value, frozen=True):
    """Copy features out of the encoder cache, for a reader; answered by one Collected.

    ``items[i]`` are the blocks of media item i, and the rows in them.
    """

    request: str
    items: tuple[tuple[tuple[int, ...], int], ...]


class Prefill(Value, frozen=True):
    """Run prompt positions [start, start + length), a chunk of a chunked prefill; ``last`` samples the first token."""

    request: str
    start: int
    length: int
    last: bool


class Step(Value, frozen=True):
    """Run this batch on a lane; answered by one Stepped. ``decodes`` name requests: one row each.

    ``group``: report each time this many more layers of the prefills' KV are written; 0 for no report.
    """

    id: int
    lane: str
    encodes: tuple[Encode, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    decodes: tuple[str, ...] = ()
    group: int = 0


class Revoke(Value, frozen=True):
    """Set the generation of these blocks before any later command: their lease was revoked and they get new content."""

    kind: str
    blocks: tuple[int, ...]
    generation: int


class Pull(Value, frozen=True):
    """Read blocks of a peer's pool into our own; answered by one Pulled.

    Fails where, after the copy, a source block has a higher generation than the offer's ``generation``, or a block
    differs from its ``digests`` (added by the host where blocks are verified, else None; computing them took
    ``digest_s`` seconds). ``part`` is the offer's part, or for KV the number of the pull. ``layers``: [first, end) of
    each block, None for all. ``tail``: rows in the last block if that is not full, else 0; the others need not move.
    """

    offer: str
    part: int
    source: str
    kind: str
    request: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    generation: int = 0
    layers: tuple[int, int] | None = None
    digests: tuple[int, ...] | None = None
    digest_s: float = 0.0
    tail: int = 0
