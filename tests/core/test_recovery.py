"""FrontendCore where an instance is lost: its requests go on from their first stage, with the tokens that are out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import Row, brief, emitted, make_frontend, peer_up, sent, work
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort, End, FrontendCore
from trinity.core.frontend_events import Prepare, Prepared
from trinity.core.messages import (
    NOWHERE,
    PREEMPTED,
    Emit,
    Failure,
    Finished,
    Gone,
    Moved,
    PeerDown,
    PeerUp,
    Sampled,
    Submit,
    Tick,
    Value,
)
from trinity.errors import ConfigError


def recovering(peers: str = "E0 P0 P1 D0 D1", **policy: Any) -> FrontendCore:
    core = make_frontend(peers)
    core.failures = FailurePolicy(**policy)
    return core


def emit(name: str, attempt: int, *tokens: tuple[int, int]) -> Emit:
    return emitted(*((name, attempt, index, Sampled(token)) for index, token in tokens))


def told(name: str, attempt: int, error: str = "MigrationError", cause: str = "", **fields: Any) -> Finished:
    why = Failure(error, "it went wrong", {"cause": cause} if cause else {})
    return Finished(request=name, attempt=attempt, reason="error", failure=why, **fields)


def table(core: FrontendCore, rows: Iterable[Row], now: float = 0.0) -> None:
    for number, (event, expected) in enumerate(rows):
        found = brief(core.handle(event, now))
        assert found == expected, f"row {number}, {event}: {found}"


def quiet(core: FrontendCore) -> None:
    assert (core.entries, core.lives, core.waiting, core.next_timer()) == ({}, {}, 0, None)
    assert (core.waiting_bytes, core.kept_bytes) == (0, 0)


TO_P0, TO_D0 = Moved("r", 0, "P0", 1), Moved("r", 0, "D0", 2, 0, "P0", 0)
AT_D0: list[Row] = [
    (Submit(work("r", "cat", 1, max_tokens=4)), ["E0: submit r"]),
    (TO_P0, []),
    (emit("r", 0, (0, 5)), ["deliver r#0=5"]),
    (TO_D0, []),
    (emit("r", 0, (1, 6)), ["deliver r#1=6"]),
]
LEFT = ["E0: forget r", "P0: forget r", "D0: forget r", "E0: submit r~1"]


def end_of(out: list[Value]) -> End:
    (end,) = [each for each in out if isinstance(each, End)]
    return end


def submitted(out: list[Value]) -> Submit:
    (again,) = sent(out, Submit)
    return again


def test_a_lost_request_goes_on_under_another_name_with_its_tokens_and_ends_once() -> None:
    core = recovering()
    table(core, AT_D0)
    out = core.handle(PeerDown("D0"), 2.0)
    assert brief(out) == LEFT
    again = submitted(out)
    assert (again.tokens, again.work.outputs, again.work.attempt, again.work.number) == ((5, 6), 2, 1, 1)
    table(
        core,
        [
            (Moved("r~1", 1, "P1", 1), []),
            (Moved("r~1", 1, "D1", 2, 0, "P1", 0), []),
            (emit("r~1", 1, (3, 8)), []),
            (emit("r~1", 1, (2, 7)), ["deliver r#2=7", "deliver r#3=8"]),
        ],
    )
    route, spans = ("E0", "P1", "D1"), {"prefill": 0.5}
    last = Finished(request="r~1", attempt=1, reason="length", count=4, route=route, cached_tokens=3, spans=spans)
    end = end_of(core.handle(last, 3.0))
    assert (end.request, end.reason, end.attempts, len(end.former)) == ("r", "length", 2, 1)
    (former,) = end.former
    assert (former.tokens, former.seconds, former.route) == (2, 2.0, ("E0", "P0", "D0"))
    assert "D0 was lost" in former.why
    assert end.recomputed == len(again.work.prompt) + 2 - 3
    assert end.finished is not None
    assert end.finished.route == ("E0", "P0", "D0", "E0", "P1", "D1")
    quiet(core)


@pytest.mark.parametrize(
    "heard",
    [
        emit("r", 0, (2, 99)),
        Finished(request="r", attempt=0, reason="length", count=2, route=("E0", "P0", "D0")),
        told("r", 0, route=("E0", "P0")),
        Moved("r", 0, "D1", 3),
        Gone("r", 0, "P0", "D0", 2),
    ],
)
def test_what_is_heard_of_a_former_life_is_nothing_but_a_reason_to_forget_it(heard: Value) -> None:
    core = recovering()
    table(core, AT_D0)
    core.handle(PeerDown("D0"), 2.0)
    found = brief(core.handle(heard, 2.5))
    assert all(each.endswith(": forget r") for each in found)
    assert bool(found) == (not isinstance(heard, Emit)), "who emits has said before that it has it"
    assert core.entries["r"].tokens == [5, 6]


def test_a_token_that_waits_for_a_missing_one_comes_again() -> None:
    """D0's second token is here and P0's first one is not: it is lost, and both are sampled again."""
    core = recovering()
    table(core, [*AT_D0[:2], (TO_D0, []), (emit("r", 0, (1, 6)), [])])
    assert brief(core.handle(PeerDown("P0"), 1.0)) == LEFT
    assert brief(core.handle(emit("r~1", 1, (0, 5)), 1.0)) == ["deliver r#0=5"]
    assert brief(core.handle(emit("r~1", 1, (1, 6)), 1.0)) == ["deliver r#1=6"]


@pytest.mark.parametrize(
    "end",
    [
        told("r", 0, cause="PeerLost", count=2),
        told("r", 0, cause="LeaseExpired", count=2),
        told("r", 0, cause="OfferRefused", count=2),
        told("r", 0, cause="TransferTimeout", count=2),
        told("r", 0, cause="IntegrityError", count=2),
        told("r", 0, count=2),
    ],
)
def test_blocks_that_were_lost_on_their_way_are_no_fault_of_the_request(end: Finished) -> None:
    core = recovering()
    table(core, AT_D0)
    assert brief(core.handle(end, 2.0)) == LEFT


@pytest.mark.parametrize("error", ["StageError", "RequestTooLarge", "RequestError"])
def test_its_own_fault_ends_a_request(error: str) -> None:
    core = recovering()
    table(core, AT_D0)
    assert brief(core.handle(told("r", 0, error, count=2), 2.0))[0] == f"end r error {error}"
    quiet(core)


def test_a_message_that_could_not_be_sent_ends_a_request_whatever_it_says() -> None:
    core = recovering()
    table(core, AT_D0)
    assert end_of(core.handle(told("r", 0, count=2, cut=True), 2.0)).reason == "error"


def test_a_deadline_that_an_instance_saw_pass_is_no_loss() -> None:
    core = recovering()
    table(core, AT_D0)
    assert end_of(core.handle(told("r", 0, "DeadlineExceeded", count=2), 2.0)).reason == "deadline"


@pytest.mark.parametrize("recoveries", [0, 1, 2])
def test_it_goes_on_so_often_and_no_more(recoveries: int) -> None:
    core = recovering(recoveries=recoveries)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    for life in range(recoveries):
        name = f"r~{life}" if life else "r"
        assert brief(core.handle(told(name, life), 1.0))[-1] == f"E0: submit r~{life + 1}"
    end = end_of(core.handle(told(f"r~{recoveries}" if recoveries else "r", recoveries), 2.0))
    assert end.failure is not None
    assert (end.failure.error, end.attempts, len(end.former)) == ("MigrationError", recoveries + 1, recoveries)
    quiet(core)


@pytest.mark.parametrize(("ids", "reason"), [((5, 6, 7, 8), "length"), ((5, 3), "stop")])
def test_a_request_whose_last_token_is_out_ends_there(ids: tuple[int, ...], reason: str) -> None:
    core = recovering()
    table(core, [(Submit(work("r", "cat", 1, max_tokens=4, stop_ids=frozenset({3}))), ["E0: submit r"]), *AT_D0[1:2]])
    core.handle(emit("r", 0, *enumerate(ids)), 0.0)
    core.handle(TO_D0, 0.0)
    end = end_of(core.handle(PeerDown("D0"), 1.0))
    assert (end.reason, end.failure, end.former) == (reason, None, ())
    assert end.finished is not None
    assert end.finished.count == len(ids)
    quiet(core)


@pytest.mark.parametrize("reason", ["cancelled", "stop"])
def test_what_its_reader_gave_up_does_not_go_on(reason: str) -> None:
    core = recovering()
    table(core, AT_D0)
    core.handle(Abort("r", reason), 1.0)
    out = core.handle(PeerDown("D0"), 2.0)
    assert not sent(out, Submit)
    quiet(core)


def test_a_later_life_has_the_time_that_is_left() -> None:
    core = recovering()
    core.handle(Submit(work("r", "cat", 1, deadline_s=10.0)), 1.0)
    assert submitted(core.handle(told("r", 0), 4.0)).work.deadline_s == 7.0
    assert core.next_timer() == 11.0
    assert end_of(core.handle(Tick(), 11.0)).reason == "deadline"


def test_no_life_has_a_name_that_a_reader_gave() -> None:
    core = recovering()
    core.handle(Submit(work("r~1", 1)), 0.0)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    assert brief(core.handle(told("r", 0), 1.0))[-1] == "E0: submit r~1~"
    assert core.reader_of("r~1~") == "r"
    assert core.reader_of("r~1") == "r~1"
    refused = end_of(core.handle(Submit(work("r~1~", 1)), 1.0))
    assert refused.failure is not None
    assert refused.failure.error == "RequestError"


def test_a_life_that_was_preempted_before_it_was_lost_is_forgotten_wherever_it_was() -> None:
    core = recovering("E0 P0 P1 D0 D1")
    core.handle(replace(peer_up("D0"), returns=True), 0.0)
    table(core, AT_D0)
    back = Finished(request="r", attempt=0, reason=PREEMPTED, count=2, route=("E0", "P0", "D0"), preemptions=1)
    assert brief(core.handle(back, 1.0)) == ["E0: submit r"]
    core.handle(Moved("r", 1, "P1", 1), 1.0)
    out = brief(core.handle(PeerDown("P1"), 2.0))
    assert out == ["E0: forget r", "P1: forget r", "P0: forget r", "D0: forget r", "E0: submit r~2"]


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
    assert brief(out) == ["P0: submit old~1", "P0: submit older~1", "P0: submit new"]


def test_a_lost_request_waits_where_nobody_else_has_its_stage() -> None:
    core = recovering("E0 P0 D0")
    table(core, AT_D0)
    assert brief(core.handle(PeerDown("D0"), 1.0)) == LEFT[:-1]
    assert brief(core.handle(PeerDown("E0"), 1.5)) == []
    assert brief(core.handle(replace(peer_up("D0"), epoch=1), 2.0)) == [], "and where its first stage is away"
    assert brief(core.handle(replace(peer_up("E0"), epoch=1), 3.0)) == ["E0: submit r~1"]


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
    core.failures = FailurePolicy()
    core.handle(peer_up("P0", kv=1), 0.0)
    core.handle(peer_up("P1", kv=9), 0.0)
    core.handle(PeerDown("P1"), 0.0)
    assert brief(core.handle(Submit(work("r", 1, 2, 3, 4, 5)), 1.0)) == []
    assert brief(core.handle(replace(peer_up("P1", kv=1), epoch=1), 2.0)) == ["end r error RequestTooLarge"]


def test_prompt_and_outputs_that_no_longer_fit_are_a_typed_error() -> None:
    core = make_frontend("E0 D0")
    core.failures = FailurePolicy()
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
        name = f"r~{life}" if life else "r"
        assert brief(core.handle(told(name, life, cause=NOWHERE), now)) == [f"E0: forget {name}"]
        due = core.next_timer()
        assert due is not None
        pauses.append(round(due - now, 3))
        now = due
        assert brief(core.handle(Tick(), now)) == [f"E0: submit r~{life + 1}"]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert brief(core.handle(told("r~8", 8), now))[-1] == "E0: submit r~9"
    assert end_of(core.handle(told("r~9", 9), now)).reason == "error"


def test_it_is_not_sent_to_and_fro_for_longer_than_it_may_wait() -> None:
    core = recovering("E0 P0 D0", wait_s=1.0)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(told("r", 0, cause=NOWHERE), 1.0)
    core.handle(Tick(), 1.05)
    end = end_of(core.handle(told("r~1", 1, cause=NOWHERE), 2.5))
    assert end.failure is not None
    assert end.failure.error == "MigrationError"
    quiet(core)


# ---------------------------------------------------------------- inputs


def with_pixels(size: int, **named: Any) -> Submit:
    return Submit(work("r", "cat", 1, **named), ("pixels",), input_bytes=size)


def test_inputs_are_kept_within_a_bound_and_sent_again() -> None:
    core = recovering(kept_bytes=100)
    core.handle(with_pixels(60), 0.0)
    core.handle(replace(with_pixels(41), work=work("s", "cat", 1)), 0.0)
    assert (core.kept_bytes, core.waiting_bytes) == (60, 101)
    assert submitted(core.handle(told("r", 0), 1.0)).inputs == ("pixels",)
    core.handle(emit("r~1", 1, (0, 5)), 2.0)
    assert (core.kept_bytes, core.waiting_bytes) == (60, 41)


def test_inputs_that_are_not_kept_are_made_again() -> None:
    core = recovering(kept_bytes=0)
    first = core.handle(with_pixels(60), 0.0)
    assert submitted(first).inputs == ("pixels",)
    assert core.entries["r"].inputs == ()
    out = core.handle(told("r", 0), 1.0)
    assert [each for each in out if isinstance(each, Prepare)] == [Prepare("r")]
    assert not sent(out, Submit)
    assert not core.handle(PeerUp("E9", "E", 0), 1.5), "it is being prepared: not twice at once"
    contents = tuple(span.content for span in core.entries["r"].work.media)
    again = submitted(core.handle(Prepared("r", ("new pixels",), contents), 2.0))
    assert (again.inputs, again.work.request) == (("new pixels",), "r~1")
    assert core.entries["r"].inputs == ()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Prepared("r", failure=Failure("BadMedia", "the file is gone")), "BadMedia"),
        (Prepared("r", ("other",), ("another image",)), "BadMedia"),
    ],
)
def test_media_that_are_others_by_now_end_the_request(answer: Prepared, error: str) -> None:
    core = recovering(kept_bytes=0)
    core.handle(with_pixels(60), 0.0)
    core.handle(told("r", 0), 1.0)
    assert brief(core.handle(answer, 2.0)) == [f"end r error {error}"]
    quiet(core)
    assert not core.handle(answer, 3.0), "its reader has left"


def test_text_needs_no_inputs() -> None:
    core = recovering(kept_bytes=0)
    core.handle(Submit(work("r", 1)), 0.0)
    assert brief(core.handle(told("r", 0), 1.0))[-1] == "P1: submit r~1"


def test_inputs_of_one_that_waits_are_there_when_it_is_sent() -> None:
    core = recovering("E0 P0 D0", kept_bytes=0)
    core.handle(PeerDown("E0"), 0.0)
    core.handle(with_pixels(60), 0.0)
    assert submitted(core.handle(replace(peer_up("E0"), epoch=1), 1.0)).inputs == ("pixels",)


@pytest.mark.parametrize("wrong", [{"recoveries": -1}, {"wait_s": -1.0}, {"kept_bytes": -1}, {"recoveries": 1.5}])
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FailurePolicy(**wrong)
