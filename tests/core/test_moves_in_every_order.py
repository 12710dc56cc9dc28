"""A decode is asked to move, in every order of events with the death and the return of an instance, and of a cancel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.core_tables import work
from support.every_order import Search
from support.virtual.cluster import make_settings
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort, decode_moves, frontend_core
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.messages import MoveRequest
from trinity.core.instance.state import State
from trinity.core.messages import Moved, Submit, Value
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import PrecopyMode, TransferPolicy

TEXT = Submit(work("r", 1, max_tokens=3))
LONG = Submit(work("r", 4, max_tokens=3))  # its first block is full
THERE, BACK = MoveRequest("r", "D1"), MoveRequest("r", "D0")
ROOM = {"kv": 8}


def search(
    placement: str, asked: tuple[Value, ...], victim: str = "", back: bool = False, precopy: PrecopyMode = "off"
) -> Search:
    rules, transfers = BatchRules(token_budget=64, image_budget=64), TransferPolicy(early=False, precopy=precopy)
    cached = precopy != "off"
    own = make_settings(placement, ROOM, kv_block_size=4, prefix_cache=cached, rules=rules, transfers=transfers)
    return Search(own, asked, victim, back, FailurePolicy(recoveries=2, wait_s=0.0))


def ends(found: Search) -> set[str]:
    return {reason for each in found.ends for _, reason in each}


@pytest.mark.parametrize("asked", [(TEXT, THERE), (TEXT, THERE, BACK), (TEXT, THERE, THERE)])
def test_a_decode_that_moves_is_whole_in_every_order(asked: tuple[Value, ...]) -> None:
    found = search("P+2D", asked)
    assert len(found.run()) > 300
    assert ends(found) == {"length"}


def test_one_without_a_prefill_instance_moves_as_well() -> None:
    found = search("2PD", (TEXT, MoveRequest("r", "PD1"), MoveRequest("r", "PD0")))
    assert len(found.run()) > 100
    assert ends(found) == {"length"}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["D1", pytest.param("D0", marks=pytest.mark.slow)])
def test_it_is_whole_in_every_order_of_the_death_of_its_source_or_its_target(victim: str) -> None:
    found = search("P+2D", (TEXT, THERE), victim)
    assert len(found.run()) > 5000
    assert ends(found) == {"length"}


def test_it_is_whole_or_cancelled_in_every_order_with_a_cancel() -> None:
    found = search("P+2D", (TEXT, THERE, Abort("r", "cancelled")))
    assert len(found.run()) > 1000
    assert ends(found) == {"length", "cancelled"}


@pytest.mark.parametrize("victim", ["", "D1"])
def test_it_is_whole_in_every_order_where_its_full_blocks_go_ahead(victim: str) -> None:
    found = search("P+2D", (LONG, THERE), victim, precopy="on")
    assert len(found.run()) > (300 if not victim else 5000)
    assert ends(found) == {"length"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("asked", "victim", "back"),
    [
        ((TEXT, THERE), "D1", True),
        ((TEXT, THERE, Abort("r", "cancelled")), "D0", False),
        ((TEXT, THERE, Abort("r", "cancelled")), "D1", False),
        ((TEXT, THERE, BACK), "D1", False),
    ],
)
def test_many_more_orders_with_a_death(asked: tuple[Value, ...], victim: str, back: bool) -> None:
    """With the return of D1: four million states."""
    found = search("P+2D", asked, victim, back)
    assert len(found.run()) > 20_000
    assert ends(found) <= {"length", "cancelled"}


# ---------------------------------------------------------------- a rule not kept is noticed


def without_a_tombstone(patch: pytest.MonkeyPatch) -> None:
    """The source does not remember where it went, so that nobody hears of its target's death."""
    patch.setattr(State, "leave_tombstone", lambda s, state, to: None)


def without_senders(patch: pytest.MonkeyPatch) -> None:
    """The front end does not remember whose tokens it lacks."""

    def noted(entry: FrontendRequest, event: Moved) -> list[Value]:
        before = list(entry.senders)
        found = plainly(entry, event)
        entry.senders = before if event.start else entry.senders
        return found

    plainly = decode_moves.note_moved
    patch.setattr(frontend_core, "note_moved", noted)


@pytest.mark.parametrize(
    ("broken", "victim", "back"),
    [(without_a_tombstone, "D1", False), pytest.param(without_senders, "D0", False, marks=pytest.mark.slow)],
)
def test_a_rule_that_is_not_kept_is_missed(
    broken: Callable[[pytest.MonkeyPatch], None], victim: str, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=r"still waits|still has"):
        search("P+2D", (TEXT, THERE), victim, back).run()
