"""The least loaded of any set is found, whatever changed since, as if each were looked at."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from support.core_tables import peer_up
from trinity.core.messages import PeerLoad
from trinity.core.routing.router import LeastLoaded, Router
from trinity.core.routing.stage_peers import FEW, LoadOrder, Slots, StagePeers


def make_order(seconds: dict[str, float]) -> tuple[LoadOrder, Slots]:
    slots, read = Slots(), list[str]()
    for name in seconds:
        slots.add(name)
    peers = StagePeers.of([peer_up(name) for name in seconds], slots)
    return LoadOrder(peers, slots, lambda name: read.append(name) or seconds[name]), slots  # type: ignore[func-returns-value]


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 5 * FEW])
def test_the_least_of_any_set(count: int) -> None:
    draw, seconds = Random(count), {f"P{number}": 0.0 for number in range(count)}
    order, slots = make_order(seconds)
    for _ in range(300):
        for name in draw.choices(list(seconds), k=draw.randrange(4)):
            seconds[name] = draw.choice((0.0, -0.0, 0.25, 0.5, draw.random(), inf))
            order.changed(name)
        order.changed("nobody")
        asked = draw.sample(list(seconds), draw.randint(1, count))
        least = min(seconds[name] for name in asked)
        expected = sum(slots.bit(name) for name in asked if seconds[name] == least)
        assert order.least(sum(map(slots.bit, asked))) == expected


def test_only_what_changed_is_read_again() -> None:
    """Else a choice costs as much as there are instances."""
    seconds, read = {f"P{number}": float(number) for number in range(99)}, list[str]()
    slots = Slots()
    for name in seconds:
        slots.add(name)

    def note(name: str) -> float:
        read.append(name)
        return seconds[name]

    order = LoadOrder(StagePeers.of([peer_up(name) for name in seconds], slots), slots, note)
    assert order.least(sum(map(slots.bit, seconds))) == slots.bit("P0")
    assert sorted(read) == sorted(seconds)
    read.clear()
    seconds["P0"] = 50.0
    order.changed("P0")
    assert order.least(sum(map(slots.bit, seconds))) == slots.bit("P1")
    assert order.least(slots.bit("P0") | slots.bit("P60")) == slots.bit("P0")
    assert read == ["P0"]


def test_seconds_that_are_no_number_come_last() -> None:
    """An instance that divides by nothing must not stop the choice among the others."""
    router = Router(LeastLoaded())
    for name in ("P0", "P1"):
        router.add(peer_up(name))
    router.take(PeerLoad("P0", predicted_s={"P": float("nan")}))
    router.take(PeerLoad("P1", predicted_s={"P": 9.0}))
    assert router.seconds("P0", "P") == inf
    assert router.least_loaded("P", 0b11) == 0b10
