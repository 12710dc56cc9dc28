"""Runs in virtual time in which decodes are moved, each checked after every event; and rules that moves need.

``support.moving.run(seed)`` repeats a run: beside moves come deaths, freezes, cancels, deadlines, leases and faults.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from support.core_tables import work
from support.moving import POLICY, commit_on_its_way, count, is_whole, run, slow_move, target_stands_still
from support.moving import moves_of as ends
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.frontend import Abort
from trinity.core.frontend.messages import MoveRequest
from trinity.core.messages import FRONTEND, Step

STILL = Durations(lambda *_: 0.01, lambda *_: 1.0, lambda *_: 0.1)
AT_ALL = 60


def test_decodes_move_with_all_invariants() -> None:
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        count(run(seed), seen)
    assert seen["moved"] > AT_ALL // 2, seen
    assert min(seen[reason] for reason in ("refused", "late", "lost", "same", "moving", "ended")) > 1, seen
    assert all(seen[reason] for reason in ("unpulled", "too large", "unknown")), seen
    assert min(seen["copy pulled"], seen["copy refused"]) > 3, seen
    assert min(seen["deaths"], seen["survived"]) > 3, seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_more_runs_with_moves(part: int) -> None:
    """10,000 in all."""
    for seed in range(100_000 + part * 1000, 101_000 + part * 1000):
        run(seed)


def test_a_pull_of_blocks_that_its_source_took_back_before_it_died_fails() -> None:
    """The virtual connector once gave what was written into them since."""
    run(100_201)


# ---------------------------------------------------------------- every step boundary


def cluster_of(placement: str, **settings: Any) -> VirtualCluster:
    sizes = {"image_block_size": 4, "kv_block_size": 4, **settings}
    return VirtualCluster(make_settings(placement, {"image": 16, "kv": 32}, **sizes), durations=STILL, failures=POLICY)


def decoders(cluster: VirtualCluster) -> list[str]:
    return [name for name, core in cluster.cores.items() if "D" in core.settings.roles]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reservation", ["full", "optimistic"])
@pytest.mark.parametrize("placement", ["EP+2D", "2EPD", "E+P+2D", "2ED+P", "E+2PD"])
def test_a_decode_moves_at_every_step_boundary(placement: str, reservation: str, depth: int) -> None:
    """Asked each tenth of a second to go to the other decoder: it does so again and again, and misses no token."""
    cluster = cluster_of(placement, depth=depth, reservation=reservation)
    cluster.submit(work("r", "cat", 1, max_tokens=12))
    for tenth in range(300):
        cluster.post(tenth / 10, FRONTEND, MoveRequest("r", decoders(cluster)[tenth % 2]))
    cluster.run()
    outcome = cluster.outcomes["r"]
    assert outcome.tokens == list(range(1, 13))
    assert outcome.end is not None
    assert outcome.end.lives == 1, "no move costs a recovery"
    assert ends(cluster).count("moved") >= (9 if depth == 1 else 4)  # two steps are in flight at a time with depth 2


def test_a_request_has_no_row_while_it_moves_and_its_neighbour_goes_on() -> None:
    cluster = cluster_of("P+2D")
    for name in "ab":
        cluster.submit(work(name, 9, max_tokens=12))
    cluster.post(8.05, FRONTEND, MoveRequest("a", "D1"))
    cluster.run()
    steps = [(name, each.decodes) for _, name, each in cluster.commands if isinstance(each, Step) and each.decodes]
    assert ends(cluster) == ["moved"]
    assert {decodes for name, decodes in steps if name == "D0"} & {("a", "b"), ("a",)}
    assert ("D1", ("b", "a")) in steps or ("D1", ("a", "b")) in steps, "it joins the other's steps there"


# ---------------------------------------------------------------- what fails leaves it where it is


def one_life(cluster: VirtualCluster) -> None:
    cluster.run()
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        assert (outcome.end.reason, outcome.end.lives) == ("length", 1)
        assert outcome.tokens == list(range(1, outcome.work.max_tokens + 1))


def test_two_instances_that_are_full_and_move_to_each_other_do_not_wait_for_each_other() -> None:
    cluster = VirtualCluster(make_settings("P+2D", {"kv": 6}, kv_block_size=4), durations=STILL)
    for name in "ab":
        cluster.submit(work(name, 9, max_tokens=12))
    for tenth in range(20, 100):
        for name, to in [("a", "D1"), ("b", "D0"), ("a", "D0"), ("b", "D1")]:
            cluster.post(tenth / 10, FRONTEND, MoveRequest(name, to))
    one_life(cluster)
    assert "refused" in ends(cluster)


@pytest.mark.parametrize("tenth", range(50, 110, 2))
def test_a_target_that_dies_before_the_commit_costs_no_life(tenth: int) -> None:
    """Its pull takes two seconds, in which it dies; or it dies before, or is still there when it is through."""
    cluster = slow_move()
    cluster.kill("D1", at=tenth / 10, back_s=None)
    moved = tenth >= 78  # the step ends at 5.7, the pull two seconds after
    is_whole(cluster, *((2, "moved") if moved else (1, "lost")))


@pytest.mark.parametrize("lease_s", [1.5, 30.0])
def test_a_target_that_stands_still_costs_no_life(lease_s: float) -> None:
    target_stands_still(lease_s)


def test_a_target_that_gives_up_while_the_commit_is_on_its_way_costs_a_life() -> None:
    end = commit_on_its_way().outcomes["r"].end
    assert end is not None
    assert "gave the request up while it moved there" in end.former[0].why


def test_one_that_is_cancelled_while_it_moves_leaves_nothing() -> None:
    for tenth in range(50, 80):
        cluster = cluster_of("P+2D")
        cluster.submit(work("r", 9, max_tokens=12))
        cluster.post(5.05, FRONTEND, MoveRequest("r", "D1"))
        cluster.post(tenth / 10, FRONTEND, Abort("r", "cancelled"))
        cluster.run()
        (end,) = [outcome.end for outcome in cluster.outcomes.values()]
        assert end is not None
        assert end.reason == "cancelled"
        assert len(ends(cluster)) == 1
