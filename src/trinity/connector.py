"""Connector: moves image-cache and KV-cache blocks between instances over one transport."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from trinity.core.messages import Failure, Pull, Pulled
from trinity.core.transfers import gigabytes_a_second
from trinity.errors import (
    ClosedError,
    ConfigError,
    OfferRefused,
    PeerLost,
    TransferTimeout,
    TransportError,
    TrinityError,
)
from trinity.memory.block_memory import BlockMemory
from trinity.memory.digests import Verify, check_verify, layer_byte_range, should_verify, verify_pull
from trinity.transport.base import Remote, Transport, find_runs
from trinity.transport.registry import make_transport

logger = logging.getLogger("trinity")
INLINE_BYTES = 4 << 20  # below this digests cost no more than the way to a thread and back


class Connector:
    """One for both kinds of block, image and KV (step 3 of TriInfer's pull migration, 4.3).

    ``transport`` is a name or a ``Transport``; ``timeout_s`` bounds every read. Every read is recorded: scheme, bytes,
    blocks, pieces, set-up and wire seconds, GB/s on the wire, and digest seconds (both sides) where blocks are
    verified: ``verify`` is "always", "never", or "network" for transports that leave the host. A connector serves one
    pipeline, which closes it and its transport.
    """

    def __init__(
        self, transport: str | Transport = "inproc", *, timeout_s: float = 30.0, verify: Verify = "network"
    ) -> None:
        self.transport = make_transport(transport)
        self.timeout_s, self.verify = timeout_s, check_verify(verify)
        self._memories: dict[tuple[str, str], BlockMemory] = {}
        self._descriptors: dict[tuple[str, str], bytes] = {}
        self._remotes: dict[tuple[str, str, str], Remote] = {}
        self._attaching: dict[tuple[str, str, str], asyncio.Lock] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def scheme(self) -> str:
        return self.transport.scheme

    @property
    def verifies(self) -> bool:
        """Whether sources send digests of their blocks, which are compared with what has arrived."""
        return should_verify(self.verify, self.transport)

    def bind(self, instance: str, memories: Mapping[str, BlockMemory]) -> dict[str, bytes]:
        """Publish an instance's pools; their descriptors by kind.

        Raises ``ConfigError`` where another pipeline uses this connector.
        """
        if self._closed or any(name == instance for name, _ in self._memories):
            raise ConfigError("a Connector serves one pipeline: make one for each")
        for kind, memory in memories.items():
            self._memories[instance, kind] = memory
            self._descriptors[instance, kind] = self.transport.publish(memory)
        return {kind: self._descriptors[instance, kind] for kind in memories}

    def introduce(self, peer: str, pools: Mapping[str, bytes]) -> None:
        """Learn the descriptors of an instance in another process."""
        self.forget(peer)
        for kind, descriptor in pools.items():
            self._descriptors[peer, kind] = descriptor

    def forget(self, peer: str) -> None:
        """A peer is gone: its pools cannot be read any more."""
        for key in [key for key in self._descriptors if key[0] == peer and key not in self._memories]:
            del self._descriptors[key]
        for attached in [each for each in self._remotes if each[1] == peer]:
            self._part_from(self._remotes.pop(attached))

    def _part_from(self, remote: Remote) -> None:
        """Let go of a pool whose owner is gone: its mapping or connection is ours."""
        task = asyncio.get_running_loop().create_task(self._close(remote))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def pull(self, instance: str, pull: Pull) -> Pulled:
        """Carry out a core's Pull for ``instance``. A failed transfer does not raise: the failure is in the answer."""
        started = time.perf_counter()
        try:
            return Pulled(pull.offer, pull.part, None, await self._read(instance, pull))
        except Exception as error:  # transports are other people's: whatever they raise fails this request alone
            cause = type(error).__name__ if isinstance(error, (TransportError, ClosedError)) else "TransportError"
            fields = {"source": pull.source, "target": instance, "kind": pull.kind, "cause": cause}
            if isinstance(error, OfferRefused):
                fields["reason"] = error.reason
            why = str(error) if isinstance(error, TrinityError) else repr(error)
            text = f"{pull.kind} blocks did not arrive at {instance} from {pull.source}: {why}"
            record = self._record(instance, pull, "failed", 0, time.perf_counter() - started)
            return Pulled(pull.offer, pull.part, Failure("MigrationError", text, fields), record)

    async def _read(self, instance: str, pull: Pull) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                remote = await self._remote(instance, pull.source, pull.kind)
                ready = time.perf_counter()
                within = layer_byte_range(self._memories[instance, pull.kind], pull.layers)
                moved = await remote.read(pull.source_blocks, pull.target_blocks, within)
                await self._check_fresh(remote, instance, pull)
        except TimeoutError as error:
            text = f"a read of {len(pull.source_blocks)} blocks took more than {self.timeout_s} s"
            raise TransferTimeout(text, self._scheme(instance, pull), pull.source) from error
        record = self._record(instance, pull, "pulled", moved, time.perf_counter() - ready)
        if self.verifies and pull.digests is not None:
            record["digest_s"] = pull.digest_s + await self._check_arrived(instance, pull, moved, pull.digests)
        pieces = (
            len(pull.source_blocks) if within else sum(1 for _ in find_runs(pull.source_blocks, pull.target_blocks))
        )
        return {**record, "pieces": pieces, "setup_s": ready - started, "gb_s": gigabytes_a_second(record)}

    async def _check_arrived(self, instance: str, pull: Pull, moved: int, expected: tuple[int, ...]) -> float:
        memory = self._memories[instance, pull.kind]
        if moved <= INLINE_BYTES:
            return verify_pull(memory, pull, expected)
        return await asyncio.to_thread(verify_pull, memory, pull, expected)

    async def _check_fresh(self, remote: Remote, instance: str, pull: Pull) -> None:
        """A source that took blocks back may have written something else there while we read."""
        generation = await remote.generation(pull.source_blocks)
        if generation > pull.generation:
            text = f"{pull.source} took its blocks back (generation {generation}, offered at {pull.generation})"
            raise OfferRefused(text, "stale", self._scheme(instance, pull), pull.source)

    def _scheme(self, instance: str, pull: Pull) -> str:
        """That of the peer, where the transport chooses for each."""
        remote = self._remotes.get((instance, pull.source, pull.kind))
        return getattr(remote, "scheme", self.scheme)

    def _record(self, instance: str, pull: Pull, outcome: str, moved: int, seconds: float) -> dict[str, Any]:
        return {
            "kind": pull.kind,
            "source": pull.source,
            "target": instance,
            "outcome": outcome,
            "scheme": self._scheme(instance, pull),
            "bytes": moved,
            "blocks": len(pull.source_blocks),
            "seconds": seconds,
        }

    async def _remote(self, instance: str, source: str, kind: str) -> Remote:
        if self._closed:
            raise ClosedError("the connector is closed")
        key = (instance, source, kind)
        async with self._attaching.setdefault(key, asyncio.Lock()):  # two first reads at once must not attach twice
            if key not in self._remotes:
                descriptor = self._descriptors.get((source, kind))
                if descriptor is None:
                    raise PeerLost(f"{source} is gone, or has no {kind} blocks", self.scheme, source)
                remote = await self.transport.attach(descriptor, self._memories[instance, kind])
                if self._descriptors.get((source, kind)) is not descriptor:
                    self._part_from(remote)
                    raise PeerLost(f"{source} was lost while it was attached to", self.scheme, source)
                self._remotes[key] = remote
        return self._remotes[key]

    async def aclose(self) -> None:
        """Detach from every peer and withdraw every pool. Twice is once. What cannot be closed is logged."""
        if not self._closed:
            self._closed = True
            for remote in self._remotes.values():
                await self._close(remote)
            await asyncio.gather(*self._leaving)
            await self._close(self.transport)

    async def _close(self, each: Remote | Transport) -> None:
        try:
            await each.aclose()
        except Exception:
            logger.exception("%r of transport %s could not be closed", each, self.scheme)


def choice(connector: str | Transport | Connector | None, hosting: str) -> str | Transport | Connector:
    """What to use where nobody says, or says "auto": in one process that is inproc for every pair."""
    if hosting == "thread" and connector in (None, "auto"):
        return "inproc"
    return connector or "auto"


def make_connector(connector: str | Transport | Connector, verify: Verify | None = None) -> Connector:
    """A connector of one's own keeps its setting where ``verify`` is None."""
    if not isinstance(connector, Connector):
        return Connector(connector, verify=verify or "network")
    if verify is not None:
        connector.verify = check_verify(verify)
    return connector
