"""What the front end is told, word for word, of requests that ended because a peer was lost or fell silent."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from support.core_tables import brief, done, emptied, image_offer, kv_offer, make_core, sent, work
from trinity.core import InstanceCore
from trinity.core.instance.loads import report
from trinity.core.instance.request_state import Tombstone
from trinity.core.messages import (
    IMAGE,
    NOWHERE,
    Commit,
    Failure,
    Fetch,
    Fetched,
    Finished,
    Forget,
    Moved,
    Offer,
    PeerDown,
    PeerLoad,
    Pulled,
    Ready,
    Submit,
    Tick,
    Value,
    Withdraw,
)
from trinity.core.scheduler import BatchRules, StepRates

SLOW: dict[str, Any] = {"lease_s": 10.0, "report_s": inf}
SILENT = "was silent for 10 s, and the lease on {kind} blocks ran out; try again"


def silent(who: str, source: str, target: str, kind: str) -> Failure:
    fields = {"source": source, "target": target, "kind": kind, "cause": "LeaseExpired"}
    return Failure("MigrationError", f"instance {who} {SILENT.format(kind=kind)}", fields)


def only(commands: list[Value]) -> Finished:
    (finished,) = sent(commands, Finished)
    return finished


def test_a_lost_source_ends_what_was_on_its_way_from_it_and_nothing_else() -> None:
    core = make_core("D0", peers="P0 P1")
    core.handle(kv_offer("P0:1", work("r", 4), (0,)), 1.0)
    core.handle(kv_offer("P1:1", work("s", 4), (0,), source="P1"), 1.0)
    finished = only(core.handle(PeerDown("P0"), 5.0))
    fields = {"source": "P0", "target": "D0", "kind": "kv", "cause": "PeerLost"}
    assert finished.failure == Failure("MigrationError", "instance P0 was lost before its kv blocks were here", fields)
    assert (finished.request, finished.reason, finished.route) == ("r", "error", ("P0", "D0"))
    assert list(core.state.requests) == ["s"]
    core.handle(Forget("s"), 6.0)
    core.handle(Forget("r"), 6.0)
    emptied(core)


def test_the_time_that_a_lost_source_had_promised_is_not_booked() -> None:
    core = make_core("P0", peers="E0 D0")
    core.handle(image_offer("E0:1", work("r", 1, "cat*4"), (0,)), 1.0)
    core.handle(Commit("E0:1"), 2.0)
    assert only(core.handle(PeerDown("E0"), 5.0)).spans == {"ep_migration": 3.0}


def test_what_was_heard_of_a_lost_peer_does_not_renew_the_leases_of_its_next_life() -> None:
    core = make_core("E0", image=2, peers="P0", **SLOW)
    core.handle(PeerLoad("P0"), 8.0)
    core.handle(PeerDown("P0"), 8.5)
    assert "P0" not in core.state.last_heard


def test_a_silent_target_is_named_to_it_and_to_the_front_end() -> None:
    core = make_core("E0", image=1, peers="P0", **SLOW)
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    core.handle(done(1), 1.0)
    commands = core.handle(Tick(), 11.0)
    why = silent("P0", "E0", "P0", "image")
    assert sent(commands, Withdraw) == [Withdraw("E0:1", why)]
    assert only(commands) == Finished(request="r", attempt=0, reason="error", failure=why, count=0, route=("E0", "P0"))


def test_a_silent_target_of_kv_has_the_tokens_so_far_counted() -> None:
    core = make_core("P0", peers="D0", **SLOW)
    core.handle(Submit(work("r", 4)), 0.0)
    core.handle(done(1, r=7), 1.0)
    finished = only(core.handle(Tick(), 11.0))
    assert (finished.failure, finished.count) == (silent("D0", "P0", "D0", "kv"), 1)


def test_a_silent_target_of_a_request_that_is_here() -> None:
    core = make_core("E0", image=32, peers="P0", **SLOW)
    core.handle(Submit(work("r", 1, "cat*4", "dog*64")), 0.0)  # the second image fills a budget alone
    commands = core.handle(done(1), 1.0)
    assert sent(commands, Offer)
    core.handle(Tick(), 11.0)
    finished = only(core.handle(done(2), 12.0))
    assert finished.reason == "error"
    assert finished.failure == silent("P0", "E0", "P0", "image")


def test_a_silent_source_is_named() -> None:
    core = make_core("P0", peers="E0 D0", **SLOW)
    core.handle(image_offer("E0:1", work("r", 1, "cat*4"), (0,)), 1.0)
    finished = only(core.handle(Tick(), 11.0))
    assert (finished.failure, finished.reason) == (silent("E0", "E0", "P0", "image"), "error")


@pytest.mark.parametrize(("now", "ended"), [(16.0, True), (16.1, False)])
def test_who_stood_still_itself_blames_nobody(now: float, ended: bool) -> None:
    """The check was due at 11: later than by half a lease, it was this instance that did not run."""
    core = make_core("E0", image=1, peers="P0", **SLOW)
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    core.handle(done(1), 1.0)
    assert bool(sent(core.handle(Tick(), now), Finished)) is ended


def test_without_a_prefill_instance_the_source_says_who_it_is() -> None:
    core = make_core("E0", peers="P0")
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    core.handle(PeerDown("P0"), 0.5)
    why = only(core.handle(done(1), 1.0)).failure
    assert why == Failure(
        "MigrationError", "no instance with stage P is up just now", {"source": "E0", "cause": NOWHERE}
    )


def test_a_lease_begins_with_its_offer() -> None:
    core = make_core("E0", image=1, peers="P0", **SLOW)
    core.handle(PeerLoad("P0"), 0.0)
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    core.handle(done(1), 5.0)
    assert core.next_timer() == 15.0


def holder() -> InstanceCore:
    """An encoder whose cached features of "cat" others may fetch."""
    core = make_core("E0", image=1, peers="P0", **SLOW)
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    core.handle(done(1), 1.0)
    core.handle(PeerDown("P0"), 2.0)
    core.handle(Forget("r"), 2.0)
    return core


def test_a_fetch_is_a_lease_like_any_other() -> None:
    core = holder()
    keys = tuple(core.state.slots(work("x", 1, "cat*4"))[0].keys)
    core.state.generation = 3
    assert sent(core.handle(Fetch("P1>E0:1", "P1", IMAGE, keys), 4.0), Fetched) == [Fetched("P1>E0:1", "E0", (0,), 3)]
    lease = core.state.outgoing["P1>E0:1"]
    assert (lease.request, lease.target, lease.since) == ("", "P1", 4.0)
    assert core.state.last_heard["P1"] == 4.0
    assert sent(core.handle(Fetch("P1>E0:2", "P1", "audio", keys), 5.0), Fetched)[0].blocks == ()


@pytest.mark.parametrize(("busy", "due"), [(False, 2.0), (True, 1.1)])
def test_the_next_report_is_soon_while_there_is_work(busy: bool, due: float) -> None:
    core = make_core("PD0", peers="E0", report_s=0.1, heartbeat_s=1.0)
    if busy:
        core.handle(Submit(work("r", 4)), 0.5)
    report(core.state, 1.0)
    assert core.state.report_at == pytest.approx(due)


def test_a_report_says_whose_life_it_is_and_what_waits() -> None:
    core = make_core("PD0", peers="E0", epoch=4)
    core.state.rates.per_unit["P"] = 0.5
    core.handle(Submit(work("r", 8)), 0.5)
    core.state.out = []
    report(core.state, 1.0)
    (load,) = {each.name: each for each in sent(core.state.out, PeerLoad)}.values()
    assert (load.epoch, load.predicted_s["P"]) == (4, 4.0)


def test_a_request_passed_to_an_encoder_leaves_a_tombstone() -> None:
    core = make_core("P0", peers="E0 D0")
    core.handle(Submit(work("r", 1, "cat*4", attempt=2)), 0.0)
    commands = core.handle(Tick(), 0.0)
    assert brief(commands) == []
    assert "r" not in core.state.requests
    assert core.state.tombstones == {"r": Tombstone("E0", 2, 1, "frontend")}


def test_a_request_without_its_features_goes_to_an_encoder() -> None:
    core = make_core("P0", peers="E0 D0")
    commands = core.handle(Submit(work("r", 1, "cat*4", attempt=2), ("pixels",), ("X0",)), 0.0)
    passed = Submit(
        work("r", 1, "cat*4", attempt=2), ("pixels",), ("X0", "P0"), target_epoch=0, spans={"encode_queue": 0.0}
    )
    assert sent(commands, Submit) == [passed]
    assert sent(commands, Moved) == [Moved("r", 2, "P0", 1)], "from another instance: it says that it has it"


def test_where_no_encoder_is_up_it_ends_with_a_typed_error() -> None:
    core = make_core("P0", peers="D0")
    finished = only(core.handle(Submit(work("r", 1, "cat*4")), 0.0))
    assert finished.failure == Failure(
        "MigrationError", "no instance with stage E is up just now", {"source": "P0", "cause": NOWHERE}
    )
    assert finished.reason == "error"
    core.handle(Forget("r"), 1.0)
    emptied(core)


def test_an_instance_ends_what_is_late_in_its_own_words() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("r", 4, deadline_s=5.0)), 0.0)
    core.handle(Tick(), 5.0)
    why = only(core.handle(done(1, r=7), 6.0)).failure
    assert why == Failure("DeadlineExceeded", "the deadline passed while the request was at PD0")


def test_what_was_cached_of_all_images_is_told_and_prefill_begins() -> None:
    core = make_core("P0", peers="E0 D0", prefix_cache=False)
    core.handle(image_offer("E0:1", work("r", 1, "cat*4"), (0,)), 0.0)
    core.handle(Ready("E0:1", (0,)), 0.0)
    core.handle(Commit("E0:1"), 0.0)
    core.handle(Pulled("E0:1", 0), 0.0)
    core.handle(done(1, r=7), 0.0)
    commands = core.handle(Submit(work("s", 2, "cat*4", max_tokens=1)), 1.0)
    assert brief(commands) == ["open s kv 2,3 images [0]", "step 2 joint: prefill s 0+6 last"]
    finished = only(core.handle(done(2, s=8), 2.0))
    nothing = {"bytes": 0, "blocks": 0, "seconds": 0.0}
    assert finished.transfers == ({"kind": "image", "source": "P0", "target": "P0", "outcome": "cached", **nothing},)


@pytest.mark.parametrize(("letter", "unit"), [("E", 4.0 / 8), ("P", 1.0 / 64), ("D", 2.0 / 64)])
def test_a_profiled_unit_is_a_share_of_a_full_step(letter: str, unit: float) -> None:
    class Cost:
        def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
            return 2.0 * bool(decodes) + bool(prefill_tokens) + 4.0 * bool(media_tokens)

    assert StepRates(BatchRules(token_budget=64, image_budget=8, cost=Cost()), "EPD").unit_seconds(letter) == unit
