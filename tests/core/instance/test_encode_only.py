"""Requests that want nothing but the features of their media: they end behind E, whatever comes between."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, broken, done, emptied, make_core, peer_up, sent, table, work
from support.deadly import deadly_cluster
from support.every_order import Search
from support.scenarios import PLACEMENTS, encode_alone, random_cluster
from support.virtual.cluster import VirtualCluster, make_settings
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import Abort, FrontendCore, FrontendOptions
from trinity.core.instance.request_state import RequestState
from trinity.core.messages import (
    Cancel,
    Collect,
    Collected,
    Failure,
    Finished,
    Forget,
    Open,
    Prefill,
    Step,
    Submit,
    Tick,
    Value,
    Work,
)
from trinity.core.routing.router import PrefixHits, RoundRobin, RoutingPolicy
from trinity.core.routing.stage_peers import needs
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

CAT = encode_alone(work("r", 1, "cat*6", "dog*4"))


def features(name: str, *pieces: str, **fields: Any) -> Work:
    return encode_alone(work(name, *pieces, **fields))


# ---------------------------------------------------------------- one instance, event by event


def test_a_request_ends_with_its_features_and_holds_no_kv() -> None:
    for name in ("E0", "EP0", "EPD0", "ED0"):
        core = make_core(name, peers="P9 D9")
        table(
            core,
            [
                (Submit(CAT), ["step 1 joint: encode r.0 into 0,1, encode r.1 into 2"]),
                (done(1), ["collect r [0,1 of 6 rows][2 of 4 rows]"]),
                (Collected("r", ("cat", "dog")), [f"frontend: finished r encoded 0 by way of {name}"]),
                (Forget("r"), []),
            ],
        )
        emptied(core)


def test_the_end_brings_the_rows_and_the_time_of_the_encoder() -> None:
    core = make_core("E0", peers="P0 D0")
    for at, event in enumerate([Submit(CAT), done(1)]):
        core.handle(event, float(at))
    (end,) = sent(core.handle(Collected("r", ("cat", "dog")), 3.0), Finished)
    assert end.rows == ("cat", "dog")
    assert end.spans == {"encode_queue": 0.0, "encode": 3.0}


def test_blocks_are_held_until_the_copy_has_ended() -> None:
    core = make_core("E0", image=3, peers="P0 D0")
    table(
        core,
        [
            (Submit(CAT), ["step 1 joint: encode r.0 into 0,1, encode r.1 into 2"]),
            (done(1), ["collect r [0,1 of 6 rows][2 of 4 rows]"]),
            (Submit(features("s", "bird*6")), []),  # no block is free, though all are published
            (Cancel("r"), []),
            (Collected("r"), ["frontend: finished r cancelled 0 by way of E0", "step 2 joint: encode s.0 into 0,1"]),
        ],
    )


def test_features_that_are_cached_are_not_encoded_again() -> None:
    core = make_core("EP0", peers="D0")
    for event in (Submit(CAT), done(1), Collected("r")):
        core.handle(event, 0.0)
    assert brief(core.handle(Submit(replace(CAT, request="s")), 0.0)) == ["collect s [0,1 of 6 rows][2 of 4 rows]"]


def test_a_request_and_an_encode_only_one_share_the_encoding_of_an_image() -> None:
    core = make_core("E0", peers="P0 D0")
    for event in (Submit(features("r", "cat*6")), Submit(work("s", 1, "cat*6"))):
        core.handle(event, 0.0)
    said = brief(core.handle(done(1), 0.0))
    assert "collect r [0,1 of 6 rows]" in said
    assert "P0: commit E0:1" in said
    assert not any("r.0" in each for each in said)


def test_a_failed_row_or_copy_ends_its_own_request_alone() -> None:
    core = make_core("E0", peers="P0 D0")
    for event in (Submit(features("r", "cat")), Submit(features("s", "cat"))):
        core.handle(event, 0.0)
    said = brief(core.handle(broken(1, "r"), 0.0))
    assert said == ["frontend: finished r error 0 by way of E0 StageError", "step 2 joint: encode s.0 into 0"]
    assert brief(core.handle(done(2), 0.0)) == ["collect s [0 of 4 rows]"]
    why = Failure("StageError", "the device is gone")
    assert brief(core.handle(Collected("s", (), why), 0.0)) == ["frontend: finished s error 0 by way of E0 StageError"]
    emptied(core)


def test_a_deadline_ends_it_in_the_queue_and_during_the_copy() -> None:
    core = make_core("E0", image=1, peers="P0 D0")
    for event in (Submit(features("r", "cat", deadline_s=5.0)), Submit(features("s", "dog", deadline_s=2.0)), done(1)):
        core.handle(event, 0.0)
    (queued,) = sent(core.handle(Tick(), 2.0), Finished)
    assert not sent(core.handle(Tick(), 5.0), Finished)
    (copied,) = sent(core.handle(Collected("r", ("late",)), 5.1), Finished)
    for end in (queued, copied):
        assert end.failure is not None
        assert (end.failure.error, end.rows) == ("DeadlineExceeded", ())


def test_one_too_large_for_the_instance_is_refused() -> None:
    core = make_core("E0", image=2, peers="P0 D0")
    assert brief(core.handle(Submit(CAT), 0.0)) == ["frontend: finished r error 0 by way of E0 RequestTooLarge"]


# ---------------------------------------------------------------- the front end


def frontend(*names: str, policy: RoutingPolicy | None = None, **kept: Any) -> FrontendCore:
    core = FrontendCore(policy or RoundRobin(), FrontendOptions(**{"failures": NO_RECOVERY, **kept}))
    for name in names:
        core.handle(peer_up(name), 0.0)
    return core


def test_the_front_end_sends_it_to_an_encoder_and_ends_it_as_it_is_encoded() -> None:
    core = frontend("EP0", "D0", "E1", policy=PrefixHits())
    table_of = [
        (Submit(CAT), ["EP0: submit r"]),
        (
            Finished(request="r", attempt=0, reason="encoded", route=("EP0",), rows=("cat", "dog")),
            ["end r encoded", "EP0: forget r"],
        ),
    ]
    for event, expected in table_of:
        assert brief(core.handle(event, 0.0)) == expected
    assert (core.entries, core.waiting, core.inputs.waiting_bytes) == ({}, 0, 0)


def test_it_counts_as_waiting_until_its_end() -> None:
    core = frontend("E0", "P0", "D0", max_waiting=1, max_waiting_bytes=100)
    core.handle(Submit(CAT, input_bytes=60), 0.0)
    assert brief(core.handle(Submit(replace(CAT, request="s")), 0.0)) == ["end s error Overloaded"]
    assert brief(core.handle(Submit(work("t", 3)), 0.0)) == ["end t error Overloaded"]
    core.handle(Abort("r", "cancelled"), 0.0)
    core.handle(Finished(request="r", attempt=0, reason="cancelled", route=("E0",)), 0.0)
    assert brief(core.handle(Submit(replace(CAT, request="s")), 0.0)) == ["E0: submit s"]


@pytest.mark.parametrize(
    ("names", "asked", "error"),
    [
        (("PD0",), CAT, "RequestError"),
        (("EPD0",), replace(CAT, media=()), "RequestError"),
        (("E0", "PD0"), features("r", "cat*999"), "RequestTooLarge"),
    ],
)
def test_what_no_encoder_can_serve_is_refused(names: tuple[str, ...], asked: Work, error: str) -> None:
    assert brief(frontend(*names).handle(Submit(asked), 0.0)) == [f"end r error {error}"]


def test_it_needs_image_blocks_alone() -> None:
    for roles in ("E", "EP", "ED", "EPD"):
        assert needs("E", CAT, roles, 4, 4) == {"image": 3}


# ---------------------------------------------------------------- all that may come between


def run(cluster: VirtualCluster, seed: int) -> Counter[str]:
    """Run it to its end. Counts why its encode-only requests ended."""
    try:
        cluster.run()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    ends: Counter[str] = Counter()
    for outcome in cluster.outcomes.values():
        if outcome.work.encode_only:
            assert outcome.end is not None
            assert not outcome.tokens
            ends[outcome.end.failure.error if outcome.end.failure else outcome.end.reason] += 1
            if outcome.end.reason == "encoded":
                assert outcome.end.finished is not None
                assert len(outcome.end.finished.rows) == len(outcome.work.media)
    return ends


def alone(seed: int, placement: str) -> Counter[str]:
    return run(random_cluster(seed, placement, encode_only=0.5), seed)


def run_all(placement: str, seeds: range) -> Counter[str]:
    return sum((alone(seed, placement) for seed in seeds), Counter())


def test_interleavings_with_other_requests_keep_the_invariants() -> None:
    ends: Counter[str] = Counter()
    for number, placement in enumerate(PLACEMENTS):
        ends += run_all(placement, range(9_000_000 + 1000 * number, 9_000_004 + 1000 * number))
    assert {"encoded", "cancelled", "StageError", "RequestTooLarge", "Overloaded"} <= ends.keys(), ends
    assert ends["encoded"] > 75


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_many_more_interleavings_keep_them_too(placement: str) -> None:
    assert run_all(placement, range(9_100_000, 9_100_400))["encoded"]


def test_instances_that_die_and_come_back_leave_no_request_without_an_end() -> None:
    ends: Counter[str] = Counter()
    for seed in range(40):
        ends += run(deadly_cluster(seed, encode_only=0.6), seed)
    assert {"encoded", "StageError"} <= ends.keys(), ends


def test_every_order_of_a_death_ends_it() -> None:
    asked: tuple[Value, ...] = (Submit(features("r", "cat*4")), Abort("r", "cancelled"))
    for victim, calls in (("", asked[:1]), ("E0", asked[:1]), ("E0", asked), ("PD0", asked)):
        settings = make_settings(
            "E+PD",
            {"image": 4, "kv": 8},
            image_block_size=4,
            kv_block_size=4,
            rules=BatchRules(token_budget=64, image_budget=64),
            transfers=TransferPolicy(early=False),
        )
        found = Search(settings, calls, victim, back=bool(victim))
        found.run()
        reasons = {reason for each in found.ends for _, reason in each}
        assert "encoded" in reasons
        assert reasons <= {"encoded", "cancelled", "StageError", "Overloaded"}


def test_a_simulation_serves_them() -> None:
    cluster = VirtualCluster(make_settings("1E1P1D", {"image": 4, "kv": 16}, image_block_size=4, kv_block_size=4))
    cluster.submit(features("r", "cat*6"))
    cluster.submit(work("s", 2, "cat*6"))
    cluster.run()
    commands = [each for _, _, each in cluster.commands]
    opened = {each.work.request for each in commands if isinstance(each, Open)}
    prefilled = {row.request for each in commands if isinstance(each, Step) for row in each.prefills}
    assert opened == prefilled == {"s"}
    assert [each.request for each in commands if isinstance(each, Collect)] == ["r"]
    assert isinstance(next(row for each in commands if isinstance(each, Step) for row in each.prefills), Prefill)


# ---------------------------------------------------------------- what the checks would see


def test_a_core_that_lets_go_of_blocks_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(state: RequestState) -> Collect:
        command = plain(state)
        state.collecting = False
        return command

    plain = RequestState.collect
    monkeypatch.setattr(RequestState, "collect", collect)
    with pytest.raises((AssertionError, KeyError)):
        run_all("EPD", range(200))
