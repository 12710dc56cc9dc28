"""TLS of control channels over TCP: mutual TLS 1.3 under a private authority, around the handshake and its tags.

Names in certificates are not checked: whoever has a certificate of the authority may speak, and the pipeline's secret
says who belongs to it. The proof of the secret covers the TLS connection (``bind``), so that another holder of a
certificate cannot stand between two ends (docs/decisions/0046-mutual-tls.md).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from trinity.errors import ConfigError, HandshakeError
from trinity.errors.arguments import check_arguments
from trinity.remote.channel.handshake import GIVE_TLS, MAGIC, NEEDS_TLS, PEER_LEFT, TLS_RECORD, CrowdedError

BUSY_ALERT = bytes.fromhex("15030300020250")  # RFC 8446, 6: a fatal internal_error, a crowded server's last word
BUSY_REASON = "TLSV1_ALERT_INTERNAL_ERROR"
NO_TLS_REASON = "WRONG_VERSION_NUMBER"  # OpenSSL's word where what came is no record of TLS
TURNS = 3  # of each end, in which a handshake of TLS 1.3 is done
DRAINED = 4096  # bytes of a greeting in clear that are read before its answer: unread ones would reset it away


@check_arguments
@dataclass(frozen=True)
class TLSConfig:
    """Files, in PEM, with which one side of control channels over TCP speaks mutual TLS 1.3.

    - ``certificate``: this side's, for both directions, with those between it and the authority after it.
    - ``key``: its private key, not encrypted.
    - ``authority``: certificates of the private authority that signs those of all instances and front ends.
    """

    certificate: str | Path
    key: str | Path
    authority: str | Path

    def paths(self) -> tuple[str, str, str]:
        """Return the three files with absolute paths, for another process."""
        certificate, key, authority = (str(Path(each).absolute()) for each in self._files)
        return certificate, key, authority

    @property
    def _files(self) -> tuple[str | Path, str | Path, str | Path]:
        return self.certificate, self.key, self.authority

    def check(self) -> None:
        """Raise ``ConfigError`` unless this side would accept itself: readable, signed by the authority, in date."""
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.make_context(server=False).wrap_bio(back, there)
        server = self.make_context(server=True).wrap_bio(there, back, server_side=True)
        try:
            for end in (client, server) * TURNS:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLCertVerificationError as error:
            text = f"the certificate {self.certificate} is not one that {self.authority} vouches for now"
            raise ConfigError(f"{text}: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise ConfigError(f"no TLS can be spoken with the certificate {self.certificate}: {error}") from error

    def make_context(self, *, server: bool) -> ssl.SSLContext:
        """Read the files. Raises ``ConfigError`` for one that is missing or is none, and for an encrypted key."""
        for each in self._files:
            if not Path(each).is_file():
                raise ConfigError(
                    f"{each} is no file: TLS needs a certificate, its key and the authority's certificate"
                )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # no connection goes on from an earlier one
        try:
            context.load_cert_chain(self.certificate, self.key, self._refuse_password)
        except (ssl.SSLError, OSError) as error:
            text = f"{self.certificate} and {self.key} are no certificate and its key in PEM"
            raise ConfigError(f"{text}: {error}") from error
        try:
            context.load_verify_locations(self.authority)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{self.authority} has no certificate of an authority in PEM: {error}") from error
        return context

    def _refuse_password(self) -> str:
        raise ConfigError(f"the key {self.key} is encrypted, and nobody is there to be asked: give it in the clear")


TLS_FILES = tuple(each.name for each in fields(TLSConfig))


def join_files(given: Iterable[str | None], options: Sequence[str] = TLS_FILES) -> TLSConfig | None:
    """Make the ``TLSConfig`` of files in the order of ``TLS_FILES``, None for none of them.

    Raises ``ConfigError`` for some of them alone, which names the ``options`` that gave them.
    """
    files = [each for each in given if each]
    if files and len(files) != len(TLS_FILES):
        raise ConfigError(f"TLS needs all of {', '.join(options[:-1])} and {options[-1]}")
    return TLSConfig(*files) if files else None


async def open_tls(host: str, port: int, tls: TLSConfig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and shake hands in TLS. Raises ``HandshakeError``, ``OSError``, ``CrowdedError`` where to try again."""
    try:
        return await asyncio.open_connection(host, port, ssl=tls.make_context(server=False), server_hostname="")
    except ssl.SSLCertVerificationError as error:
        text = f"the certificate of {host}:{port} is not accepted: {error.verify_message}"
        raise HandshakeError(f"{text}; one authority has to vouch for both sides", "control") from error
    except ssl.SSLError as error:
        if error.reason == BUSY_REASON:
            raise CrowdedError("the peer has no room for another handshake now", "control") from error
        why = f"speaks no TLS: {GIVE_TLS}" if error.reason == NO_TLS_REASON else f"cannot speak TLS with us: {error}"
        raise HandshakeError(f"the peer at {host}:{port} {why}", "control") from error
    except ConnectionResetError as error:
        reset = CrowdedError(PEER_LEFT, "control")
        reset.told = False
        raise reset from error


async def expect_tls(connection: socket.socket) -> None:
    """Wait for the first byte of an accepted connection, and leave it there; answer a greeting in the clear.

    Raises ``HandshakeError`` unless TLS begins.
    """
    loop, come = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, come.set)
    try:
        await come.wait()
    finally:
        loop.remove_reader(connection)
    first = connection.recv(1, socket.MSG_PEEK)
    if first == TLS_RECORD[:1]:
        return
    if first == MAGIC[:1]:
        connection.recv(DRAINED)
        connection.send(NEEDS_TLS)
        raise HandshakeError(f"the peer speaks no TLS, and this side nothing else: {GIVE_TLS}", "control")
    raise HandshakeError(PEER_LEFT if not first else "the peer speaks neither TLS nor trinity's protocol", "control")
