"""Connector: moves image-cache and KV-cache blocks between instances over one transport."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from trinity.errors import ClosedError, ConfigError, TransferTimeout, TransportError, TrinityError
from trinity.memory import BlockMemory
from trinity.messages import Failure, Pull, Pulled
from trinity.transport.base import Remote, Transport, runs
from trinity.transport.registry import make_transport

logger = logging.getLogger("trinity")


class Connector:
    """One for both kinds of block, image and KV (step 3 of TriInfer's pull migration, 4.3).

    ``transport`` is a name or a ``Transport``; ``timeout_s`` bounds every read. Every read is recorded: scheme, bytes,
    blocks, pieces, set-up and wire seconds. A connector serves one pipeline, which closes it and its transport.
    """

    def __init__(self, transport: str | Transport = "inproc", *, timeout_s: float = 30.0) -> None:
        self.transport = make_transport(transport)
        self.timeout_s = timeout_s
        self._memories: dict[tuple[str, str], BlockMemory] = {}
        self._descriptors: dict[tuple[str, str], bytes] = {}
        self._remotes: dict[tuple[str, str, str], Remote] = {}
        self._attaching = asyncio.Lock()
        self._closed = False

    @property
    def scheme(self) -> str:
        return self.transport.scheme

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
        for remote in [each for each in self._remotes if each[1] == peer]:
            del self._remotes[remote]

    async def pull(self, instance: str, pull: Pull) -> Pulled:
        """Carry out a core's Pull for ``instance``. A failed transfer does not raise: the failure is in the answer."""
        started = time.perf_counter()
        try:
            return Pulled(pull.offer, pull.part, None, await self._read(instance, pull))
        except Exception as error:  # transports are other people's: whatever they raise fails this request alone
            cause = type(error).__name__ if isinstance(error, (TransportError, ClosedError)) else "TransportError"
            fields = {"source": pull.source, "target": instance, "kind": pull.kind, "cause": cause}
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
                moved = await remote.read(pull.source_blocks, pull.target_blocks)
        except TimeoutError as error:
            text = f"a read of {len(pull.source_blocks)} blocks took more than {self.timeout_s} s"
            raise TransferTimeout(text, self.scheme, pull.source) from error
        record = self._record(instance, pull, "pulled", moved, time.perf_counter() - ready)
        pieces = sum(1 for _ in runs(pull.source_blocks, pull.target_blocks))
        return {**record, "pieces": pieces, "setup_s": ready - started}

    def _record(self, instance: str, pull: Pull, outcome: str, moved: int, seconds: float) -> dict[str, Any]:
        return {
            "kind": pull.kind,
            "source": pull.source,
            "target": instance,
            "outcome": outcome,
            "scheme": self.scheme,
            "bytes": moved,
            "blocks": len(pull.source_blocks),
            "seconds": seconds,
        }

    async def _remote(self, instance: str, source: str, kind: str) -> Remote:
        if self._closed:
            raise ClosedError("the connector is closed")
        key = (instance, source, kind)
        if key not in self._remotes:
            async with self._attaching:  # two first reads at once must not attach twice
                if key not in self._remotes:
                    descriptor = self._descriptors[source, kind]
                    self._remotes[key] = await self.transport.attach(descriptor, self._memories[instance, kind])
        return self._remotes[key]

    async def aclose(self) -> None:
        """Detach from every peer and withdraw every pool. Twice is once. What cannot be closed is logged."""
        if not self._closed:
            self._closed = True
            opened: list[Remote | Transport] = [*self._remotes.values(), self.transport]
            for each in opened:
                try:
                    await each.aclose()
                except Exception:
                    logger.exception("%r of transport %s could not be closed", each, self.scheme)
