"""Which encoders a request's media items are dealt to, and what the front end sends."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, holding, make_frontend, peer_up, sent, work
from trinity.core.frontend.dispatch import deal_items
from trinity.core.messages import IMAGE, PeerLoad, PeerSuspect, PeerUp, Submit, Work
from trinity.core.routing.router import LeastLoaded, RoundRobin, Router


def router(peers: str = "E0 E1 E2 P0 D0") -> Router:
    known = Router(RoundRobin())
    known.counts = True
    for peer in peers.split():
        known.add(peer_up(peer))
    return known


def load(name: str, waits: float = 0.0, unit: float = 1.0) -> PeerLoad:
    return PeerLoad(name, predicted_s={"E": waits}, unit_s={"E": unit})


def busy(known: Router, **seconds: float) -> Router:
    for name, each in seconds.items():
        known.take(load(name, each))
    return known


def four(**fields: Any) -> Work:
    return work("r", *(f"{name}*4" for name in ("cat", "dog", "owl", "fox")), 1, **fields)


def dealt(known: Router, of: Work, most: int = 9, first: str = "E0") -> str:
    known.count(first, "E", sum(span.tokens for span in of.media))
    return " ".join(each or "-" for each in deal_items(known, of, first, most))


def test_images_are_dealt_to_those_that_are_through_first() -> None:
    assert dealt(busy(router(), E0=0, E1=0, E2=0), four()) == "- E1 E2 -"
    assert dealt(busy(router(), E0=0, E1=4, E2=0), four()) == "- E2 - E2", "E1 would be through as late as both"
    assert dealt(busy(router(), E0=8, E1=0, E2=1), four()) == "E1 E2 E1 E2"


def test_the_largest_go_first() -> None:
    unequal = work("r", "cat*4", "dog*12", "owl*4", "fox*4", 1)
    assert dealt(busy(router("E0 E1 P0 D0"), E0=0, E1=0), unequal) == "E1 - E1 E1"


def test_at_most_so_many_encoders_take_part() -> None:
    known = busy(router(), E0=0, E1=1, E2=0)
    assert dealt(known, four(), most=2) == "- E2 - E2"
    assert dealt(busy(router(), E0=0, E1=0, E2=0), four(), most=1) == ""


def test_speeds_that_nobody_knows_are_those_that_are_known() -> None:
    """An encoder that has done nothing yet is no faster than the others."""
    known = router("E0 E1 P0 D0")
    known.take(load("E0", 0.0, 0.5))
    known.take(load("E1", 0.0, 0.0))
    assert dealt(known, four()) == "- E1 - E1"
    assert dealt(router("E0 E1 P0 D0"), four()) == "- E1 - E1", "nor where nothing is known of any"


def test_an_encoder_that_has_not_reported_is_as_fast_as_the_others() -> None:
    known = router("E0 E1 P0 D0")
    known.take(load("E0", 0.0, 0.5))
    assert dealt(known, four()) == "- E1 - E1"


@pytest.mark.parametrize(
    ("waits", "helpers"),
    [((0.0, 5.5), ""), ((0.0, 3.0), "- - E1 -"), ((20.0, 10.0), ""), ((20.0, 5.0), "E1 E1 E1 E1")],
    ids=["gains 6 %", "gains a quarter", "busy for longer than eight seconds", "all of it"],
)
def test_seconds_are_those_of_the_tokens(waits: tuple[float, float], helpers: str) -> None:
    """An image takes two seconds, all of them eight."""
    known = router("E0 E1 P0 D0")
    for name, seconds in zip(("E0", "E1"), waits, strict=True):
        known.take(load(name, seconds, 0.5))
    assert dealt(known, four()) == helpers


def test_two_images_are_dealt_and_one_stays_where_it_was_sent() -> None:
    known = busy(router("E0 E1 P0 D0"), E0=0, E1=0)
    assert deal_items(known, work("r", "cat*4", "dog*4", 1), "E0", 2) == ("", "E1")
    assert deal_items(busy(known, E0=4, E1=0), work("s", "cat*4", 1), "E0", 2) == ()


def test_a_slow_encoder_gets_less() -> None:
    known = router("E0 E1 P0 D0")
    known.take(load("E0", 0.0, 1.0))
    known.take(load("E1", 0.0, 3.0))
    assert dealt(known, four()) == "- - - E1"


@pytest.mark.parametrize(
    ("peers", "waits", "of"),
    [
        ("E0 E1 P0 D0", {"E0": 0, "E1": 0}, work("r", "cat*4", 1)),
        ("E0 E1 P0 D0", {"E0": 0, "E1": 0}, work("r", "cat*4", 1, "cat*4")),
        ("E0 E1 P0 D0", {"E0": 0, "E1": 0}, four(encode_only=True)),
        ("E0 EP1 P0 D0", {"E0": 0, "EP1": 1}, four()),
        ("E0 P0 D0", {"E0": 0}, four()),
        ("E0 E1 P0 D0", {"E0": 0, "E1": 16}, four()),
        ("E0 E1 P0 D0", {"E0": 150, "E1": 150}, four()),
        ("E0 E1 P0 D0", {"E0": 0, "E1": 0}, work("r", "cat*4", "dog*96", 1)),
    ],
    ids=[
        "one image",
        "one content",
        "features",
        "it prefills too, and is not at rest",
        "alone",
        "busy",
        "all are",
        "gains too little",
    ],
)
def test_otherwise_all_stay_with_one(peers: str, waits: dict[str, float], of: Work) -> None:
    assert dealt(busy(router(peers), **waits), of) == ""


def test_those_that_prefill_or_decode_take_part_while_they_are_at_rest() -> None:
    assert dealt(busy(router("EP0 E1 D0"), EP0=0, E1=0), four(), first="EP0") == "- E1 - E1"
    assert dealt(busy(router("EPD0 EPD1"), EPD0=0, EPD1=0), four(), first="EPD0") == "- EPD1 - EPD1"
    assert dealt(busy(router("E0 ED1 P0"), E0=0, ED1=0), four()) == "- ED1 - ED1"
    for letter in "PD":
        known = busy(router("EPD0 EPD1"), EPD0=0)
        known.take(PeerLoad("EPD1", predicted_s={"E": 0.0, letter: 0.01}, unit_s={"E": 1.0}))
        assert dealt(known, four(), first="EPD0") == "", letter
    sent_since = busy(router("EPD0 EPD1"), EPD0=0, EPD1=0)
    sent_since.count("EPD1", "P", 1)
    assert dealt(sent_since, four(), first="EPD0") == ""


def test_a_helper_needs_room_for_the_images_alone() -> None:
    known = busy(router("EPD0"), EPD0=0)
    known.add(replace(peer_up("EPD1"), pools={"image": 4, "kv": 0}))
    known.take(load("EPD1"))
    assert dealt(known, four(), first="EPD0") == "- EPD1 - EPD1"
    known.add(replace(peer_up("EPD1"), pools={"image": 3, "kv": 9}))
    assert dealt(known, four(), first="EPD0") == ""


def test_one_that_is_silent_does_not_help() -> None:
    known = busy(router("E0 E1 E2 P0 D0"), E0=0, E1=0, E2=0)
    known.avoid(PeerSuspect("E1", 0, suspected=True))
    assert dealt(known, four()) == "- E2 - E2"


def test_one_whose_pool_is_too_small_does_not_help() -> None:
    known = busy(router("E0 P0 D0"), E0=0)
    known.add(peer_up("E1", image=3))
    assert dealt(known, four()) == ""


@pytest.mark.parametrize("holder", ["E0", "E1", "P0"])
def test_images_that_some_instance_has_stay_where_they_are(holder: str) -> None:
    known = busy(router("E0 E1 P0 D0"), E0=0, E1=0)
    known.take(replace(holding(holder, work("x", "cat*4", "dog*4"), IMAGE), unit_s={"E": 1.0}))
    assert dealt(known, four()) == "- - - E1"


def test_equal_images_go_to_one_helper() -> None:
    of = work("r", "cat*4", "dog*4", "cat*4", "dog*4", 1)
    assert dealt(busy(router("E0 E1 P0 D0"), E0=0, E1=0), of) == "- E1 - E1"


def test_what_was_dealt_counts_until_the_next_report() -> None:
    known = busy(router("E0 E1 P0 D0"), E0=0, E1=0)
    assert dealt(known, four()) == "- E1 - E1"
    assert (known.seconds("E0", "E"), known.seconds("E1", "E")) == (8.0, 8.0)
    assert dealt(known, replace(four(), request="s")) == "- E1 - E1"
    assert (known.seconds("E0", "E"), known.seconds("E1", "E")) == (16.0, 16.0)
    assert dealt(known, replace(four(), request="t")) == "", "both are busy for longer than it would take alone"


# ---------------------------------------------------------------- what the front end sends


def test_the_first_gets_all_inputs_and_each_helper_its_own() -> None:
    core = make_frontend("E0 E1 E2 P0 D0", spread=9)
    commands = core.handle(Submit(four(deadline_s=7.0), ("a", "b", "c", "d")), 0.0)
    assert brief(commands) == ["E0: submit r left to -,E1,E2,-", "E1: submit r~0+1 for E0", "E2: submit r~0+2 for E0"]
    whole, second, third = sent(commands, Submit)
    assert (whole.inputs, second.inputs, third.inputs) == (("a", "b", "c", "d"), ("b",), ("c",))
    assert (second.work.media, second.work.encode_only, second.work.prompt) == (four().media[1:2], True, ())
    assert (second.work.deadline_s, second.work.number) == (7.0, 1)


def test_equal_images_are_sent_once() -> None:
    core = make_frontend("E0 E1 P0 D0", spread=2)
    of = work("r", "cat*4", "dog*4", "cat*4", "dog*4", 1)
    assert brief(core.handle(Submit(of), 0.0)) == ["E0: submit r left to -,E1,-,E1", "E1: submit r~0+1 for E0"]


def test_a_request_without_inputs_is_spread_as_well() -> None:
    core = make_frontend("E0 E1 P0 D0", spread=2)
    assert [each.inputs for each in sent(core.handle(Submit(four()), 0.0), Submit)] == [(), (), ()]


def test_the_default_is_one_encoder() -> None:
    core = make_frontend("E0 E1 E2 P0 D0")
    assert brief(core.handle(Submit(four()), 0.0)) == ["E0: submit r"]


def test_a_policy_that_reads_loads_reads_what_was_dealt() -> None:
    core = make_frontend("E0 E1 P0 D0", spread=2)
    core.router.policy = LeastLoaded()
    core.handle(Submit(four()), 0.0)
    assert core.router.seconds("E0", "E") == core.router.seconds("E1", "E") > 0.0


def test_an_instance_of_another_host_helps_too() -> None:
    core = make_frontend("E0 P0 D0", spread=2)
    core.handle(PeerUp("E1", "E", 0, {"image": 99}, 4, 4, host="far"), 0.0)
    assert len(sent(core.handle(Submit(four()), 0.0), Submit)) == 3
