"""Prefix cache and encoder cache: keys of content, by which blocks of KV and of features are found again.

The blocks themselves, which of them are cached and which go first, are in ``trinity.core.block_pool``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from trinity.core.values import blocks_for

if TYPE_CHECKING:
    from trinity.core.messages import MediaSpan

Key = bytes
DIGEST = 8  # bytes of a key by which others know it: one in 2^64 is mistaken, and then nothing is found there
_encode = msgspec.msgpack.Encoder().encode


def each_prefix_key(tokens: Sequence[int], media: Sequence[MediaSpan], block: int, salt: str = "") -> Iterator[Key]:
    """Yield prefix-cache keys, one per full block: a hash chain over token ids and the content and offset of media.

    The same text with another image has different keys from the image's first block on; with another salt all differ,
    and so they do where another number of positions see each other (``MediaSpan.whole``).
    """
    previous = blake2b(salt.encode(), digest_size=16).digest() if salt else b""
    whole = max((span.whole for span in media), default=0)
    if whole:  # the same tokens differ where more of them are seen
        previous = blake2b(previous + f"whole {whole}".encode(), digest_size=16).digest()
    for start in range(0, len(tokens) - block + 1, block):
        end = start + block
        inside = [(span.content, span.offset - start) for span in media if span.offset < end and span.end > start]
        previous = blake2b(previous + _encode((tokens[start:end], inside)), digest_size=16).digest()
        yield previous


def prefix_keys(tokens: Sequence[int], media: Sequence[MediaSpan], block: int, salt: str = "") -> list[Key]:
    """All of ``each_prefix_key``."""
    return list(each_prefix_key(tokens, media, block, salt))


def uncut_blocks(count: int, media: Sequence[MediaSpan], block: int) -> int:
    """Count how many of the first ``count`` blocks of a prompt end inside no atomic media item."""
    for span in reversed(media):
        start, end = span.uncut
        if start < count * block < end:
            count = start // block
    return count


def media_keys(span: MediaSpan, block: int) -> list[Key]:
    """Encoder-cache keys, one per image block of a media item."""
    return [
        blake2b(f"{span.kind}:{span.content}:{span.tokens}:{index}".encode(), digest_size=16).digest()
        for index in range(blocks_for(span.tokens, block))
    ]
