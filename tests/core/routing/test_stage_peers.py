"""Instances as sets: numbers in the order of their coming, halves of a set counted, what fits everywhere."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.core_tables import peer_up, work
from trinity.core.messages import PeerUp
from trinity.core.routing.stage_peers import SPARE_SLOTS, Slots, StagePeers, bits_of, fitting, nth_bit


def make_peers(*peers: PeerUp) -> StagePeers:
    slots = Slots()
    for peer in peers:
        slots.add(peer.name)
    return StagePeers.of(peers, slots)


@given(st.integers(0, 1 << 300), st.data())
def test_bits_are_found_by_number_and_in_order(mask: int, data: st.DataObject) -> None:
    places = [place for place in range(mask.bit_length()) if mask >> place & 1]
    assert list(bits_of(mask)) == [1 << place for place in places]
    if places:
        number = data.draw(st.integers(0, len(places) - 1))
        assert nth_bit(mask, number) == 1 << places[number]


@pytest.mark.parametrize(("mask", "number"), [(0, 0), (0b101, 2), (1, -1)])
def test_a_number_that_a_set_lacks_is_refused(mask: int, number: int) -> None:
    with pytest.raises(ValueError, match="no number"):
        nth_bit(mask, number)


def test_numbers_follow_the_order_of_coming_through_hundreds_of_lives() -> None:
    draw, slots, alive = Random(0), Slots(), list[str]()
    renumbered = 0
    for life in range(600):
        name = f"P{draw.randrange(9)}"
        if name in alive and draw.random() < 0.6:
            slots.drop(name)
            alive.remove(name)
        else:
            renumbered += slots.add(name)
            alive += [name] if name not in alive else []
        found = [slots.bit(each) for each in alive]
        assert found == sorted(found), life
        assert all(bit.bit_length() <= 2 * 9 + SPARE_SLOTS + 1 for bit in found), "else sets grow without end"
        assert len({*found}) == len(alive)
    assert renumbered > 1
    assert slots.bit("nobody") == 0


def test_a_part_is_in_order_and_the_whole_is_itself() -> None:
    peers = make_peers(*(peer_up(f"P{number}") for number in range(20)))
    bits = list(bits_of(peers.mask))
    chosen = peers.select(bits[17] | bits[3] | 1 << 40)
    assert [peer.name for peer in chosen] == ["P3", "P17"]
    assert chosen[0] is peers[3]
    assert peers.select(peers.mask) is peers
    assert peers.nth(chosen.mask, 1) is peers[17]
    assert not peers.select(0)
    assert make_peers().mask == 0


def test_hosts_of_sets() -> None:
    placed = ["b", "a", "b", "", "a"]
    peers = make_peers(*(PeerUp(f"P{number}", "P", host=host) for number, host in enumerate(placed)))
    bits = list(bits_of(peers.mask))
    assert list(peers.by_host) == ["b", "a", ""]
    assert [peers.host_of(mask) for mask in (bits[0] | bits[2], bits[1], bits[0] | bits[1], bits[3])] == [
        "b",
        "a",
        "",
        "",
    ]
    assert make_peers(PeerUp("P0", "P", host="h"), PeerUp("P1", "P", host="h")).host_of(3) == "h"


SIZES = st.dictionaries(st.sampled_from(("image", "kv")), st.integers(0, 6), max_size=2)


@given(st.lists(st.tuples(st.sampled_from(("P", "PD", "EPD")), SIZES, st.sampled_from((4, 8))), max_size=5),
       st.integers(1, 30), st.booleans())  # fmt: skip
def test_all_fit_where_each_does(kinds: list[tuple[str, dict[str, int], int]], text: int, image: bool) -> None:
    ups = [PeerUp(f"{roles}{at}", roles, 0, pools, 4, rows) for at, (roles, pools, rows) in enumerate(kinds)]
    asked = work("r", text, "cat*4") if image else work("r", text)
    assert make_peers(*ups).all_fit("P", asked) == (len(list(fitting("P", asked, ups))) == len(ups))


def test_who_sends_requests_back() -> None:
    assert not make_peers(peer_up("P0")).returning
    assert make_peers(peer_up("P0"), PeerUp("P1", "P", returns=True)).returning
