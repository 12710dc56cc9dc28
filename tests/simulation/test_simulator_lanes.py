"""Simulator: lanes that share a device, KV that moves while prefill runs, devices and hosts that differ, timelines."""

from __future__ import annotations

import pytest

from support.simulations import LINK, MESSAGE_S, row, served, simulator
from trinity.core.transfers import TransferPolicy
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.interconnects import Interconnect
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import DEVICES, Roofline
from trinity.errors import ConfigError
from trinity.simulation.simulator import Simulator
from trinity.timeline import Timeline
from trinity.traces.trace import SLO, Trace

AT_ONCE = Cluster.of("H100", 1, message_s=0.0)
STEPS = LinearCost(step_s=1.0, encode_s=1.0)
LANES = ("vision", "language")


def test_lanes_slow_each_other_down_while_both_are_busy() -> None:
    # A is prefilled from 0 on; B's image comes at 0.5. Both go half as fast: A's prefill ends at 1.5, and its decode
    # goes on beside what is left of the image (0.5), until 2.5; then alone until 3. B is prefilled in the next step.
    rows = [row(0.0, 16, 4), row(0.5, 16, 1, [""])]
    (first, gaps), (second, _) = served(rows, "EPD", 1, cluster=AT_ONCE, cost=STEPS, lanes=LANES, interference=2.0)
    assert (first, gaps, second) == (1.5, [1.5, 1.0, 1.0], 3.5)
    (first, gaps), (second, _) = served(rows, "EPD", 1, cluster=AT_ONCE, cost=STEPS, lanes=LANES)
    assert (first, gaps, second) == (1.0, [1.0, 1.0, 1.0], 2.5), "no interference"
    (first, gaps), (second, _) = served(rows, "EPD", 1, cluster=AT_ONCE, cost=STEPS)
    assert (first, gaps, second) == (1.0, [2.0, 1.0, 1.0], 3.5), "one lane: the image is in the decode's step"


def test_lanes_are_busy_as_long_as_their_steps_take() -> None:
    rows = [row(0.0, 16, 4), row(0.5, 16, 1, [""])]
    made = simulator(1, cluster=AT_ONCE, cost=STEPS, lanes=LANES, interference=2.0)
    replay = made.replay(Trace(rows), "EPD", record=True)
    assert replay.busy_s == {"EPD0": {"E": 2.0, "P": 1.5 + 0.5, "D": 1.5 + 0.5 + 1.0}}
    shown = [(each.lane, each.name, each.start_s, each.duration_s) for each in replay.timeline]
    assert shown == [
        ("language", "simulated prefill", 0.0, 1.5),
        ("vision", "simulated encode", 0.5, 2.0),
        ("language", "simulated decode", 1.5, 1.5),
        ("language", "simulated prefill+decode", 3.0, 1.0),
        ("language", "simulated decode", 4.0, 1.0),
    ]


def test_only_instances_that_encode_beside_another_stage_have_two_lanes() -> None:
    made = simulator(4, lanes=LANES)
    assert [each.lanes for each in made.settings("E+EP+P+D")] == [("joint",), LANES, ("joint",), ("joint",)]


def test_kv_that_moves_layer_by_layer_is_there_when_prefill_ends() -> None:
    # 32 layers of a second each; one of the block takes 1/32 + 1/4 s to pull. The last is written 2/3 s before the
    # end of prefill, so that decode starts at once; moved whole, the block takes 5/4 s after it.
    cluster = Cluster.of("H100", 2, link=LINK, message_s=0.0)
    cost = LinearCost(step_s=32.0)

    def gap(kv: str, pulls: int) -> float:
        made = simulator(2, cluster=cluster, cost=cost, transfers=TransferPolicy(kv=kv))  # type: ignore[arg-type]
        replay = made.replay(Trace([row(0.0, 16, 2)]), "P+D", record=True)
        assert sum(each.lane == "migration" for each in replay.timeline) == pulls
        assert replay.moved_bytes["kv"] == 2**23
        (outcome,) = replay.outcomes
        return outcome.itl_s[0]

    assert gap("layer", 32) == 32.0
    assert gap("off", 1) == 32.0 + 1.25
    assert gap("grouped", 4) == 32.0, "four groups while nothing is known: 8 layers take 1/2 s to pull"


def test_auto_is_simulated_as_kv_that_moves_after_prefill() -> None:
    """What streaming gains is little, and a plan that streams is replayed on the slow cores, for 25 times as long."""
    for kv, simulated in (("auto", "off"), ("grouped", "grouped"), ("layer", "layer")):
        made = simulator(2, cluster=Cluster.of("H100", 2, per_host=1), transfers=TransferPolicy(kv=kv))  # type: ignore[arg-type]
        assert {each.transfers.kv for each in made.settings("P+D")} == {simulated}


def test_layers_written_by_a_slowed_lane_come_later() -> None:
    cluster = Cluster.of("H100", 2, link=LINK, message_s=0.0)
    chosen = {
        "cluster": cluster,
        "cost": LinearCost(step_s=32.0, encode_s=32.0),
        "transfers": TransferPolicy(kv="layer"),
    }
    rows = [row(0.0, 16, 2), row(0.0, 16, 1, [""])]
    (first, (gap,)), _ = served(rows, "EP+D", 2, lanes=LANES, interference=2.0, **chosen)
    assert (first, gap) == (64.0, 32.0), "prefill beside the image: each half as fast"


def test_devices_that_differ_cost_what_each_takes() -> None:
    shape = get_model_shape("llava-1.5-7b")
    cluster = Cluster.of(("H100", 1), ("L40S", 1), message_s=0.0)
    made = Simulator(shape, SLO(1.0, 0.1), cluster=cluster)
    replay = made.replay(Trace([row(0.0, 16, 2)]), "PD+PD")
    fast, slow = (Roofline(model=shape, device=DEVICES[name]) for name in ("H100", "L40S"))
    assert [each.roles for each in made.settings("2PD")] == ["PD", "PD"]
    big, small = (each.pools["kv"] for each in made.settings("2PD"))
    assert big > 1.9 * small
    twice = made.replay(Trace([row(0.0, 16, 1), row(0.0, 16, 1)]), "2PD")
    ttfts = [each.ttft_s for each in twice.outcomes]
    assert ttfts == [each.at(0, 16, 0, context=0.0) for each in (fast, slow)]
    assert replay.busy_s["PD1"] == {"P": 0.0, "D": 0.0}
    given = simulator(2, cluster=cluster, cost={"H100": STEPS, "L40S": LinearCost(step_s=3.0)})
    ttfts = [each.ttft_s for each in given.replay(Trace([row(0.0, 16, 1), row(0.0, 16, 1)]), "2PD").outcomes]
    assert ttfts == [1.0, 3.0]
    with pytest.raises(ConfigError, match="L40S"):
        simulator(2, cluster=cluster, cost={"H100": STEPS}, budgets=None).check("2PD")


def test_blocks_cross_hosts_over_the_network() -> None:
    slow = Interconnect(name="string", bandwidth=2.0**23, fixed_s=100.0)
    (_, (near,)), (_, (far,)) = (
        served([row(0.0, 16, 2)], "P+D", 2, cluster=Cluster.of("H100", 2, per_host=each, link=LINK, network=slow))[0]
        for each in (2, 1)
    )
    assert far == pytest.approx(near + 100.0 - 0.25)


def test_budgets_keep_steps_within_the_bound_of_their_roles() -> None:
    cost = LinearCost(step_s=0.25, prefill_s=1 / 1024, decode_s=1 / 64, media_s=1 / 4096, encode_s=0.25)
    made = Simulator("llava-1.5-7b", SLO(2.0, 0.5), cluster=Cluster.of("H100", 4), cost=cost)
    rules = {each.roles: each.rules for each in made.settings("E+P+D+EPD")}
    assert rules["P"].token_budget == 768, "0.25 s and 768 tokens are a second, half of the bound on TTFT"
    assert rules["D"].token_budget == 15, "16 rows are 0.5 s, all of the bound on TBT: a step gets a little less"
    assert rules["EPD"].token_budget == 240, "0.98 of 0.5 s, less 0.25 s, are 245.8 tokens, 16 at a time"
    assert (rules["E"].image_budget, rules["EPD"].image_budget) == (5 * 576, 576), (
        "0.75 s are 5.3 images; not one fits 0.25 s less"
    )
    assert [each.rules.limit_s for each in made.settings("E+P+D+EPD")] == [1.0, 1.0, 0.49, 0.49]


def test_a_timeline_has_steps_and_migrations() -> None:
    replay = simulator(3).replay(Trace([row(0.0, 16, 2, [""])]), "E+P+D", record=True)
    assert [(each.instance, each.lane, each.name) for each in replay.timeline] == [
        ("E0", "joint", "simulated encode"),
        ("P0", "migration", "image"),
        ("P0", "joint", "simulated prefill"),
        ("D0", "migration", "kv"),
        ("D0", "joint", "simulated decode"),
    ]
    encode, image, prefill, kv, decode = replay.timeline
    assert (encode.start_s, encode.duration_s, dict(encode.args)["media tokens"]) == (MESSAGE_S, 1.0, 576)
    assert (image.start_s, image.duration_s) == (2 * MESSAGE_S + 1.0, 0.8125)
    assert image.args["source"] == "E0"
    assert prefill.args["prefill tokens"] == 592
    assert kv.args["bytes"] == 37 * 2**23
    assert decode.args["decodes"] == 1
    drawn = Timeline()
    for each in replay.timeline:
        drawn.add(*each)
    assert '"simulated prefill"' in drawn.to_json()
    assert simulator(3).replay(Trace([row(0.0, 16, 2, [""])]), "E+P+D").timeline == ()
