"""Every placement at N, counted by the paper's formula; mixed devices against all ways to hand them out."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.errors import ConfigError
from trinity.placement import METHODS, Placement
from trinity.planner.candidates import (
    ALL_METHODS,
    PAPER_METHODS,
    TEXT_METHODS,
    Deployment,
    iter_device_choices,
    list_deployments,
    list_placements,
)


def test_at_eight_there_are_35_of_the_paper_and_43_in_all() -> None:
    assert len(list_placements(8, PAPER_METHODS)) == 35
    assert len(list_placements(8)) == 43


def test_at_sixty_four_there_are_2079_of_the_paper() -> None:
    assert len(list_placements(64, PAPER_METHODS)) == 2 * 63 + 63 * 62 // 2
    assert len(list_placements(64)) == 2143


@given(st.integers(1, 20))
def test_they_are_all_different_of_the_right_size_and_serve_every_stage(count: int) -> None:
    found = list_placements(count)
    assert len({str(each) for each in found}) == len(found)
    assert {each.size for each in found} == {count}
    assert {each.stages for each in found} == {"EPD"}
    assert {each.method for each in found} <= set(METHODS)


def test_small_clusters() -> None:
    assert [str(each) for each in list_placements(1)] == ["1EPD"]
    assert {str(each) for each in list_placements(2)} == {"1EP1D", "1ED1P", "1PD1E", "2EPD"}
    assert {str(each) for each in list_placements(3)} >= {"1E1P1D", "1EP2D", "2EP1D", "3EPD"}


def test_text_alone() -> None:
    assert {str(each) for each in list_placements(3, TEXT_METHODS)} == {"1P2D", "2P1D", "3PD"}
    assert all("E" not in str(each) for each in list_placements(9, TEXT_METHODS))


@pytest.mark.parametrize("count", [0, -1])
def test_no_instance_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 instance"):
        list_placements(count)


def test_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 instance"):
        list_deployments([])


# ---------------------------------------------------------------- mixed devices


def test_equal_devices_give_placements_alone() -> None:
    found = list_deployments(["H100"] * 8)
    assert [each.placement for each in found] == list_placements(8)
    assert {each.devices for each in found} == {("H100",) * 8}


def handed_out(names: list[str], method: str) -> set[tuple[str, tuple[str, ...]]]:
    """Every way to give each device one of the method's roles, each role at least once: the brute force."""
    roles, found = method.split("+"), set()
    for each in product(roles, repeat=len(names)):
        given = {role: sorted(n for n, r in zip(names, each, strict=True) if r == role) for role in roles}
        if all(given.values()):
            placement = "".join(f"{len(given[role])}{role}" for role in roles)
            found.add((placement, tuple(name for role in roles for name in given[role])))
    return found


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("names", [["A", "B"], ["A", "B", "B"], ["A", "A", "B", "B"], ["A", "B", "C", "C"]])
def test_mixed_devices_are_some_of_all_ways_and_of_two_groups_all(names: list[str], method: str) -> None:
    found = {(str(each.placement), each.devices) for each in list_deployments(names, [method])}
    every = handed_out(names, method)
    assert found <= every
    apart = {each for each in every if split_roles(*each) <= len(set(names)) - 1}
    assert found <= apart
    if len(set(names)) == 2:
        assert found == apart


def split_roles(placement: str, devices: tuple[str, ...]) -> int:
    """How many times a role has one more kind of device than one."""
    kinds: dict[str, set[str]] = {}
    for (_, roles), name in zip(Placement.parse(placement).instances(), devices, strict=True):
        kinds.setdefault(roles, set()).add(name)
    return sum(len(each) - 1 for each in kinds.values())


@given(st.integers(1, 5), st.integers(1, 5))
def test_each_uses_every_device_once(a: int, b: int) -> None:
    for each in list_deployments(["A"] * a + ["B"] * b):
        assert Counter(each.devices) == {"A": a, "B": b}
        assert each.placement.size == a + b


def test_groups_of_equal_instances() -> None:
    devices = ["L40S", *["H100"] * 2, "L40S", *["H100"] * 4]
    mixed = Deployment.of(Placement.parse("1E3P4D"), devices)
    assert mixed.groups == ((1, "E", "L40S"), (2, "P", "H100"), (1, "P", "L40S"), (4, "D", "H100"))
    assert mixed.method == "E+P+D"
    assert {each.groups for each in list_deployments(["H100"] * 3, ["EP+D"])} == {
        ((1, "EP", "H100"), (2, "D", "H100")),
        ((2, "EP", "H100"), (1, "D", "H100")),
    }


def test_a_coarse_search_has_the_ends_and_some_between() -> None:
    assert [str(each) for each in list_placements(10, ["EP+D"], step=4)] == ["1EP9D", "4EP6D", "8EP2D", "9EP1D"]
    assert set(map(str, list_placements(40, step=8))) < set(map(str, list_placements(40)))
    assert list_placements(40, step=1) == list_placements(40)
    assert {str(each) for each in list_deployments(["A"] * 3 + ["B"] * 3, ["EP+D"], step=3)} >= {"3EP3D", "1EP5D"}


# ---------------------------------------------------------------- fewer than all


def test_every_choice_of_at_most_so_many() -> None:
    assert list(iter_device_choices({"H100": 3}, 2)) == [("H100",), ("H100", "H100")]
    found = list(iter_device_choices({"A": 2, "B": 1}, 2))
    assert [len(each) for each in found] == [1, 1, 2, 2]
    assert set(found) == {("A",), ("B",), ("A", "A"), ("A", "B")}
