"""Placements: what is one, what it means, and what is said about one that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trinity
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


RANKS = "ranks of one instance on several devices"
DEVICES = "devices or hosts"
SHARING = "groups of instances that share a device"
INSTEAD = {
    RANKS: "an instance has one device: write more instances, such as 2P, or a smaller dtype",
    DEVICES: "give a list of trinity.Instance, each with its device= or address=, in place of the placement",
    SHARING: "write a count ahead of letters, such as 2EP; those of a list of trinity.Instance share a device=",
}


@pytest.mark.parametrize(
    ("text", "what", "part"),
    [
        ("1E@2+PD", DEVICES, "@2"),
        ("2EP@cuda:1+2D", DEVICES, "@cuda:1"),
        ("1E1P1D @ host-a", DEVICES, "@ host-a"),
        ("2x1EP+D", SHARING, "2x"),
        ("2X(EP)+D", SHARING, "2X"),
        ("(1E1P)1D", SHARING, "("),
        ("[E|P]+D", SHARING, "["),
        ("2*EP+D", SHARING, "*"),
        ("1P:tp2+D", RANKS, ":tp2"),
        ("1E1P:tp=2+D", RANKS, ":tp=2"),
        ("PD tp=4", RANKS, "tp=4"),
        ("1PTP2", RANKS, "TP2"),
        ("EPD/pp=2", RANKS, "/pp=2"),
        ("1P:2+D", RANKS, ":2"),
    ],
)
def test_what_placements_do_not_say_is_refused_by_name(text: str, what: str, part: str) -> None:
    with pytest.raises(PlacementError) as error:
        Placement.parse(text)
    assert str(error.value) == f"placement {text!r} names {what} ({part!r}), which placements cannot: {INSTEAD[what]}"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["1" * 200_000, "1@" + "x" * 200_000, "tp" * 100_000, "x1" * 100_000, ":" * 200_000])
def test_a_long_text_is_refused_at_once_and_in_few_words(text: str) -> None:
    with pytest.raises(PlacementError) as error:
        Placement.parse(text)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("roles", "what"), [("E@cuda:1", DEVICES), ("P:tp2", RANKS), ("2xEP", SHARING), ("(E)", SHARING)]
)
def test_nor_do_the_roles_of_an_instance(roles: str, what: str) -> None:
    with pytest.raises(PlacementError, match=what):
        trinity.Instance(roles)


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
