"""Cancel and failure at every phase: what is in flight ends first, nothing new starts, everything is given back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.core_tables import Row, brief, broken, done, emptied, image_offer, kv_offer, lost, make_core, table, work
from trinity.core import InstanceCore
from trinity.core.messages import Cancel, Commit, Failure, Forget, Pulled, Ready, Release, Submit, Value, Withdraw
from trinity.core.scheduler import BatchRules

TWO = ("cat", 1, "dog*6", 1)


def after(name: str, *events: Value, **settings: object) -> InstanceCore:
    core = make_core(name, peers="E0 P0 D0".replace(name, "").strip(), **settings)  # type: ignore[arg-type]
    for event in events:
        core.handle(event, 0.0)
    return core


def ended(name: str, count: int = 0, *, opened: bool = False, route: str = "") -> list[str]:
    lines = [f"frontend: finished r cancelled {count} by way of {route or name}"]
    return [*lines, "close r"] if opened else lines


@pytest.mark.parametrize(
    ("make", "at_once", "then", "at_last"),
    [
        pytest.param(
            lambda: after("EPD0", Submit(work("x", "cat", 1)), Submit(work("r", "dog", 1))),
            ended("EPD0"),
            None,
            [],
            id="waiting to be encoded",
        ),
        pytest.param(
            lambda: after("EPD0", Submit(work("r", "dog", 1))), [], done(1), ended("EPD0"), id="being encoded"
        ),
        pytest.param(
            lambda: after("PD0", Submit(work("x", 1)), Submit(work("r", 5))), ended("PD0"), None, [], id="KV queue"
        ),
        pytest.param(
            lambda: after("PD0", Submit(work("r", 5))),
            [],
            done(1, r=5),
            ended("PD0", opened=True),
            id="prefilling: its token is not counted",
        ),
        pytest.param(
            lambda: after("PD0", Submit(work("r", 5)), done(1, r=5)),
            [],
            done(2, r=6),
            ended("PD0", 1, opened=True),
            id="decoding",
        ),
        pytest.param(
            lambda: after(
                "P0", image_offer("E0:1", work("x", "cat*32"), ()), image_offer("E0:2", work("r", "dog"), (1,))
            ),
            ["E0: release E0:2 cancelled", *ended("P0", route="E0 P0")],
            None,
            [],
            id="waiting for image blocks",
        ),
        pytest.param(
            lambda: after("P0", image_offer("E0:1", work("r", *TWO), (1,), (2, 3)), Ready("E0:1", (0,))),
            [],
            Pulled("E0:1", 0),
            ["E0: release E0:1 cancelled", *ended("P0", route="E0 P0")],
            id="pulling images",
        ),
        pytest.param(
            lambda: after("P0", image_offer("E0:1", work("r", *TWO), (1,), (2, 3))),
            ["E0: release E0:1 cancelled", *ended("P0", route="E0 P0")],
            None,
            [],
            id="image blocks reserved, nothing in flight",
        ),
        pytest.param(
            lambda: after("D0", kv_offer("P0:1", work("r", 5), (1, 2)), Ready("P0:1", (0,)), Commit("P0:1", (5,))),
            [],
            Pulled("P0:1", 0),
            ["P0: release P0:1 cancelled", *ended("D0", 1, route="P0 D0")],
            id="pulling KV",
        ),
        pytest.param(
            lambda: after("D0", kv_offer("P0:1", work("r", 5), (1, 2)), Ready("P0:1", (0,))),
            [],
            lost("P0:1"),
            ["P0: release P0:1 cancelled", *ended("D0", route="P0 D0")],
            id="pulling KV, and the pull fails",
        ),
        pytest.param(
            lambda: after(
                "P0",
                image_offer("E0:1", work("r", "cat", 1), (1,)),
                Ready("E0:1", (0,)),
                Commit("E0:1"),
                Submit(work("x", 1)),
                Pulled("E0:1", 0),
            ),
            ended("P0", route="E0 P0"),
            None,
            [],
            id="migrated, waiting for prefill",
        ),
    ],
)
def test_cancel(make: Callable[[], InstanceCore], at_once: list[str], then: Value | None, at_last: list[str]) -> None:
    core = make()
    table(core, [(Cancel("r"), at_once), (Cancel("r"), [])])
    if then is not None:
        table(core, [(then, at_last)])
    assert "r" not in core.state.requests
    core.handle(Cancel("x"), 0.0)
    for lane, flight in core.state.lanes.items():
        for running in list(flight):
            core.handle(done(running.step.id, lane, x=1), 0.0)
    table(core, [(Forget("r"), [])])
    emptied(core)


def test_a_cancelled_prefill_publishes_nothing() -> None:
    core = after("PD0", Submit(work("r", 9)), Cancel("r"), done(1, r=5))
    core.handle(Submit(work("q", 9)), 0.0)
    assert core.state.requests["q"].prefill_start == 0


def test_cancel_before_the_commit_follows_the_offer() -> None:
    core = after("E0", Submit(work("r", *TWO)), done(1), rules=BatchRules(image_budget=1))
    rows: list[Row] = [
        (Cancel("r"), ["P0: cancel r"]),
        (done(2), []),
        (Release("E0:1", "cancelled"), []),
        (Forget("r"), []),
    ]
    table(core, rows)
    emptied(core)


def test_a_released_offer_is_not_cancelled_again() -> None:
    core = after("E0", Submit(work("r", *TWO)), done(1), Release("E0:1", "failed"), rules=BatchRules(image_budget=1))
    table(core, [(Cancel("r"), []), (done(2), []), (Forget("r"), [])])
    emptied(core)


def test_cancel_after_the_hand_on_follows_the_tombstone_until_forget() -> None:
    core = after("E0", Submit(work("r", "cat", 1)), done(1))
    rows: list[Row] = [
        (Cancel("r"), ["P0: cancel r"]),
        (Release("E0:1", "cancelled"), []),
        (Cancel("r"), ["P0: cancel r"]),
        (Forget("r"), []),
        (Cancel("r"), []),
    ]
    table(core, rows)
    emptied(core)


def test_a_source_whose_target_gave_up_stops_without_a_report() -> None:
    core = after("E0", Submit(work("r", *TWO)), done(1), rules=BatchRules(image_budget=1))
    rows: list[Row] = [(Release("E0:1", "failed"), []), (done(2), []), (Forget("r"), [])]
    table(core, rows)
    emptied(core)


def test_a_forget_ahead_of_the_release_ends_the_request_at_its_source() -> None:
    core = after("E0", Submit(work("r", *TWO)), done(1), rules=BatchRules(image_budget=1))
    rows: list[Row] = [(Forget("r"), ["P0: cancel r"]), (done(2), []), (Release("E0:1", "failed"), [])]
    table(core, rows)
    emptied(core)


def test_a_source_that_fails_withdraws_and_leaves_the_report_to_the_target() -> None:
    core = after("E0", Submit(work("r", *TWO)), done(1), rules=BatchRules(image_budget=1))
    rows: list[Row] = [
        (broken(2, "r"), ["P0: withdraw E0:1 StageError"]),
        (Release("E0:1", "failed"), []),
        (Forget("r"), []),
    ]
    table(core, rows)
    emptied(core)


def test_a_source_that_fails_after_its_release_has_nothing_to_withdraw() -> None:
    core = after("E0", Submit(work("r", *TWO)), done(1), Release("E0:1", "failed"), rules=BatchRules(image_budget=1))
    table(core, [(broken(2, "r"), []), (Cancel("r"), ["P0: cancel r"]), (Forget("r"), [])])
    emptied(core)


def test_a_source_that_fails_before_any_offer_reports_itself() -> None:
    core = after("E0", Submit(work("r", *TWO)))
    table(core, [(broken(1, "r"), ["frontend: finished r error 0 by way of E0 StageError"])])
    emptied(core)


def test_a_withdrawn_offer_drains_its_pulls_then_releases_and_reports() -> None:
    core = after("P0", image_offer("E0:1", work("r", *TWO), (1,), (2, 3)), Ready("E0:1", (0,)))
    why = Failure("StageError", "the encoder broke")
    rows: list[Row] = [
        (Withdraw("E0:1", why), []),
        (Pulled("E0:1", 0), ["E0: release E0:1 failed", "frontend: finished r error 0 by way of E0 P0 StageError"]),
    ]
    table(core, rows)
    emptied(core)


def test_a_withdrawn_offer_with_nothing_in_flight_is_released_at_once() -> None:
    core = after("P0", image_offer("E0:1", work("r", *TWO), (1,), (2, 3)))
    expected = ["E0: release E0:1 cancelled", "frontend: finished r cancelled 0 by way of E0 P0"]
    table(core, [(Withdraw("E0:1"), expected), (Withdraw("E0:1"), [])])
    emptied(core)


@pytest.mark.parametrize("others", [0, 1])
def test_a_failed_pull_ends_the_request_once_the_others_have_ended(others: int) -> None:
    core = after("P0", image_offer("E0:1", work("r", *TWO), (1,), (2, 3)), Ready("E0:1", (0, 1)[: others + 1]))
    over = ["E0: release E0:1 failed", "frontend: finished r error 0 by way of E0 P0 MigrationError"]
    table(core, [(lost("E0:1"), [] if others else over)])
    if others:
        table(core, [(Pulled("E0:1", 1), over)])
    emptied(core)


def test_two_failed_pulls_are_one_end() -> None:
    core = after("P0", image_offer("E0:1", work("r", *TWO), (1,), (2, 3)), Ready("E0:1", (0, 1)))
    over = ["E0: release E0:1 failed", "frontend: finished r error 0 by way of E0 P0 MigrationError"]
    table(core, [(lost("E0:1", 1), []), (lost("E0:1", 0), over)])
    emptied(core)


def test_what_a_failed_pull_should_have_brought_is_not_matchable() -> None:
    core = after("P0", image_offer("E0:1", work("r", "cat", 1), (1,)), Ready("E0:1", (0,)), lost("E0:1"))
    core.handle(image_offer("E0:2", work("q", "cat", 1), (1,)), 0.0)
    assert brief(core.handle(Ready("E0:2", (0,)), 0.0)) == ["pull E0:2.0 image of q from E0 1 into 0"]


def test_a_failed_kv_pull_is_released_as_failed() -> None:
    core = after("D0", kv_offer("P0:1", work("r", 5), (1, 2)), Ready("P0:1", (0,)), Commit("P0:1", (5,)))
    over = ["P0: release P0:1 failed", "frontend: finished r error 1 by way of P0 D0 MigrationError"]
    table(core, [(lost("P0:1"), over)])
    emptied(core)


def test_a_cancelled_request_whose_row_then_fails_stays_cancelled() -> None:
    core = after("PD0", Submit(work("r", 5)), Cancel("r"))
    table(core, [(broken(1, "r"), ended("PD0", opened=True))])
    emptied(core)


def test_a_cancelled_request_stays_held_until_its_step_has_ended() -> None:
    core = after("PD0", Submit(work("r", 5)), Cancel("r"))
    assert core.state.kv.held == 2
    assert core.state.requests["r"].ending is not None
    core.handle(done(1, r=5), 0.0)
    assert core.state.kv.held == 0


def test_the_rest_of_the_batch_goes_on() -> None:
    core = after("PD0", Submit(work("x", 1)), Submit(work("r", 1, text=200)), done(1, x=5))
    rows: list[Row] = [
        (Cancel("r"), []),
        (
            done(2, x=6, r=5),
            [
                "frontend: emit x#1=6",
                "frontend: finished r cancelled 0 by way of PD0",
                "close r",
                "step 3 joint: decode x",
            ],
        ),
    ]
    table(core, rows)


def test_ends_come_in_the_order_of_the_rows() -> None:
    core = make_core("PD0", kv=64)
    core.handle(Submit(work("x", 1)), 0.0)
    names = [f"r{number}" for number in range(12)]
    for name in names:
        core.handle(Submit(work(name, 1)), 0.0)
    core.handle(done(1, x=5), 0.0)
    for name in reversed(names):
        core.handle(Cancel(name), 0.0)
    out = brief(core.handle(done(2, x=6, **dict.fromkeys(names, 1)), 0.0))
    assert [line.split()[2] for line in out if "finished" in line] == names
