"""Plans for requests with images, videos and audio: bounds that no replay exceeds, and a search that serves them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import Roofline, get_device
from trinity.placement import Placement
from trinity.planner import HybridPlanner
from trinity.planner.algorithm2 import measure_workload
from trinity.planner.bounds import Bounds, Kind
from trinity.planner.candidates import Deployment
from trinity.planner.search_config import SearchConfig
from trinity.simulation.simulator import Simulator
from trinity.traces.goodput import goodput
from trinity.traces.trace import SLO, Trace, TraceAudio, TraceImage, TraceRow, TraceVideo

OMNI, MINICPM = get_model_shape("qwen2.5-omni-7b"), get_model_shape("minicpm-v-2.6")
RELAXED = SLO(0.6, 0.2)
A10 = get_device("A10")


def trace(model: Any, requests: int = 120) -> Trace:
    """Requests of each kind of media that the model takes, in turn, ten a second."""
    draw, rows = random.Random(0), []
    for number in range(requests):
        audio = [TraceAudio(seconds=draw.uniform(2, 30))] if model.audio and number % 3 == 2 else []
        videos = [TraceVideo(frames=draw.choice([4, 8]), width=320, height=240)] if number % 3 == 1 else []
        images = [TraceImage(width=640, height=480)] if number % 3 == 0 else []
        fields: dict[str, Any] = {"images": images, "videos": videos, "audio": audio}
        rows.append(TraceRow(timestamp=100.0 * number, input_length=0, text_length=30, output_length=8, **fields))
    return Trace(rows)


def test_the_workload_counts_what_encoding_costs() -> None:
    audio = [TraceAudio(tokens=1000)]
    rows = (TraceRow(timestamp=n, input_length=0, text_length=9, output_length=2, audio=audio) for n in (0, 1))
    load = measure_workload(Trace(rows), OMNI)
    assert OMNI.media.audio is not None
    assert load.visual == 2 * round(1000 * OMNI.media.audio.work)
    assert load.prompt == 2 * 1009


@pytest.mark.parametrize(
    ("model", "placement"),
    [
        *((MINICPM, placement) for placement in ("1E1P1D", "2EP1D", "3EPD")),
        *(pytest.param(OMNI, placement, marks=pytest.mark.slow) for placement in ("1E1P1D", "2EP1D")),
        (OMNI, "3EPD"),
    ],
)
def test_no_replay_exceeds_its_bound(model: Any, placement: str) -> None:
    asked = trace(model)
    kinds = {"A10": Kind(Roofline(model=model, device=A10), 0.9 * A10.memory)}
    upper = Bounds(asked, RELAXED, model, kinds).upper(Deployment.of(Placement.parse(placement), ("A10",) * 3))
    simulator = Simulator(model, RELAXED, cluster=Cluster.of("A10", 3))
    found = goodput(simulator.serve(placement), asked, RELAXED, least_requests=60, least_ttfts=3)
    assert 0 < found.rate <= upper


@pytest.mark.parametrize(
    "model",
    [MINICPM, pytest.param(OMNI, marks=pytest.mark.slow)],
    ids=lambda model: str(model.name),
)
def test_a_mixed_trace_is_planned_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With audio whose encoding costs other than its tokens do, the search is on the cores, of less, and says so."""
    monkeypatch.setattr("trinity.planner.hybrid.SHORT", 150)
    search = SearchConfig(seeds=0, least_requests=30)
    plan = HybridPlanner(model, RELAXED, device="A10", instances=2, search=search).plan(trace(model, 200))
    assert plan.met
    assert "with videos" in plan.explain()
    assert ("with audio" in plan.explain()) == bool(model.audio)
    assert any("Not screened (media whose" in note for note in plan.notes) == bool(model.audio)
