"""Connector: moves blocks of the image and KV caches between instances, over one transport or one for each kind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from trinity.core.messages import IMAGE, KV, STATE, Failure, Pull, Pulled
from trinity.core.transfers import gigabytes_a_second
from trinity.errors import (
    ClosedError,
    ConfigError,
    LayoutMismatch,
    OfferRefused,
    PeerLost,
    TransferTimeout,
    TransportError,
    TrinityError,
    UnknownName,
)
from trinity.errors.arguments import Positive, check_arguments, check_value
from trinity.errors.live_objects import forbid_copies
from trinity.memory.block_memory import BlockMemory, PullRanges, plan_pull
from trinity.memory.devices import wait_for_default_stream
from trinity.memory.digests import Sealed, Verify, check_verify, digest_rows, leaves_host, should_verify, verify_pull
from trinity.transport.base import Remote, Transport, check_block_numbers, contain, gather_or_cancel, withdraw
from trinity.transport.registry import make_transport

logger = logging.getLogger("trinity")
INLINE_DIGEST_BYTES = 4 << 20  # digests of fewer bytes take less time than a hand-over to a thread and back
INLINE_KEYED_BYTES = 256 << 10  # the same of digests under a key, which take fifteen times as long
BLOCK_KINDS = (IMAGE, KV)  # each has a transport; states go as KV does, unless they have one of their own


class Route(NamedTuple):
    """Medium of one kind of block, and its settings. ``name`` is "" for a transport that was given as an object."""

    transport: Transport
    timeout_s: float
    verify: Verify
    name: str = ""
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def verifies(self) -> bool:
        """True if sources send digests of their blocks, which are compared with the blocks received."""
        return should_verify(self.verify, self.transport)


@forbid_copies("pass the name and options of its transport")
@check_arguments
class Connector:
    """Pulls image and KV blocks (TriInfer 4.3, pull migration, step 3). Serves one pipeline, which closes it.

    - ``transport`` (name, ``Transport``, or these by kind of block; "inproc"): the medium, or one for each kind, such
      as ``{"image": "shm", "kv": Connector("nixl", timeout_s=5)}``. It is closed with the connector.
    - ``timeout_s`` (seconds, 30): a read that takes longer fails with ``TransferTimeout``.
    - ``verify`` ("always", "never" or "network"; "network"): compare digests of blocks with those of the source; with
      "network" only for transports that leave the host.
    - ``options`` (None): keywords of the named transport, plain values, such as ``{"timeout_s": 5.0}`` for "nixl".

    Instances in processes make transports of their own from name, options, timeout and verify. Raises ``ConfigError``,
    and ``TransportUnavailable`` if a transport cannot run here.

    Every read is recorded: scheme, bytes, blocks, pieces, seconds of set-up and on the wire, GB/s on the wire, and if
    blocks are verified the seconds of both sides' digests.
    """

    def __init__(
        self,
        transport: str | Transport | Mapping[str, Medium] = "inproc",
        *,
        timeout_s: Positive = 30.0,
        verify: Verify = "network",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.routes = make_routes(transport, timeout_s, check_verify(verify), options or {})
        self._memories: dict[tuple[str, str], BlockMemory] = {}
        self._descriptors: dict[tuple[str, str], bytes] = {}
        self._remotes: dict[tuple[str, str, str], Remote] = {}
        self._attaching: dict[tuple[str, str, str], asyncio.Lock] = {}
        self._detaching: set[asyncio.Task[None]] = set()
        self._closed = False
        self._verification_key = b""

    def __repr__(self) -> str:
        return f"Connector({', '.join(f'{kind} by {route.transport.scheme}' for kind, route in self.routes.items())})"

    @property
    def shared(self) -> bool:
        """True if a transport needs pools in memory files, which other processes can map."""
        return any(getattr(route.transport, "shared", False) for route in self.routes.values())

    @property
    def verified(self) -> list[str]:
        """Kinds of blocks that are compared with the source's digests on arrival."""
        return [kind for kind, route in self.routes.items() if route.verifies]

    def seal_digests(self, key: bytes) -> None:
        """Key the digests of blocks that may leave the host: nobody without ``key`` can write a block that fits one."""
        self._verification_key = key

    def verification_key(self, kind: str) -> bytes:
        """Return the key of this kind's digests; b"" where they have none, and find accidents alone."""
        return self._verification_key if leaves_host(self.routes[kind].transport) else b""

    def bind(self, instance: str, memories: Mapping[str, BlockMemory]) -> dict[str, bytes]:
        """Publish an instance's pools; return their descriptors by kind.

        Raises ``ConfigError`` if another pipeline uses this connector, and what a transport raises that cannot publish
        a pool; none of them is bound then.
        """
        self.check_unbound(instance)
        published: dict[str, bytes] = {}
        tried: list[str] = []
        try:
            for kind, memory in memories.items():
                tried.append(kind)
                published[kind] = self.routes[kind].transport.publish(memory)
        except BaseException:
            for kind in tried:  # the last one may be half published
                withdraw(self.routes[kind].transport, memories[kind])
            raise
        for kind, memory in memories.items():
            self._memories[instance, kind] = memory
            self._descriptors[instance, kind] = published[kind]
        return published

    def unbind(self, memories: Mapping[str, BlockMemory]) -> None:
        """Undo ``bind``: the name is free, the pools are withdrawn, and so is what reads into them: nobody may now."""
        for key in [key for key, memory in self._memories.items() if memory is memories.get(key[1])]:
            withdraw(self.routes[key[1]].transport, self._memories.pop(key))
            self._descriptors.pop(key, None)
            self.forget(key[0])

    def check_unbound(self, instance: str) -> None:
        """Raise ``ConfigError`` if no instance of this name can be bound."""
        if self._closed or any(name == instance for name, _ in self._memories):
            text = f"is closed, or has an instance {instance}: a Connector serves one pipeline, make one for each, "
            raise ConfigError(f"the connector {text}and give each instance a name of its own")

    def introduce(self, peer: str, pools: Mapping[str, bytes]) -> None:
        """Add a peer in another process: the descriptors of its pools, by kind."""
        self.forget(peer)
        for kind, descriptor in pools.items():
            self._descriptors[peer, kind] = descriptor

    def forget(self, peer: str) -> None:
        """Remove a peer that is gone: its pools cannot be read any more."""
        for key in [key for key in self._descriptors if key[0] == peer and key not in self._memories]:
            del self._descriptors[key]
        for attached in [each for each in self._remotes if each[1] == peer or each[::2] not in self._memories]:
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

    async def move(
        self,
        source: BlockMemory,
        blocks: Sequence[int],
        target: BlockMemory,
        places: Sequence[int],
        *,
        rows: int | None = None,
    ) -> dict[str, Any]:
        """Move blocks from one pool of this process to another: ``blocks[i]`` of ``source`` into ``places[i]``.

        ``rows``: how many rows the blocks hold, so that the empty ones of the last block need not move; None: all.
        On a GPU it waits for the default stream; whoever has written on another one waits for that first.
        Returns the record of the move. Raises ``ConfigError`` for pools of two kinds, of an unknown one, and for rows
        that these blocks do not have, ``LayoutMismatch`` for blocks of two shapes or dtypes, ``TransportError`` where
        the blocks did not arrive, and ``ClosedError``.
        """
        if self._closed:
            raise ClosedError("the connector is closed")
        source, target = check_value("source", source, BlockMemory), check_value("target", target, BlockMemory)
        blocks, places = (tuple(check_value("blocks", each, Sequence[int])) for each in (blocks, places))
        kind, height, rows = source.kind, source.shape.rows, check_value("rows", rows, int | None)
        if source.closed or target.closed:
            raise ClosedError(f"a pool of {kind} blocks is closed: the stage that it belongs to has ended")
        if target.kind != kind:
            raise ConfigError(f"{kind} blocks do not fit a pool of {target.kind} blocks")
        if str(source.shape) != str(target.shape):  # blocks of as many bytes would move and mean something else
            raise LayoutMismatch(f"blocks of {_layout(source)} do not fit a pool of {_layout(target)}")
        if rows is not None and -(-rows // height) != len(blocks):
            raise ConfigError(f"{rows} rows are not in {len(blocks)} blocks of {height}")
        if kind not in self.routes:
            raise UnknownName("kind of block", kind, self.routes, "Give pools of an instance that trinity loaded.")
        check_block_numbers(self.routes[kind].transport.scheme, "source", blocks, source.blocks)
        for gpu in {source.gpu, target.gpu} - {None}:
            await asyncio.to_thread(wait_for_default_stream, gpu)
        ours, theirs = self._name_pool(target), self._name_pool(source)
        pull = Pull("", 0, theirs, kind, "", blocks, places, source.generation(blocks), tail=(rows or 0) % height)
        if self.routes[kind].verifies:
            filled = plan_pull(source, pull).filled
            sealed = Sealed(self.verification_key(kind), pull.offer, blocks)
            found = await asyncio.to_thread(digest_rows, source, blocks, filled, sealed)
            pull = replace(pull, digests=tuple(found))
        return await self._read(ours, pull)

    def _name_pool(self, memory: BlockMemory) -> str:
        """Return the name under which this pool is bound; bind it if it is not."""
        for (name, _), known in self._memories.items():
            if known is memory:
                return name
        name = f"pool {len(self._memories)}"
        self.bind(name, {memory.kind: memory})
        return name

    async def _read(self, instance: str, pull: Pull) -> dict[str, Any]:
        started, route = time.perf_counter(), self.routes[pull.kind]
        scheme = route.transport.scheme
        try:
            async with asyncio.timeout(route.timeout_s):
                remote = await self._remote(instance, pull.source, pull.kind)
                ready = time.perf_counter()
                ranges = plan_pull(self._memories[instance, pull.kind], pull)
                reads = [remote.read(each.source, each.target, each.within) for each in ranges.reads]
                moved = sum(await gather_or_cancel([contain(each, scheme) for each in reads]))
                await self._check_fresh(remote, instance, pull)
        except TimeoutError as error:
            text = f"a read of {len(pull.source_blocks)} blocks took more than {route.timeout_s} s"
            raise TransferTimeout(text, self._scheme(instance, pull), pull.source) from error
        record = self._record(instance, pull, "pulled", moved, time.perf_counter() - ready)
        if pull.digests is not None and route.verifies:
            record["digest_s"] = pull.digest_s + await self._check_arrived(instance, pull, ranges, moved)
        return {**record, "pieces": ranges.pieces, "setup_s": ready - started, "gb_s": gigabytes_a_second(record)}

    async def _check_arrived(self, instance: str, pull: Pull, ranges: PullRanges, moved: int) -> float:
        memory, key = self._memories[instance, pull.kind], self.verification_key(pull.kind)
        if moved <= (INLINE_KEYED_BYTES if key else INLINE_DIGEST_BYTES):
            return verify_pull(memory, pull, ranges, key)
        return await asyncio.to_thread(verify_pull, memory, pull, ranges, key)

    async def _check_fresh(self, remote: Remote, instance: str, pull: Pull) -> None:
        """Raise ``OfferRefused`` if the source took the blocks back: their bytes may have changed during the read."""
        generation = await contain(remote.generation(pull.source_blocks), self._scheme(instance, pull))
        if generation > pull.generation:
            text = f"{pull.source} took its blocks back (generation {generation}, offered at {pull.generation})"
            raise OfferRefused(text, "stale", self._scheme(instance, pull), pull.source)

    def _scheme(self, instance: str, pull: Pull) -> str:
        """Return the scheme used for this peer, if the transport chooses one for each (auto)."""
        remote = self._remotes.get((instance, pull.source, pull.kind))
        return getattr(remote, "scheme", self.routes[pull.kind].transport.scheme)

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
        key, transport = (instance, source, kind), self.routes[kind].transport
        async with self._attaching.setdefault(key, asyncio.Lock()):  # two concurrent first reads must not attach twice
            if key not in self._remotes:
                descriptor = self._descriptors.get((source, kind))
                if descriptor is None:
                    raise PeerLost(f"{source} is gone, or has no {kind} blocks", transport.scheme, source)
                into = self._memories[instance, kind]
                remote = await contain(transport.attach(descriptor, into), transport.scheme)
                if self._descriptors.get((source, kind)) is not descriptor or self._memories.get(key[::2]) is not into:
                    self._detach(remote)
                    raise PeerLost(f"{source} was lost while attaching to its pool", transport.scheme, source)
                self._remotes[key] = remote
        return self._remotes[key]

    async def aclose(self) -> None:
        """Detach from every peer and withdraw every pool. Errors are logged. Calling it twice does no harm."""
        if not self._closed:
            self._closed = True
            for remote in self._remotes.values():
                await self._close(remote)
            await asyncio.gather(*self._detaching)
            for transport in {id(route.transport): route.transport for route in self.routes.values()}.values():
                await self._close(transport)
            self._memories, self._remotes = {}, {}

    async def _close(self, each: Remote | Transport) -> None:
        try:
            await contain(each.aclose(), getattr(each, "scheme", ""))
        except Exception:
            logger.exception("%r could not be closed", each)


def _layout(memory: BlockMemory) -> str:
    return f"{memory.shape.dtype} {list(memory.shape.shape)}"


def make_routes(
    transport: str | Transport | Mapping[str, Medium], timeout_s: float, verify: Verify, options: Mapping[str, Any]
) -> dict[str, Route]:
    """Make the route of each kind of block. Raises ``ConfigError``."""
    if isinstance(transport, str):
        given = check_options(options)
        route = Route(make_transport(transport, **given), timeout_s, verify, transport, given)
        return dict.fromkeys((*BLOCK_KINDS, STATE), route)
    if options:
        raise ConfigError("options= are for one transport that is given by name")
    if not isinstance(transport, Mapping):
        return dict.fromkeys((*BLOCK_KINDS, STATE), Route(transport, timeout_s, verify))
    for kind in BLOCK_KINDS:
        if kind not in transport:
            raise ConfigError(f"{kind} blocks have no transport: give one for each kind, {', '.join(BLOCK_KINDS)}")
    for kind in transport:
        if kind not in (*BLOCK_KINDS, STATE):
            raise UnknownName("kind of block", kind, (*BLOCK_KINDS, STATE))
    made = {
        kind: each if isinstance(each, Connector) else Connector(each, timeout_s=timeout_s, verify=verify)
        for kind, each in transport.items()
    }
    routes = {kind: connector.routes[kind] for kind, connector in made.items()}
    return {**routes, STATE: routes.get(STATE, routes[KV])}


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a transport's options as plain values, which can travel. Raises ``ConfigError``."""
    try:
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(dict(options)))
        return msgspec.convert(plain, dict[str, Any])
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError, NotImplementedError) as error:
        raise ConfigError(f"options= are keywords and plain values, got {options!r:.200}: {error}") from error


Medium: TypeAlias = str | Transport | Connector  # a transport by name, one of your own, or one with its settings


def make_connector(connector: Medium | Mapping[str, Medium] | None, verify: Verify | None, hosting: str) -> Connector:
    """Make a pipeline's connector, or return the one given; its ``verify`` changes only if ``verify`` is set.

    The default, and what "auto" means for instances of one process, is inproc; for processes it is auto. Raises
    ``ConfigError`` for a wrong type, and for a transport that cannot reach instances in processes.
    """
    if connector is None or (hosting == "thread" and connector == "auto"):
        connector = "inproc" if hosting == "thread" else "auto"
    made = connector if isinstance(connector, Connector) else Connector(connector)
    if verify is not None:
        made.routes = {kind: route._replace(verify=check_verify(verify)) for kind, route in made.routes.items()}
    for route in made.routes.values() if hosting == "process" else ():
        if route.transport.scheme == "inproc":
            raise ConfigError(
                "inproc reaches instances of one process only; use connector='shm' with hosting='process'"
            )
        if not route.name:
            raise ConfigError(
                "instances in processes make their own transports: give connector= by name, with "
                "Connector(name, options=...) for its settings"
            )
    return made
