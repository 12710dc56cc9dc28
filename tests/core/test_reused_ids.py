"""Ids that are used again at once: no instance takes one request for another, whatever deaths left of the former."""

from __future__ import annotations

import pytest

from support.deadly import deadly_cluster
from support.reusing import Reusers
from support.thinned import thinned
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.frontend import frontend_core
from trinity.core.values import LifeNames

POLICIES = {"recovering": FailurePolicy(recoveries=20, wait_s=10.0), "as before": NO_RECOVERY}


def run(seed: int, policy: FailurePolicy) -> int:
    """Run a cluster to its end; returns how often an id was used again."""
    cluster = deadly_cluster(seed, failures=policy)
    readers = Reusers(cluster, 4)
    cluster.run(300_000)
    core = cluster.frontend
    assert (core.entries, core.lives, core.waiting, core.inputs.kept_bytes) == ({}, {}, 0, 0)
    assert not any(each.state.requests for each in cluster.cores.values())
    return readers.reused.total()


def runs_well(seed: int) -> bool:
    try:
        return run(seed, POLICIES["recovering"]) > 0
    except AssertionError:
        return False


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("start", thinned(range(0, 60, 20), (0).__eq__))
def test_an_id_may_be_used_again_at_once(start: int, policy: str) -> None:
    assert sum(run(seed, POLICIES[policy]) for seed in range(start, start + 20)) > 200


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("start", range(1000, 3000, 100))
def test_in_many_runs(start: int, policy: str) -> None:
    for seed in range(start, start + 100):
        run(seed, POLICIES[policy])


def test_ids_are_remembered_within_a_bound_beyond_which_all_count_as_used() -> None:
    names = LifeNames(most=2)
    assert [names.name_first(each, number) for number, each in enumerate(("a", "a", "b", "c", "b", "d~1.0"))] == [
        "a", "a~1.0", "b", "c~3.0", "b~4.0", "d~1.0~5.0",
    ]  # fmt: skip


def test_lives_that_are_named_by_their_id_alone_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LifeNames, "name_first", lambda self, request, number: request)
    monkeypatch.setattr(frontend_core, "name_life", lambda request, number, attempt, owner: f"{request}~{attempt}")
    assert not all(runs_well(seed) for seed in range(100))
