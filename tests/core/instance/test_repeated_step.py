"""Steps that repeat: the short way answers as the long one does, in every order of events, and only where it may."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any, ClassVar

import pytest

from support.core_tables import broken, done, make_core, work
from support.scenarios import random_cluster
from trinity.core import InstanceCore
from trinity.core.instance.instance_core import RepeatedStep
from trinity.core.instance.settings import Settings
from trinity.core.messages import Cancel, PeerLoad, Sampled, Step, Stepped, Submit, Tick, Value
from trinity.core.routing.router import RoundRobin, RoutingPolicy
from trinity.core.scheduler import BatchRules


class Doubled(InstanceCore):
    """A core beside one that goes the long way for every event; both must answer and remember the same."""

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, settings: Settings, policy: RoutingPolicy | None = None) -> None:
        super().__init__(settings, policy)
        self.long = InstanceCore(settings, deepcopy(policy))

    def handle(self, event: Value, now: float) -> list[Value]:
        repeated = self._repeated
        expected = self.long.handle(event, now)
        self.long._repeated = None
        answer = super().handle(event, now)
        assert answer == expected, f"{event}: {answer} in place of {expected}"
        assert self.next_timer() == self.long.next_timer()
        assert _remembered(self) == _remembered(self.long)
        self.counts["repeated" if repeated is not None and repeated is self._repeated else "other"] += 1
        return answer


def _remembered(core: InstanceCore) -> dict[str, Any]:
    s, columns = core.state, core.state.decode_batch
    flights = {lane: [(each.step, tuple(each.requests), each.written) for each in f] for lane, f in s.lanes.items()}
    outputs = {request: state.outputs for request, state in s.requests.items()}
    return {
        "steps": (s.steps, flights, s.rates.per_unit),
        "columns": (columns.rows, columns.count, columns.due, columns.stops, columns.attempts, columns.starts),
        "requests": (outputs, list(s.decoding), s.before_decode, s.waiting_offers, s.leaving),
    }


def serve(core: InstanceCore, steps: int, token: int = 5, seconds: float = 0.25) -> None:
    """End ``steps`` steps, the oldest in flight first."""
    for _ in range(steps):
        step = core.state.lanes["joint"][0].step
        core.handle(ended(step, token, seconds), 0.0)


def ended(step: Step, token: int = 5, seconds: float = 0.25) -> Stepped:
    rows = [row.request for row in step.prefills if row.last] + list(step.decodes)
    return Stepped(step.id, step.lane, dict.fromkeys(rows, Sampled(token)), {}, seconds)


def decoding(core: InstanceCore, **fields: Any) -> RepeatedStep:
    """Have a and b decode; return the repeated step."""
    for name in "ab":
        core.handle(Submit(work(name, 3, **{"max_tokens": 60, **fields})), 0.0)
    serve(core, 4)
    assert core._repeated is not None
    return core._repeated


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Cores of virtual clusters are doubled; returns how many answers repeated a step."""
    Doubled.counts = Counter()
    monkeypatch.setattr("trinity.simulation.event_loop.InstanceCore", Doubled)
    monkeypatch.setattr("support.virtual.cluster.InstanceCore", Doubled)
    return Doubled.counts


def test_random_clusters_answer_the_same_by_the_long_way(doubled: Counter[str]) -> None:
    for seed in range(60):
        random_cluster(seed, depth=1 if seed % 2 else None).run()
    assert doubled["repeated"] > 20
    assert doubled["other"] > 1000


@pytest.mark.slow
def test_many_more_random_clusters_answer_the_same(doubled: Counter[str]) -> None:
    for seed in range(5000, 7000):
        random_cluster(seed).run()
    assert doubled["repeated"] > 1000


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rules", [BatchRules(), BatchRules(policy="prefill_first")])
def test_long_decodes_answer_the_same_with_arrivals_ends_and_cancels_between(depth: int, rules: BatchRules) -> None:
    Doubled.counts = Counter()
    core = Doubled(Settings("PD0", "PD", {"kv": 400}, rules, depth=depth, kv_block_size=4), RoundRobin())
    for number in range(6):
        core.handle(Submit(work(f"r{number}", 5, max_tokens=20 + 9 * number, stop_ids=frozenset({7}))), 0.0)
        serve(core, 13)
        core.handle(Tick(), 1.0 * number)
        serve(core, 3, seconds=0.0)
    core.handle(Cancel("r3"), 9.0)
    serve(core, 5)
    serve(core, 1, token=7)
    while core.state.requests:
        serve(core, 1)
    assert Doubled.counts["repeated"] > 60


@pytest.mark.parametrize("depth", [1, 2])
def test_most_steps_repeat(depth: int) -> None:
    core = make_core("PD0", kv=64, depth=depth, prefix_cache=False)
    repeated = decoding(core)
    serve(core, 9)
    assert core._repeated is repeated


def test_a_stop_token_a_failed_row_and_a_row_without_a_token_go_the_long_way() -> None:
    core = make_core("PD0", kv=64, prefix_cache=False)
    decoding(core, stop_ids=frozenset({7}))
    step = core.state.lanes["joint"][0].step
    before = core.state.decode_batch.count
    with pytest.raises(AssertionError, match="a row of b gave no token"):
        core.handle(done(step.id, a=5), 0.0)
    assert core.state.decode_batch.count == before
    core = make_core("PD0", kv=64, prefix_cache=False)
    decoding(core, stop_ids=frozenset({7}))
    serve(core, 1, token=7)
    assert not core.state.requests
    core = make_core("PD0", kv=64, prefix_cache=False)
    decoding(core)
    core.handle(broken(core.state.steps, "a", a=5, b=5), 0.0)
    assert list(core.state.requests) == ["b"]


def test_a_step_that_does_not_run_is_a_fault_as_before() -> None:
    core = make_core("PD0", kv=64, prefix_cache=False)
    decoding(core)
    with pytest.raises(AssertionError, match="is not running"):
        core.handle(done(core.state.steps + 1, a=5, b=5), 0.0)
    with pytest.raises(KeyError):
        core.handle(Stepped(core.state.steps, "vision", {"a": Sampled(5), "b": Sampled(5)}), 0.0)


def test_nothing_repeats_while_anything_else_is_due() -> None:
    core = make_core("PD0", kv=64, prefix_cache=False)
    decoding(core)
    core.handle(PeerLoad("elsewhere"), 0.0)
    assert core._repeated is not None, "nobody came or went"
    core.handle(Submit(work("c", 3, max_tokens=9)), 0.0)
    assert core._repeated is None
    core.handle(Cancel("c"), 0.0)
    grows = make_core("PD0", kv=64, prefix_cache=False, reservation="optimistic")
    for name in "ab":
        grows.handle(Submit(work(name, 3, max_tokens=60)), 0.0)
    serve(grows, 9)
    assert grows._repeated is None, "its block tables grow"
