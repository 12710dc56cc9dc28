"""Instances that switch roles in a simulation: whole runs, in which nothing is lost, and what the switches are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from support.simulations import COST, MESSAGE_S, row, simulator
from trinity.core.messages import PeerLoad, Pulled
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.errors import ConfigError, PlacementError
from trinity.placement import Placement
from trinity.simulation.role_switches import AdaptiveCluster, PlacementChange
from trinity.simulation.simulator import Replay
from trinity.traces.trace import Trace, TraceRow

CHANGE_S = 0.75
QUICK = LinearCost(step_s=1 / 16, decode_s=1 / 256, prefill_s=1 / 4096, encode_s=0.5)


def change(placement: str, at_s: float, **named: Any) -> PlacementChange:
    return PlacementChange(placement=placement, at_s=at_s, **{"change_s": CHANGE_S, **named})


def replay(
    rows: Sequence[TraceRow], placement: str, *changes: PlacementChange, record: bool = False, **options: Any
) -> Replay:
    devices = sum(int(letter) for letter in placement if letter.isdigit())
    return simulator(devices, **options).replay(Trace(rows), placement, changes=changes, record=record)


def check_whole(found: Replay, rows: Sequence[TraceRow]) -> None:
    """Each request has all its tokens, one after another."""
    for outcome, asked in zip(found.outcomes, rows, strict=True):
        assert outcome.finish_reason == "length"
        assert 1 + len(outcome.itl_s) == asked.output_length
        assert outcome.ttft_s is not None
        assert outcome.ttft_s > 0
        assert all(gap >= 0 for gap in outcome.itl_s)


def crowd(draw: random.Random, count: int) -> list[TraceRow]:
    """Requests within five seconds, some with images, of which some are alike."""
    made = []
    for number in range(count):
        images = [draw.choice(["cat", f"{number}", ""]) for _ in range(draw.choice([0, 1, 1, 2]))]
        made.append(row(draw.uniform(0.0, 5.0), draw.randrange(5, 300), draw.choice([1, 2, 30, 80]), images))
    return sorted(made, key=lambda each: each.timestamp)


# ---------------------------------------------------------------- one switch, by hand


def test_an_idle_encoder_decodes_after_the_seconds_that_a_switch_takes() -> None:
    """Four requests at once after the switch: two on each of two that decode."""
    rows = [row(10.0 + number / 8, 64, 20) for number in range(4)]
    found = replay(rows, "2E1P1D", change("1E1P2D", at_s=2.0), record=True)
    check_whole(found, rows)
    (done,) = found.switches
    assert (done.name, done.former, done.roles) == ("E1", "E", "D")
    assert (done.drain_s, done.change_s, done.emptied) == (0.0, CHANGE_S, True)
    decoded = {each.instance for each in found.timeline if "decode" in each.name}
    assert decoded == {"D0", "E1"}
    slices = [(each.name, each.start_s, each.duration_s) for each in found.timeline if each.lane == "switch"]
    assert slices == [("offload E", 2.0, 0.0), ("onload D", 2.0, CHANGE_S)]
    assert found.busy_s["E1"]["D"] > 0
    assert set(found.pools["E1"]) == {"kv"}


def test_what_is_encoded_is_encoded_to_its_end_before() -> None:
    """Its request is announced to P meanwhile, so that the front end no longer knows it at E."""
    rows = [row(0.0, 64, 4, ["a"]), row(0.0, 64, 4, ["b"]), row(9.0, 64, 4, ["c"])]
    found = replay(rows, "2E1P1D", change("1E1P2D", at_s=0.5))
    check_whole(found, rows)
    (done,) = found.switches
    assert done.drain_s >= COST.encode_s - 0.5, "it had half a second of encoding to go"
    assert sum(busy["E"] for busy in found.busy_s.values() if "E" in busy) == pytest.approx(3 * COST.encode_s)


def test_decodes_move_away_from_one_that_leaves() -> None:
    """In place of waiting for 400 tokens of each; the reports that tell so come ten times a second."""
    rows = [row(number / 8, 64, 400) for number in range(4)]
    found = replay(rows, "1E1P2D", change("2E1P1D", at_s=6.0), record=True, cluster=Cluster.of("H100", 4))
    check_whole(found, rows)
    (done,) = found.switches
    assert done.emptied
    assert done.drain_s < 15, "to its own end a request would have taken some 200 s"
    moved = [each for each in found.timeline if each.lane == "migration" and each.start_s > 6.0]
    assert {each.args["source"] for each in moved} == {"D1"}
    assert len(moved) == 2


def test_what_is_cut_short_goes_on_with_its_tokens() -> None:
    """Requests that no other has room for or time to take: they are recomputed elsewhere."""
    rows = [row(number / 8, 64, 100) for number in range(4)]
    found = replay(rows, "1E1P2D", change("2E1P1D", at_s=6.0, drain_s=0.0), record=True)
    check_whole(found, rows)
    (done,) = found.switches
    assert (done.drain_s, done.emptied) == (0.0, False)
    again = [each for each in found.timeline if "prefill" in each.name and each.start_s > 6.0]
    assert again, "what was there is prefilled once more"
    uncut = replay(rows, "1E1P2D", record=True)
    assert not [each for each in uncut.timeline if "prefill" in each.name and each.start_s > 6.0]


def test_a_stage_that_nobody_has_for_a_moment_is_waited_for() -> None:
    rows = [row(number / 4, 64, 6) for number in range(40)]
    found = replay(rows, "1E1P1D", change("1E1D1P", at_s=3.0), change("1P1D1E", at_s=9.0))
    check_whole(found, rows)
    assert not found.switches, "the same roles take none"
    found = replay(rows, "1EPD1E", change("1E1EPD", at_s=3.0))
    assert not found.switches
    found = replay(rows, "1EPD1PD", change("1PD1EPD", at_s=3.0), change("1ED1P", at_s=5.0), change("1EPD1E", at_s=20.0))
    check_whole(found, rows)
    assert len(found.switches) >= 2


def test_the_others_hear_of_it_a_message_later() -> None:
    """A request on its way to the one that ends is lost with it, and goes on elsewhere."""
    rows = [row(2.0 - MESSAGE_S / 2, 64, 6, ["a"]), row(2.0 - MESSAGE_S / 2, 64, 6, ["b"])]
    found = replay(rows, "2E1P1D", change("1E1P2D", at_s=2.0, drain_s=0.0))
    check_whole(found, rows)
    assert [each.emptied for each in found.switches] == [False]


# ---------------------------------------------------------------- whole runs


PLACES = ("5E1P2D", "2E1P5D", "1E3P4D", "4EP4D", "2ED2P4D", "8EPD", "3E5PD", "1E1P6D", "6E1P1D")


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(each, marks=pytest.mark.slow) for each in range(6, 200))])
def test_whatever_switches_nothing_is_lost(seed: int) -> None:
    """Random changes of random crowds, drained or cut short: all tokens, each once, and every block comes back."""
    draw = random.Random(seed)
    rows = crowd(draw, draw.choice([5, 20, 40]))
    placements = draw.sample(PLACES, draw.choice([2, 3]))
    changes = [
        change(each, draw.uniform(0.0, 8.0), drain_s=draw.choice([0.0, 0.5, 30.0]), change_s=draw.choice([0.0, 0.75]))
        for each in placements[1:]
    ]
    options: dict[str, Any] = {
        "reservation": draw.choice(["full", "optimistic"]),
        "routing": draw.choice(["round_robin", "prefix_hits"]),
    }
    found = replay(rows, placements[0], *changes, cost=QUICK, cluster=Cluster.of("H100", 8), **options)
    check_whole(found, rows)
    last = max(changes, key=lambda each: each.at_s).placement
    kinds = sorted(sorted(pools) for pools in found.pools.values())
    assert kinds == sorted(sorted(_kinds(roles)) for _, roles in Placement.parse(last).instances())
    assert len(found.switches) >= len(changes), "each of them differs from the one before"
    for done in found.switches:
        change_s = {each.change_s for each in changes}
        assert any(done.change_s == pytest.approx(each) for each in change_s)
        assert done.drain_s <= 30.0 + 1e-9


def _kinds(roles: str) -> set[str]:
    """Pools that an instance of these roles has."""
    return ({"image"} if set(roles) & {"E", "P"} else set()) | ({"kv"} if set(roles) & {"P", "D"} else set())


def test_the_same_seed_gives_the_same_run() -> None:
    rows = crowd(random.Random(3), 30)
    one, two = (replay(rows, "5E1P2D", change("2E1P5D", at_s=4.0)) for _ in range(2))
    assert one == two


def test_changes_that_change_nothing_change_nothing() -> None:
    """One to the same placement, and none: loads are reported meanwhile, which nobody asks for in turn."""
    rows = crowd(random.Random(5), 30)
    one, none = replay(rows, "5E1P2D", change("5E1P2D", at_s=4.0)), replay(rows, "5E1P2D")
    assert one.outcomes == none.outcomes
    assert (one.backend, one.switches) == ("python", ())


def test_an_unused_life_says_nothing_more() -> None:
    """Heartbeats of a life that has ended are dropped, and those of the next one begin."""
    rows = [row(at, 64, 2, [f"{at} {number}"]) for at in (0.0, 30.0) for number in range(2)]
    run = simulator(4).prepare(Trace(rows), "2E1P1D", changes=[change("1E1P2D", at_s=2.0)])
    assert isinstance(run, AdaptiveCluster)
    epochs: list[int] = []
    handle = run.frontend.handle

    def watch(event: Any, now: float) -> Any:
        if isinstance(event, PeerLoad) and event.name == "E1":
            epochs.append(event.epoch)
        return handle(event, now)

    run.frontend.handle = watch  # type: ignore[method-assign]
    run.run()
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}
    assert run.cores["E1"].settings.roles == "D"


def heard(run: AdaptiveCluster, name: str) -> list[tuple[float, Any]]:
    """What the present life of an instance hears from now on, with times."""
    told: list[tuple[float, Any]] = []
    handle = run.cores[name].handle

    def watch(event: Any, now: float) -> Any:
        told.append((now, event))
        return handle(event, now)

    run.cores[name].handle = watch  # type: ignore[method-assign]
    return told


def test_a_life_that_has_ended_hears_nothing() -> None:
    """Neither the end of its step, nor what comes while there is none; and nothing of that waits for the next one."""
    rows = [row(number / 8, 64, 100) for number in range(4)]
    run = simulator(4).prepare(Trace(rows), "1E1P2D", changes=[change("2E1P1D", at_s=6.0, drain_s=0.0)])
    assert isinstance(run, AdaptiveCluster)
    told = heard(run, "D1")
    while run.now < 6.0:
        run.advance()
    while not run.switches:
        run.advance()
        if run.now < 6.0 + MESSAGE_S:
            assert not [event for _, _, to, event in run._heap if to == "D1"]
    run.run()
    assert told
    assert max(at for at, _ in told) <= 6.0
    assert run.reasons == ["length"] * 4


def test_a_pull_from_a_life_that_has_ended_fails() -> None:
    """Five blocks take more than five seconds here; the source ends amid that."""
    rows = [row(0.0, 64, 10), row(0.0, 64, 10)]
    run = simulator(4).prepare(Trace(rows), "2P2D", changes=[change("1P3D", at_s=3.0, drain_s=0.0)])
    assert isinstance(run, AdaptiveCluster)
    told = [each for name in ("D0", "D1") for each in [heard(run, name)]]
    run.run()
    failed = [event for each in told for _, event in each if isinstance(event, Pulled) and event.failure]
    assert len(failed) == 1
    assert run.reasons == ["length"] * 2


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("wrong", ["1E1P1D", "3E1P1D", "nonsense", "4E"])
def test_a_placement_that_cannot_be_is_refused_before_the_run(wrong: str) -> None:
    with pytest.raises(PlacementError):
        replay([row(0.0, 64, 2)], "2E1P1D", change("1E1P2D", at_s=1.0), change(wrong, at_s=2.0))


@pytest.mark.parametrize("name", ["at_s", "change_s", "drain_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_seconds_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        change("1E1P2D", **{"at_s": 1.0, name: value})


def test_the_compiled_engine_says_that_it_cannot() -> None:
    assert "switch roles" in simulator(4).why_python("2E1P1D", changes=[change("1E1P2D", at_s=1.0)])
    with pytest.raises(ConfigError, match="switch roles"):
        replay([row(0.0, 64, 2)], "2E1P1D", change("1E1P2D", at_s=1.0), backend="compiled")
