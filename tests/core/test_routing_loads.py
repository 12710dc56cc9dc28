"""Policies that read what instances say of themselves, and requests that go past E because their images are cached."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from support.core_tables import brief, done, emptied, holding, image_offer, make_core, peer_up, sent, table, work
from support.emulated_pipelines import MODEL, POOLS
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core import InstanceCore
from trinity.core.messages import (
    IMAGE,
    KV,
    Cancel,
    Commit,
    Finished,
    Forget,
    Moved,
    Offer,
    PeerLoad,
    PeerUp,
    Pulled,
    Ready,
    Release,
    Submit,
    Work,
)
from trinity.core.prefix_cache import DIGEST, prefix_keys
from trinity.core.routing.router import LeastLoaded, PrefixHits, RoundRobin, Router, RoutingPolicy, routing_policy
from trinity.emulation.model import EmulatedRequest
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline


def make_router(peers: str, policy: RoutingPolicy, *loads: PeerLoad) -> Router:
    router = Router(policy)
    for peer in peers.split():
        router.add(peer_up(peer))
    for load in loads:
        router.take(load)
    return router


# ---------------------------------------------------------------- least_loaded


def test_the_least_loaded_is_the_one_with_the_fewest_predicted_seconds_at_this_stage() -> None:
    loads = [PeerLoad("PD0", predicted_s={"P": 2.0, "D": 0.1}), PeerLoad("PD1", predicted_s={"P": 1.0, "D": 0.3})]
    router = make_router("PD0 PD1", LeastLoaded(), *loads)
    assert router.choose("P", work("r", 8)) == "PD1"
    assert router.choose("D", work("r", 8)) == "PD0"


def test_what_was_sent_since_the_last_report_counts_too() -> None:
    """Ten reports a second: without it everybody would go to the same instance meanwhile."""
    loads = [PeerLoad("P0", predicted_s={"P": 1.0}, unit_s={"P": 0.1}), PeerLoad("P1", predicted_s={"P": 1.5})]
    router = make_router("P0 P1", LeastLoaded(), *loads)
    assert [router.choose("P", work("r", 4)) for _ in range(3)] == ["P0", "P0", "P1"]
    router.take(loads[0])
    assert router.choose("P", work("r", 4)) == "P0"


def test_before_anything_is_known_the_counts_decide_and_equals_take_turns() -> None:
    router = make_router("P0 P1 P2", LeastLoaded())
    assert Counter(router.choose("P", work("r", 4)) for _ in range(9)) == {"P0": 3, "P1": 3, "P2": 3}
    large = router.choose("P", work("large", 300))
    others = {router.choose("P", work("r", 4)) for _ in range(20)}
    assert others == {"P0", "P1", "P2"} - {large}


# ---------------------------------------------------------------- prefix_hits


def test_the_longest_cached_prefix_and_the_most_images_win() -> None:
    asked = work("r", 8, "cat*4", 8)
    router = make_router("PD0 PD1 PD2", PrefixHits(), holding("PD2", asked, KV))
    assert {router.choose("P", asked) for _ in range(5)} == {"PD2"}
    router.take(holding("PD1", asked, KV, IMAGE))
    assert router.choose("P", asked) == "PD1"
    assert router.choose("D", asked) in ("PD1", "PD2"), "images do not matter there"


def test_a_prefix_is_counted_from_the_beginning() -> None:
    asked = work("r", 16)
    router = make_router("P0 P1", PrefixHits())
    keys = [key[:DIGEST] for key in prefix_keys(asked.prompt, (), 4)]
    router.take(PeerLoad("P0", cached={KV: b"".join(keys[1:])}))
    router.take(PeerLoad("P1", cached={KV: keys[0]}))
    assert router.cached_tokens(peer_up("P0"), "P", asked) == 0
    assert router.cached_tokens(peer_up("P1"), "P", asked) == 4
    assert router.choose("P", asked) == "P1"


def test_without_a_hit_the_least_loaded_is_chosen() -> None:
    router = make_router("P0 P1", PrefixHits(), PeerLoad("P0", predicted_s={"P": 1.0}))
    assert router.choose("P", work("r", 8)) == "P1"


def test_a_policy_of_ones_own_may_read_loads_or_not() -> None:
    class MostFree:
        informed, straight = True, False

        def choose(self, letter: str, work: Work, peers: Sequence[PeerUp], router: Router) -> PeerUp:
            return max(peers, key=lambda peer: router.loads[peer.name].free[KV])

    router = make_router("P0 P1", MostFree(), PeerLoad("P0", free={KV: 2}), PeerLoad("P1", free={KV: 3}))
    assert router.choose("P", work("r", 1)) == "P1"
    assert isinstance(routing_policy("least_loaded"), LeastLoaded)
    assert isinstance(routing_policy("prefix_hits"), PrefixHits)


# ---------------------------------------------------------------- past E


def test_a_request_whose_images_a_prefill_instance_has_goes_straight_there() -> None:
    asked = work("r", 1, "cat*4", "dog*8")
    router = make_router("E0 P0 P1", PrefixHits(), holding("P1", asked, IMAGE))
    assert router.enter(asked) == "P1"
    assert router.enter(work("s", 1, "cat*4", "fox*4")) == "E0", "all of them or none"
    assert router.enter(work("t", 5)) in ("P0", "P1")
    assert make_router("E0 P1", RoundRobin(), holding("P1", asked, IMAGE)).enter(asked) == "E0"


def test_an_instance_with_e_that_has_them_too_is_chosen_as_ever() -> None:
    asked = work("r", 1, "cat*4")
    loads = [holding("P0", asked, IMAGE), holding("EP0", asked, IMAGE)]
    assert make_router("E0 P0 EP0", PrefixHits(), *loads).enter(asked) == "EP0"


def with_cat(image: int = 4, kv: int = 16) -> InstanceCore:
    """P0 has served a request with the image "cat" and handed it on; the features are cached."""
    core = make_core("P0", image=image, kv=kv, peers="E0 D0")
    core.handle(image_offer("E0:1", work("r", 1, "cat*8"), (0, 1)), 0.0)
    for event in (Ready("E0:1", (0,)), Commit("E0:1"), Pulled("E0:1", 0)):
        core.handle(event, 0.0)
    (offer,) = sent(core.handle(done(1, r=5), 0.0), Offer)
    core.handle(Release(offer.id, "pulled"), 0.0)
    core.handle(Forget("r"), 0.0)
    emptied(core)
    return core


def test_its_cached_features_are_held_and_prefilled_from() -> None:
    core = with_cat()
    table(
        core,
        [
            (
                Submit(work("s", 3, "cat*8", text=300)),
                ["open s kv 2,3,4 images [0,1]", "step 2 joint: prefill s 0+11 last"],
            )
        ],
    )
    assert core.state.pools["image"].held == 2
    (offer,) = sent(core.handle(done(2, s=5), 1.0), Offer)
    assert offer.route == ("P0",)
    assert core.state.pools["image"].held == 0
    core.handle(Release(offer.id, "pulled"), 2.0)


def test_features_that_have_gone_meanwhile_are_encoded_after_all() -> None:
    core = with_cat()
    asked = work("s", 1, "fox*8")
    commands = core.handle(Submit(asked, ("pixels",)), 1.0)
    assert brief(commands) == ["E0: submit s"]
    assert sent(commands, Submit) == [Submit(asked, ("pixels",), ("P0",), target_epoch=0, spans={"encode_queue": 0.0})]
    assert not sent(commands, Moved), "its target will say so"
    assert core.idle()
    table(core, [(Cancel("s"), ["E0: cancel s"]), (Forget("s"), []), (Cancel("s"), [])])
    emptied(core)


def test_the_encoder_counts_the_hop() -> None:
    core = make_core("E0", peers="P0")
    assert sent(core.handle(Submit(work("s", 1, "fox*8"), (), ("P0",)), 0.0), Moved) == [Moved("s", 0, "E0", 1)]
    assert sent(core.handle(done(1), 1.0), Offer)[0].route == ("P0", "E0")


def test_without_an_encoder_it_fails_at_once() -> None:
    core = make_core("P0", peers="D0")
    (finished,) = sent(core.handle(Submit(work("s", 1, "fox*8")), 1.0), Finished)
    assert finished.failure is not None
    assert finished.failure.error == "MigrationError"


def test_kv_that_covered_the_image_and_was_evicted_sends_it_to_an_encoder() -> None:
    core = make_core("P0", image=4, kv=4, peers="E0 D0")
    core.handle(image_offer("E0:1", work("r", "cat*4", 4, max_tokens=1), (0,)), 0.0)
    for event in (Ready("E0:1", (0,)), Commit("E0:1"), Pulled("E0:1", 0), done(1, r=5), Forget("r")):
        core.handle(event, 0.0)
    core.handle(Submit(work("x", 3, text=700, max_tokens=1)), 0.0)
    core.handle(Submit(work("a", 15, text=500, max_tokens=1)), 0.0)
    core.handle(Submit(work("s", "cat*4", 4, max_tokens=1)), 0.0)
    assert core.state.requests["s"].skip_media
    core.handle(done(2, x=5), 1.0)
    commands = core.handle(done(3, a=5), 2.0)
    assert "E0: submit s" in brief(commands)
    assert "s" not in core.state.requests


def spread(count: int, **settings: Any) -> VirtualCluster:
    """Requests a second apart that show one of two images, while instances report ten times a second."""
    configured = make_settings(
        "1E2P1D",
        {"image": 2, "kv": 40},
        image_block_size=4,
        kv_block_size=4,
        prefix_cache=False,
        report_s=0.1,
        **settings,
    )
    cluster = VirtualCluster(configured, routing=PrefixHits, durations=Durations(message=lambda draw, *_: 0.01))
    for number in range(count):
        cluster.submit(work(f"r{number}", 1, "cat*8" if number % 3 else "dog*8", text=100 * number), at=float(number))
    cluster.run()
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}
    return cluster


def routes(cluster: VirtualCluster) -> list[str]:
    ends = [outcome.end for outcome in cluster.outcomes.values()]
    return [" ".join(end.finished.route) for end in ends if end is not None and end.finished is not None]


def test_each_image_is_encoded_once_and_found_again() -> None:
    found = routes(spread(8, heartbeat_s=0.3))
    assert sorted(found) == ["E0 P0 D0", "E0 P1 D0", *["P0 D0"] * 4, *["P1 D0"] * 2] or sorted(found) == [
        "E0 P0 D0",
        "E0 P1 D0",
        *["P0 D0"] * 2,
        *["P1 D0"] * 4,
    ]


def test_digests_that_are_no_longer_true_cost_a_hop_and_nothing_else() -> None:
    """Everybody hears of everything two seconds late, and each pool holds one image."""
    configured = make_settings(
        "1E1P1D", {"image": 2, "kv": 40}, image_block_size=4, kv_block_size=4, prefix_cache=False
    )
    late = Durations(message=lambda draw, source, target: 2.0 if target == "frontend" else 0.01)
    reporting = [type(each)(**{**vars(each), "report_s": 0.1, "heartbeat_s": 0.3}) for each in configured]
    cluster = VirtualCluster(reporting, routing=PrefixHits, durations=late)
    for number, image in enumerate(["cat"] * 3 + ["dog"] + ["cat"] * 4):
        cluster.submit(work(f"r{number}", 1, f"{image}*8"), at=float(number))
    cluster.run()
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}
    found = routes(cluster)
    assert "P0 E0 P0 D0" in found
    assert "P0 D0" in found


@pytest.mark.parametrize("hosting", ["thread", "process"])
async def test_a_pipeline_finds_an_image_again(hosting: Any) -> None:
    asked = EmulatedRequest(text_tokens=18, image_tokens=(576,), contents=("cat",), max_tokens=4)
    async with Pipeline(MODEL, "E+P+D", hosting=hosting, cache=CacheConfig(pools=POOLS), routing="prefix_hits") as pipe:
        first = await pipe.complete(asked)
        async with asyncio.timeout(120):
            while "P0" not in pipe.loads or not pipe.loads["P0"].cached[IMAGE]:
                await asyncio.sleep(0.02)
        second = await pipe.complete(
            EmulatedRequest(text_tokens=30, image_tokens=(576,), contents=("cat",), max_tokens=4, text="other")
        )
    assert [record["outcome"] for record in first.transfers] == ["pulled", "pulled"]
    assert (first.route, second.route) == (["E0", "P0", "D0"], ["P0", "D0"])
    assert not second.spans.get("encode")
