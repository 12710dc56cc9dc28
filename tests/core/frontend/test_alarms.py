"""Alarms: the next that means something, in any order, and no more of them than of those that have some."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from trinity.core.frontend.turns import SPARE, Alarms


@dataclass
class Sleeper:
    at: float

    def is_due(self, at: float) -> bool:
        return at == self.at


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), max_size=60))
def test_the_next_one_is_the_earliest_that_still_means_something(set_: list[tuple[int, int]]) -> None:
    sleepers: dict[str, Sleeper] = {}
    alarms = Alarms(sleepers)
    for name, at in set_:
        sleepers[str(name)] = Sleeper(float(at))
        alarms.set(float(at), str(name))
        assert alarms.next() == min(each.at for each in sleepers.values())


def test_alarms_of_those_that_have_gone_are_dropped_behind_one_that_stays() -> None:
    sleepers = {"stays": Sleeper(1.0)}
    alarms = Alarms(sleepers)
    alarms.set(1.0, "stays")
    for number in range(3000):
        sleepers["goes"] = Sleeper(3600.0 + number)
        alarms.set(3600.0 + number, "goes")
        del sleepers["goes"]
        assert alarms.next() == 1.0
    assert len(alarms._heap) <= SPARE + 8


def test_alarms_outlive_the_others_though_their_sleeper_is_not_known_yet() -> None:
    class Known:
        def __init__(self, *at: float) -> None:
            self.at = at

        def is_due(self, at: float) -> bool:
            return at in self.at

    known: dict[str, Known] = {}
    alarms = Alarms(known)
    for number in range(4 * SPARE):
        retry, end = 2.0 + number, 1e4 + number
        alarms.set(retry, "new")
        alarms.set(end, "new")
        known["new"] = Known(retry, end)
        assert alarms.next() == retry
        known["new"] = Known(end)
        assert alarms.next() == end, "a request of which it is the only alarm would wait for ever"
        del known["new"]
        alarms.set(1e6, "gone")
