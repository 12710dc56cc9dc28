"""Requests to the source of a pool, with a tag under a key that only the pool's descriptor tells.

Descriptors go over control channels. A request without the tag costs a digest of its bytes and is answered by nothing;
the key itself never goes over the medium.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets

logger = logging.getLogger("trinity")
KEY_BYTES, TAG_BYTES = 32, 16
LOGGED_REQUESTS = 8  # of a source's life; the rest is not worth a line each


def seal_request(key: bytes, request: bytes) -> bytes:
    """Return the request behind its tag."""
    return hashlib.blake2b(request, key=key, digest_size=TAG_BYTES).digest() + request


class RequestKey:
    """Key of a source, and the number of requests without its tag."""

    def __init__(self, source: str) -> None:
        self.value = secrets.token_bytes(KEY_BYTES)
        self._source, self._refused = source, 0

    def open(self, message: bytes) -> bytes | None:
        """Return the request of a message, or None, which is logged, if its tag is not of this key."""
        request = message[TAG_BYTES:]
        if hmac.compare_digest(seal_request(self.value, request), message):
            return request
        self._refused += 1
        if self._refused <= LOGGED_REQUESTS:
            logger.warning("%s refused a request for blocks that lacks its secret", self._source)
        return None
