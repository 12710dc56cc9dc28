"""FrontendCore where an instance is lost: its requests go on from their first stage, with the tokens that are out."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, peer_up, sent, work
from support.recovering import AT_D0, LEFT, TO_D0, emit, end_of, quiet, recovering, submitted, table, told
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort
from trinity.core.messages import (
    PREEMPTED,
    Emit,
    Finished,
    Gone,
    Moved,
    PeerDown,
    Submit,
    Tick,
    Value,
)
from trinity.errors import ConfigError


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
            (Moved("r~1.1", 1, "P1", 1), []),
            (Moved("r~1.1", 1, "D1", 2, 0, "P1", 0), []),
            (emit("r~1.1", 1, (3, 8)), []),
            (emit("r~1.1", 1, (2, 7)), ["deliver r#2=7", "deliver r#3=8"]),
        ],
    )
    route, spans = ("E0", "P1", "D1"), {"prefill": 0.5}
    last = Finished(request="r~1.1", attempt=1, reason="length", count=4, route=route, cached_tokens=3, spans=spans)
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
    assert brief(core.handle(PeerDown("P0"), 1.0)) == [*LEFT[:3], "E0: submit r~1.1"]
    assert brief(core.handle(emit("r~1.1", 1, (0, 5)), 1.0)) == ["deliver r#0=5"]
    assert brief(core.handle(emit("r~1.1", 1, (1, 6)), 1.0)) == ["deliver r#1=6"]


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
        name = f"r~1.{life}" if life else "r"
        assert brief(core.handle(told(name, life), 1.0))[-1] == f"E0: submit r~1.{life + 1}"
    end = end_of(core.handle(told(f"r~1.{recoveries}" if recoveries else "r", recoveries), 2.0))
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
    for name in ("r~2.1", "r~2.1~2.1"):
        assert brief(core.handle(Submit(work(name, 1)), 0.0))[0].endswith(f" {name}~{core.taken}.0")
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    assert brief(core.handle(told("r", 0), 1.0))[-1] == "E0: submit r~3.1"
    assert core.reader_of("r~3.1") == "r"
    assert brief(core.handle(Submit(work("r~3.1", 1)), 1.0))[0].endswith("submit r~3.1~4.0"), "it is free for readers"


def test_what_an_instance_still_says_of_a_request_is_no_word_of_the_next_one_of_its_id() -> None:
    """P0 gave r to D1 and died with its words; r went on and ended, its id is used again, and now D1 speaks of it."""
    core = recovering("P0 P1 D0 D1")
    core.handle(Submit(work("r", 4, max_tokens=2)), 0.0)
    core.handle(PeerDown("P0"), 0.1)
    core.handle(emit("r~1.1", 1, (0, 5)), 0.2)
    core.handle(Moved("r~1.1", 1, "D0", 1, 0, "P1", 0), 0.2)
    core.handle(emit("r~1.1", 1, (1, 6)), 0.3)
    core.handle(Finished(request="r~1.1", attempt=1, reason="length", count=2, route=("P1", "D0")), 0.3)
    quiet(core)
    assert brief(core.handle(Submit(work("r", 7, max_tokens=2)), 0.4)) == ["P1: submit r~2.0"]
    assert brief(core.handle(emit("r~2.0", 0, (0, 50)), 0.5)) == ["deliver r#0=50"]
    assert brief(core.handle(Moved("r", 0, "D1", 1, 0, "P0", 0), 0.5)) == ["D1: forget r"]
    assert brief(core.handle(emit("r", 0, (1, 6)), 0.6)) == []


def test_a_life_that_was_preempted_before_it_was_lost_is_forgotten_wherever_it_was() -> None:
    core = recovering("E0 P0 P1 D0 D1")
    core.handle(replace(peer_up("D0"), returns=True), 0.0)
    table(core, AT_D0)
    back = Finished(request="r", attempt=0, reason=PREEMPTED, count=2, route=("E0", "P0", "D0"), preemptions=1)
    assert brief(core.handle(back, 1.0)) == ["E0: submit r"]
    core.handle(Moved("r", 1, "P1", 1), 1.0)
    out = brief(core.handle(PeerDown("P1"), 2.0))
    assert out == ["E0: forget r", "P1: forget r", "P0: forget r", "D0: forget r", "P0: submit r~1.2"]


@pytest.mark.parametrize("wrong", [{"recoveries": -1}, {"wait_s": -1.0}, {"kept_bytes": -1}, {"recoveries": 1.5}])
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FailurePolicy(**wrong)
