"""FrontendCore: media that an encoder cannot take are tried once more, elsewhere if there is another, then refused."""

from __future__ import annotations

from typing import Any

import pytest

from support.core_tables import make_frontend, peer_up, sent, work
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort, End, FrontendCore
from trinity.core.frontend.messages import Prepared
from trinity.core.messages import UNFIT, Failure, Finished, Forget, Send, Submit


def opened(*encoders: str, **options: Any) -> FrontendCore:
    core = make_frontend(**{"failures": FailurePolicy(), **options})
    for name in encoders:
        core.handle(peer_up(name), 0.0)
    core.handle(Submit(work("r", "cat", 1), ("pixels",)), 1.0)
    return core


def first_of(core: FrontendCore) -> str:
    return core.entries["r"].first


def unfit(core: FrontendCore, **fields: str) -> Finished:
    entry = core.entries["r"]
    why = Failure("StageError", "encode raised ValueError: 0 rows", {"stage": "E", UNFIT: "it is too thin", **fields})
    return Finished(
        request=entry.work.request, attempt=entry.work.attempt, reason="error", failure=why, route=(entry.first,)
    )


def ends(out: list[Any]) -> list[End]:
    return [each for each in out if isinstance(each, End)]


def test_a_second_encoder_tries_what_the_first_cannot_take_and_then_it_is_bad_media() -> None:
    core = opened("E1")
    first = first_of(core)
    out = core.handle(unfit(core), 2.0)
    assert not ends(out)
    (again,) = sent(out, Submit)
    assert again.inputs == ("pixels",)
    assert {first, first_of(core)} == {"E0", "E1"}
    assert Forget in {type(each.message) for each in out if isinstance(each, Send)}
    (end,) = ends(core.handle(unfit(core), 3.0))
    assert end.failure == Failure("BadMedia", "it is too thin")
    assert not core.entries


def test_a_single_encoder_tries_twice() -> None:
    core = opened()
    assert len(sent(core.handle(unfit(core), 2.0), Submit)) == 1
    assert first_of(core) == "E0"
    (end,) = ends(core.handle(unfit(core), 3.0))
    assert end.failure is not None
    assert end.failure.error == "BadMedia"


def test_what_a_second_encoder_cannot_do_for_another_reason_is_a_stage_error() -> None:
    core = opened("E1")
    core.handle(unfit(core), 2.0)
    entry = core.entries["r"]
    why = Failure("StageError", "out of memory", {"stage": "E"})
    last = Finished(
        request=entry.work.request, attempt=entry.work.attempt, reason="error", failure=why, route=(entry.first,)
    )
    (end,) = ends(core.handle(last, 3.0))
    assert end.failure == why


def test_a_reader_that_has_left_has_nothing_tried_again() -> None:
    core = opened("E1")
    report = unfit(core)
    core.handle(Abort("r", "cancelled"), 2.0)
    assert not sent(core.handle(report, 3.0), Submit)
    assert not core.entries


@pytest.mark.parametrize("policy", [FailurePolicy(), FailurePolicy(recoveries=0, wait_s=0.0)])
def test_many_of_them_take_turns_and_cost_no_recovery_and_no_death(policy: FailurePolicy) -> None:
    core = make_frontend(failures=policy)
    core.handle(peer_up("E1"), 0.0)
    names = [f"r{number}" for number in range(40)]
    for name in names:
        core.handle(Submit(work(name, name, 1), ("pixels",)), 1.0)
    refused, tried = [], 0
    for step in range(200):
        for asked in [each for each in core.entries.values() if each.preparing]:
            contents = tuple(span.content for span in asked.work.media)
            core.handle(Prepared(asked.work.request, ("pixels",), contents), 2.0 + step)
        for entry in [each for each in core.entries.values() if each.first]:
            why = Failure("StageError", "raised", {"stage": "E", UNFIT: "too thin"})
            end = Finished(
                request=entry.work.request,
                attempt=entry.work.attempt,
                reason="error",
                failure=why,
                route=(entry.first,),
            )
            assert (entry.recoveries, entry.suspicion.deaths) == (0, ())
            tried += 1
            refused += [(each.request, each.failure) for each in ends(core.handle(end, 2.0 + step))]
    assert sorted(name for name, _ in refused) == sorted(names)
    assert {why.error for _, why in refused if why} == {"BadMedia"}
    assert tried == 2 * len(names)
    assert not core.isolation.places
