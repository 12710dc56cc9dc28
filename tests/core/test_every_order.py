"""All orders of events of few requests on real cores, with the death of one instance (``support.every_order``)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import work
from support.every_order import Search
from support.thinned import thinned
from support.virtual.cluster import make_settings
from trinity.core.frontend import Abort, frontend_request
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import Gone, Moved, Submit, Value
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

IMAGE = Submit(work("r", 1, "cat*4", max_tokens=3))
TEXT = Submit(work("s", 2, max_tokens=2))
ROOM = {"image": 4, "kv": 8}
PAIRS = [("EP+D", "EP0"), ("EP+D", "D0"), ("ED+P", "ED0"), ("ED+P", "P0"), ("PD+E", "PD0"), ("PD+E", "E0")]


def search(placement: str, asked: tuple[Value, ...], victim: str, back: bool = False, **settings: Any) -> Search:
    settings.setdefault("rules", BatchRules(token_budget=64, image_budget=64))
    settings.setdefault("transfers", TransferPolicy(early=False))
    own = make_settings(placement, ROOM, image_block_size=4, kv_block_size=4, prefix_cache=False, **settings)
    return Search(own, asked, victim, back)


def ends(found: Search) -> set[str]:
    """Why requests ended, in all orders."""
    return {reason for each in found.ends for _, reason in each}


@pytest.mark.parametrize(("placement", "victim"), PAIRS)
def test_a_request_ends_in_every_order_of_a_death_and_a_return(placement: str, victim: str) -> None:
    found = search(placement, (IMAGE,), victim, back=True)
    assert len(found.run()) > 1000
    assert {"length", "StageError", "Overloaded"} <= ends(found)


@pytest.mark.parametrize("victim", ["", "E0", "P0", "D0"])
def test_a_request_on_three_instances_ends_in_every_order_of_a_death(victim: str) -> None:
    found = search("E+P+D", (IMAGE,), victim)
    assert len(found.run()) > (3000 if victim else 400)
    assert ends(found) == ({"length", "StageError", "MigrationError", "Overloaded"} if victim else {"length"})


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["E0", "P0", "D0"])
def test_two_requests_on_three_instances_end_in_every_order_of_a_death(victim: str) -> None:
    """One with an image and one of text alone: 2.7 million states for the three victims."""
    found = search("E+P+D", (IMAGE, TEXT), victim)
    assert len(found.run()) > 200_000
    assert {"length", "StageError", "MigrationError"} <= ends(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["E0", "P0", "D0"])
def test_a_request_on_three_instances_ends_in_every_order_of_a_death_and_a_return(victim: str) -> None:
    assert len(search("E+P+D", (IMAGE,), victim, back=True).run()) > 50_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("placement", "victim"), PAIRS)
def test_two_requests_end_in_every_order_of_a_death_and_a_return(placement: str, victim: str) -> None:
    assert len(search(placement, (IMAGE, TEXT), victim, back=True).run()) > 10_000


PREFILLING = [("EP+D", "EP0"), ("ED+P", "P0"), ("PD+E", "PD0")]


@pytest.mark.parametrize(("placement", "victim"), thinned(PREFILLING, PREFILLING[1].__eq__))
@pytest.mark.parametrize("reason", ["cancelled", "stop"])
def test_a_request_that_its_reader_gives_up_ends_in_every_order_of_a_death(
    placement: str, victim: str, reason: str
) -> None:
    found = search(placement, (IMAGE, Abort("r", reason)), victim)
    found.run()
    assert reason in ends(found)


def test_events_at_different_cores_commute() -> None:
    found = search("EP+D", (IMAGE,), "EP0", back=True)
    assert sum(map(found.commutes, found.run())) > 3000


# ---------------------------------------------------------------- a rule not kept is noticed


def test_a_loss_that_the_source_does_not_tell_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(s: State, to: str, message: Value) -> None:
        if not isinstance(message, Gone):
            said(s, to, message)

    said = State.send
    monkeypatch.setattr(State, "send", send)
    with pytest.raises(AssertionError, match="still waits"):
        search("E+P+D", (IMAGE,), "P0").run()


def test_a_first_token_that_nobody_has_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def anonymous(s: State, state: RequestState, hop: int) -> Moved:
        return replace(said(s, state, hop), source="")

    said = State._moved
    monkeypatch.setattr(State, "_moved", anonymous)
    with pytest.raises(AssertionError, match="still waits"):
        search("EP+D", (IMAGE,), "EP0").run()


def test_a_former_life_that_counts_as_up_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words are the same, but what it was given is gone: no channel leads there any more."""
    monkeypatch.setattr(frontend_request, "lives_on", lambda router, life: True)
    with pytest.raises(AssertionError, match="still waits"):
        search("EP+D", (IMAGE,), "D0", back=True).run()
