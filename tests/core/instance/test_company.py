"""Company: an instance that is reserved says when it is empty, and takes only what runs alone from then on."""

from __future__ import annotations

from msgspec.structs import replace

from support.core_tables import brief, make_core, peer_up, sent, table, work
from trinity.core.instance.instance_core import InstanceCore
from trinity.core.messages import (
    NOWHERE,
    Cancel,
    Finished,
    Offer,
    Part,
    PeerEmpty,
    PeerReserved,
    Release,
    Sampled,
    Stepped,
    Submit,
)
from trinity.core.routing.router import RoundRobin, Router

ALONE = replace(work("r", 4, max_tokens=2), alone="PD")


def reserve(core: InstanceCore, number: int = 1) -> list[str]:
    return brief(core.handle(PeerReserved(core.settings.name, 0, True, number), 0.0))


def refused(core: InstanceCore, event: Submit | Offer) -> bool:
    out = core.handle(event, 0.0)
    ends = [each for each in sent(out, Finished) if each.failure is not None]
    assert all(end.failure is not None and end.failure.fields["cause"] == NOWHERE for end in ends)
    return bool(ends)


def test_one_that_is_empty_says_so_at_once_and_every_time_that_it_is_asked() -> None:
    core = make_core("PD0")
    assert reserve(core, 4) == ["frontend: empty PD0.0 of 4"]
    assert reserve(core, 5) == ["frontend: empty PD0.0 of 5"]
    assert brief(core.handle(PeerReserved("PD0", 0, False), 0.0)) == []


def test_one_that_is_not_says_so_as_the_last_has_gone() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("s", 4, max_tokens=9)), 0.0)
    assert reserve(core) == []
    core.handle(Stepped(1, "joint", {"s": Sampled(7)}), 0.1)
    assert brief(core.handle(Cancel("s"), 0.2)) == []
    out = core.handle(Stepped(2, "joint", {"s": Sampled(7)}), 0.3)
    assert sent(out, PeerEmpty) == [PeerEmpty("PD0", 0, 1)]
    assert not sent(core.handle(Cancel("s"), 0.4), PeerEmpty), "once"


def test_blocks_that_others_still_read_are_company() -> None:
    core = make_core("P0", peers="D0")
    core.handle(Submit(work("s", 4, max_tokens=9)), 0.0)
    core.handle(Stepped(1, "joint", {"s": Sampled(7)}), 0.1)
    assert core.state.outgoing
    assert reserve(core) == []
    (lease,) = core.state.outgoing
    assert sent(core.handle(Release(lease, "pulled"), 0.2), PeerEmpty)


def test_only_what_runs_alone_is_taken_by_one_that_is_reserved() -> None:
    core = make_core("PD0")
    reserve(core)
    assert refused(core, Submit(work("s", 4)))
    assert not refused(core, Submit(ALONE))
    assert refused(core, Submit(work("s", 4)))
    assert refused(core, Submit(replace(ALONE, request="q"))), "two are not alone"
    core.handle(PeerReserved("PD0", 0, False), 0.0)
    assert not refused(core, Submit(work("s", 4)))


def test_what_runs_alone_is_taken_by_none_that_is_not_reserved_or_not_empty() -> None:
    core = make_core("PD0")
    assert refused(core, Submit(ALONE))
    core.handle(Submit(work("s", 4, max_tokens=9)), 0.0)
    reserve(core)
    assert [each.reason for each in sent(core.handle(Submit(ALONE), 0.0), Finished)] == ["error"]


def test_at_other_stages_it_is_like_any_request() -> None:
    core = make_core("PD0")
    assert not refused(core, Submit(replace(ALONE, alone="E")))
    assert not refused(core, Submit(work("s", 4)))


def test_an_offer_to_one_that_is_reserved_is_released_and_goes_back() -> None:
    core = make_core("D0", peers="P0")
    reserve(core)
    offer = Offer(id="P0:1", kind="kv", source="P0", work=work("s", 4), parts=(Part((0,)),), route=("P0",))
    table(core, [(offer, ["P0: release P0:1 failed", "frontend: finished s error 0 by way of P0 D0 MigrationError"])])
    assert not refused(core, replace(offer, id="P0:2", work=replace(ALONE, alone="D")))


def test_routers_send_what_runs_alone_to_what_is_reserved_and_all_else_past_it() -> None:
    router = Router(RoundRobin())
    for name in ("PD0", "PD1", "EPD2"):
        router.add(peer_up(name))
    router.reserve(PeerReserved("PD1", 0, True))
    plain = work("s", 4)
    assert {router.choose("P", plain) for _ in range(6)} == {"PD0", "EPD2"}
    assert {router.choose("P", ALONE) for _ in range(6)} == {"PD1"}
    assert {router.choose("P", replace(ALONE, alone="E")) for _ in range(6)} == {"PD0"}, "nor where it would encode"
    router.reserve(PeerReserved("PD1", 1, True))
    assert {router.choose("P", plain) for _ in range(6)} == {"PD0", "PD1", "EPD2"}, "its next life"
    router.add(replace(peer_up("PD1"), epoch=2))
    assert {router.choose("P", plain) for _ in range(6)} == {"PD0", "EPD2"}, "or a later one"
    router.reserve(PeerReserved("PD1", 1, False))
    assert {router.choose("P", plain) for _ in range(6)} == {"PD0", "PD1", "EPD2"}


def test_a_stage_that_is_reserved_is_waited_for() -> None:
    router = Router(RoundRobin())
    router.add(peer_up("PD0"))
    router.reserve(PeerReserved("PD0", 0, True))
    assert router.choose("P", work("s", 4)) is None
    assert router.awaits("P", work("s", 4))
    assert not router.awaits("P", ALONE)
