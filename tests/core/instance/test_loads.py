"""What instances say of themselves: when, what it holds, what steps cost, and who listens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.core_tables import done, kv_offer, make_core, peer_up, sent, work
from support.emulated_pipelines import MODEL, POOLS
from support.scenarios import Linear
from trinity.core import InstanceCore
from trinity.core.block_pool import BlockPool
from trinity.core.instance.loads import load_of, queued
from trinity.core.messages import (
    IMAGE,
    KV,
    Encode,
    Fetched,
    MediaSpan,
    Offer,
    Part,
    PeerDown,
    PeerLoad,
    Prefill,
    Ready,
    Release,
    Revoke,
    Send,
    Step,
    Submit,
    Tick,
)
from trinity.core.prefix_cache import DIGEST, media_keys, prefix_keys
from trinity.core.routing.router import LeastLoaded, RoundRobin, Router
from trinity.core.scheduler import BatchRules, StepRates, units
from trinity.core.transfers import PullTimes, TransferPolicy
from trinity.emulation.model import EmulatedRequest
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.channel.wire import decode, encode

LIVENESS_S = 120.0

# ---------------------------------------------------------------- when


def told(core: InstanceCore, now: float) -> list[str]:
    """Whom a report goes to at this time."""
    return [each.to for each in core.handle(Tick(), now) if isinstance(each, Send)]


def test_a_busy_instance_reports_what_changes_and_an_idle_one_that_it_is_there() -> None:
    core = make_core("D0", peers="D1", policy=LeastLoaded(), report_s=0.1, heartbeat_s=1.0)
    assert core.next_timer() == 0.1
    commands = core.handle(Tick(), 0.1)
    assert [each.to for each in commands if isinstance(each, Send)] == ["D1", "frontend"]
    assert sent(commands, PeerLoad) == [load_of(core.state)] * 2
    assert core.next_timer() == 1.1
    core.handle(kv_offer("P0:1", work("r", 4, max_tokens=9), (0,)), 0.5)
    assert core.next_timer() == 0.6
    assert [load.free for load in sent(core.handle(Tick(), 0.6), PeerLoad)] == [{"kv": 13}] * 2
    assert core.handle(Tick(), 0.7) == [], "nothing has changed"
    assert len(core.handle(Tick(), 1.6)) == 2


def test_where_routing_reads_no_loads_peers_are_left_alone_and_the_front_end_hears_heartbeats() -> None:
    core = make_core("D0", peers="D1 E0 P0", report_s=0.1, heartbeat_s=1.0)
    assert told(core, 0.1) == ["frontend"]
    core.handle(Submit(work("r", 4)), 0.5)
    assert core.next_timer() == 1.1, "work that comes in makes nobody ask"
    assert told(core, 1.1) == ["frontend"]


def test_who_shares_a_lease_hears_heartbeats_until_it_ends() -> None:
    """Any word renews a lease: without one, a target that waits for room would lose its blocks."""
    source = make_core("P0", peers="D0 D1", report_s=0.1, heartbeat_s=1.0, image_cache=False)
    target = make_core("D0", peers="P0 P1", report_s=0.1, heartbeat_s=1.0)
    source.handle(Submit(work("r", 4)), 0.0)
    (offer,) = sent(source.handle(done(1, r=9), 0.2), Offer)
    target.handle(offer, 0.3)
    assert [told(source, at) for at in (0.1, 1.1)] == [["D0", "frontend"]] * 2
    assert [told(target, at) for at in (0.1, 1.1)] == [["P0", "frontend"]] * 2
    source.handle(Release(offer.id, "pulled"), 1.2)
    assert told(source, 2.1) == ["frontend"]


def test_holder_and_asker_of_features_hear_each_other() -> None:
    core = make_core("P0", peers="E0 P1 P2 D0", report_s=0.1, heartbeat_s=1.0)
    held = Offer(
        id="E0:1", kind="image", source="E0", work=work("r", 1, "cat*4"), parts=(Part((), holder="P1"),), route=("E0",)
    )
    core.handle(held, 0.0)
    core.handle(Ready("E0:1", (0,)), 0.0)
    assert list(core.state.fetches) == ["E0:1/0"]
    assert told(core, 0.1) == ["E0", "P1", "frontend"]
    core.handle(Fetched("E0:1/0", "P1", (0,), 0), 0.2)
    assert not core.state.fetches
    assert told(core, 1.1) == ["E0", "P1", "frontend"], "its blocks are being read"


@pytest.mark.parametrize(
    ("settings", "heard"),
    [({}, ["E0"]), ({"image_cache": False}, []), ({"transfers": TransferPolicy(store=False)}, [])],
)
def test_encoders_hear_soon_what_they_need_not_encode(settings: dict[str, Any], heard: list[str]) -> None:
    core = make_core("P0", peers="E0 EP0 D0", report_s=0.1, heartbeat_s=1.0, **settings)
    assert told(core, 0.1) == [*heard, "frontend"]
    core.handle(Submit(work("r", 4)), 0.2)
    assert core.next_timer() == pytest.approx(0.3 if heard else 1.1)


def test_heartbeats_come_more_often_than_leases_end() -> None:
    core = make_core("PD0", peers="PD1", report_s=0.1, heartbeat_s=60.0, lease_s=2.0)
    core.handle(Tick(), 0.1)
    assert core.next_timer() == pytest.approx(0.6)


def test_one_that_knows_nobody_yet_says_nothing() -> None:
    from trinity.core.instance.state import Settings

    assert InstanceCore(Settings("PD0", "PD", {"kv": 8})).next_timer() is None


# ---------------------------------------------------------------- what


def test_work_is_counted_where_it_waits() -> None:
    core = make_core("EP0", image=8, kv=8, rules=BatchRules(token_budget=4, image_budget=4))
    for request, image in ("ra", "sb"):
        core.handle(Submit(work(request, 2, f"{image}*8")), 0.0)
    core.handle(Submit(work("t", 9)), 0.0)
    assert queued(core.state) == {"E": 16, "P": 10 + 10 + 9}
    core.handle(done(1), 1.0)
    assert queued(core.state) == {"E": 8, "P": 10 + 10 + 9}, "no prefill yet: one image is done"


def test_a_decode_instance_counts_its_rows_and_those_that_are_on_their_way() -> None:
    core = make_core("D0", kv=4)
    for number, request in enumerate("rst"):
        core.handle(kv_offer(f"P0:{number}", work(request, 8), (number,)), 0.0)
    assert queued(core.state) == {"D": 3}


def test_the_digest_has_what_is_cached_and_no_more_than_its_limit() -> None:
    core = make_core("EP0", image=8, kv=16, digest_keys=3)
    request = work("r", 9, "cat*8", max_tokens=1)
    core.handle(Submit(request), 0.0)
    core.handle(done(1), 1.0)
    core.handle(done(2, r=5), 2.0)
    cached = load_of(core.state).cached
    keys = [key[:DIGEST] for key in media_keys(request.media[0], 4)]
    assert cached[IMAGE] in (b"".join(keys), b"".join(keys[::-1]))
    known = {key[:DIGEST] for key in prefix_keys(request.prompt, request.media, 4)}
    assert len(cached[KV]) == 3 * DIGEST
    assert {cached[KV][at : at + DIGEST] for at in range(0, 3 * DIGEST, DIGEST)} <= known


def test_a_digest_begins_with_what_is_in_use_and_follows_changes() -> None:
    pool = BlockPool(KV, 4)
    assert pool.digest(0) == b""
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"a" * 16, b"b" * 16, b"c" * 16), strict=True):
        pool.publish(block, key)
    pool.drop(blocks[:1])
    pool.drop(blocks[2:])
    assert pool.digest(9) == b"b" * 8 + b"c" * 8 + b"a" * 8
    assert pool.digest(2) == b"b" * 8 + b"c" * 8
    pool.allocate(2)
    assert pool.digest(9) == b"b" * 8 + b"c" * 8, "a, used longest ago, has gone"
    pool.clear()
    assert pool.digest(9) == b""


def test_the_largest_report_is_of_a_few_kilobytes() -> None:
    full = b"x" * (512 * DIGEST)
    load = PeerLoad("PD0", 3, {"image": 9, "kv": 9}, {"P": 1.5, "D": 0.1}, {"P": 0.1}, {"image": full, "kv": full})
    assert decode(encode(load)) == load
    assert len(encode(load)) < 8500


# ---------------------------------------------------------------- what steps cost


def step(media: int = 0, prefill: int = 0, decodes: int = 0) -> Step:
    span = MediaSpan("image", media, 0, media, "c")
    encodes = (Encode("e", 0, span, (0,), None),) if media else ()
    prefills = (Prefill("p", 0, prefill, True),) if prefill else ()
    return Step(1, "joint", encodes, prefills, tuple(str(number) for number in range(decodes)))


def test_a_load_says_what_pulls_and_preemptions_have_cost() -> None:
    core = make_core("D0", layers=3)
    assert (load_of(core.state).preemptions, load_of(core.state).pull_s) == (0, None)
    core.state.preemptions = 5
    for name, pulls in {"P0": ((10, 2.0), (20, 3.0)), "P1": ((10, 4.0), (20, 4.5)), "P2": ()}.items():
        core.state.pull_times[name] = PullTimes()
        for cells, seconds in pulls:
            core.state.pull_times[name].add(cells, seconds)
    load = load_of(core.state)
    assert load.preemptions == 5
    assert load.pull_s == pytest.approx((3.5, 0.1 * 3)), "the slowest of each, a block of all layers"


@pytest.mark.parametrize(("frontends", "newest"), [(1, 0), (2, 17)])
def test_a_load_says_the_newest_request_where_front_ends_share_the_instance(frontends: int, newest: int) -> None:
    core = make_core("D0")
    core.state.newest = 17
    core.state.frontends = [f"frontend {number}" for number in range(frontends)]
    assert load_of(core.state).newest == newest


def test_units_of_a_step() -> None:
    assert units(step(5, 7, 2)) == {"E": 5, "P": 7, "D": 2}
    assert units(step(decodes=3)) == {"D": 3}


def test_rates_are_learned_from_steps_of_one_kind_and_from_mixed_ones() -> None:
    rates = StepRates(BatchRules(), "EPD")
    rates.learn(step(decodes=2), 0.2)
    assert rates.seconds("D", 3) == pytest.approx(0.3)
    rates.learn(step(decodes=2), 0.4)
    assert rates.unit_seconds("D") == pytest.approx(0.11)
    rates.learn(step(prefill=100, decodes=2), 1.22)
    assert rates.unit_seconds("P") == pytest.approx(0.01), "the rest of the step"
    for _ in range(200):
        rates.learn(step(prefill=100, decodes=2), 2.44)
    assert 100 * rates.unit_seconds("P") + 2 * rates.unit_seconds("D") == pytest.approx(2.44, rel=0.01)
    assert rates.seconds("E", 9) == 0.0, "never seen"


def test_a_first_step_of_several_kinds_gives_every_kind_something() -> None:
    rates = StepRates(BatchRules(), "EPD")
    rates.learn(step(10, 10, 10), 3.0)
    assert all(rates.unit_seconds(letter) > 0 for letter in "EPD")
    before = dict(rates.per_unit)
    rates.learn(step(decodes=2), 0.0)
    assert rates.per_unit == before, "no time, no news"


def test_a_profile_is_believed() -> None:
    rules = BatchRules(token_budget=10, image_budget=4, cost=Linear(decode=1.0, prefill=10.0, media=100.0))
    rates = StepRates(rules, "EPD")
    rates.learn(step(decodes=2), 77.0)
    assert rates.seconds("P", 25) == pytest.approx(2 * 100.001 + 50.001), "in steps of the budget"
    assert rates.seconds("E", 6) == pytest.approx(400.001 + 200.001)
    assert rates.seconds("D", 30) == pytest.approx(30.001), "in one step"
    assert rates.seconds("P", 0) == 0.0
    assert rates.unit_seconds("P") == pytest.approx(10.0001)


# ---------------------------------------------------------------- who listens


def test_the_latest_of_each_known_peer_and_of_its_present_life() -> None:
    router = Router(RoundRobin())
    router.take(PeerLoad("P0"))
    assert router.loads == {}, "unknown"
    router.add(peer_up("P0"))
    router.take(PeerLoad("P0", 0, {"kv": 1}))
    router.take(PeerLoad("P0", 0, {"kv": 2}))
    router.take(PeerLoad("P0", 3, {"kv": 9}))
    assert router.loads["P0"].free == {"kv": 2}
    router.drop("P0")
    assert router.loads == {}


def test_cores_and_front_end_keep_them() -> None:
    core = make_core("E0", peers="P0")
    core.handle(PeerLoad("P0", 0, {"kv": 2}), 0.0)
    assert core.state.router.loads["P0"].free == {"kv": 2}
    core.handle(PeerDown("P0"), 1.0)
    assert core.state.router.loads == {}


@pytest.mark.parametrize("hosting", ["thread", "process"])
async def test_a_pipeline_knows_how_its_instances_stand(hosting: Any) -> None:
    async with Pipeline(MODEL, "E+P+D", hosting=hosting, cache=CacheConfig(pools=POOLS)) as pipe:
        await pipe.complete(EmulatedRequest(text_tokens=40, image_tokens=(5,), max_tokens=8))
        async with asyncio.timeout(LIVENESS_S):
            while set(pipe.loads) != {"E0", "P0", "D0"} or not _settled(pipe.loads):
                await asyncio.sleep(0.02)
        assert len(pipe.loads["P0"].cached[KV]) >= 2 * DIGEST


def _settled(loads: dict[str, PeerLoad]) -> bool:
    """The request has been everywhere, and nothing of it is left."""
    seen = loads["E0"].cached[IMAGE] and loads["P0"].cached[KV] and loads["D0"].unit_s["D"]
    return bool(seen) and not any(any(load.predicted_s.values()) for load in loads.values())


async def test_a_host_carries_out_a_revocation_and_tells_its_core_the_time() -> None:
    async with Pipeline(MODEL, "EPD", cache=CacheConfig(pools=POOLS)) as pipe:
        host = pipe.hosts["EPD0"]
        host._execute([Revoke(KV, (1, 3), 7)])
        assert host.loaded.memory[KV].generations[:5].tolist() == [0, 7, 0, 7, 0]
        async with asyncio.timeout(LIVENESS_S):
            while not any(isinstance(event, Tick) for event in list(host.events)):
                await asyncio.sleep(0.02)
