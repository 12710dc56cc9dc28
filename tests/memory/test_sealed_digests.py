"""Digests under a key: a block that somebody has rewritten on its way is noticed, though its plain digest stays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from support.forgery import forge, forging_network
from support.pipeline_driver import ONE, all_tokens, good_ones, serving
from support.wrapped_transports import WrappedTransport
from trinity.connector import Connector
from trinity.core.messages import Fetched, Offer, Part, Pull, Ready, Send, Work
from trinity.core.transfers import TransferPolicy
from trinity.errors import ConfigError, IntegrityError
from trinity.memory import native
from trinity.memory.block_memory import BlockMemory, BlockShape, find_filled, plan_pull
from trinity.memory.device_blocks import gather_on_device
from trinity.memory.digests import Digests, Sealed, digest_rows, verify_pull
from trinity.memory.native import compute_digests

KEY, OTHER = b"k" * 32, b"o" * 32
SHAPES = {
    "kv": BlockShape("kv", (4, 2, 1, 4, 6), torch.float32),
    "image": BlockShape("image", (5, 6), torch.float32),
}
BLOCKS = (1, 2, 5)


@pytest.fixture(scope="module")
def expected() -> None:
    all_tokens()


def pools() -> dict[str, BlockMemory]:
    made = {kind: BlockMemory(shape, 8) for kind, shape in SHAPES.items()}
    for memory in made.values():
        memory.tensor.copy_(torch.rand(memory.tensor.shape))
    return made


def pull(kind: str, layers: tuple[int, int] | None = None, tail: int = 0, offer: str = "P0:1") -> Pull:
    return Pull(offer, 0, "P0", kind, "r", BLOCKS, (0, 1, 2), layers=layers, tail=tail)


def ship(asked: Pull, ours: bytes = KEY, theirs: bytes = KEY, fetched: bool = False) -> tuple[BlockMemory, Pull]:
    """Tell the target of blocks and copy them; its pool of this kind, and the pull with the digests that it heard."""
    source, target = pools(), pools()

    def keys(key: bytes) -> Mapping[str, bytes]:
        return dict.fromkeys(SHAPES, key)

    sender, receiver = Digests(source, keys(ours)), Digests(target, keys(theirs))
    part = Part(() if fetched else BLOCKS, tail=asked.tail)
    work = Work(request="r", prompt=(1, 2))
    said: list[Offer | Ready | Fetched] = [Offer(id="P0:1", kind=asked.kind, source="P0", work=work, parts=(part,))]
    answer = Fetched("P0:1/0", "P0", BLOCKS, tail=asked.tail, kind=asked.kind)
    said.append(answer if fetched else Ready("P0:1", (0,), asked.layers))
    for message in said:
        receiver.observe(sender.add_digests(Send("D0", message), ["P0:1"]))
    target[asked.kind].tensor[:3] = source[asked.kind].tensor[list(BLOCKS)]
    return target[asked.kind], receiver.add_expected(asked)


def check(memory: BlockMemory, asked: Pull, key: bytes = KEY) -> float:
    assert asked.digests is not None
    return verify_pull(memory, asked, plan_pull(memory, asked), key)


WAYS = [
    (pull("kv"), False),
    (pull("kv", (1, 3), 2), False),
    (pull("image", tail=3), False),
    (pull("image"), True),
    (pull("kv"), True),
]


@pytest.mark.parametrize(("asked", "fetched"), WAYS)
def test_a_forged_block_keeps_its_plain_digest_and_not_the_keyed_one(asked: Pull, fetched: bool) -> None:
    for key in (b"", KEY):
        memory, told = ship(asked, key, key, fetched)
        check(memory, told, key)
        before = memory.tensor.clone()
        forge(memory, [1], memory.block_bytes // 4 // 8 if asked.layers else 0)  # of the layers that are checked
        assert not torch.equal(before, memory.tensor)
        if not key:
            check(memory, told, key)  # what this cannot see
            continue
        with pytest.raises(IntegrityError, match=r"1 of 3 .* \(its \[2\]\)") as caught:
            check(memory, told)
        assert caught.value.peer == "P0"


@pytest.mark.parametrize(("asked", "fetched"), WAYS)
@pytest.mark.parametrize(("ours", "theirs"), [(KEY, b""), (b"", KEY), (KEY, OTHER)])
def test_sides_of_different_keys_believe_nothing(asked: Pull, fetched: bool, ours: bytes, theirs: bytes) -> None:
    memory, told = ship(asked, ours, theirs, fetched)
    with pytest.raises(IntegrityError, match="3 of 3"):
        check(memory, told, theirs)


def test_a_digest_is_of_one_block_of_one_offer() -> None:
    """Of equal blocks each has its own, so that one cannot pass for another that was verified."""
    memory, told = ship(pull("kv"))
    for wrong in (replace(told, offer="P0:2"), replace(told, source_blocks=(2, 1, 5))):
        with pytest.raises(IntegrityError):
            check(memory, wrong)
    memory.tensor[:] = 0.0
    found = digest_rows(memory, [0, 1], find_filled(memory, None, {}), Sealed(KEY, "P0:1", (0, 1)))
    assert len(set(found)) == 2
    assert len(set(compute_digests(memory.pool, [0, 1]))) == 1


def test_rows_that_hold_nothing_do_not_count() -> None:
    memory, told = ship(pull("kv", tail=2))
    memory.tensor[2, ..., 2:, :] = 7.0
    check(memory, told)
    memory.tensor[2, ..., 1, 0] += 1.0
    with pytest.raises(IntegrityError, match=r"its \[5\]"):
        check(memory, told)


def test_they_are_what_rfc_7693_says() -> None:
    memory = pools()["image"]
    rows = memory.tensor[3, :2].contiguous().numpy().tobytes()
    which = repr(("image", "P0:1", 9, 0, memory.block_bytes, 2)).encode()
    wanted = int.from_bytes(hashlib.blake2b(which + rows, key=KEY, digest_size=8).digest(), "little", signed=True)
    assert digest_rows(memory, [3], find_filled(memory, None, {0: 2}), Sealed(KEY, "P0:1", [9])) == [wanted]
    assert -(1 << 63) <= wanted < 1 << 63


@pytest.mark.parametrize(("scheme", "keyed"), [("inproc", b""), ("shm", b""), ("forged", KEY)])
def test_only_digests_that_leave_the_host_are_keyed(scheme: str, keyed: bytes) -> None:
    connector = Connector(forging_network() if scheme == "forged" else scheme, verify="always")
    assert connector.verification_key("kv") == b"", "in threads, with no secret"
    connector.seal_digests(KEY)
    assert connector.verification_key("kv") == keyed


@pytest.mark.parametrize("blocks", [3, 2048])
async def test_blocks_moved_by_hand_are_compared_under_the_key(blocks: int) -> None:
    """As few as are compared on the loop, and as many as are compared on a thread."""
    numbers = range(blocks)
    for key in (b"", KEY):
        ours, theirs = (BlockMemory(SHAPES["kv"], blocks, shared=True) for _ in range(2))
        ours.tensor.copy_(torch.rand(ours.tensor.shape))
        connector = Connector(forging_network())
        connector.seal_digests(key)
        try:
            if not key:
                assert (await connector.move(ours, numbers, theirs, numbers))["digest_s"] > 0
                assert not np.array_equal(ours.pool, theirs.pool)
                continue
            with pytest.raises(IntegrityError, match=f"{blocks} of {blocks}"):
                await connector.move(ours, numbers, theirs, numbers)
        finally:
            await connector.aclose()


@pytest.mark.parametrize(("layers", "tails"), [(None, {}), ((1, 3), {2: 2})])
def test_a_pool_that_is_a_tensor_has_the_same(layers: tuple[int, int] | None, tails: dict[int, int]) -> None:
    """A pool on a GPU has no array on the host, as this one is made to."""
    memory = pools()["kv"]
    sealed, filled = Sealed(KEY, "P0:1", BLOCKS), find_filled(memory, layers, tails)
    wanted = digest_rows(memory, BLOCKS, filled, sealed)
    _ = memory.tensor
    memory.raw = None
    assert digest_rows(memory, BLOCKS, filled, sealed) == wanted


@pytest.mark.parametrize("kv", ["off", "layer"])
async def test_tokens_stay_exact_under_a_key(kv: Literal["off", "layer"], expected: None) -> None:
    transport = WrappedTransport()
    transport.network = True
    connector = Connector(transport)
    connector.seal_digests(KEY)
    transfers = TransferPolicy(kv=kv)
    async with serving("E+P+D", connector=connector, transfers=transfers, prefix_cache=False) as pipe:
        await good_ones(pipe)
        output = await pipe.complete(ONE.request())
    assert output.token_ids == ONE.tokens
    assert all(record["digest_s"] > 0 for record in output.transfers if record["outcome"] == "pulled")


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("at_once", "gathers"), [(1 << 20, 1), (1, 3)])
def test_blocks_of_a_gpu_are_gathered_once(
    kind: str, at_once: int, gathers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not block by block; the digests are those of the host."""
    memory, sealed, asked = pools()[kind], Sealed(KEY, "P0:1", BLOCKS), list[int]()
    filled = find_filled(memory, (1, 3) if kind == "kv" else None, {2: 3})
    wanted = digest_rows(memory, BLOCKS, filled, sealed)

    def gather(rows: torch.Tensor, numbers: np.ndarray, offset: int, length: int) -> np.ndarray:
        asked.append(len(numbers))
        return gather_on_device(rows, numbers, offset, length)

    monkeypatch.setattr(native, "_on_device", lambda pool: isinstance(pool, torch.Tensor))
    monkeypatch.setattr(native, "gather_on_device", gather)
    monkeypatch.setattr(native, "READ_AT_ONCE", at_once)
    assert memory.tensor is not None
    memory.raw = None  # as on a GPU
    advances: list[int] = []
    assert digest_rows(memory, BLOCKS, filled, sealed, lambda: advances.append(1)) == wanted
    assert asked == [len(BLOCKS) // gathers] * gathers
    assert len(advances) == len(BLOCKS)


def test_a_block_that_is_not_there_has_no_digest() -> None:
    memory = pools()["kv"]
    with pytest.raises(ConfigError, match="not all in a pool of 8"):
        digest_rows(memory, (1, 8), find_filled(memory, None, {}), Sealed(KEY, "P0:1", (1, 8)))
