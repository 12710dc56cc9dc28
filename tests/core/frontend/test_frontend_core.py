"""FrontendCore: one order of tokens, one end, whatever the channels do; limits and deadlines."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from support.core_tables import Row, brief, emitted, make_frontend, peer_up, sent, work
from trinity.core.frontend import Abort, Deliver, End, FrontendCore
from trinity.core.messages import (
    Emit,
    Failure,
    Finished,
    Sampled,
    Submit,
    Tick,
    Value,
)


def table(core: FrontendCore, rows: Iterable[Row], now: float = 0.0) -> None:
    for number, (event, expected) in enumerate(rows):
        found = brief(core.handle(event, now))
        assert found == expected, f"row {number}, {event}: {found}"


def emit(request: str, *tokens: tuple[int, int], attempt: int = 0) -> Emit:
    return emitted(*((request, attempt, index, Sampled(token)) for index, token in tokens))


def finished(count: int, reason: str = "length", route: str = "P0 D0", **fields: object) -> Finished:
    return Finished(request="r", attempt=0, reason=reason, count=count, route=tuple(route.split()), **fields)  # type: ignore[arg-type]


FORGETS = ["P0: forget r", "D0: forget r"]


def quiet(core: FrontendCore) -> None:
    assert not core.entries
    assert core.waiting == 0
    assert core.next_timer() is None


def test_media_go_to_an_encode_instance_and_text_past_it() -> None:
    core = make_frontend()
    table(core, [(Submit(work("r", "cat", 1)), ["E0: submit r"]), (Submit(work("s", 1)), ["P0: submit s"])])
    assert core.waiting == 2


def test_the_submit_is_passed_on_with_its_inputs() -> None:
    core = make_frontend()
    submit = Submit(work("r", "cat", 1), ("pixels",))
    numbered = replace(submit, work=replace(submit.work, number=1), target_epoch=0)
    assert sent(core.handle(submit, 0.0), Submit) == [numbered]


def test_tokens_are_delivered_in_order_then_the_end_then_all_is_forgotten() -> None:
    core = make_frontend()
    rows: list[Row] = [
        (Submit(work("r", "cat", 1)), ["E0: submit r"]),
        (emit("r", (0, 5)), ["deliver r#0=5"]),
        (emit("r", (1, 6)), ["deliver r#1=6"]),
        (emit("r", (2, 7)), ["deliver r#2=7"]),
        (
            finished(3, route="E0 P0 D0"),
            ["end r length", "E0: forget r", *FORGETS],
        ),
    ]
    table(core, rows)
    quiet(core)


def test_the_first_token_may_come_last() -> None:
    core = make_frontend()
    rows: list[Row] = [
        (Submit(work("r", 1)), ["P0: submit r"]),
        (emit("r", (1, 6)), []),
        (emit("r", (2, 7)), []),
        (finished(3), []),
        (emit("r", (0, 5)), ["deliver r#0=5", "deliver r#1=6", "deliver r#2=7", "end r length", *FORGETS]),
    ]
    table(core, rows)
    quiet(core)


def test_one_emit_has_the_tokens_of_many_requests() -> None:
    core = make_frontend()
    table(core, [(Submit(work("r", 1)), ["P0: submit r"]), (Submit(work("s", 1)), ["P0: submit s"])])
    both = emitted(("s", 0, 0, Sampled(4)), ("r", 0, 0, Sampled(5)))
    table(core, [(both, ["deliver s#0=4", "deliver r#0=5"])])


def test_a_token_is_delivered_once() -> None:
    core = make_frontend()
    rows: list[Row] = [
        (Submit(work("r", 1)), ["P0: submit r"]),
        (emit("r", (0, 5)), ["deliver r#0=5"]),
        (emit("r", (0, 5)), []),
        (emit("r", (2, 7)), []),
        (emit("r", (2, 7)), []),
        (emit("r", (1, 6)), ["deliver r#1=6", "deliver r#2=7"]),
        (emit("r", (2, 7), (3, 8)), ["deliver r#3=8"]),
    ]
    table(core, rows)


def test_another_attempt_and_another_request_are_not_heard() -> None:
    core = make_frontend()
    rows: list[Row] = [
        (Submit(work("r", 1, attempt=1)), ["P0: submit r"]),
        (emit("r", (0, 5)), []),
        (finished(0), FORGETS),
        (emit("r", (0, 5), attempt=1), ["deliver r#0=5"]),
        (emit("s", (0, 5)), []),
        (Finished(request="s", attempt=0, reason="length"), []),
        (Abort("s", "cancelled"), []),
    ]
    table(core, rows)


def test_the_end_reaches_the_reader_with_all_that_was_reported() -> None:
    core = make_frontend()
    core.handle(Submit(work("r", 1)), 0.0)
    report = finished(0, "error", failure=Failure("StageError", "broke"), spans={"decode": 1.0})
    end = core.handle(report, 0.0)[0]
    assert end == End("r", "error", Failure("StageError", "broke"), report)
    quiet(core)


def test_an_error_waits_for_the_tokens_before_it() -> None:
    core = make_frontend()
    rows: list[Row] = [
        (Submit(work("r", 1)), ["P0: submit r"]),
        (finished(1, "error", failure=Failure("StageError", "broke")), []),
        (emit("r", (0, 5)), ["deliver r#0=5", "end r error StageError", *FORGETS]),
    ]
    table(core, rows)
    quiet(core)


@pytest.mark.parametrize("delivered", [0, 1])
def test_a_reader_that_leaves_gets_its_end_at_once(delivered: int) -> None:
    core = make_frontend()
    core.handle(Submit(work("r", 1)), 0.0)
    if delivered:
        core.handle(emit("r", (0, 5)), 0.0)
    rows: list[Row] = [
        (Abort("r", "cancelled"), ["P0: cancel r", "end r cancelled"]),
        (emit("r", (delivered, 6)), []),
        (Abort("r", "cancelled"), []),
        (Abort("r", "stop"), []),
        (finished(delivered + 1, "cancelled"), FORGETS),
    ]
    table(core, rows)
    quiet(core)


def test_a_stop_string_waits_for_the_report() -> None:
    core = make_frontend()
    rows: list[Row] = [
        (Submit(work("r", 1)), ["P0: submit r"]),
        (emit("r", (0, 5)), ["deliver r#0=5"]),
        (Abort("r", "stop"), ["P0: cancel r"]),
        (emit("r", (1, 6)), []),
        (Abort("r", "stop"), []),
        (finished(2, "cancelled"), ["end r stop", *FORGETS]),
    ]
    table(core, rows)
    quiet(core)


def test_a_reader_that_leaves_behind_a_stop_string_waits_for_nothing() -> None:
    core = make_frontend()
    rows: list[Row] = [
        (Submit(work("r", 1)), ["P0: submit r"]),
        (emit("r", (0, 5)), ["deliver r#0=5"]),
        (Abort("r", "stop"), ["P0: cancel r"]),
        (Abort("r", "cancelled"), ["end r stop"]),
        (Abort("r", "cancelled"), []),
        (finished(1, "cancelled"), FORGETS),
    ]
    table(core, rows)
    quiet(core)


def test_an_error_after_a_stop_string_is_none() -> None:
    core = make_frontend()
    core.handle(Submit(work("r", 1)), 0.0)
    core.handle(emit("r", (0, 5)), 0.0)
    core.handle(Abort("r", "stop"), 0.0)
    end = core.handle(finished(1, "error", failure=Failure("StageError", "broke")), 0.0)[0]
    assert isinstance(end, End)
    assert (end.reason, end.failure) == ("stop", None)


@pytest.mark.parametrize(("reason", "end"), [("cancelled", "end r cancelled"), ("stop", "end r stop")])
def test_an_abort_of_a_request_that_has_finished_and_waits_for_a_token(reason: str, end: str) -> None:
    core = make_frontend()
    rows: list[Row] = [
        (Submit(work("r", 1)), ["P0: submit r"]),
        (emit("r", (1, 6)), []),
        (finished(2), []),
        (Abort("r", reason), ["P0: cancel r", end, *FORGETS]),
        (emit("r", (0, 5)), []),
    ]
    table(core, rows)
    quiet(core)


def test_every_instance_that_saw_the_request_is_told_once_to_forget_it() -> None:
    core = make_frontend("ED0 P0")
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(emit("r", (0, 5)), 0.0)
    expected = ["end r length", "ED0: forget r", "P0: forget r"]
    table(core, [(finished(1, route="ED0 P0 ED0"), expected)])


def test_a_deadline_ends_the_request_when_it_is_due() -> None:
    core = make_frontend()
    core.handle(Submit(work("a", 1, deadline_s=5.0)), 10.0)
    core.handle(Submit(work("b", 1, deadline_s=2.0)), 10.0)
    core.handle(Submit(work("c", 1)), 10.0)
    assert core.next_timer() == 12.0
    table(core, [(Tick(), [])], now=11.9)
    table(core, [(Tick(), ["P0: cancel b", "end b deadline DeadlineExceeded"])], now=12.0)
    assert core.next_timer() == 15.0
    out = core.handle(Tick(), 16.0)
    assert brief(out) == ["P0: cancel a", "end a deadline DeadlineExceeded"]
    assert isinstance(out[1], End)
    assert out[1].failure == Failure("DeadlineExceeded", "the deadline passed after 0 tokens")
    assert core.next_timer() is None
    assert list(core.entries) == ["a", "b", "c"]


def test_several_deadlines_may_be_due_at_once() -> None:
    core = make_frontend()
    core.handle(Submit(work("a", 1, deadline_s=5.0)), 0.0)
    core.handle(Submit(work("b", 1, deadline_s=2.0)), 0.0)
    assert [line for line in brief(core.handle(Tick(), 9.0)) if "end" in line] == [
        "end b deadline DeadlineExceeded",
        "end a deadline DeadlineExceeded",
    ]


def test_a_deadline_says_how_far_the_request_came() -> None:
    core = make_frontend()
    core.handle(Submit(work("r", 1, deadline_s=2.0)), 0.0)
    core.handle(emit("r", (0, 5), (1, 6)), 1.0)
    end = core.handle(Tick(), 2.0)[1]
    assert isinstance(end, End)
    assert end.failure == Failure("DeadlineExceeded", "the deadline passed after 2 tokens")
    assert core.waiting == 0


def test_the_deadline_of_a_request_that_has_ended_is_none() -> None:
    core = make_frontend()
    core.handle(Submit(work("r", 1, deadline_s=2.0)), 0.0)
    core.handle(finished(0), 1.0)
    assert core.next_timer() is None
    assert core.handle(Tick(), 2.0) == []


def test_a_deadline_does_not_outlive_its_request_in_the_next_with_the_same_id() -> None:
    core = make_frontend()
    core.handle(Submit(work("r", 1, deadline_s=10.0)), 0.0)
    core.handle(finished(0), 1.0)
    core.handle(Submit(work("r", 1, deadline_s=10.0)), 5.0)
    assert core.next_timer() == 15.0
    table(core, [(Tick(), [])], now=10.0)
    table(core, [(Tick(), ["P0: cancel r~2.0", "end r deadline DeadlineExceeded"])], now=15.0)


def test_an_id_in_use_is_refused_by_a_typed_error() -> None:
    core = make_frontend()
    core.handle(Submit(work("r", 1)), 0.0)
    core.handle(Abort("r", "cancelled"), 0.0)
    out = core.handle(Submit(work("r", 1)), 0.0)
    text = "a request 'r' is still being served or ended; wait, or use another request_id"
    assert out == [End("r", "error", Failure("RequestError", text))]
    assert core.waiting == 0
    core.handle(finished(0, "cancelled"), 0.0)
    table(core, [(Submit(work("r", 1)), ["P0: submit r~3.0"])])


def test_too_many_waiting_requests_are_refused_and_tokens_make_room() -> None:
    core = make_frontend(max_waiting=2)
    rows: list[Row] = [
        (Submit(work("r", 1)), ["P0: submit r"]),
        (Submit(work("s", 1)), ["P0: submit s"]),
        (Submit(work("t", 1)), ["end t error Overloaded"]),
        (emit("r", (0, 5)), ["deliver r#0=5"]),
        (emit("r", (1, 5)), ["deliver r#1=5"]),
        (Submit(work("t", 1)), ["P0: submit t"]),
        (Submit(work("u", 1)), ["end u error Overloaded"]),
        (Abort("s", "cancelled"), ["P0: cancel s", "end s cancelled"]),
        (Submit(work("u", 1)), ["P0: submit u"]),
        (Abort("r", "cancelled"), ["P0: cancel r", "end r cancelled"]),
    ]
    table(core, rows)
    assert core.waiting == 2
    end = core.handle(Submit(work("v", 1)), 0.0)[0]
    assert isinstance(end, End)
    assert end.failure == Failure("Overloaded", "2 requests wait already; try later or raise max_waiting")


def test_the_default_allows_1024_waiting_requests() -> None:
    assert make_frontend().options.max_waiting == 1024


def refused(core: FrontendCore, of: Value) -> str:
    (end,) = core.handle(of, 0.0)
    assert isinstance(end, End)
    assert end.reason == "error"
    assert end.failure is not None
    assert end.failure.error == "RequestTooLarge"
    assert end.request not in core.entries
    return end.failure.message


def test_a_request_that_no_instance_could_ever_hold_is_refused_with_the_figures() -> None:
    core = make_frontend("")
    core.handle(peer_up("E0", image=2), 0.0)
    core.handle(peer_up("P0", image=3, kv=4), 0.0)
    core.handle(peer_up("D0", image=0, kv=5), 0.0)
    advice = "; shorten the prompt or max_tokens, or enlarge the pools"
    begin = "no instance can hold this request at stage"
    want = "; blocks that it needs of the pools:"
    assert refused(core, Submit(work("r", "cat*9", 1))) == f"{begin} E{want} 3 image of 2 in E0{advice}"
    assert refused(core, Submit(work("r", 17))) == f"{begin} P{want} 5 kv of 4 in P0{advice}"
    assert refused(core, Submit(work("r", 1, max_tokens=21))) == f"{begin} D{want} 6 kv of 5 in D0{advice}"
    table(core, [(Submit(work("r", "cat*8", 8, max_tokens=5)), ["E0: submit r~4.0"])])
    table(core, [(Submit(work("s", 16, max_tokens=1)), ["P0: submit s"])])
    core.handle(peer_up("PD0", image=9, kv=6), 0.0)
    table(core, [(Submit(work("t", 17)), ["PD0: submit t"])])


def test_one_output_needs_no_room_to_decode() -> None:
    core = make_frontend("P0")
    core.handle(peer_up("D0", image=0, kv=1), 0.0)
    table(core, [(Submit(work("r", 8, max_tokens=1)), ["P0: submit r"])])
    assert "at stage D" in refused(core, Submit(work("s", 8, max_tokens=2)))


def test_without_an_encode_instance_media_are_refused() -> None:
    assert "at stage E" in refused(make_frontend("P0 D0"), Submit(work("r", "cat", 1)))


def test_delivered_tokens_keep_what_the_sampler_said() -> None:
    core = make_frontend()
    core.handle(Submit(work("r", 1)), 0.0)
    sampled = Sampled(5, -0.5, ((5, -0.5),))
    assert core.handle(emitted(("r", 0, 0, sampled)), 0.0) == [Deliver("r", 0, sampled)]
