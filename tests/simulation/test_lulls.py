"""Lulls: with an informed policy instances report without end; waits end by time and arrivals, not by their count."""

from __future__ import annotations

from typing import Any

import pytest

from support.virtual.cluster import VirtualCluster
from trinity.core.instance.settings import Settings
from trinity.core.messages import FRONTEND, PeerLoad, Release, Send, Work
from trinity.core.routing.router import LeastLoaded
from trinity.costs.cluster import Cluster
from trinity.simulation.simulator import Simulator
from trinity.traces.trace import SLO, Trace, TraceRow


def arrivals(*seconds: float) -> Trace:
    return Trace(TraceRow(timestamp=1000 * at, input_length=100, text_length=100, output_length=20) for at in seconds)


def replay(trace: Trace, placement: str, count: int, **options: Any) -> Any:
    simulator = Simulator("llava-1.5-7b", SLO(2.0, 0.1), cluster=Cluster.of("H100", count), backend="python", **options)
    return simulator.replay(trace, placement)


@pytest.mark.parametrize("routing", ["least_loaded", "prefix_hits"])
@pytest.mark.parametrize("pause", [600.0, 86_400.0, 1e9])
def test_a_pause_of_any_length_costs_no_more_than_a_short_one(routing: str, pause: float) -> None:
    seen = replay(arrivals(0, 0.01, pause, pause + 0.01, 2 * pause), "2E2P4D", 8, routing=routing)
    short = replay(arrivals(0, 0.01, 10, 10.01, 20), "2E2P4D", 8, routing=routing)
    assert [each.finish_reason for each in seen.outcomes] == ["length"] * 5
    assert [each.ttft_s for each in seen.outcomes] == pytest.approx([each.ttft_s for each in short.outcomes], abs=1e-5)
    assert seen.events < 3 * short.events


def test_a_lull_between_many_requests_changes_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = arrivals(*(0.05 * n + 40 * (n // 20) for n in range(60)))
    skipped = replay(trace, "2EP2D", 4, routing="least_loaded")
    monkeypatch.setattr("trinity.simulation.event_loop.EventLoop.skip_lull", lambda self: None)
    whole = replay(trace, "2EP2D", 4, routing="least_loaded")
    assert skipped.events < 0.7 * whole.events
    assert [each.ttft_s for each in skipped.outcomes] == pytest.approx([each.ttft_s for each in whole.outcomes])


class CutOff(VirtualCluster):
    """Loses Release and all that D instances say to others afterwards: the source's lease runs to its end."""

    def send(self, name: str, command: Send) -> None:
        lost = isinstance(command.message, Release | PeerLoad) and name.startswith("D") and command.to != FRONTEND
        if not lost:
            super().send(name, command)


def test_a_lease_ends_by_its_time_however_many_instances_report_meanwhile() -> None:
    settings = [
        Settings(f"{roles}{n}", roles, {"kv": 64, "image": 8}, lease_s=30.0, report_s=0.1, heartbeat_s=0.1)
        for roles, count in (("EP", 7), ("D", 7))
        for n in range(count)
    ]
    cluster = CutOff(settings, routing=LeastLoaded, observers=())
    cluster.submit(Work(request="r", prompt=(1, 2, 3), max_tokens=3))
    cluster.run()
    assert [each.end.reason for each in cluster.outcomes.values() if each.end] == ["length"]
    assert all(core.idle() for core in cluster.cores.values())
