"""Interleavings of whole placements, each checked after every event (``support.virtual.checks``): a fortieth of the
first thousands in each run, all of them and 40,000 more in ``make test-all``.

A failure names its seed: ``random_cluster(seed).run()`` in ``tests/support/scenarios.py`` repeats it, on any machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from hashlib import sha256

import pytest

from support.core_tables import work
from support.paths import PYTHON_PATH
from support.scenarios import PLACEMENTS, Linear, random_cluster, roomy_cluster
from support.tight_pools import TIGHT, flood, same_size
from support.virtual.cluster import Durations, Faults, VirtualCluster, make_settings, predict_steps
from support.virtual.conversation import ends_lease_early
from trinity.core.messages import Pull, Release, Revoke, Send, Step, Value, Withdraw
from trinity.core.scheduler import BatchRules

PER_PLACEMENT, IN_EACH_RUN = 120, 3


def run(seed: int, placement: str | None = None, depth: int | None = None) -> VirtualCluster:
    cluster = random_cluster(seed, placement, depth=depth)
    try:
        cluster.run()
    except BaseException as error:
        error.add_note(f"random_cluster({seed}, {placement!r}, depth={depth})")
        raise
    return cluster


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_interleaving_keeps_the_invariants(placement: str) -> None:
    for seed in range(IN_EACH_RUN):
        run(1000 * PLACEMENTS.index(placement) + seed, placement)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_others_keep_them_too(placement: str) -> None:
    for seed in range(IN_EACH_RUN, PER_PLACEMENT):
        run(1000 * PLACEMENTS.index(placement) + seed, placement)


def test_there_are_at_least_2000_of_them() -> None:
    assert PER_PLACEMENT * len(PLACEMENTS) >= 2000


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(20))
def test_many_more_interleavings(part: int) -> None:
    for seed in range(1_000_000 + part * 2000, 1_000_000 + part * 2000 + 2000):
        run(seed)


WANTED = {"length", "stop", "cancelled", "deadline", "error", "StageError", "MigrationError", "Overloaded"}
WANTED |= {"RequestTooLarge", "pulled", "cached", "failed", "withdraw", "pull", "cached KV", "lease ran out", "revoke"}


def test_the_interleavings_reach_what_they_are_for() -> None:
    """Every end, every outcome of a transfer, and the rare turns of the core; a tame generator would show here."""
    seen: Counter[str] = Counter()
    for seed in range(500):
        cluster = run(seed, depth=1 if seed % 2 else None)
        for outcome in cluster.outcomes.values():
            assert outcome.end is not None
            seen[outcome.end.reason] += 1
            seen[outcome.end.failure.error if outcome.end.failure else "no failure"] += 1
        for _, _, command in cluster.commands:
            seen.update(_kinds(command))
        if all(seen[each] >= 2 for each in WANTED):
            return
    raise AssertionError(seen)


def test_steps_that_encode_prefill_and_decode_at_once_keep_the_invariants() -> None:
    """Not by luck: the random clusters come to such a step about once in 300 runs."""
    mixed = 0
    for seed in range(100):
        cluster = roomy_cluster(seed)
        cluster.run()
        mixed += sum("mixed" in _kinds(command) for _, _, command in cluster.commands)
    assert mixed >= 15


def _kinds(command: Value) -> list[str]:
    if isinstance(command, Send) and isinstance(command.message, Release):
        return [command.message.outcome]
    if isinstance(command, Send) and isinstance(command.message, Withdraw):
        return ["withdraw", "lease ran out"] if ends_lease_early(command.message) else ["withdraw"]
    if isinstance(command, Step):
        mixed = command.encodes and command.prefills and command.decodes
        return ["mixed"] if mixed else ["cached KV" for row in command.prefills if row.start and row.last]
    if isinstance(command, Revoke):
        return ["revoke"]
    return ["pull"] if isinstance(command, Pull) else []


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pools_of_one_request_serve_eight_at_once_everywhere(placement: str, caches: bool) -> None:
    """A limit shared by the stages of ED+P, or reserving image and KV jointly, hangs here (rule 4 of the design)."""
    flood(placement, image_cache=caches, prefix_cache=caches)


@pytest.mark.parametrize("placement", ["2E1P1D", "2ED1P", "E+P+D", "3E2PD"])
def test_images_that_come_one_by_one_never_fill_a_pool_with_halves_of_two_requests(placement: str) -> None:
    """Every image is a step of its own, so that both requests are half encoded when the target reserves."""
    flood(placement, 6, images=3, rules=BatchRules(token_budget=64, image_budget=1), image_cache=False)


@pytest.mark.parametrize("placement", ["E+P+D", "EP+D", "2E1P2D", "1E1EPD"])
def test_features_may_be_fetched_while_kv_is_full(placement: str) -> None:
    """Image blocks for three, KV blocks for one: the features of those that wait are here already."""
    configured = make_settings(
        placement, {"image": 9, "kv": 4}, image_block_size=4, kv_block_size=4, prefix_cache=False
    )
    slow = Durations(step=lambda draw, name, step: 0.01 if step.encodes else 0.5)
    cluster = VirtualCluster(configured, durations=slow)
    for number in range(6):
        cluster.submit(same_size(f"r{number}"))
    cluster.run()
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}


def test_a_cancel_in_the_middle_of_everything_frees_the_way() -> None:
    """The first of three has all pools; when its reader leaves, the others go on."""
    cluster = VirtualCluster(
        make_settings("E+P+D", TIGHT, image_block_size=4, kv_block_size=4), durations=Durations(step=lambda *_: 1.0)
    )
    for number in range(3):
        cluster.submit(same_size(f"r{number}"), at=number * 0.1)
    cluster.abort("r0", at=1.5)
    cluster.run()
    reasons = [outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end]
    assert reasons == ["cancelled", "length", "length"]


def test_all_at_the_same_instant() -> None:
    """No time passes at all: every order of events is that of the channels."""
    still = Durations(lambda *_: 0.0, lambda *_: 0.0, lambda *_: 0.0)
    for placement in PLACEMENTS:
        cluster = VirtualCluster(make_settings(placement, TIGHT, image_block_size=4, kv_block_size=4), durations=still)
        for number in range(5):
            cluster.submit(same_size(f"r{number}"))
            cluster.abort(f"r{number // 2}", at=0.0)
        cluster.run()
        assert cluster.now == 0.0


def test_when_every_row_or_every_pull_fails_every_request_ends_with_an_error() -> None:
    for faults in (Faults.at_random(1.0, 0.0), Faults.at_random(0.0, 1.0)):
        cluster = VirtualCluster(make_settings("E+P+D", TIGHT, image_block_size=4, kv_block_size=4), faults=faults)
        for number in range(5):
            cluster.submit(same_size(f"r{number}"))
        cluster.run()
        assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"error"}


def test_a_cost_gives_the_durations() -> None:
    cost = Linear(decode=1.0, prefill=10.0, media=100.0)
    still = Durations(lambda *_: 0.0, predict_steps(cost), lambda *_: 0.0)
    rules = BatchRules(token_budget=64, image_budget=64)
    cluster = VirtualCluster(
        make_settings("EPD", {"image": 9, "kv": 9}, rules=rules, image_block_size=4, kv_block_size=4), durations=still
    )
    cluster.submit(work("r", 1, "cat", 2, max_tokens=3), at=5.0)
    cluster.run()
    outcome = cluster.outcomes["r"]
    assert outcome.times == pytest.approx([5 + 400.001 + 70.001, 475.002 + 1.001, 476.003 + 1.001])
    assert outcome.ended == outcome.times[-1]


def digest(seeds: range) -> str:
    """Of all commands: random runs, and one in which twelve requests are cancelled in the middle of one step."""
    slow = Durations(step=lambda draw, name, step: 1.0)
    together = VirtualCluster(make_settings("PD", {"kv": 99}, image_block_size=4, kv_block_size=4), durations=slow)
    for number in range(13):
        together.submit(work(f"r{number}", 1))
        together.abort(f"r{number}", at=1.5)
    together.run()
    clusters = [together, *(run(seed) for seed in seeds)]
    lines = [f"{time:.9f} {name} {command}" for each in clusters for time, name, command in each.commands]
    return sha256("\n".join(lines).encode()).hexdigest()


def test_a_seed_gives_the_same_run_in_any_process() -> None:
    """Replays depend on it: no order may come from a set of strings."""
    code = "from core.test_interleavings import digest; print(digest(range(9)))"
    digests = set()
    for salt in "12":
        env = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": PYTHON_PATH}
        found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        digests.add(found.stdout)
    assert len(digests) == 1
