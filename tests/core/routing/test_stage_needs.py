"""Needs of a request at a stage: blocks, units of work, and who could ever hold it."""

from __future__ import annotations

import pytest

from support.core_tables import peer_up, work
from trinity.core.routing.stage_peers import fitting, kv_tokens, needs, units_of


@pytest.mark.parametrize(
    ("letter", "roles", "expected"),
    [
        ("E", "E", {"image": 4}),
        ("E", "ED", {"image": 4}),
        ("E", "EP", {"image": 4, "kv": 4}),
        ("E", "EPD", {"image": 4, "kv": 5}),
        ("P", "P", {"image": 4, "kv": 4}),
        ("P", "EP", {"image": 4, "kv": 4}),
        ("P", "PD", {"image": 4, "kv": 5}),
        ("D", "D", {"kv": 5}),
        ("D", "ED", {"kv": 5}),
        ("D", "EPD", {"kv": 5}),
    ],
)
def test_a_stage_needs_blocks_for_itself_and_for_those_that_follow_here(
    letter: str, roles: str, expected: dict[str, int]
) -> None:
    """Four image blocks of four rows for five and six rows; 13 prompt tokens and five more to decode from."""
    request = work("r", 1, "cat*5", "dog*6", 1, max_tokens=6)
    assert needs(letter, request, roles, 4, 4) == expected
    peer = peer_up(f"{roles}0", image=expected.get("image", 0), kv=expected.get("kv", 0))

    assert list(fitting(letter, request, [peer])) == [peer]
    for kind in expected:
        smaller = {**peer.pools, kind: peer.pools[kind] - 1}
        assert not list(fitting(letter, request, [peer_up(f"{roles}0", **smaller)]))


def test_text_alone_needs_no_image_blocks() -> None:
    assert needs("P", work("r", 4, max_tokens=2), "EPD", 4, 4) == {"kv": 2}


def test_kv_is_kept_for_every_output_but_the_last_and_where_it_is_decoded() -> None:
    assert kv_tokens(work("r", 7, max_tokens=5), decodes=True) == 11
    assert kv_tokens(work("r", 7, max_tokens=5), decodes=False) == 7
    assert kv_tokens(work("r", 7, max_tokens=1), decodes=True) == 7


def test_units_are_those_that_predictions_count() -> None:
    request = work("r", 1, "cat*5", "dog*6", 1, max_tokens=6)
    assert [units_of(letter, request) for letter in "EPD"] == [11, 13, 1]


def test_of_mixed_instances_those_that_fit_are_found_in_order() -> None:
    peers = [peer_up("P0"), peer_up("P1", kv=1), peer_up("E0"), peer_up("PD0", kv=4), peer_up("EPD1")]
    assert [peer.name for peer in fitting("P", work("r", 13, max_tokens=6), peers)] == ["P0", "EPD1"]
