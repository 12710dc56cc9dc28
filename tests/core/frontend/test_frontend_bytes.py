"""Bytes that wait: what requests hold is bounded until it has been encoded, wherever it waits meanwhile."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from support.core_tables import emitted, make_frontend, sent, work
from support.recovering import change_policy
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort, End, FrontendCore
from trinity.core.messages import PREEMPTED, Finished, PeerDown, PeerUp, Sampled, Submit, Tick, Value
from trinity.core.routing.router import RoundRobin


def bounded(limit: int) -> FrontendCore:
    core = make_frontend()
    core.options = dataclasses.replace(core.options, max_waiting_bytes=limit)
    return core


def submit(name: str, size: int, **named: Any) -> Submit:
    return Submit(work(name, "cat", 1, **named), ("pixels",), input_bytes=size)


def refusal(out: list[Value]) -> str:
    ends = [each for each in out if isinstance(each, End)]
    return ends[0].failure.error if ends and ends[0].failure is not None else ""


def test_above_the_bound_a_request_is_too_large_or_has_to_wait() -> None:
    core = bounded(100)
    assert refusal(core.handle(submit("a", 101), 0.0)) == "RequestTooLarge"
    assert refusal(core.handle(submit("b", 60), 0.0)) == ""
    assert refusal(core.handle(submit("c", 41), 0.0)) == "Overloaded"
    assert refusal(core.handle(submit("d", 40), 0.0)) == ""
    assert core.inputs.waiting_bytes == 100


def test_its_first_token_says_that_its_inputs_are_used() -> None:
    core = bounded(100)
    core.handle(submit("a", 100), 0.0)
    core.handle(emitted(("a", 0, 0, Sampled(7))), 0.1)
    assert core.inputs.waiting_bytes == 0
    assert refusal(core.handle(submit("b", 100), 0.2)) == ""
    core.handle(Finished(request="a", attempt=0, reason="length", count=1), 0.3)
    assert core.inputs.waiting_bytes == 100


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_what_nobody_waits_for_still_waits_at_its_instance(reason: str) -> None:
    """Else a frozen instance is sent more and more, by requests that end at their deadline."""
    core = bounded(100)
    core.handle(submit("a", 100, deadline_s=1.0), 0.0)
    out = core.handle(Tick() if reason == "deadline" else Abort("a", "cancelled"), 2.0)
    assert [each.reason for each in out if isinstance(each, End)] == [reason]
    assert refusal(core.handle(submit("b", 1), 2.1)) == "Overloaded"
    core.handle(PeerDown("E0"), 3.0)
    core.handle(PeerUp("E0", "E", 1, {"image": 8}), 4.0)
    assert core.inputs.waiting_bytes == 0
    assert refusal(core.handle(submit("b", 1), 4.1)) == ""


def test_inputs_that_are_kept_to_be_sent_again_wait_to_the_first_token_and_are_kept_to_the_end() -> None:
    core = bounded(100)
    change_policy(core, FailurePolicy(kept_bytes=100))
    core.handle(PeerUp("D0", "D", 0, {"kv": 100}, returns=True), 0.0)
    core.handle(submit("a", 100), 0.0)
    core.handle(emitted(("a", 0, 0, Sampled(7))), 0.1)
    assert (core.inputs.waiting_bytes, core.inputs.kept_bytes) == (0, 100)
    core.handle(Finished(request="a", attempt=0, reason=PREEMPTED, count=1, route=("E0", "P0", "D0")), 0.2)
    assert (core.inputs.waiting_bytes, core.inputs.kept_bytes) == (0, 100)
    core.handle(Finished(request="a", attempt=1, reason="length", count=1, route=("E0", "P0", "D0")), 0.3)
    assert (core.inputs.waiting_bytes, core.inputs.kept_bytes) == (0, 0)


def test_the_count_is_that_of_the_requests_that_are_there_in_any_order_of_events() -> None:
    draw = random.Random(3)
    for _ in range(300):
        core, names = bounded(500), [f"r{number}" for number in range(8)]
        for step in range(40):
            name = draw.choice(names)
            life = core.entries[name].work.request if name in core.entries else name
            event: Value = draw.choice(
                [
                    submit(name, draw.randrange(300), deadline_s=5.0),
                    emitted((life, 0, 0, Sampled(1))),
                    Finished(request=life, attempt=0, reason=draw.choice(["length", "error"]), count=1),
                    Abort(name, "cancelled"),
                    PeerDown("E0"),
                    PeerUp("E0", "E", step, {"image": 8}),
                    Tick(),
                ]
            )
            core.handle(event, float(step))
            assert core.inputs.waiting_bytes == sum(entry.input_bytes for entry in core.entries.values()) <= 500
        for name in list(core.lives):
            core.handle(Finished(request=name, attempt=0, reason="error", cut=True), 50.0)
        assert core.inputs.waiting_bytes == 0


def test_the_default_is_one_gigabyte() -> None:
    assert FrontendCore(RoundRobin()).options.max_waiting_bytes == 1 << 30


def test_the_bytes_are_told_to_the_front_end_alone() -> None:
    assert [each.input_bytes for each in sent(bounded(100).handle(submit("a", 60), 0.0), Submit)] == [0]


def test_where_a_message_was_lost_the_request_ends_though_another_instance_ended_it_well() -> None:
    """The first token was P's, and could not be sent: nobody may wait for it."""
    core = bounded(100)
    core.handle(submit("a", 1), 0.0)
    core.handle(Finished(request="a", attempt=0, reason="length", count=1, route=("E0", "P0")), 0.1)
    assert core.entries
    out = core.handle(Finished(request="a", attempt=0, reason="error", cut=True, route=("P0",)), 0.2)
    assert [each.reason for each in out if isinstance(each, End)] == ["error"]
    assert not core.entries
