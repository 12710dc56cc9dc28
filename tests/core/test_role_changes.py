"""Which switches make one placement of another, and in which order: held against every order there is."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations

import pytest

from trinity.core.role_changes import RoleChange, Switch, order_changes
from trinity.errors import PlacementError
from trinity.instance import Instance, list_instances
from trinity.pipeline.placement_changes import check_added, describe_instances, switch_instances
from trinity.placement import Placement

ROLES = ["E", "P", "D", "EP", "ED", "PD", "EPD"]


def order(now: str, wanted: str) -> list[tuple[str, str]]:
    return [(each.name, each.roles) for each in order_changes(list_instances(now), Placement.parse(wanted))]


def lacks(instances: list[Instance], changes: list[RoleChange], needed: str) -> bool:
    """Walk the switches: is a stage without an instance during one of them?"""
    roles = {each.name: each.roles for each in instances}
    for name, new in changes:
        others = "".join(each for other, each in roles.items() if other != name)
        if not set(needed) <= set(others):
            return True
        roles[name] = new
    return False


def random_instances(draw: random.Random, count: int) -> list[Instance]:
    while True:
        made = [Instance(draw.choice(ROLES), f"x{number}") for number in range(count)]
        if {"E", "P", "D"} <= {letter for each in made for letter in each.roles}:
            return made


def test_the_shift_of_the_paper_takes_three_switches() -> None:
    """EPDServe's table 6: 5E1P2D to 2E1P5D."""
    found = order("5E1P2D", "2E1P5D")
    assert len(found) == 3
    assert {roles for _, roles in found} == {"D"}
    assert {name[0] for name, _ in found} == {"E"}


@pytest.mark.parametrize("seed", range(300))
def test_it_is_the_wanted_placement_with_the_fewest_switches_and_lacks_nothing_where_that_can_be(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(2, 6)
    now, later = random_instances(draw, count), random_instances(draw, count)
    changes = order_changes(now, describe_instances(later))
    after = now
    for change in changes:
        after = switch_instances(after, change)
    wanted = Counter(each.roles for each in later)
    assert Counter(each.roles for each in after) == wanted
    assert len(changes) == sum((Counter(each.roles for each in now) - wanted).values())
    if lacks(now, changes, "EPD"):
        assert all(lacks(now, list(each), "EPD") for each in permutations(changes))


@pytest.mark.parametrize("seed", range(300))
def test_of_another_size_it_is_the_wanted_placement_with_the_fewest_changes(seed: int) -> None:
    """Additions come first and removals last, so that what lacks during a switch lacks in any order of switches."""
    draw = random.Random(seed)
    now, later = random_instances(draw, draw.randrange(3, 7)), random_instances(draw, draw.randrange(3, 7))
    changes = order_changes(now, describe_instances(later), resize=True)
    names = {each.name for each in now}
    kinds = ["add" if each.name not in names else "switch" if each.roles else "remove" for each in changes]
    assert kinds == sorted(kinds, key=("add", "switch", "remove").index)
    after = {each.name: each.roles for each in now}
    for change in changes:
        assert change.roles != after.get(change.name)
        after[change.name] = change.roles
    had, wanted = Counter(each.roles for each in now), Counter(each.roles for each in later)
    assert Counter(filter(None, after.values())) == wanted
    assert len(changes) == max((had - wanted).total(), (wanted - had).total())
    switches = [each for each, kind in zip(changes, kinds, strict=True) if kind == "switch"]
    grown = [*now, *(Instance(each.roles, each.name) for each in changes[: kinds.count("add")])]
    if lacks(grown, switches, "EPD"):
        assert all(lacks(grown, list(each), "EPD") for each in permutations(switches))


def test_what_none_may_become_is_added_and_who_may_nothing_else_is_removed() -> None:
    now = [Instance(role, name, may=role) for role, name in zip("EEPD", "abcd", strict=True)]
    found = order_changes(now, Placement.parse("1E1P2D"), resize=True)
    assert found == [RoleChange("D0", "D"), RoleChange("b", "")]


def test_added_ones_get_the_first_free_names() -> None:
    now = [Instance("E", "D1"), Instance("P", "P0"), Instance("D", "D0")]
    assert [each.name for each in order_changes(now, Placement.parse("1E1P3D"), resize=True)] == ["D2", "D3"]
    assert check_added(now, Instance("E")).name == "E0"
    assert check_added(now, Instance("D")).name == "D2"
    assert check_added(now, Instance("D", "mine")).name == "mine"


def test_a_large_one_is_ordered_in_no_time() -> None:
    changes = order("24E16P24D", "8EP8ED16E16P16PD")
    assert len(changes) == 8 + 8 + 16
    assert not lacks(list_instances("24E16P24D"), [RoleChange(*each) for each in changes], "EPD")


def test_an_instance_becomes_only_what_it_may() -> None:
    now = [Instance("E", "a", may="EP"), Instance("E", "b", may="ED"), Instance("P", "c"), Instance("D", "d")]
    assert order_changes(now, Placement.parse("1E1P2D")) == [RoleChange("b", "D")]
    assert order_changes(now, Placement.parse("1E2P1D")) == [RoleChange("a", "P")]
    fixed = [Instance(role, name, may=role) for role, name in zip("EEPD", "abcd", strict=True)]
    with pytest.raises(PlacementError, match=r"cannot be made of what a, b, c, d may be \(Instance.may\)"):
        order_changes(fixed, Placement.parse("1E1P2D"))


def test_capabilities_are_shared_out_so_that_all_fit() -> None:
    """The first that could become either has to leave one of them to the other."""
    now = [Instance("E", "a"), Instance("E", "b", may="ED"), Instance("P", "c"), Instance("D", "d", may="D")]
    assert set(order_changes(now, Placement.parse("2P2D"))) == {("a", "P"), ("b", "D")}


@pytest.mark.parametrize("wanted", ["1E1P1D", "2E2P2D"])
def test_another_number_of_instances_is_refused(wanted: str) -> None:
    with pytest.raises(
        PlacementError, match="and 4 run: give one of as many, which they can switch to, or resize=True"
    ):
        order("2E1P1D", wanted)


def test_the_same_placement_takes_nothing() -> None:
    assert order("2E1P1D", "1P2E1D") == []


def test_the_parts_of_a_switch_are_its_whole() -> None:
    done = Switch("E1", "E", "D", drain_s=2.0, change_s=0.5, emptied=True, migration_s=0.4)
    assert done.migration_s + done.onload_s == done.change_s
