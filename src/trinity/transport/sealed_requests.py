"""Requests to the source of a pool, and its replies, each with a tag under a key that only the pool's descriptor tells.

Descriptors go over control channels; the key itself never goes over the medium. A tag covers the connection and the
number of its request, so that neither is believed a second time (the window of numbers is that of RFC 6347, 4.1.2.6).
What lacks its tag costs a digest of its bytes and is answered by nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from itertools import count
from typing import NamedTuple

logger = logging.getLogger("trinity")
KEY_BYTES, TAG_BYTES, LINK_BYTES, NUMBER_BYTES = 32, 16, 16, 8
SEAL_BYTES = TAG_BYTES + LINK_BYTES + NUMBER_BYTES
WINDOW = 4096  # numbers of requests that may overtake each other
FIRST_NUMBERS = 1 << 38  # a connection begins below; UCX's tags hold numbers of 40 bits
LOGGED_MESSAGES = 8  # of the life of a source or a link; the rest is not worth a line each
_REQUEST, _REPLY = b"trinity-request", b"trinity-reply"  # neither passes for the other


class SealedRequest(NamedTuple):
    """A request whose tag is right: its connection, its number there, and what is asked for."""

    link: bytes
    number: int
    body: bytes


class Suspicions:
    """Log of messages that ``owner`` did not believe: the first few, in a line each."""

    def __init__(self, owner: str) -> None:
        self.owner, self.count = owner, 0

    def add(self, what: str) -> None:
        """Take note of a message."""
        self.count += 1
        if self.count <= LOGGED_MESSAGES:
            logger.warning("%s refused %s", self.owner, what)


class LinkSeal:
    """Target side of one connection: seals its requests, and opens the replies to them.

    - ``key``: the source's, out of its descriptor; ``peer``: the source's name.
    """

    def __init__(self, key: bytes, peer: str) -> None:
        self._key, self._link = key, secrets.token_bytes(LINK_BYTES)
        self._numbers = count(1 + secrets.randbelow(FIRST_NUMBERS))
        self._suspicions = Suspicions(f"a connection to {peer}")

    def seal(self, request: bytes) -> tuple[int, bytes]:
        """Return the number of a new request, and the message that carries it."""
        number = next(self._numbers)
        return number, _seal(self._key, _REQUEST, self._link, number, request)

    def open(self, message: bytes) -> tuple[int, bytes] | None:
        """Return a reply's number and content, or None, which is logged, if it is not the source's to this link."""
        reply = _open(self._key, _REPLY, message)
        if reply is None or reply.link != self._link:
            self._suspicions.add("a reply that lacks its secret")
            return None
        return reply.number, reply.body


class RequestKey:
    """Source side: its key, and the numbers of the requests that it has believed.

    It remembers a connection for as long as it lives, at most some 800 bytes for each. Only who has the key makes one.
    """

    def __init__(self, source: str) -> None:
        self.value = secrets.token_bytes(KEY_BYTES)
        self.suspicions = Suspicions(source)
        self._seen: dict[bytes, tuple[int, int]] = {}  # of each connection: highest number, a bit for each below it

    def open(self, message: bytes) -> SealedRequest | None:
        """Return a message's request, or None, which is logged, if its tag is not of this key or it came before."""
        request = _open(self.value, _REQUEST, message)
        if request is None:
            self.suspicions.add("a request for blocks that lacks its secret")
        elif not self._is_new(request):
            self.suspicions.add("a request for blocks that has come before")
            return None
        return request

    def seal_reply(self, request: SealedRequest, reply: bytes) -> bytes:
        """Return the message that carries the reply to this request."""
        return _seal(self.value, _REPLY, request.link, request.number, reply)

    def _is_new(self, request: SealedRequest) -> bool:
        """Take note of a number. False if it was noted already, or is further behind than the window is wide."""
        highest, bits = self._seen.get(request.link, (-1, 0))
        behind = highest - request.number
        if behind >= WINDOW or (behind >= 0 and bits >> behind & 1):
            return False
        if behind >= 0:
            bits |= 1 << behind
        else:
            highest, bits = request.number, (bits << min(-behind, WINDOW) | 1) & ((1 << WINDOW) - 1)
        self._seen[request.link] = highest, bits
        return True


def _seal(key: bytes, purpose: bytes, link: bytes, number: int, body: bytes) -> bytes:
    covered = link + number.to_bytes(NUMBER_BYTES, "big") + body
    return hashlib.blake2b(covered, key=key, digest_size=TAG_BYTES, person=purpose).digest() + covered


def _open(key: bytes, purpose: bytes, message: bytes) -> SealedRequest | None:
    tag, covered = message[:TAG_BYTES], message[TAG_BYTES:]
    expected = hashlib.blake2b(covered, key=key, digest_size=TAG_BYTES, person=purpose).digest()
    if len(message) < SEAL_BYTES or not hmac.compare_digest(tag, expected):
        return None
    head = LINK_BYTES + NUMBER_BYTES
    return SealedRequest(covered[:LINK_BYTES], int.from_bytes(covered[LINK_BYTES:head], "big"), covered[head:])
