"""What instances may become, come and go: each check of one change, and what is said of it."""

from __future__ import annotations

import pytest

from trinity.core.role_changes import RoleChange
from trinity.errors import ConfigError, PlacementError, UnknownName
from trinity.instance import Instance, list_instances
from trinity.pipeline.placement_changes import (
    check_added,
    check_removed,
    check_switch,
    describe_instances,
    switch_instances,
)


@pytest.mark.parametrize("name", ["P0", "frontend"])
def test_a_name_in_use_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"an instance {name} runs already"):
        check_added(list_instances("1E1P1D"), Instance("D", name))


def test_only_one_that_others_can_do_without_is_removed() -> None:
    now = [*list_instances("1E1P1D"), Instance("PD", "both")]
    assert check_removed(now, "D0") == "D0"
    assert check_removed(now, "both") == "both"
    with pytest.raises(PlacementError, match="no instance would have stage E without E0; add another one first"):
        check_removed(now, "E0")
    with pytest.raises(PlacementError, match="stage P and D without both"):
        check_removed([Instance("E", "a"), Instance("PD", "both")], "both")
    with pytest.raises(UnknownName, match="unknown instance 'X'"):
        check_removed(now, "X")


@pytest.mark.parametrize(
    ("name", "roles", "error", "said"),
    [
        ("X", "D", UnknownName, "unknown instance 'X'; known: D0, E0, E1, P0"),
        ("E1", "E", PlacementError, "has the roles E already"),
        ("E1", "Q", PlacementError, "unknown stage Q"),
        ("E1", "", PlacementError, "letters of E, P, D"),
        ("P0", "E", PlacementError, "no instance would have stage P once P0 is E; switch another one to it first"),
        ("D0", "EP", PlacementError, "no instance would have stage D once D0 is EP"),
    ],
)
def test_a_switch_that_cannot_be_is_refused(name: str, roles: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as told:
        check_switch(list_instances("2E1P1D"), name, roles)
    assert said in str(told.value)


def test_a_switch_beyond_the_capability_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"may have the roles EP, and not D \(Instance.may\)"):
        check_switch([Instance("E", "a", may="PE"), *list_instances("1E1P1D")], "a", "D")


@pytest.mark.parametrize("may", ["P", "X", ""])
def test_a_capability_without_the_roles_is_refused(may: str) -> None:
    with pytest.raises(ConfigError):
        Instance("E", may=may)


def test_instances_are_described_in_the_order_of_their_stages() -> None:
    made = [Instance("D", "a"), Instance("E", "b"), Instance("PD", "c"), Instance("D", "d"), Instance("P", "e")]
    assert str(describe_instances(made)) == "1E1PD1P2D"


def test_a_switch_that_can_be_is_one_change_of_one_instance() -> None:
    now = list_instances("2E1P1D")
    change = check_switch(now, "E1", "d")
    assert change == RoleChange("E1", "D")
    assert [(each.name, each.roles) for each in switch_instances(now, change)] == [
        ("E0", "E"), ("E1", "D"), ("P0", "P"), ("D0", "D")
    ]  # fmt: skip
    assert [each.roles for each in now] == ["E", "E", "P", "D"]
