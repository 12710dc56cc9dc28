"""cuda_ipc: its logic across two processes over a stand-in for the driver, and the real thing where there is a GPU."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from support import fake_cuda
from support.fake_cuda import Fake
from support.freezing import freeze
from support.lender import EMPTY, LIVENESS_S, Lending, ends, holds, lending, lent, pool
from trinity.connector import Connector
from trinity.core.messages import Pull
from trinity.errors import HandshakeError, PeerLost, TransportError, TransportUnavailable
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.memory.cuda_driver import CudaDriver, make_driver_error
from trinity.testing import transport_contract
from trinity.testing.transport_contract import check_transport
from trinity.transport.base import CopyPlan
from trinity.transport.cuda_ipc import transport as cuda_ipc
from trinity.transport.cuda_ipc.transport import CudaIpcDescriptor, CudaIpcTransport, list_copies

BLOCKS, BLOCK_BYTES = 32, 16 << 10
SIZE = (BLOCKS, BLOCK_BYTES)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_cuda.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(cuda_ipc, "device_of", fake_cuda.on_device)
    made = Fake(library)
    made.forget()
    yield made
    assert made.opens() == 0, "an allocation of another process was left open"
    made.lib.fake_clean()


@asynccontextmanager
async def source(fake: Fake) -> AsyncIterator[Lending]:
    async with lending(fake.path, BLOCKS, BLOCK_BYTES, fake_cuda.__file__) as peer:
        yield peer
    for left in Path("/dev/shm").glob(f"trinity-fake-{peer.process.pid}-*"):
        left.unlink()


async def test_contract_in_one_process(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(shape: BlockShape, blocks: int, *, shared: bool = False) -> BlockMemory:
        return fake.memory(shape, blocks)

    monkeypatch.setattr(transport_contract, "BlockMemory", memory)
    await check_transport(fake.transport)
    assert "cuIpcOpenMemHandle_v2" not in fake.calls(), "the driver refuses to open a handle where it was made"


async def test_blocks_and_pieces_of_another_process(fake: Fake) -> None:
    async with source(fake) as peer:
        transport, memory = fake.transport(), fake.pool(*SIZE)
        remote = await transport.attach(peer.descriptor, memory)
        assert await remote.read([3, 4, 5, 31], [0, 1, 2, 30]) == 4 * BLOCK_BYTES
        assert await remote.read([7, 9], [10, 9], (512, 1024)) == 2048
        wanted = torch.full_like(memory.tensor, EMPTY)
        wanted[[0, 1, 2, 30]] = lent(*SIZE)[[3, 4, 5, 31]]
        wanted[[10, 9], 64:192] = lent(*SIZE)[[7, 9], 64:192]
        assert torch.equal(memory.tensor, wanted)
        assert Counter(fake.calls())["cuMemcpyDtoDAsync_v2"] == 2 + 2, "a run is one copy"
        await transport.aclose()


async def test_copies_wait_for_nothing_and_are_done_on_return(fake: Fake) -> None:
    """What was offered is written, and nothing that is queued here writes to what was reserved (decision 0048)."""
    async with source(fake) as peer:
        transport, memory = fake.transport(), fake.pool(*SIZE)
        remote = await transport.attach(peer.descriptor, memory)
        fake.forget()
        before = await peer.calls()
        await remote.read([1, 3], [1, 3])
        assert fake.calls() == [*["cuMemcpyDtoDAsync_v2"] * 2, "cuStreamSynchronize"]
        assert await peer.calls() == before, "the source's device has nothing to do"
        await transport.aclose()


async def test_no_thread_is_left_on_another_device(fake: Fake) -> None:
    """The loop's thread serves instances of several; the stand-in refuses calls while no context is current."""
    async with source(fake) as peer:
        transport, memory = fake.transport(), fake.pool(*SIZE)
        transport.publish(memory)
        remote = await transport.attach(peer.descriptor, memory)
        await remote.read([1, 3], [1, 3])
        assert {await asyncio.to_thread(fake.contexts) for _ in range(8)} == {0}
        await transport.aclose()
        assert fake.contexts() == 0


async def test_a_call_that_fails_leaves_the_device_too(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    async with source(fake) as peer:
        transport = fake.transport()
        monkeypatch.setenv("FAKE_CUDA_FAIL", "cuStreamCreate:719")
        with pytest.raises(PeerLost):
            await transport.attach(peer.descriptor, fake.pool(*SIZE))
        assert fake.contexts() == 0
        monkeypatch.delenv("FAKE_CUDA_FAIL")
        await transport.aclose()


async def test_a_peer_is_opened_once(fake: Fake) -> None:
    async with source(fake) as peer:
        transports = [fake.transport(), fake.transport()]
        remotes = [await each.attach(peer.descriptor, fake.pool(*SIZE)) for each in transports for _ in range(2)]
        await asyncio.gather(*(remote.read([1], [1]) for remote in remotes for _ in range(8)))
        assert Counter(fake.calls())["cuIpcOpenMemHandle_v2"] == 1
        await transports[0].aclose()
        assert await remotes[2].read([2], [2]) == BLOCK_BYTES, "others use it still"
        assert fake.opens() == 1
        await transports[1].aclose()
        assert Counter(fake.calls())["cuIpcCloseMemHandle"] == 1


async def test_generations_and_a_peer_that_takes_blocks_back(fake: Fake) -> None:
    async with source(fake) as peer:
        transport, memory = fake.transport(), fake.pool(*SIZE)
        remote = await transport.attach(peer.descriptor, memory)
        assert await remote.generation([1, 2]) == 0
        await peer.revoke(2, 9)
        assert (await remote.generation([1, 2]), await remote.generation([1]), await remote.generation([])) == (9, 0, 0)
        await transport.aclose()


@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_a_source_that_is_gone_is_lost(fake: Fake, how: str) -> None:
    async with source(fake) as peer:
        transport, memory = fake.transport(), fake.pool(*SIZE)
        remote = await transport.attach(peer.descriptor, memory)
        if how == "killed":
            peer.process.kill()
            await peer.process.wait()
        else:
            await peer.close()
        async with asyncio.timeout(LIVENESS_S):
            for _ in range(2):
                with pytest.raises(PeerLost):
                    await remote.read([0], [0])
                with pytest.raises(PeerLost):
                    await remote.generation([0])
            with pytest.raises(PeerLost):
                await transport.attach(peer.descriptor, memory)
        assert bool((memory.tensor == EMPTY).all())
        await transport.aclose()


async def test_a_frozen_source_ends_at_the_deadline(fake: Fake) -> None:
    async with source(fake) as peer:
        connector = Connector(fake.transport(), timeout_s=0.5)
        connector.bind("D0", {"kv": fake.pool(*SIZE)})
        connector.introduce("P0", {"kv": peer.descriptor})
        pull = Pull("P0:1", 0, "P0", "kv", "r", (1, 2), (3, 4))
        assert (await connector.pull("D0", pull)).failure is None
        freeze(peer.process.pid)
        answer = await asyncio.wait_for(connector.pull("D0", pull), LIVENESS_S)
        assert answer.failure is not None
        assert answer.failure.fields["cause"] == "TransferTimeout"
        peer.process.send_signal(signal.SIGCONT)
        await connector.aclose()


async def test_a_forgotten_peer_is_closed(fake: Fake) -> None:
    async with source(fake) as peer:
        connector = Connector(fake.transport())
        connector.bind("D0", {"kv": fake.pool(*SIZE)})
        connector.introduce("P0", {"kv": peer.descriptor})
        assert (await connector.pull("D0", Pull("P0:1", 0, "P0", "kv", "r", (1,), (3,)))).failure is None
        connector.forget("P0")
        async with asyncio.timeout(LIVENESS_S):
            while fake.opens():
                await asyncio.sleep(0.001)
        await connector.aclose()


# ------------------------------------------------------------ what it refuses, and what the driver says


async def test_a_wrong_secret_gets_no_answer(fake: Fake) -> None:
    async with source(fake) as peer:
        wrong = msgspec.structs.replace(
            msgspec.msgpack.decode(peer.descriptor, type=CudaIpcDescriptor), secret=b"guessed"
        )
        transport = fake.transport()
        with pytest.raises(PeerLost):
            await transport.attach(msgspec.msgpack.encode(wrong), fake.pool(*SIZE))
        assert fake.opens() == 0
        await transport.aclose()


ERRORS: dict[str, type[TransportError]] = {
    "cuIpcOpenMemHandle_v2:1": HandshakeError,
    "cuIpcOpenMemHandle_v2:2": TransportUnavailable,
    "cuStreamCreate:719": PeerLost,
}


@pytest.mark.parametrize("failing", ERRORS)
async def test_errors_of_the_driver_are_ours(fake: Fake, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with source(fake) as peer:
        transport, memory = fake.transport(), fake.pool(*SIZE)
        monkeypatch.setenv("FAKE_CUDA_FAIL", failing)
        with pytest.raises(ERRORS[failing], match=failing.partition(":")[0]):
            await transport.attach(peer.descriptor, memory)
        monkeypatch.delenv("FAKE_CUDA_FAIL")
        remote = await transport.attach(peer.descriptor, memory)
        assert await remote.read([1], [1]) == BLOCK_BYTES, "it works when the driver does"
        await transport.aclose()


async def test_a_copy_that_fails(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    async with source(fake) as peer:
        transport, memory = fake.transport(), fake.pool(*SIZE)
        remote = await transport.attach(peer.descriptor, memory)
        monkeypatch.setenv("FAKE_CUDA_FAIL", "cuMemcpyDtoDAsync_v2:700")
        assert isinstance(await ends(asyncio.ensure_future(remote.read([1], [1]))), PeerLost)
        assert fake.calls()[-1] == "cuStreamSynchronize", "nothing is on its way when it is told"
        await transport.aclose()


async def test_memory_that_cannot_be_exported_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_POOL", "1")
    transport = fake.transport()
    with pytest.raises(TransportUnavailable, match="expandable segments"):
        transport.publish(fake.pool(*SIZE))
    await transport.aclose()


def test_a_pool_of_the_host_is_refused() -> None:
    with pytest.raises(TransportUnavailable, match="use shm"):
        cuda_ipc.device_of(pool(*SIZE))


def test_no_driver_is_said() -> None:
    with pytest.raises(TransportUnavailable, match="NVIDIA"):
        CudaDriver("libno-such-driver.so.1")


@pytest.mark.parametrize(
    ("code", "error"), [(201, HandshakeError), (100, TransportUnavailable), (700, PeerLost), (12345, TransportError)]
)
def test_codes(code: int, error: type[TransportError]) -> None:
    made = make_driver_error("cuCall", code, "CUDA_ERROR_SOMETHING")
    assert type(made) is error
    assert str(made) == f"cuCall failed: CUDA_ERROR_SOMETHING ({code})"


def test_runs_of_whole_blocks_are_one_copy() -> None:
    assert list_copies(CopyPlan([1, 2, 5], [3, 4, 0], 0, 8, 8)) == [(1, 3, 16), (5, 0, 8)]
    assert list_copies(CopyPlan([1, 2, 5], [3, 4, 0], 4, 4, 8)) == [(1, 3, 4), (2, 4, 4), (5, 0, 4)]


# ------------------------------------------------------------ the real thing

no_gpu = not torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(no_gpu, reason="needs an NVIDIA GPU: cuda_ipc between two processes on it")
@pytest.mark.parametrize("scheme", ["cuda_ipc", "nixl", "nixl-push"])
async def test_two_processes_on_a_gpu(scheme: str) -> None:
    from trinity.transport import make_transport

    async with lending(scheme, 256, 1 << 20, DEVICE="cuda") as peer:
        transport: Any = make_transport(scheme)
        memory = pool(256, 1 << 20, "cuda")
        remote = await transport.attach(peer.descriptor, memory)
        assert await remote.read(range(255, -1, -1), range(256)) == 256 << 20
        assert await holds(memory, list(range(255, -1, -1)))
        await transport.aclose()


@pytest.mark.gpu
@pytest.mark.skipif(no_gpu, reason="needs an NVIDIA GPU: the contract of cuda_ipc on its memory")
async def test_contract_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(shape: BlockShape, blocks: int, *, shared: bool = False) -> BlockMemory:
        return BlockMemory(shape, blocks, "cuda", shared=shared)

    monkeypatch.setattr(transport_contract, "BlockMemory", memory)
    await check_transport(CudaIpcTransport)
