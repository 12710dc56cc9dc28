"""The source of an offer that its target has passed: it offers the same blocks to the sibling, and what else may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.core_tables import brief, done, emptied, make_core, make_frontend, sent, table, work
from support.recovering import recovering
from trinity.core import InstanceCore
from trinity.core.frontend import End
from trinity.core.messages import (
    Cancel,
    Commit,
    Emit,
    Finished,
    Forget,
    Gone,
    Moved,
    Offer,
    PeerDown,
    PeerReserved,
    PeerSuspect,
    Release,
    Sampled,
    Spare,
    Submit,
    Value,
)

PASSED = Release("P0:1", "passed", to="D1", waited_s=1.5)


def prefilled(peers: str = "D0 D1 D2", **fields: Any) -> InstanceCore:
    """P0 has prefilled r and committed it to D0."""
    core = make_core("P0", peers=peers)
    core.handle(Submit(work("r", 5, **fields)), 0.0)
    core.handle(done(1, r=5), 1.0)
    return core


def test_the_same_blocks_go_to_the_sibling_with_all_that_was_said() -> None:
    core = prefilled(deadline_s=9.0)
    (before,) = [lease.said for lease in core.state.outgoing.values()]
    assert before is not None
    out = core.handle(PASSED, 3.0)
    again = ["D1: offer P0:2 kv of r [0,1] by way of P0 D0 P0", "D1: ready P0:2 0", "D1: commit P0:2 after 5"]
    assert brief(out) == again
    assert sent(out, Moved) == [Moved("r", 0, "P0", 2, passed=True)]
    (offer,), (commit,) = sent(out, Offer), sent(out, Commit)
    assert offer.passed
    assert (commit.tokens, commit.deadline_s) == (before.tokens, 6.0)
    assert commit.spans == {**before.spans, "pd_migration": 1.5}
    assert core.state.kv.held == 2, "leased once"
    table(core, [(Cancel("r"), ["D1: cancel r"]), (Release("P0:2", "pulled"), []), (Forget("r"), [])], 4.0)
    emptied(core)


def test_features_go_likewise() -> None:
    core = make_core("E0", peers="P0 P1")
    core.handle(Submit(work("r", "cat*8", 1)), 0.0)
    core.handle(done(1), 1.0)
    out = core.handle(Release("E0:1", "passed", to="P1", waited_s=0.5), 2.0)
    assert brief(out) == ["P1: offer E0:2 image of r [0,1] by way of E0 P0 E0", "P1: ready E0:2 0", "P1: commit E0:2"]
    assert sent(out, Commit)[0].spans["ep_migration"] == 0.5
    table(core, [(Release("E0:2", "pulled"), []), (Forget("r"), [])], 3.0)
    emptied(core)


@pytest.mark.parametrize(
    "news",
    [PeerDown("D1"), PeerSuspect("D1", 0, suspected=True), PeerReserved("D1", 0, True, 1)],
    ids=lambda each: type(each).__name__,
)
def test_a_sibling_that_is_not_to_have_it_hears_so_and_another_gets_it(news: Value) -> None:
    core = prefilled("D0 D1")
    core.handle(news, 2.0)
    out = brief(core.handle(PASSED, 3.0))
    assert out[0] == "D0: offer P0:2 kv of r [0,1] by way of P0 D0 P0"
    assert out[-1] == "D1: spare none"


def ended(core: InstanceCore) -> None:
    core.handle(Forget("r"), 2.0)


def expired(core: InstanceCore) -> None:
    core.handle(PeerDown("D2"), 2.0)
    for lease in list(core.state.outgoing.values()):
        del core.state.outgoing[lease.id]
        core.state.kv.drop(lease.blocks)


@pytest.mark.parametrize("before", [ended, expired], ids=["the request has ended", "the lease has"])
def test_what_is_over_goes_to_nobody_and_the_sibling_hears_so(before: Callable[[InstanceCore], None]) -> None:
    core = prefilled()
    before(core)
    assert brief(core.handle(PASSED, 3.0)) == ["D1: spare none"]
    core.handle(Forget("r"), 4.0)
    emptied(core)


def test_where_nobody_may_have_it_the_owner_hears_so() -> None:
    core = prefilled("D0 D1")
    for name in ("D0", "D1"):
        core.handle(PeerReserved(name, 0, True, 1), 2.0)
    out = core.handle(PASSED, 3.0)
    (end,) = sent(out, Finished)
    assert end.failure is not None
    assert (end.failure.error, end.route) == ("MigrationError", ("P0", "D0"))
    assert sent(out, Spare) == [Spare("P0", "none")]
    core.handle(Forget("r"), 4.0)
    emptied(core)


def test_a_loss_after_that_costs_no_life_once() -> None:
    """Passed to D1, which dies; then with D2."""
    core = prefilled()
    core.handle(PASSED, 3.0)
    out = core.handle(PeerDown("D1"), 4.0)
    assert brief(out)[0] in (
        "D0: offer P0:3 kv of r [0,1] by way of P0 D0 P0 D1 P0",
        "D2: offer P0:3 kv of r [0,1] by way of P0 D0 P0 D1 P0",
    )
    (offer,), (moved,) = sent(out, Offer), sent(out, Moved)
    assert offer.passed, "it is not passed again"
    assert (moved.hop, moved.passed) == (4, False), "the death counts"
    (target,) = [lease.target for lease in core.state.outgoing.values()]
    assert sent(core.handle(PeerDown(target), 5.0), Gone) == [Gone("r", 0, "P0", target, 5)]


def test_one_that_was_lost_before_is_passed_as_well() -> None:
    core = prefilled()
    (offer,) = sent(core.handle(PeerDown("D0"), 2.0), Offer)
    assert not offer.passed
    (lease,) = core.state.outgoing.values()
    other = "D2" if lease.target == "D1" else "D1"
    (again,) = sent(core.handle(Release("P0:2", "passed", to=other), 3.0), Offer)
    assert (again.passed, again.route) == (True, ("P0", "D0", "P0", lease.target, "P0"))
    assert sent(core.handle(PeerDown(other), 4.0), Gone) == [Gone("r", 0, "P0", other, 5)], "once after a loss"


# ---------------------------------------------------------------- the front end

TO_P0, TO_D0 = Moved("r", 0, "P0", 1), Moved("r", 0, "D0", 2, 0, "P0", 0)
BACK, TO_D1 = Moved("r", 0, "P0", 3, passed=True), Moved("r", 0, "D1", 4, 0, "P0", 0)
FIRST = Emit(("r",), (0,), (0,), (Sampled(5),))


def test_the_death_of_one_where_it_only_waited_does_not_count() -> None:
    """After a loss it does (test_second_offers): that one may have died of it."""
    for heard, deaths in ((BACK, []), (Moved("r", 0, "P0", 3), ["D0"])):
        core = recovering("E0 P0 D0 D1")
        for event in (Submit(work("r", "cat", 1, max_tokens=3)), TO_P0, FIRST, TO_D0, heard, TO_D1, PeerDown("D0")):
            assert not [each for each in core.handle(event, 1.0) if isinstance(each, End)]
        assert [death.life.name for death in core.entries["r"].suspicion.deaths] == deaths


def test_where_it_waited_in_a_former_life_is_forgotten() -> None:
    core = recovering("E0 P0 D0 D1")
    for event in (Submit(work("r", "cat", 1, max_tokens=3)), TO_P0, FIRST, TO_D0, BACK, TO_D1):
        core.handle(event, 1.0)
    assert core.entries["r"].waited_at == {2}
    core.handle(PeerDown("D1"), 2.0)
    core.handle(Gone("r", 0, "P0", "D1", 4), 2.0)
    assert core.entries["r"].waited_at == frozenset()


def test_who_passed_and_lost_its_source_speaks_for_it() -> None:
    """The source may have died before it offered the request elsewhere."""
    core = make_frontend("E0 P0 D0 D1")
    found: list[str] = []
    gone = Gone("r", 0, "D0", "P0", 3)
    for event in (Submit(work("r", "cat", 1, max_tokens=3)), TO_P0, FIRST, TO_D0, gone, PeerDown("P0")):
        found += [each.reason for each in core.handle(event, 0.0) if isinstance(each, End)]
    assert found == ["error"]
