"""Handshake of a control channel: both sides prove the secret, and draw from it keys for this connection alone.

Each side greets with a fresh nonce. The client proves first, so that a peer without the secret learns nothing; a proof
is an HMAC over both greetings, and over the TLS connection where they go in one. The keys, one for each direction, are
HKDF-SHA256 (RFC 5869) of the secret, salted with the same: a frame of another connection, or of the other direction,
has another tag.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct

from trinity.errors import HandshakeError

VERSION = 8
MAGIC = b"TRNY"
NONCE = 32
GREETING = len(MAGIC) + 3 + NONCE  # bytes: magic, version, flags, nonce
NEEDS_TLS = b"TLS!"  # the last word of a server with certificates to a greeting in the clear
TLS_RECORD = b"\x16\x03"  # RFC 8446, 5.1: so begins a client that speaks TLS
CROWDED = b"BUSY"  # a server's last word to a connection that it dropped for others, before its proof
VOUCHED = 1  # flag of a greeting: the system tells this side who the peer is
PROOF = 32
TAG = 16
PEER_LEFT = "the peer left during the handshake: the secrets differ, or it is not an instance of trinity"
GIVE_TLS = "give both sides their certificates (ProcessConfig(tls=...), --tls-certificate), or neither"
REFUSED_TLS = f"{PEER_LEFT}, or it does not accept this side's certificate: its log says why"
PEER_CREDENTIALS = struct.Struct("3i")  # process, user, group


class BrokenHandshake(HandshakeError):
    """The connection ended before both sides had shown who they are, as when the peer dies: another try may succeed."""


class CrowdedError(BrokenHandshake):
    """The server dropped this connection before its proof, because too many waited: try again.

    ``told`` is False where it only looks so: the connection was reset, and with it the server's last word may be lost.
    """

    told = True


class Seal:
    """Tags of the frames of one direction: keyed BLAKE2b over the frame's number and its header, or its bytes.

    A frame that was rewritten, replayed, reordered or dropped does not have the tag of the number that is due. The
    header, which has the size, has a tag of its own, so that it is believed before a byte of the frame is awaited.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=TAG)
        self._number = 0

    def header_tag(self, header: bytes) -> bytes:
        """Begin the next frame; return the tag of its header."""
        self._number += 1
        return self._tag(b"head", header)

    def data_tag(self, data: bytes | memoryview) -> bytes:
        """Return the tag of the frame's bytes."""
        return self._tag(b"data", data)

    def _tag(self, part: bytes, data: bytes | memoryview) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(self._number.to_bytes(8, "big") + part)
        keyed.update(data)
        return keyed.digest()


Seals = tuple[Seal, Seal] | None  # of what is sent and of what is received; None where the system vouches for both


async def shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, server: bool
) -> Seals:
    """Exchange greetings and proofs, the client's proof first; return the seals of the frames that follow.

    Raises ``HandshakeError``, ``BrokenHandshake`` if the peer left, and ``CrowdedError`` if the server had no room.
    """
    mine = MAGIC + VERSION.to_bytes(2, "big") + bytes([VOUCHED * is_vouched(writer)]) + secrets.token_bytes(NONCE)
    binding = bind(writer)
    left, theirs = REFUSED_TLS if binding else PEER_LEFT, b""
    try:
        writer.write(mine)
        theirs = await _read_greeting(reader)
        both = (theirs + mine if server else mine + theirs) + binding
        ours, others = (b"server", b"client") if server else (b"client", b"server")
        if server:
            await _verify(reader, secret, others, both)
        writer.write(_proof(secret, ours, both))
        if not server:
            await _verify(reader, secret, others, both)
    except asyncio.IncompleteReadError as error:
        if error.partial == CROWDED:
            raise CrowdedError("the peer has no room for another handshake now", "control") from error
        if error.partial == NEEDS_TLS:
            raise HandshakeError(
                f"the peer takes TLS alone, and this side speaks none: {GIVE_TLS}", "control"
            ) from error
        if binding and not theirs:  # as when the server dropped it inside its own half of TLS
            raise _untold(left) from error
        raise BrokenHandshake(left, "control") from error
    except OSError as error:
        raise _untold(f"{left} ({error})" if isinstance(error, ssl.SSLError) else left) from error
    if mine[6] & theirs[6] & VOUCHED:
        return None
    return Seal(_derive_key(secret, both, ours)), Seal(_derive_key(secret, both, others))


def is_vouched(writer: asyncio.StreamWriter) -> bool:
    """Tell if the system vouches for the peer: a Unix socket whose other end is of the same user, or root.

    Nobody else can come between the two, and who may trace a process needs no socket to speak in its place.
    """
    ours: socket.socket = writer.get_extra_info("socket")
    if ours.family != socket.AF_UNIX:
        return False
    try:
        found = ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    except (AttributeError, OSError):  # no such option on this system
        return False
    return PEER_CREDENTIALS.unpack(found)[1] in (os.geteuid(), 0)


def _untold(text: str) -> CrowdedError:
    error = CrowdedError(text, "control")
    error.told = False
    return error


def bind(writer: asyncio.StreamWriter) -> bytes:
    """Return what both ends of this TLS connection alone have in common (RFC 5929, 3); nothing without TLS.

    Who ends TLS and begins another to pass a conversation on has two connections, and so two such values.
    """
    inside: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
    if inside is None:
        return b""
    found = inside.get_channel_binding("tls-unique")
    if not found:
        raise HandshakeError("this Python's ssl cannot tell one TLS connection from another", "control")
    return found


async def _read_greeting(reader: asyncio.StreamReader) -> bytes:
    start = len(MAGIC) + 2
    greeting = await reader.readexactly(start)  # of every version: what follows may differ
    if greeting.startswith(TLS_RECORD):
        raise HandshakeError(f"the peer speaks TLS, and this side none: {GIVE_TLS}", "control")
    if not greeting.startswith(MAGIC):
        raise HandshakeError("the peer does not speak trinity's protocol", "control")
    version = int.from_bytes(greeting[len(MAGIC) :], "big")
    if version != VERSION:
        text = f"the peer speaks version {version} of the protocol, this side {VERSION}"
        raise HandshakeError(f"{text}: install the same trinity on both", "control")
    return greeting + await reader.readexactly(GREETING - start)


def _proof(secret: bytes, role: bytes, greetings: bytes) -> bytes:
    return hmac.digest(secret, b"trinity proof " + role + greetings, "sha256")


def _derive_key(secret: bytes, greetings: bytes, role: bytes) -> bytes:
    """Return the key of what ``role`` sends."""
    return _expand(secret, greetings, b"trinity frames " + role)


def derive_block_key(secret: bytes, pipeline: str) -> bytes:
    """Return the key of digests of blocks in this session of a pipeline, the same for all its instances."""
    return _expand(secret, pipeline.encode(), b"trinity blocks")


def _expand(secret: bytes, salt: bytes, use: bytes) -> bytes:
    """Return 32 bytes for one use: HKDF-SHA256 (RFC 5869) with one block of output, its salt hashed."""
    extracted = hmac.digest(hashlib.sha256(salt).digest(), secret, "sha256")
    return hmac.digest(extracted, use + b"\x01", "sha256")


async def _verify(reader: asyncio.StreamReader, secret: bytes, role: bytes, greetings: bytes) -> None:
    if not hmac.compare_digest(await reader.readexactly(PROOF), _proof(secret, role, greetings)):
        raise HandshakeError("the peer does not hold this pipeline's secret", "control")
