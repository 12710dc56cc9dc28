"""FrontendCore: what was preempted where it cannot be recomputed goes from its first stage on once more."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from support.core_tables import brief, emitted, make_frontend, peer_up, sent, work
from trinity.core.frontend import Abort, End, FrontendCore
from trinity.core.messages import (
    PREEMPTED,
    Finished,
    Forget,
    Gone,
    Moved,
    PeerDown,
    Sampled,
    Submit,
)


def returning() -> FrontendCore:
    """ "r" has gone by way of E0, P0 and D0, which may send requests back, and has two tokens."""
    core = make_frontend()
    core.handle(replace(peer_up("D0"), returns=True), 0.0)
    core.handle(Submit(work("r", "cat", 1, max_tokens=9, deadline_s=10.0), ("pixels",)), 1.0)
    for hop, name in enumerate(("P0", "D0"), start=1):
        core.handle(Moved("r", 0, name, hop, source="P0" if name == "D0" else ""), 2.0)
    core.handle(emitted(("r", 0, 0, Sampled(7))), 3.0)
    return core


def sent_back(count: int, attempt: int = 0, **fields: Any) -> Finished:
    route = ("E0", "P0", "D0")
    return Finished(request="r", attempt=attempt, reason=PREEMPTED, count=count, route=route, preemptions=1, **fields)


def test_what_was_sent_back_goes_again_with_its_tokens_its_inputs_and_the_time_that_is_left() -> None:
    core = returning()
    assert brief(core.handle(sent_back(2), 4.0)) == [], "its second token is still on its way"
    out = core.handle(emitted(("r", 0, 1, Sampled(8))), 5.0)
    (again,) = sent(out, Submit)
    assert (again.inputs, again.tokens, again.work.attempt, again.work.number) == (("pixels",), (7, 8), 1, 1)
    assert again.work.deadline_s == 6.0
    assert brief(out)[-1] == "E0: submit r"


def test_the_end_of_what_was_sent_back_tells_all_that_it_went_through() -> None:
    core = returning()
    core.handle(emitted(("r", 0, 1, Sampled(8))), 4.0)
    core.handle(sent_back(2, spans={"prefill": 1.0, "decode": 2.0}, cached_tokens=4, transfers=({"kind": "kv"},)), 5.0)
    old = core.handle(Moved("r", 0, "elsewhere", 2), 5.0)
    assert sent(old, Forget) == [Forget("r", 0)], "of the former attempt"
    assert brief(core.handle(Gone("r", 0, "E0", "P0", 1), 5.0)) == ["E0: forget r"]
    last = Finished(
        request="r",
        attempt=1,
        reason="length",
        count=3,
        spans={"prefill": 0.5},
        cached_tokens=16,
        transfers=({"kind": "image"},),
        route=("E0", "P0", "D0"),
        preemptions=2,
    )
    core.handle(emitted(("r", 1, 2, Sampled(9))), 6.0)
    ends = [each for each in core.handle(last, 7.0) if isinstance(each, End)]
    assert [end.reason for end in ends] == ["length"]
    found = ends[0].finished
    assert found is not None
    assert found.spans == {"prefill": 1.5, "decode": 2.0}
    assert found.cached_tokens == 4, "of its prompt, the first time"
    assert found.transfers == ({"kind": "kv"}, {"kind": "image"})
    assert found.route == ("E0", "P0", "D0") * 2
    assert found.preemptions == 3
    assert not core.entries


def test_what_was_given_up_meanwhile_is_not_sent_again() -> None:
    core = returning()
    core.handle(Abort("r", "cancelled"), 4.0)
    out = core.handle(sent_back(2), 5.0)
    assert not sent(out, Submit)
    assert {each.request for each in sent(out, Forget)} == {"r"}
    assert not core.entries


def test_what_was_sent_back_ends_with_an_error_where_its_first_stage_is_gone() -> None:
    core = returning()
    core.handle(emitted(("r", 0, 1, Sampled(8))), 4.0)
    core.handle(PeerDown("E0"), 4.5)
    (end,) = [each for each in core.handle(sent_back(2), 5.0) if isinstance(each, End)]
    assert end.reason == "error"
    assert end.failure is not None
    assert end.failure.error == "Overloaded"
    assert not core.entries


def test_what_was_sent_back_ends_with_an_error_where_no_prefill_pool_holds_its_outputs_too() -> None:
    """Its prompt of five fits into two blocks; with nine outputs it needs four. P1, which had them, is back small."""
    core = make_frontend()
    core.handle(peer_up("P0", kv=2), 0.0)
    core.handle(peer_up("P1", kv=4), 0.0)
    core.handle(replace(peer_up("D0"), returns=True), 0.0)
    core.handle(Submit(work("r", "cat", 1, max_tokens=20), ("pixels",)), 0.0)
    core.handle(emitted(*(("r", 0, index, Sampled(7)) for index in range(9))), 1.0)
    first = core.handle(sent_back(9), 2.0)
    (again,) = sent(first, Submit)
    assert again.work.outputs == 9
    core.handle(PeerDown("P1"), 3.0)
    core.handle(replace(peer_up("P1", kv=2), epoch=1), 3.0)
    (end,) = [each for each in core.handle(sent_back(9, attempt=1), 4.0) if isinstance(each, End)]
    assert end.failure is not None
    assert end.failure.error == "RequestTooLarge"
    assert "4 kv of 2 in P0" in end.failure.message
    assert "preempted" in end.failure.message
    assert not core.entries


def test_a_loss_after_it_was_sent_again_counts_the_tokens_of_the_new_attempt() -> None:
    """P0 samples the third token and is lost before it came: D0 cannot make up for it."""
    core = returning()
    core.handle(emitted(("r", 0, 1, Sampled(8))), 4.0)
    core.handle(sent_back(2), 5.0)
    core.handle(Moved("r", 1, "P0", 1), 6.0)
    core.handle(Moved("r", 1, "D0", 2, source="P0"), 6.0)
    assert not [each for each in core.handle(PeerDown("P0"), 7.0) if isinstance(each, End)], "D0 has not spoken"
    (end,) = [each for each in core.handle(emitted(("r", 1, 3, Sampled(8))), 7.0) if isinstance(each, End)]
    assert end.reason == "error"


def test_inputs_are_kept_only_where_somebody_may_send_requests_back() -> None:
    core = make_frontend()
    core.handle(Submit(work("r", "cat", 1), ("pixels",)), 0.0)
    assert core.entries["r"].inputs == ()
    assert returning().entries["r"].inputs == ("pixels",)
