"""Digests of blocks go from source to target, and what differs after the copy is never served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from support.pipeline_driver import GOOD, TWO, all_tokens, good_ones, serving
from support.wrapped_transports import WrappedTransport
from trinity.connector import Connector, make_connector
from trinity.core.failure_policy import FailurePolicy
from trinity.core.messages import Commit, Fetched, Offer, Part, PeerDown, Pull, Ready, Release, Send, Work
from trinity.core.transfers import merge_records
from trinity.errors import ConfigError, IntegrityError, MigrationError
from trinity.memory.block_memory import BlockMemory, BlockShape, layer_byte_range, plan_pull
from trinity.memory.digests import (
    STALE_OFFERS_KEPT,
    Digests,
    Verify,
    check_verify,
    should_verify,
    verify_pull,
)
from trinity.memory.native import compute_digests
from trinity.request import Output
from trinity.transport.inproc import InprocTransport
from trinity.transport.nixl.transport import NixlTransport
from trinity.transport.shm import ShmTransport

LAYERS = 4
KV = BlockShape("kv", (LAYERS, 2, 1, 4, 6), torch.float32)
IMAGE = BlockShape("image", (5, 6), torch.float32)
PARTS = ((1, 2, 5), (6,))


def pools() -> dict[str, BlockMemory]:
    made = {shape.kind: BlockMemory(shape, 8) for shape in (KV, IMAGE)}
    for memory in made.values():
        memory.tensor.copy_(torch.rand(memory.tensor.shape))
    return made


def offer(
    kind: str = "kv", parts: Sequence[tuple[int, ...]] = PARTS[:1], number: int = 1, tails: Sequence[int] = (0, 0)
) -> Offer:
    made = tuple(Part(blocks, tail=tail) for blocks, tail in zip(parts, tails, strict=False))
    return Offer(id=f"P0:{number}", kind=kind, source="P0", work=Work(request="r", prompt=(1, 2)), parts=made)


def pull(
    kind: str = "kv", source: tuple[int, ...] = PARTS[0], layers: tuple[int, int] | None = None, tail: int = 0
) -> Pull:
    return Pull("P0:1", 0, "P0", kind, "r", source, tuple(range(len(source))), layers=layers, tail=tail)


class Ends:
    """A source and a target, the messages between them, and a copy as it should be."""

    def __init__(self, asked: Offer) -> None:
        self.ours, self.theirs = pools(), pools()
        self.source, self.target = Digests(self.ours), Digests(self.theirs)
        self.tell(asked)

    def tell(self, message: Offer | Ready | Commit) -> Ready | Offer | Commit:
        sent = self.source.add_digests(Send("D0", message), ["P0:1"])
        self.target.observe(sent)
        assert isinstance(sent, (Offer, Ready, Commit))
        return sent

    def arrive(self, asked: Pull) -> Pull:
        """Copy as asked; the pull as the target's host has it carried out."""
        ours, theirs = (each[asked.kind].tensor for each in (self.ours, self.theirs))
        layers = slice(*asked.layers) if asked.layers else slice(None)
        theirs[list(asked.target_blocks), layers] = ours[list(asked.source_blocks), layers]
        return self.target.add_expected(asked)

    def check(self, asked: Pull) -> float:
        assert asked.digests is not None
        memory = self.theirs[asked.kind]
        return verify_pull(memory, asked, plan_pull(memory, asked))


# ---------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("verify", "checked"),
    [("always", [True, True, True, True]), ("network", [False, False, True, True]), ("never", [False] * 4)],
)
def test_which_transports_are_verified(verify: Verify, checked: list[bool]) -> None:
    """Another's transport that does not say what it is counts as a network."""
    assert [should_verify(verify, each) for each in (InprocTransport, ShmTransport, NixlTransport, object())] == checked


def test_verify_is_one_of_three() -> None:
    assert [check_verify(each) for each in ("always", "network", "never")] == ["always", "network", "never"]
    with pytest.raises(ConfigError, match="always, network, never"):
        make_connector("inproc", "sometimes", "thread")  # type: ignore[arg-type]


def test_a_connector_of_ones_own_keeps_its_setting() -> None:
    mine = Connector("inproc", verify="always")
    assert make_connector(mine, None, "thread") is mine
    assert mine.verified == ["image", "kv", "state"]
    assert not make_connector(mine, "never", "thread").verified
    assert not make_connector("inproc", None, "thread").verified
    assert make_connector(WrappedTransport(), "always", "thread").verified
    assert Connector({"image": "inproc", "kv": Connector("inproc", verify="always")}).verified == ["kv", "state"]


# ---------------------------------------------------------------- what


def test_layers_are_one_piece_of_each_block() -> None:
    memory = pools()["kv"]
    assert layer_byte_range(memory, None) is None
    assert layer_byte_range(memory, (0, LAYERS)) == (0, memory.block_bytes)
    assert layer_byte_range(memory, (1, 3)) == (memory.block_bytes // 4, memory.block_bytes // 2)


def test_each_part_has_its_digests_in_order() -> None:
    ends = Ends(offer("image", PARTS))
    sent = ends.tell(Ready("P0:1", (1, 0)))
    assert isinstance(sent, Ready)
    assert list(sent.digests) == compute_digests(ends.ours["image"].tensor, [6, 1, 2, 5])
    assert sent.digest_s > 0
    asked = ends.arrive(pull("image", PARTS[1]))
    assert asked.digests == sent.digests[:1]
    assert asked.digest_s == sent.digest_s
    assert ends.check(asked) > 0
    rest = ends.arrive(pull("image", PARTS[0]))
    assert rest.digest_s == 0, "what the source spent is counted once"
    ends.check(rest)


def test_what_is_cached_at_the_target_is_left_out() -> None:
    ends = Ends(offer())
    ends.tell(Ready("P0:1", (0,)))
    ends.check(ends.arrive(pull(source=(2, 5))))


def test_groups_of_layers_have_digests_of_their_own() -> None:
    ends = Ends(offer())
    for layers, blocks in (((0, 1), (0, 2)), ((1, 4), (0, 2)), (None, (2, 3))):
        ends.tell(Ready("P0:1", (0,), layers, blocks))
    first, second = (ends.arrive(pull(source=(1, 2), layers=layers)) for layers in ((0, 1), (1, 4)))
    assert first.digests != second.digests
    for asked in (first, second):
        ends.check(asked)
    ends.check(ends.arrive(pull(source=(5,), layers=(0, LAYERS))))  # all layers, said in another way
    with pytest.raises(IntegrityError, match="sent 0 digests"):
        ends.check(ends.arrive(pull(source=(1, 2))))


@pytest.mark.parametrize(("kind", "layers"), [("kv", None), ("kv", (1, 3)), ("image", None)])
def test_rows_that_hold_nothing_do_not_count(kind: str, layers: tuple[int, int] | None) -> None:
    """Of the last block, 5, two rows are filled: what the others hold need not arrive."""
    ends = Ends(offer(kind, tails=(2,)))
    ends.tell(Ready("P0:1", (0,), layers))
    asked = ends.arrive(pull(kind, layers=layers, tail=2))
    target = ends.theirs[kind].tensor
    target[2, ..., 2:, :] = 7.0
    ends.check(asked)
    right = target.clone()
    target[2, ..., 1, 0] += 1.0
    with pytest.raises(IntegrityError, match=r"its \[5\]"):
        ends.check(asked)
    target.copy_(right)
    target[1, ..., 3, 0] += 1.0  # a row of a full block
    with pytest.raises(IntegrityError, match=r"its \[2\]"):
        ends.check(asked)


def test_a_part_of_the_blocks_has_the_tail_only_with_the_last() -> None:
    ends = Ends(offer(tails=(2,)))
    ends.tell(Ready("P0:1", (0,), None, (0, 2)))
    ends.check(ends.arrive(pull(source=(1, 2))))
    ends.tell(Ready("P0:1", (0,), None, (2, 3)))
    ends.check(ends.arrive(pull(source=(5,), tail=2)))


@pytest.mark.parametrize("layers", [None, (1, 3)])
def test_one_bit_makes_the_difference(layers: tuple[int, int] | None) -> None:
    ends = Ends(offer())
    ends.tell(Ready("P0:1", (0,), layers))
    asked = ends.arrive(pull(layers=layers))
    ends.check(asked)
    ends.theirs["kv"].tensor.view(8, LAYERS, -1).view(torch.int32)[2, 1, 7] ^= 1
    with pytest.raises(IntegrityError, match=r"1 of 3 kv blocks are not what P0 sent \(its \[5\]\)") as caught:
        ends.check(asked)
    assert caught.value.peer == "P0"
    ends.theirs["kv"].tensor.view(8, LAYERS, -1).view(torch.int32)[2, 1, 7] ^= 1
    ends.theirs["kv"].tensor[4, 0] += 1  # a block that is not of this pull, and a layer that may not be
    ends.check(asked)


def test_content_that_is_written_anew_has_new_digests() -> None:
    ends = Ends(offer())
    ends.tell(Ready("P0:1", (0,)))
    ends.ours["kv"].tensor[2] += 1
    with pytest.raises(IntegrityError):
        ends.check(ends.arrive(pull()))
    ends.tell(Ready("P0:1", (0,)))
    ends.check(ends.arrive(pull()))


def test_a_source_that_sends_none_is_not_believed() -> None:
    ends = Ends(offer())
    ends.target.observe(Ready("P0:1", (0,)))
    for asked in (pull(), replace(pull(), offer="P0:9")):
        with pytest.raises(IntegrityError, match=r"sent 0 digests for 3 blocks: is verify= the same\?"):
            ends.check(ends.arrive(asked))


def test_pulls_of_one_transfer_add_up_what_they_cost() -> None:
    total = merge_records({"bytes": 8, "digest_s": 0.25}, {"bytes": 8, "digest_s": 0.5})
    assert (total["digest_s"], total["pulls"]) == (0.75, 2)


# ---------------------------------------------------------------- what is remembered, and until when


def remembered(ends: Ends) -> tuple[int, int]:
    return len(ends.source._offered), len(ends.target._expected)


def test_a_release_ends_it_on_both_sides() -> None:
    ends = Ends(offer())
    ends.tell(Ready("P0:1", (0,)))
    ends.tell(Commit("P0:1"))
    assert remembered(ends) == (1, 1)
    release = ends.target.add_digests(Send("P0", Release("P0:1", "pulled")), [])
    ends.source.observe(release)
    assert remembered(ends) == (0, 0)
    assert ends.tell(Ready("P0:1", (0,))) == Ready("P0:1", (0,)), "nothing is known of it any more"


def test_features_of_a_holder_come_with_digests_of_their_own() -> None:
    """The multimodal store: the offer is of E0 and has no blocks, the holder P0 answers what the target asked."""
    ends = Ends(offer("image", ((),)))
    ends.tell(Ready("P0:1", (0,)))
    cut = ends.source.add_digests(Send("D0", Fetched("P0:1/0", "P0", (3, 1), tail=2)), [])
    answer = ends.source.add_digests(Send("D0", Fetched("P0:1/0", "P0", (3, 1))), [])
    assert isinstance(answer, Fetched)
    assert isinstance(cut, Fetched)
    assert cut.digests[0] == answer.digests[0]
    assert cut.digests[1] != answer.digests[1]
    assert answer.digests == tuple(compute_digests(ends.ours["image"].pool, (3, 1)))
    ends.target.observe(answer)
    assert ends.check(ends.arrive(pull("image", (3, 1)))) >= 0
    assert ends.target.add_expected(pull("image", (3, 1))).digests == (), "once"
    ends.target.observe(answer)
    ends.target.add_digests(Send("P0", Release("P0:1/0", "cancelled")), [])
    assert not ends.target._fetched
    assert ends.source.add_digests(Send("D0", Fetched("P0:1/0", "P0")), []) == Fetched("P0:1/0", "P0")


def test_of_kv_that_is_fetched_as_many_digests_are_taken_as_blocks_are_pulled() -> None:
    ends = Ends(offer())
    answer = ends.source.add_digests(Send("D0", Fetched("P0:2/0", "P0", (3, 1, 2), kind="kv")), [])
    assert isinstance(answer, Fetched)
    assert answer.digests == tuple(compute_digests(ends.ours["kv"].pool, (3, 1, 2)))
    ends.target.observe(answer)
    told = ends.arrive(replace(pull("kv", (1, 2)), offer="P0:2"))
    assert told.digests == answer.digests[1:]
    assert ends.check(told) >= 0


def test_a_lost_peer_ends_it_too() -> None:
    ends = Ends(offer())
    for side in (ends.source, ends.target):
        side.observe(PeerDown("E0"))
    assert remembered(ends) == (1, 1)
    ends.source.observe(PeerDown("D0"))
    ends.target.observe(PeerDown("P0"))
    assert remembered(ends) == (0, 0)


def test_leases_that_ran_out_are_forgotten_in_time() -> None:
    ends = Ends(offer())
    for number in range(2, 10 * STALE_OFFERS_KEPT):
        ends.source.add_digests(Send("D0", offer(number=number)), ["P0:1"])
    assert len(ends.source._offered) <= STALE_OFFERS_KEPT + 4
    assert "P0:1" in ends.source._offered


# ---------------------------------------------------------------- from end to end


def flipping(kind: str, only: int = 1) -> WrappedTransport:
    """Flips the top bit of an exponent in what the first reads of a kind have moved."""
    seen: list[int] = []

    def flip(memory: BlockMemory, blocks: Sequence[int]) -> None:
        if memory.kind == kind and len(seen) < only:
            seen.append(1)
            memory.tensor.view(memory.blocks, -1).view(torch.int32)[blocks[0], 3] ^= 1 << 30

    return WrappedTransport(after=flip)


@pytest.fixture(scope="module")
def expected() -> None:
    all_tokens()


@pytest.mark.usefixtures("expected")
@pytest.mark.parametrize(("kind", "source", "target"), [("image", "E0", "P0"), ("kv", "P0", "D0")])
async def test_a_flipped_bit_ends_its_request_and_no_other(kind: str, source: str, target: str) -> None:
    once: dict[str, Any] = {"verify": "always", "prefix_cache": False, "failures": FailurePolicy(recoveries=0)}
    async with serving("E+P+D", connector=flipping(kind), **once) as pipe:
        with pytest.raises(MigrationError, match="are not what") as caught:
            await pipe.complete(TWO.request(request_id="unlucky"))
        error = caught.value
        assert (error.source, error.target, error.kind, error.request_id) == (source, target, kind, "unlucky")
        assert type(error.__cause__) is IntegrityError
        assert isinstance(error.output, Output)
        assert error.output.token_ids == (TWO.tokens[:1] if kind == "kv" else [])  # the first one is prefill's
        await good_ones(pipe)


@pytest.mark.usefixtures("expected")
@pytest.mark.parametrize("kind", ["image", "kv"])
async def test_a_request_survives_a_flipped_bit(kind: str) -> None:
    async with serving("E+P+D", connector=flipping(kind), verify="always", prefix_cache=False) as pipe:
        output = await pipe.complete(TWO.request())
        assert (output.token_ids, output.lives) == (TWO.tokens, 2)
        assert "are not what" in output.former_lives[0]["why"]


@pytest.mark.usefixtures("expected")
async def test_without_verification_wrong_blocks_are_served() -> None:
    """The control: the same transport, unchecked, serves something else without a word."""
    async with serving("EP+D", connector=flipping("kv"), verify="never", prefix_cache=False) as pipe:
        output = await pipe.complete(TWO.request())
    assert output.token_ids != TWO.tokens
    assert "digest_s" not in output.transfers[0]


@pytest.mark.usefixtures("expected")
@pytest.mark.parametrize(("verify", "verified"), [("always", True), ("network", False)])
async def test_what_it_costs_is_in_the_record(verify: Verify, verified: bool) -> None:
    async with serving("E+P+D", verify=verify) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(case.request()) for case in GOOD))
        assert not any(host._digests and host._digests._offered for host in pipe.hosts.values())
        assert not any(host._digests and host._digests._expected for host in pipe.hosts.values())
    assert [output.token_ids for output in outputs] == [case.tokens for case in GOOD]
    moved = [each for output in outputs for each in output.transfers if each["outcome"] == "pulled"]
    assert moved
    assert all(("digest_s" in each) is verified for each in moved)
    assert all(each.get("digest_s", 1.0) > 0 for each in moved)
