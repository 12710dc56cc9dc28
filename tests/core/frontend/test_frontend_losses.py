"""FrontendCore where an instance dies: no order of what it said, what others say and the loss leaves a request waiting.

The three orders of ``ORDERS`` left it waiting for ever while the source of an offer said where the request went.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from support.core_tables import brief, emitted, make_frontend, peer_up, work
from trinity.core.frontend import Abort, End, FrontendCore
from trinity.core.messages import Failure, Finished, Gone, Moved, PeerDown, PeerSuspect, PeerUp, Sampled, Submit, Value

TO_P0 = Moved("r", 0, "P0", 1)
TO_D0 = Moved("r", 0, "D0", 2, 0, "P0", 0)
FIRST, SECOND, THIRD = (emitted(("r", 0, index, Sampled(5 + index))) for index in range(3))
WHOLE = Finished(request="r", attempt=0, reason="length", count=3, route=("E0", "P0", "D0"))


def again(name: str, epoch: int) -> PeerUp:
    up = peer_up(name)
    return PeerUp(up.name, up.roles, epoch, up.pools, up.image_block_size, up.kv_block_size)


def told(*events: Value) -> tuple[FrontendCore, list[tuple[str, str]]]:
    """Hand the front end a request and these events. Returns it, and the ends that it told: request and why."""
    core = make_frontend("E0 P0 D0 D1")
    ends = []
    for event in (Submit(work("r", "cat", 1, max_tokens=3)), *events):
        found = [each for each in core.handle(event, 0.0) if isinstance(each, End)]
        ends += [(end.request, end.failure.error if end.failure else end.reason) for end in found]
    return core, ends


ORDERS = {
    "it served to the end, and the first token was cut off": (TO_D0, SECOND, THIRD, WHOLE, PeerDown("P0")),
    "the source died before its offer left": (TO_P0, FIRST, PeerDown("P0")),
    "the target died before it heard of the offer": (
        TO_P0,
        PeerDown("D0"),
        FIRST,
        again("D0", 1),
        Gone("r", 0, "P0", "D0", 2),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_orders_that_left_a_request_waiting(order: str) -> None:
    core, ends = told(*ORDERS[order])
    assert ends == [("r", "StageError")]
    assert (core.entries, core.waiting, core.next_timer()) == ({}, 0, None)


def merges(*channels: Sequence[Value]) -> Iterator[tuple[Value, ...]]:
    """Yield every order of these events in which each channel keeps its own."""
    if not any(channels):
        yield ()
    for number, channel in enumerate(channels):
        if channel:
            rest = (*channels[:number], channel[1:], *channels[number + 1 :])
            yield from ((channel[0], *others) for others in merges(*rest))


@pytest.mark.parametrize("heard", range(3), ids=["both words of P cut", "its first token cut", "both words heard"])
def test_every_order_of_three_channels_ends_the_request(heard: int) -> None:
    """Words of P, cut at each place, before its loss; those of D; another peer's loss, which is nothing to it."""
    ends = []
    of_p = [*(TO_P0, FIRST)[:heard], PeerDown("P0")]
    orders = list(merges(of_p, [TO_D0, SECOND, THIRD, WHOLE], [PeerDown("D1")]))
    assert len(orders) == {0: 30, 1: 105, 2: 280}[heard]
    for order in orders:
        core, found = told(*order)
        assert len(found) == 1
        assert not core.entries
        ends += found
    assert (("r", "length") in ends) == (heard == 2)


def test_a_loss_is_that_of_one_life() -> None:
    """An instance that is back has not what its former life had; what it takes in now is not lost by that."""
    gone = Gone("r", 0, "E0", "P0", 1)
    core, ends = told(PeerDown("P0"), again("P0", 1), Moved("r", 0, "P0", 1, epoch=0), gone)
    assert ends == [("r", "StageError")]
    core, ends = told(PeerDown("P0"), again("P0", 1), Moved("r", 0, "P0", 1, epoch=1))
    assert not ends
    assert core.entries


def test_a_life_that_is_over_by_the_time_of_the_next_one_is_a_loss() -> None:
    """Its loss was never told: the pipeline had not heard of it before the next life came up."""
    _, ends = told(Moved("r", 0, "P0", 1, epoch=0), again("P0", 2), Gone("r", 0, "E0", "P0", 1))
    assert ends == [("r", "StageError")]


GONE = Gone("r", 0, "P0", "D0", 2)


@pytest.mark.parametrize(
    ("events", "fails"),
    [
        ((TO_P0, GONE), True),
        ((TO_P0, TO_D0, GONE), False),  # it has spoken of it: its own words tell, or its loss
        ((TO_P0, TO_D0, GONE, PeerDown("D0")), True),
        ((TO_P0, TO_D0, Gone("r", 0, "E0", "P0", 1)), False),  # it has gone on from there
        ((TO_P0, PeerDown("D0"), again("D0", 1), Moved("r", 0, "D0", 2, 1, "P0", 0), GONE), True),
        ((TO_P0, TO_D0, FIRST, SECOND, GONE), False),
    ],
    ids=["not heard of", "heard of", "lost as well", "gone on", "the offer reached the next life", "served"],
)
def test_what_was_given_to_a_lost_instance(events: tuple[Value, ...], fails: bool) -> None:
    """The next life of a target may get an offer that its source, as it hears of the death, takes back."""
    core, ends = told(*events)
    assert bool(ends) == fails == (not core.entries)


def test_the_loss_of_the_one_with_the_first_token_matters_until_that_has_come() -> None:
    core, ends = told(TO_P0, TO_D0, FIRST, PeerDown("P0"))
    assert not ends
    assert brief(core.handle(SECOND, 1.0)) == ["deliver r#1=6"]
    core, ends = told(TO_P0, TO_D0, PeerDown("E0"))
    assert not ends, "no token comes from an encoder"


NOT_HERE = Failure("MigrationError", "P0 was lost before its blocks were here", {"cause": "PeerLost", "source": "P0"})
BROKE_OFF = Finished(request="r", attempt=0, reason="error", failure=NOT_HERE, route=("E0", "P0", "D0"))


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (SECOND, "StageError"),
        (BROKE_OFF, "MigrationError"),
        (WHOLE, "StageError"),
        (PeerDown("D0"), "StageError"),
        (PeerSuspect("D0", 0, True), "StageError"),
    ],
    ids=["it decodes", "not all had come", "it has served it", "it is lost", "it is silent"],
)
@pytest.mark.parametrize("first", [True, False], ids=["the loss first", "the word first"])
def test_where_the_first_token_is_lost_its_target_says_what_has_come(word: Value, why: str, first: bool) -> None:
    """What it keeps of the text is known by then. One that has all of it cannot make up for the token."""
    core, ends = told(TO_P0, TO_D0, PeerDown("P0"))
    assert not ends
    core, ends = told(TO_P0, TO_D0, *((PeerDown("P0"), word) if first else (word, PeerDown("P0"))))
    assert ends == [("r", why)]
    assert not core.entries


@pytest.mark.parametrize("late", [False, True])
def test_nobody_waits_for_that_word_where_a_source_offers_the_request_once_more(late: bool) -> None:
    """Two would go on with one life: P0 was lost with its Release."""
    back = Moved("r", 0, "E0", 2)
    _, ends = told(TO_P0, TO_D0, *((PeerDown("P0"), back) if late else (back, PeerDown("P0"))))
    assert ends == [("r", "StageError")]


def test_nobody_waits_for_that_word_where_the_end_was_planned() -> None:
    _, ends = told(TO_P0, TO_D0, PeerDown("P0", planned=True))
    assert ends == [("r", "StageError")]


def test_a_cancel_goes_around_an_instance_that_is_lost() -> None:
    """It follows the request from the first one on, which does not know of it any more."""
    core, _ = told(TO_P0, FIRST, TO_D0, PeerDown("E0"), again("E0", 1))
    assert brief(core.handle(Abort("r", "stop"), 1.0)) == ["P0: cancel r", "D0: cancel r"]


def test_a_cancel_that_may_have_died_with_an_instance_is_said_again() -> None:
    core, _ = told(TO_P0, FIRST, TO_D0, Abort("r", "cancelled"))
    assert brief(core.handle(PeerDown("D1"), 1.0)) == []
    assert brief(core.handle(PeerDown("P0"), 1.0)) == ["E0: cancel r", "D0: cancel r"]
    assert brief(core.handle(PeerDown("D0"), 1.0)) == ["E0: forget r", "P0: forget r", "D0: forget r"]
