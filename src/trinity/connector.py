"""Connector: moves blocks of the image and KV caches between instances over one transport."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from trinity.core.messages import Failure, Pull, Pulled
from trinity.core.transfers import gigabytes_a_second, should_cut
from trinity.errors import (
    ClosedError,
    ConfigError,
    OfferRefused,
    PeerLost,
    TransferTimeout,
    TransportError,
    TrinityError,
)
from trinity.errors.arguments import Positive, check_arguments
from trinity.memory.block_memory import BlockMemory
from trinity.memory.byte_ranges import ByteRange, Strided, layer_byte_range, tail_byte_range
from trinity.memory.digests import Verify, check_verify, should_verify, verify_pull
from trinity.transport.base import Remote, Transport, find_runs
from trinity.transport.registry import make_transport

logger = logging.getLogger("trinity")
INLINE_DIGEST_BYTES = 4 << 20  # digests of fewer bytes take less time than a hand-over to a thread and back


@check_arguments
class Connector:
    """Pulls image and KV blocks (TriInfer 4.3, pull migration, step 3). Serves one pipeline, which closes it.

    - ``transport`` (name or ``Transport``, "inproc"): the medium; it is closed with the connector.
    - ``timeout_s`` (seconds, 30): a read that takes longer fails with ``TransferTimeout``.
    - ``verify`` ("always", "never" or "network"; "network"): compare digests of blocks with those of the source; with
      "network" only for transports that leave the host.

    Every read is recorded: scheme, bytes, blocks, pieces, seconds of set-up and on the wire, GB/s on the wire, and if
    blocks are verified the seconds of both sides' digests.
    """

    def __init__(
        self, transport: str | Transport = "inproc", *, timeout_s: Positive = 30.0, verify: Verify = "network"
    ) -> None:
        self.transport = make_transport(transport)
        self.timeout_s, self.verify = timeout_s, check_verify(verify)
        self._memories: dict[tuple[str, str], BlockMemory] = {}
        self._descriptors: dict[tuple[str, str], bytes] = {}
        self._remotes: dict[tuple[str, str, str], Remote] = {}
        self._attaching: dict[tuple[str, str, str], asyncio.Lock] = {}
        self._detaching: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def scheme(self) -> str:
        """Name of the transport."""
        return self.transport.scheme

    @property
    def verifies(self) -> bool:
        """True if sources send digests of their blocks, which are compared with the blocks received."""
        return should_verify(self.verify, self.transport)

    def bind(self, instance: str, memories: Mapping[str, BlockMemory]) -> dict[str, bytes]:
        """Publish an instance's pools; return their descriptors by kind.

        Raises ``ConfigError`` if another pipeline uses this connector.
        """
        if self._closed or any(name == instance for name, _ in self._memories):
            raise ConfigError("a Connector serves one pipeline: make one for each")
        for kind, memory in memories.items():
            self._memories[instance, kind] = memory
            self._descriptors[instance, kind] = self.transport.publish(memory)
        return {kind: self._descriptors[instance, kind] for kind in memories}

    def introduce(self, peer: str, pools: Mapping[str, bytes]) -> None:
        """Add a peer in another process: the descriptors of its pools, by kind."""
        self.forget(peer)
        for kind, descriptor in pools.items():
            self._descriptors[peer, kind] = descriptor

    def forget(self, peer: str) -> None:
        """Remove a peer that is gone: its pools cannot be read any more."""
        for key in [key for key in self._descriptors if key[0] == peer and key not in self._memories]:
            del self._descriptors[key]
        for attached in [each for each in self._remotes if each[1] == peer]:
            self._detach(self._remotes.pop(attached))

    def _detach(self, remote: Remote) -> None:
        """Close the connection to a pool whose owner is gone, in a task that ``aclose`` awaits."""
        task = asyncio.get_running_loop().create_task(self._close(remote))
        self._detaching.add(task)
        task.add_done_callback(self._detaching.discard)

    async def pull(self, instance: str, pull: Pull) -> Pulled:
        """Carry out a core's ``Pull`` for ``instance``. Never raises for a failed read: ``Pulled`` has the failure."""
        started = time.perf_counter()
        try:
            return Pulled(pull.offer, pull.part, None, await self._read(instance, pull))
        except Exception as error:  # a transport of another package may raise anything: only this request fails
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
                reads = plan_reads(self._memories[instance, pull.kind], pull)
                moved = sum(await gather_or_cancel(remote.read(*each) for each in reads))
                await self._check_fresh(remote, instance, pull)
        except TimeoutError as error:
            text = f"a read of {len(pull.source_blocks)} blocks took more than {self.timeout_s} s"
            raise TransferTimeout(text, self._scheme(instance, pull), pull.source) from error
        record = self._record(instance, pull, "pulled", moved, time.perf_counter() - ready)
        if self.verifies and pull.digests is not None:
            record["digest_s"] = pull.digest_s + await self._check_arrived(instance, pull, moved, pull.digests)
        pieces = sum(count_pieces(*each) for each in reads)
        return {**record, "pieces": pieces, "setup_s": ready - started, "gb_s": gigabytes_a_second(record)}

    async def _check_arrived(self, instance: str, pull: Pull, moved: int, expected: tuple[int, ...]) -> float:
        memory = self._memories[instance, pull.kind]
        if moved <= INLINE_DIGEST_BYTES:
            return verify_pull(memory, pull, expected)
        return await asyncio.to_thread(verify_pull, memory, pull, expected)

    async def _check_fresh(self, remote: Remote, instance: str, pull: Pull) -> None:
        """Raise ``OfferRefused`` if the source took the blocks back: their bytes may have changed during the read."""
        generation = await remote.generation(pull.source_blocks)
        if generation > pull.generation:
            text = f"{pull.source} took its blocks back (generation {generation}, offered at {pull.generation})"
            raise OfferRefused(text, "stale", self._scheme(instance, pull), pull.source)

    def _scheme(self, instance: str, pull: Pull) -> str:
        """Return the scheme used for this peer, if the transport chooses one for each (auto)."""
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
        async with self._attaching.setdefault(key, asyncio.Lock()):  # two concurrent first reads must not attach twice
            if key not in self._remotes:
                descriptor = self._descriptors.get((source, kind))
                if descriptor is None:
                    raise PeerLost(f"{source} is gone, or has no {kind} blocks", self.scheme, source)
                remote = await self.transport.attach(descriptor, self._memories[instance, kind])
                if self._descriptors.get((source, kind)) is not descriptor:
                    self._detach(remote)
                    raise PeerLost(f"{source} was lost while attaching to its pool", self.scheme, source)
                self._remotes[key] = remote
        return self._remotes[key]

    async def aclose(self) -> None:
        """Detach from every peer and withdraw every pool. Errors are logged. Calling it twice does no harm."""
        if not self._closed:
            self._closed = True
            for remote in self._remotes.values():
                await self._close(remote)
            await asyncio.gather(*self._detaching)
            await self._close(self.transport)

    async def _close(self, each: Remote | Transport) -> None:
        try:
            await each.aclose()
        except Exception:
            logger.exception("%r of transport %s could not be closed", each, self.scheme)


def plan_reads(memory: BlockMemory, pull: Pull) -> list[tuple[tuple[int, ...], tuple[int, ...], ByteRange]]:
    """List the reads of a pull, as ``Remote.read`` takes them.

    One of all blocks, or, where the last one has few rows (``should_cut``), one of those before it and one of its rows.
    """
    within, source, target = layer_byte_range(memory, pull.layers), pull.source_blocks, pull.target_blocks
    if not pull.tail or not should_cut(len(source), pull.tail, memory.shape.shape[-2]):
        return [(source, target, within)]
    full = [(source[:-1], target[:-1], within)] if source[1:] else []
    return [*full, (source[-1:], target[-1:], tail_byte_range(memory, pull.layers, pull.tail))]


def count_pieces(source: Sequence[int], target: Sequence[int], within: ByteRange) -> int:
    """Count the separate runs of bytes that a read moves."""
    if isinstance(within, Strided):
        return len(source) * within.runs
    return len(source) if within else sum(1 for _ in find_runs(source, target))


async def gather_or_cancel(reads: Iterable[Coroutine[Any, Any, int]]) -> list[int]:
    """Await reads that run side by side; if one fails, the others have ended before its error is raised."""
    first, *others = reads
    if not others:
        return [await first]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in (first, *others)]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def choose_connector(connector: str | Transport | Connector | None, hosting: str) -> str | Transport | Connector:
    """Choose the default transport: inproc for instances of one process, which "auto" means there too, else "auto"."""
    if hosting == "thread" and connector in (None, "auto"):
        return "inproc"
    return connector or "auto"


def make_connector(connector: str | Transport | Connector, verify: Verify | None = None) -> Connector:
    """Make a connector, or return the one given; its ``verify`` changes only if ``verify`` is set."""
    if not isinstance(connector, Connector):
        return Connector(connector, verify=verify or "network")
    if verify is not None:
        connector.verify = check_verify(verify)
    return connector
