"""FrontendCore where no instance has a stage just now, or inputs are not kept: requests wait or are prepared again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, make_frontend, peer_up, sent, work
from support.recovering import AT_D0, LEFT, change_policy, emit, end_of, quiet, recovering, submitted, table, told
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort
from trinity.core.frontend.messages import Prepare, Prepared
from trinity.core.messages import (
    NOWHERE,
    Emit,
    Failure,
    PeerDown,
    PeerUp,
    Sampled,
    Submit,
    Tick,
)

# ---------------------------------------------------------------- no instance just now


def test_a_stage_that_is_away_is_waited_for() -> None:
    core = recovering("E0 P0 D0")
    core.handle(PeerDown("P0", "it fell"), 0.0)
    table(core, [(Submit(work("r", "cat", 1)), []), (Submit(work("s", 1)), []), (PeerUp("E9", "E", 0), [])])
    assert core.waiting == 2
    assert brief(core.handle(replace(peer_up("P0"), epoch=1), 1.0)) == ["E0: submit r", "P0: submit s"]
    assert [entry.waits for entry in core.entries.values()] == [False, False]


def test_those_that_wait_go_on_in_the_order_in_which_they_came() -> None:
    core = recovering("E0 P0 D0")
    core.handle(Submit(work("old", 1)), 0.0)
    core.handle(Submit(work("older", 1)), 0.0)
    core.handle(Emit(("older",), (0,), (0,), (Sampled(5),)), 0.1)
    core.handle(PeerDown("P0"), 1.0)
    core.handle(Submit(work("new", 1)), 2.0)
    out = core.handle(replace(peer_up("P0"), epoch=1), 3.0)
    assert brief(out) == ["P0: submit old~1.1", "P0: submit older~2.1", "P0: submit new"]


def test_a_lost_request_waits_where_nobody_else_has_its_stage() -> None:
    core = recovering("E0 P0 D0")
    table(core, AT_D0)
    assert brief(core.handle(PeerDown("D0"), 1.0)) == LEFT[:-1]
    assert brief(core.handle(PeerDown("E0"), 1.5)) == []
    assert brief(core.handle(replace(peer_up("D0"), epoch=1), 2.0)) == [], "and where its first stage is away"
    assert brief(core.handle(replace(peer_up("E0"), epoch=1), 3.0)) == ["P0: submit r~1.1"]


def test_the_last_token_needs_no_decode() -> None:
    core = recovering("E0 P0 D0")
    table(core, AT_D0)
    core.handle(emit("r", 0, (2, 7)), 0.5)
    assert brief(core.handle(PeerDown("D0"), 1.0)) == LEFT


def test_waiting_ends_with_the_deadline_or_the_reader() -> None:
    core = recovering("E0 P0 D0")
    core.handle(PeerDown("P0"), 0.0)
    core.handle(Submit(work("r", "cat", 1, deadline_s=2.0)), 0.0)
    core.handle(Submit(work("s", 1)), 0.0)
    assert brief(core.handle(Abort("s", "cancelled"), 1.0)) == ["end s cancelled"]
    assert brief(core.handle(Tick(), 2.0)) == ["end r deadline DeadlineExceeded"]
    quiet(core)


def test_waiting_ends_after_as_long_as_the_policy_says() -> None:
    core = recovering("E0 P0 D0", wait_s=5.0)
    core.handle(PeerDown("P0", "it fell"), 0.0)
    core.handle(Submit(work("r", "cat", 1)), 1.0)
    assert core.next_timer() == 6.0
    end = end_of(core.handle(Tick(), 6.0))
    assert end.failure is not None
    assert (end.failure.error, end.failure.fields) == ("Overloaded", {"stage": "P"})
    assert "P0 is started again: it fell" in end.failure.message
    quiet(core)


def test_no_waiting_at_all() -> None:
    core = recovering("E0 P0 D0", wait_s=0.0)
    core.handle(PeerDown("P0"), 0.0)
    end = end_of(core.handle(Submit(work("r", "cat", 1)), 1.0))
    assert end.failure is not None
    assert end.failure.error == "Overloaded"
    quiet(core)


def test_one_that_fits_may_come_back_and_one_that_never_did_is_not_waited_for() -> None:
    core = make_frontend("E0 D0")
    change_policy(core, FailurePolicy())
    core.handle(peer_up("P0", kv=1), 0.0)
    core.handle(peer_up("P1", kv=9), 0.0)
    core.handle(PeerDown("P1"), 0.0)
    assert brief(core.handle(Submit(work("r", 1, 2, 3, 4, 5)), 1.0)) == []
    assert brief(core.handle(replace(peer_up("P1", kv=1), epoch=1), 2.0)) == ["end r error RequestTooLarge"]


def test_prompt_and_outputs_that_no_longer_fit_are_a_typed_error() -> None:
    core = make_frontend("E0 D0")
    change_policy(core, FailurePolicy())
    core.handle(peer_up("P0", kv=2), 0.0)
    core.handle(Submit(work("r", "cat", 1, max_tokens=20)), 0.0)
    core.handle(emit("r", 0, *((index, 7) for index in range(9))), 1.0)
    end = end_of(core.handle(told("r", 0, count=9), 2.0))
    assert end.failure is not None
    assert end.failure.error == "RequestTooLarge"
    assert "preempted or lost, and its 9 outputs count as prompt" in end.failure.message
    quiet(core)


def test_a_source_that_has_not_heard_who_is_up_gets_it_again_after_pauses_that_do_not_count() -> None:
    core = recovering("E0 P0 D0", recoveries=1)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    now, pauses = 0.0, []
    for life in range(8):
        name = f"r~1.{life}" if life else "r"
        assert brief(core.handle(told(name, life, cause=NOWHERE), now)) == [f"E0: forget {name}"]
        due = core.next_timer()
        assert due is not None
        pauses.append(round(due - now, 3))
        now = due
        assert brief(core.handle(Tick(), now)) == [f"E0: submit r~1.{life + 1}"]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert brief(core.handle(told("r~1.8", 8), now))[-1] == "E0: submit r~1.9"
    assert end_of(core.handle(told("r~1.9", 9), now)).reason == "error"


def test_it_is_not_sent_to_and_fro_for_longer_than_it_may_wait() -> None:
    core = recovering("E0 P0 D0", wait_s=1.0)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    now = 1.0
    for life in range(5):  # 0.05, 0.1, 0.2, 0.4 and what is left of a second
        core.handle(told(f"r~1.{life}" if life else "r", life, cause=NOWHERE), now)
        now = core.next_timer() or 0.0
        assert core.handle(Tick(), now)
        now += 10.0  # at an instance, which counts for nothing
    end = end_of(core.handle(told("r~1.5", 5, cause=NOWHERE), now))
    assert end.failure is not None
    assert end.failure.error == "MigrationError"
    quiet(core)


def test_time_at_instances_is_no_waiting() -> None:
    """It waited once, and was served for longer than it might have waited: that does not cost its recoveries."""
    core = recovering("E0 P0 D0", wait_s=5.0)
    core.handle(PeerDown("D0"), 0.0)
    core.handle(Submit(work("r", 4, max_tokens=4)), 1.0)
    assert brief(core.handle(replace(peer_up("D0"), epoch=1), 2.0)) == ["P0: submit r"]
    core.handle(told("r", 0, cause=NOWHERE, route=("P0",)), 10.0)
    assert core.next_timer() == pytest.approx(10.05)
    assert brief(core.handle(Tick(), 10.1)) == ["P0: submit r~1.1"]


def test_what_was_never_sent_again_is_no_life_and_was_not_recomputed() -> None:
    for wait_s in (0.0, 5.0):
        core = recovering("E0 P0 D0", wait_s=wait_s)
        table(core, AT_D0)
        out = core.handle(PeerDown("D0"), 1.0) + core.handle(Tick(), 6.5)
        end = end_of(out)
        assert (end.reason, end.lives, len(end.former), end.recomputed) == ("error", 1, 1, 0)
        quiet(core)


# ---------------------------------------------------------------- inputs


def with_pixels(size: int, **named: Any) -> Submit:
    return Submit(work("r", "cat", 1, **named), ("pixels",), input_bytes=size)


def test_inputs_are_kept_within_a_bound_and_sent_again() -> None:
    core = recovering(kept_bytes=100)
    core.handle(with_pixels(60), 0.0)
    core.handle(replace(with_pixels(41), work=work("s", "cat", 1)), 0.0)
    assert (core.inputs.kept_bytes, core.inputs.waiting_bytes) == (60, 101)
    assert submitted(core.handle(told("r", 0), 1.0)).inputs == ("pixels",)
    core.handle(emit("r~1.1", 1, (0, 5)), 2.0)
    assert (core.inputs.kept_bytes, core.inputs.waiting_bytes) == (60, 41)


def test_inputs_that_are_not_kept_are_made_again() -> None:
    core = recovering(kept_bytes=0)
    first = core.handle(with_pixels(60), 0.0)
    assert submitted(first).inputs == ("pixels",)
    assert core.entries["r"].inputs == ()
    out = core.handle(told("r", 0), 1.0)
    assert [each for each in out if isinstance(each, Prepare)] == [Prepare("r", "r~1.1")]
    assert not sent(out, Submit)
    assert not core.handle(PeerUp("E9", "E", 0), 1.5), "it is being prepared: not twice at once"
    contents = tuple(span.content for span in core.entries["r"].work.media)
    assert core.inputs.waiting_bytes == 0, "there are none until then"
    again = submitted(core.handle(Prepared("r~1.1", ("new pixels",), contents, input_bytes=60), 2.0))
    assert (again.inputs, again.work.request) == (("new pixels",), "r~1.1")
    assert core.entries["r"].inputs == ()
    assert core.inputs.waiting_bytes == 60
    core.handle(emit("r~1.1", 1, (0, 5)), 3.0)
    assert core.inputs.waiting_bytes == 0


def test_inputs_that_are_made_again_count_until_the_next_token() -> None:
    """At 726a4303 those of a request that had a token already did not count at all."""
    core = recovering(kept_bytes=0)
    core.handle(with_pixels(60), 0.0)
    core.handle(emit("r", 0, (0, 5)), 0.5)
    core.handle(told("r", 0), 1.0)
    contents = tuple(span.content for span in core.entries["r"].work.media)
    for life, then in (("r~1.1", told("r~1.1", 1)), ("r~1.2", None)):
        assert core.inputs.waiting_bytes == 0
        core.handle(Prepared(life, ("new pixels",), contents, input_bytes=60), 2.0)
        assert core.inputs.waiting_bytes == 60
        if then is not None:
            core.handle(then, 3.0)
    core.handle(emit("r~1.2", 2, (1, 6)), 4.0)
    assert core.inputs.waiting_bytes == 0


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Prepared("r~1.1", failure=Failure("BadMedia", "the file is gone")), "BadMedia"),
        (Prepared("r~1.1", ("other",), ("another image",)), "BadMedia"),
    ],
)
def test_media_that_are_others_by_now_end_the_request(answer: Prepared, error: str) -> None:
    core = recovering(kept_bytes=0)
    core.handle(with_pixels(60), 0.0)
    core.handle(told("r", 0), 1.0)
    assert brief(core.handle(answer, 2.0)) == [f"end r error {error}"]
    quiet(core)
    assert not core.handle(answer, 3.0), "its reader has left"


def test_inputs_that_are_being_made_are_waited_for_longer_than_a_stage() -> None:
    """Its stage came up in time; that the inputs take long is for the deadline to bound."""
    core = recovering("E0 P0 D0", kept_bytes=0, wait_s=10.0)
    core.handle(with_pixels(60), 0.0)
    core.handle(PeerDown("E0"), 1.0)
    core.handle(replace(peer_up("E0"), epoch=1), 9.0)
    assert core.entries["r"].preparing
    assert brief(core.handle(Tick(), 11.5)) == []
    assert core.next_timer() is None
    contents = tuple(span.content for span in core.entries["r"].work.media)
    assert brief(core.handle(Prepared("r~1.1", ("pixels",), contents), 12.0)) == ["E0: submit r~1.1"]


def test_inputs_made_for_a_request_that_has_left_are_not_those_of_the_next_one_of_its_name() -> None:
    core = recovering("E0 P0 D0", kept_bytes=0)
    core.handle(with_pixels(60), 0.0)
    core.handle(told("r", 0), 1.0)
    core.handle(Abort("r", "cancelled"), 2.0)
    core.handle(PeerDown("E0"), 2.0)
    core.handle(replace(with_pixels(60), work=work("r", "dog", 1)), 3.0)
    assert not core.handle(Prepared("r~1.1", ("old pixels",), ("cat",)), 4.0)
    assert submitted(core.handle(replace(peer_up("E0"), epoch=1), 5.0)).inputs == ("pixels",)


def test_inputs_made_again_for_one_that_must_wait_are_not_held() -> None:
    """Nothing would bound them: a stage that is lost with 500 requests asks for the inputs of all."""
    core = recovering("E0 P0 D0", kept_bytes=0)
    core.handle(with_pixels(60), 0.0)
    core.handle(told("r", 0), 1.0)
    core.handle(PeerDown("E0"), 1.5)
    contents = tuple(span.content for span in core.entries["r"].work.media)
    assert not core.handle(Prepared("r~1.1", ("pixels",), contents), 2.0)
    assert core.entries["r"].inputs == ()
    assert core.handle(replace(peer_up("E0"), epoch=1), 3.0) == [Prepare("r", "r~1.1")]


def test_inputs_made_for_a_former_request_of_that_id_are_no_other_ones_media() -> None:
    core = recovering(kept_bytes=0)
    core.handle(with_pixels(60), 0.0)
    core.handle(told("r", 0), 1.0)
    core.handle(Abort("r", "cancelled"), 2.0)
    core.handle(replace(with_pixels(60), work=work("r", "dog", 1)), 3.0)
    core.handle(told("r~2.0", 0), 4.0)
    assert core.entries["r"].preparing
    assert not core.handle(Prepared("r~1.1", ("a cat",), ("cat",)), 5.0)
    contents = tuple(span.content for span in core.entries["r"].work.media)
    assert submitted(core.handle(Prepared("r~2.1", ("a dog",), contents), 6.0)).inputs == ("a dog",)


def test_text_needs_no_inputs() -> None:
    core = recovering(kept_bytes=0)
    core.handle(Submit(work("r", 1)), 0.0)
    assert brief(core.handle(told("r", 0), 1.0))[-1] == "P1: submit r~1.1"


def test_inputs_of_one_that_waits_are_there_when_it_is_sent() -> None:
    core = recovering("E0 P0 D0", kept_bytes=0)
    core.handle(PeerDown("E0"), 0.0)
    core.handle(with_pixels(60), 0.0)
    assert submitted(core.handle(replace(peer_up("E0"), epoch=1), 1.0)).inputs == ("pixels",)
