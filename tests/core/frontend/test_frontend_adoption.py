"""A front end adopts requests of another one: they are sent on behind their tokens, in turn, and counted as its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from support.core_tables import brief, emitted, sent, work
from support.recovering import end_of, quiet, recovering, submitted
from trinity.core.frontend import Abort, Deliver, End
from trinity.core.frontend.messages import Adopt, FormerLife, Prepare, Prepared
from trinity.core.messages import Finished, Sampled, Submit, Tick

LOST = FormerLife("its front end was lost", 0, 0.0)


def adopt(name: str, *tokens: int, unread: bool = False, inputs: tuple[Any, ...] = (), **fields: Any) -> Adopt:
    fields.setdefault("max_tokens", 4)
    own = work(name, *fields.pop("pieces", (3,)), **fields)
    return Adopt(own, tokens, inputs, 10 * len(inputs), unread, LOST)


def test_it_goes_on_behind_the_tokens_that_its_reader_has() -> None:
    core = recovering("P0 D0")
    again = submitted(core.handle(adopt("r@x", 7, 8), 0.0))
    assert (again.work.request, again.tokens, again.work.outputs) == ("r@x~1.1", (7, 8), 2)
    assert (again.work.owner, again.work.attempt, again.work.number) == ("frontend", 1, 1)
    assert core.reader_of("r@x~1.1") == "r@x"
    assert core.waiting == 0, "it has tokens"
    out = core.handle(emitted(("r@x~1.1", 1, 2, Sampled(9)), ("r@x~1.1", 1, 3, Sampled(10))), 1.0)
    assert [(each.index, each.sampled.token) for each in out if isinstance(each, Deliver)] == [(2, 9), (3, 10)]
    end = end_of(core.handle(Finished(request="r@x~1.1", attempt=1, reason="length", count=4, route=("P0",)), 1.0))
    assert (end.reason, end.former, end.lives, end.attempts) == ("length", (LOST,), 2, 2)
    quiet(core)


def test_one_without_a_token_counts_as_waiting() -> None:
    core = recovering("P0 D0")
    assert submitted(core.handle(adopt("r@x"), 0.0)).tokens == ()
    assert core.waiting == 1
    core.handle(emitted(("r@x~1.1", 1, 0, Sampled(9))), 1.0)
    assert core.waiting == 0


def test_it_is_let_in_where_the_queue_is_full() -> None:
    core = recovering("P0 D0")
    core.options = dataclasses.replace(core.options, max_waiting=1)
    core.handle(Submit(work("own", 3)), 0.0)
    assert [each.request for each in core.handle(Submit(work("refused", 3)), 0.0) if isinstance(each, End)]
    assert submitted(core.handle(adopt("r@x"), 0.0))
    assert core.waiting == 2


@pytest.mark.parametrize(("tokens", "reason"), [((7, 3), "stop"), ((7, 8, 9, 10), "length")], ids=["stop", "length"])
def test_one_whose_tokens_tell_its_end_has_ended(tokens: tuple[int, ...], reason: str) -> None:
    core = recovering("P0 D0")
    out = core.handle(adopt("r@x", *tokens, stop_ids=frozenset({3})), 0.0)
    end = end_of(out)
    assert (end.reason, end.failure) == (reason, None)
    assert end.finished is not None
    assert end.finished.count == len(tokens)
    assert not sent(out, Submit)
    quiet(core)


def test_inputs_that_did_not_come_along_are_prepared_first() -> None:
    core = recovering("E0 P0 D0")
    out = core.handle(adopt("r@x", 7, pieces=("cat", 1), unread=True), 0.0)
    assert out == [Prepare("r@x", "r@x~1.1")]
    again = submitted(core.handle(Prepared("r@x~1.1", ("pixels",), ("cat",)), 0.5))
    assert (again.inputs, again.tokens) == (("pixels",), (7,))


def test_media_that_are_others_by_now_end_it() -> None:
    core = recovering("E0 P0 D0")
    core.handle(adopt("r@x", 7, pieces=("cat", 1), unread=True), 0.0)
    end = end_of(core.handle(Prepared("r@x~1.1", ("pixels",), ("dog",)), 0.5))
    assert end.failure is not None
    assert end.failure.error == "BadMedia"
    quiet(core)


def test_inputs_that_came_along_are_sent_and_kept() -> None:
    core = recovering("E0 P0 D0")
    assert submitted(core.handle(adopt("r@x", 7, pieces=("cat", 1), inputs=("pixels",)), 0.0)).inputs == ("pixels",)
    assert core.inputs.kept_bytes == 10
    core.handle(Abort("r@x", "cancelled"), 1.0)
    core.handle(Finished(request="r@x~1.1", attempt=1, reason="cancelled", count=1), 1.0)
    quiet(core)


def test_what_no_instance_can_hold_ends_it() -> None:
    core = recovering("P0 D0")
    end = end_of(core.handle(adopt("r@x", 7, pieces=(4000,)), 0.0))
    assert end.failure is not None
    assert end.failure.error == "RequestTooLarge"
    quiet(core)


def test_its_deadline_goes_on() -> None:
    core = recovering("P0 D0")
    core.handle(adopt("r@x", 7, deadline_s=2.0), 10.0)
    assert core.next_timer() == 12.0
    end = end_of(core.handle(Tick(), 12.0))
    assert (end.reason, end.failure.error if end.failure else "") == ("deadline", "DeadlineExceeded")


def test_many_at_once_go_on_in_turn_the_oldest_first() -> None:
    core = recovering("P0 D0", retry_floor=2, retry_share=0.1)
    names = [f"r{number}@x" for number in range(5)]
    out = [core.handle(adopt(name, 7), 0.0) for name in names]
    assert [len(sent(each, Submit)) for each in out] == [1, 1, 0, 0, 0]
    then = core.handle(emitted(("r0@x~1.1", 1, 1, Sampled(9))), 1.0)
    assert [each.work.request for each in sent(then, Submit)] == ["r2@x~3.1"]


def test_it_waits_while_no_instance_is_up() -> None:
    core = recovering("P0 D0")
    for name in ("P0", "D0"):
        core.router.drop(name)
    assert brief(core.handle(adopt("r@x", 7), 0.0)) == []
    assert core.entries["r@x"].waits
