"""Placements: what is one, what it means, and what is said about one that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.errors import PlacementError
from trinity.placement import METHODS, Group, Placement
from trinity.stage_kinds import all_letters


@pytest.mark.parametrize(
    ("text", "groups", "canonical"),
    [
        ("EPD", [(1, "EPD")], "1EPD"),
        ("2EPD", [(2, "EPD")], "2EPD"),
        ("1E1P1D", [(1, "E"), (1, "P"), (1, "D")], "1E1P1D"),
        ("1E3P4D", [(1, "E"), (3, "P"), (4, "D")], "1E3P4D"),
        ("4E12P16D", [(4, "E"), (12, "P"), (16, "D")], "4E12P16D"),
        ("2EP2D", [(2, "EP"), (2, "D")], "2EP2D"),
        ("2ED1P", [(2, "ED"), (1, "P")], "2ED1P"),
        ("ED+P", [(1, "ED"), (1, "P")], "1ED1P"),
        ("E+P+D", [(1, "E"), (1, "P"), (1, "D")], "1E1P1D"),
        ("PD+E", [(1, "PD"), (1, "E")], "1PD1E"),
        ("3P + 2D", [(3, "P"), (2, "D")], "3P2D"),
        (" 2e p\td ", [(2, "EPD")], "2EPD"),
        ("DP", [(1, "PD")], "1PD"),
        ("1EPD1D", [(1, "EPD"), (1, "D")], "1EPD1D"),
        ("65536PD", [(65536, "PD")], "65536PD"),
        ("E+E+2P+P+D", [(2, "E"), (3, "P"), (1, "D")], "2E3P1D"),
        ("1E1PD1E1PD", [(1, "E"), (1, "PD"), (1, "E"), (1, "PD")], "1E1PD1E1PD"),
    ],
)
def test_what_a_placement_means(text: str, groups: list[tuple[int, str]], canonical: str) -> None:
    placement = Placement.parse(text)
    assert [(group.count, group.roles) for group in placement.groups] == groups
    assert str(placement) == canonical
    assert Placement.parse(canonical) == placement


@pytest.mark.parametrize("text", ["", "+", "E+", "12", "EPD2", "E-P-D", "1E1P1D!", "é", "E++P+D", "1.5EPD", "²EPD"])
def test_what_is_no_placement(text: str) -> None:
    with pytest.raises(PlacementError, match=r"such as 1E3P4D or ED\+P|D \(decode\)|for example EPD"):
        Placement.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a placement: write counts and letters of E, P, D, such as 1E3P4D or ED+P"),
        ("EPD2", "'EPD2' is not a placement: write counts and letters of E, P, D, such as 1E3P4D or ED+P"),
        ("0EPD", "placement '0EPD': an instance count must lie between 1 and 65536, got 0"),
        ("65537PD", "placement '65537PD': an instance count must lie between 1 and 65536, got 65537"),
        ("EXYD", "placement 'EXYD' names unknown stage X, Y; the stages are E (encode), P (prefill), D (decode)"),
        ("EPDP", "placement 'EPDP' names a stage twice in 'EPDP'; the stages are E (encode), P (prefill), D (decode)"),
        ("2E", "placement 2E has no instance for stage P and D; a placement needs prefill (P) and decode (D), "
         "for example EPD, 1EP1D or 1E1P1D"),
        ("E+P", "placement 1E1P has no instance for stage D; a placement needs prefill (P) and decode (D), "
         "for example EPD, 1EP1D or 1E1P1D"),
    ],
)  # fmt: skip
def test_what_is_said_about_it(text: str, message: str) -> None:
    with pytest.raises(PlacementError) as error:
        Placement.parse(text)
    assert str(error.value) == message


def test_one_instances_roles() -> None:
    assert Group.parse("E") == Group(1, "E")
    assert Group.parse("dpE") == Group(1, "EPD")


@pytest.mark.parametrize("roles", ["", "2E", "E+P", "E P", None, 3])
def test_what_are_no_roles(roles: object) -> None:
    with pytest.raises(PlacementError) as error:
        Group.parse(roles)  # type: ignore[arg-type]
    assert str(error.value) == f"an instance's roles are letters of E, P, D, such as 'EP', got {roles!r}"


def test_roles_that_are_unknown_or_twice_are_named() -> None:
    with pytest.raises(PlacementError, match="placement 'eX' names unknown stage X; the stages are"):
        Group.parse("eX")
    with pytest.raises(PlacementError, match="placement 'EE' names a stage twice in 'EE'"):
        Group.parse("EE")


def test_no_group_is_no_placement() -> None:
    with pytest.raises(PlacementError, match="no instance for stage P and D"):
        Placement.of([])


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("EPD", "EPD"),
        ("7EPD", "EPD"),
        ("2EP3D", "EP+D"),
        ("3D2EP", "EP+D"),
        ("2ED1P", "ED+P"),
        ("1E3P4D", "E+P+D"),
        ("1E1E2P1D", "E+P+D"),
        ("1E2PD", "PD+E"),
        ("PD", "PD"),
        ("1D1P", "P+D"),
        ("1E1EPD", "EPD+E"),
        ("1D1PD1EPD", "EPD+PD+D"),
        ("1E1EP1P1D", "EP+E+P+D"),
    ],
)
def test_the_disaggregation_method(text: str, method: str) -> None:
    assert Placement.parse(text).method == method


def test_every_method_is_its_own_name() -> None:
    assert METHODS == ("EPD", "EP+D", "ED+P", "E+P+D", "PD+E")
    assert tuple(Placement.parse(method).method for method in METHODS) == METHODS


def test_instances_have_names_of_their_own() -> None:
    expected = [("E0", "E"), ("P0", "P"), ("P1", "P"), ("E1", "E"), ("E2", "E"), ("D0", "D")]
    assert Placement.parse("1E2P2E1D").instances() == expected
    assert Placement.parse("2EPD").instances() == [("EPD0", "EPD"), ("EPD1", "EPD")]


def test_stages_and_size() -> None:
    placement = Placement.parse("3D2P")
    assert placement.stages == "PD"
    assert placement.size == 5
    assert Placement.parse("2D1EP").stages == "EPD"


def test_what_a_model_needs_of_it() -> None:
    for text in ("EPD", "PD", "1P1D"):
        Placement.parse(text).check(multimodal=False)
    for text in ("EPD", "PD+E", "E+P+D", "ED+P"):
        Placement.parse(text).check(multimodal=True)
    with pytest.raises(PlacementError) as error:
        Placement.parse("2P1D").check(multimodal=True)
    assert str(error.value) == "placement 2P1D has no encode stage (E), which a multimodal model needs"
    with pytest.raises(PlacementError) as error:
        Placement.parse("1E1PD").check(multimodal=False)
    expected = "placement 1E1PD has an encode instance (E), which a text-only model never uses"
    assert str(error.value) == expected


ROLES = st.sampled_from(["E", "P", "D", "EP", "ED", "PD", "EPD"])


@given(st.lists(st.tuples(st.integers(1, 20), ROLES), max_size=5))
def test_a_placement_survives_being_written_and_read(groups: list[tuple[int, str]]) -> None:
    placement = Placement.of([Group(1, "PD"), *(Group(count, roles) for count, roles in groups)])
    assert Placement.parse(str(placement)) == placement
    assert Placement.parse("+".join(str(placement).split())) == placement
    names = [name for name, _ in placement.instances()]
    assert len(set(names)) == len(names) == placement.size
    assert (
        set(placement.stages)
        == {letter for _, roles in placement.instances() for letter in roles}
        <= set(all_letters())
    )


@given(st.text(max_size=8))
def test_whatever_is_written_is_a_placement_or_a_placement_error(text: str) -> None:
    try:
        placement = Placement.parse(text)
    except PlacementError:
        return
    assert Placement.parse(str(placement)) == placement
