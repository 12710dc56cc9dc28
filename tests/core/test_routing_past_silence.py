"""Requests go past an instance that has been silent for seconds, where another has its stage."""

from __future__ import annotations

from support.core_tables import make_core, make_frontend, peer_up, sent, work
from trinity.core.messages import Offer, PeerDown, PeerSuspect, PeerUp, Sampled, Stepped, Submit
from trinity.core.routing.router import PrefixHits, RoundRobin, Router

SAMPLED = Sampled(7)


def router(*names: str) -> Router:
    made = Router(RoundRobin())
    for name in names:
        made.add(peer_up(name))
    return made


def chosen(made: Router, times: int = 6) -> set[str | None]:
    return {made.choose("D", work("r", 1)) for _ in range(times)}


def test_one_that_is_silent_is_passed_until_it_speaks() -> None:
    made = router("D0", "D1")
    made.avoid(PeerSuspect("D0", 0, True))
    assert chosen(made) == {"D1"}
    made.avoid(PeerSuspect("D0", 0, False))
    assert chosen(made) == {"D0", "D1"}


def test_where_all_are_silent_one_of_them_may_only_be_slow() -> None:
    made = router("D0", "D1")
    for name in ("D0", "D1"):
        made.avoid(PeerSuspect(name, 0, True))
    assert chosen(made) == {"D0", "D1"}


def test_of_a_former_life_or_of_nobody_nothing_is_heard() -> None:
    made = router("D0", "D1")
    made.avoid(PeerSuspect("D0", 3, True))
    made.avoid(PeerSuspect("D7", 0, True))
    assert chosen(made) == {"D0", "D1"}
    made.avoid(PeerSuspect("D0", 0, True))
    made.drop("D0")
    made.add(PeerUp("D0", "D", 1, {"kv": 99}, 4, 4))
    assert chosen(made) == {"D0", "D1"}


def test_a_silent_one_that_alone_has_the_room_is_taken() -> None:
    made = router("D0")
    made.add(PeerUp("D1", "D", 0, {"kv": 0}, 4, 4))
    made.avoid(PeerSuspect("D0", 0, True))
    assert chosen(made) == {"D0"}


def test_what_it_has_cached_leads_nobody_to_it() -> None:
    made = Router(PrefixHits())
    for name in ("P0", "P1"):
        made.add(peer_up(name))
    made.avoid(PeerSuspect("P0", 0, True))
    assert {made.enter(work("r", 1)) for _ in range(4)} == {"P1"}


def test_front_end_and_instances_hear_of_it() -> None:
    frontend = make_frontend()
    frontend.handle(peer_up("P1"), 0.0)
    frontend.handle(PeerSuspect("P0", 0, True), 0.0)
    for number in range(4):
        commands = frontend.handle(Submit(work(f"r{number}", 1)), 0.0)
        assert [each.to for each in commands if hasattr(each, "to")] == ["P1"]  # type: ignore[attr-defined]
    frontend.handle(PeerDown("P1", "it broke"), 1.0)
    frontend.handle(PeerDown("P0", "it froze"), 1.0)
    (end,) = frontend.handle(Submit(work("last", 1)), 1.0)
    assert "P1 is started again: it broke; P0 is started again: it froze" in end.failure.message  # type: ignore[attr-defined]


def test_an_instance_offers_past_a_silent_peer() -> None:
    core = make_core("P0", peers="D0 D1")
    core.handle(PeerSuspect("D0", 0, True), 0.0)
    targets = set()
    for number in range(3):
        out = core.handle(Submit(work(f"r{number}", 1, text=8)), 0.0)
        steps = [each for each in out if type(each).__name__ == "Step"]
        for step in steps:
            done = core.handle(Stepped(step.id, step.lane, {f"r{number}": SAMPLED}), 0.1)  # type: ignore[attr-defined]
            out += done
        targets |= {each.to for each in out if hasattr(each, "message") and isinstance(each.message, Offer)}  # type: ignore[attr-defined]
        assert sent(out, Offer)
    assert targets == {"D1"}
