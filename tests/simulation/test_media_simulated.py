"""Videos and audio in the simulator: items, what they cost, where they are encoded, and that nothing is lost."""

from __future__ import annotations

import random
from math import ceil
from typing import Any

import pytest

from support.audio_stage import audio_stage
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.errors import ConfigError
from trinity.simulation import compiled_engine
from trinity.simulation.rate_sweep import prepare_requests
from trinity.simulation.simulator import Simulator
from trinity.simulation.workload import jobs_of, work_of
from trinity.traces.goodput import measure_point
from trinity.traces.media import MOST_FRAMES
from trinity.traces.trace import SLO, Trace, TraceAudio, TraceImage, TraceRow, TraceVideo

MINICPM, OMNI = get_model_shape("minicpm-v-2.6"), get_model_shape("qwen2.5-omni-7b")
ULTRAVOX, QWEN_AUDIO = get_model_shape("ultravox-v0.3"), get_model_shape("qwen2-audio-7b")
FRAME_S, TOKENS = 0.03125, 64  # of a frame of MiniCPM-V
COST = LinearCost(step_s=0.125, media_s=FRAME_S / TOKENS)
BUDGETS = StepBudgets(token_budget=16_384, image_budget=TOKENS)


def row(at: float = 0.0, **media: Any) -> TraceRow:
    return TraceRow(timestamp=1000 * at, input_length=0, text_length=10, output_length=2, **media)


def simulator(model: Any, devices: int, **options: Any) -> Simulator:
    options = {"cost": COST, "budgets": BUDGETS, **options}
    return Simulator(model, SLO(8.0, 1.0), cluster=Cluster.of("A100", devices, message_s=0.0), **options)


def mixed(count: int, seed: int = 3, gap_s: float = 0.4) -> Trace:
    """Requests of any media, of which some are seen twice."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        name = draw.choice(["a", "b", None])
        images, videos, clips = (draw.choice([0, most]) for most in (1, 1, 2))
        video = TraceVideo(frames=draw.choice([4, 16]), width=320, height=240, content=name)
        audio = TraceAudio(seconds=draw.uniform(1, 20), content=name and f"{name}{number % 3}")
        rows.append(
            row(
                gap_s * number,
                images=[TraceImage(width=640, height=480)] * images,
                videos=[video] * videos,
                audio=[audio] * clips,
            )
        )
    return Trace(rows)


# ---------------------------------------------------------------- items


def test_a_row_becomes_items_in_the_order_of_its_kinds() -> None:
    asked = row(
        images=[TraceImage(width=280, height=280)],
        videos=[TraceVideo(frames=4, width=280, height=280, content="v")],
        audio=[TraceAudio(seconds=2.0)],
    )
    (job,) = jobs_of(Trace([asked]), OMNI)
    assert job.images == ((100, "0.0"), (100, "v#0"), (100, "v#1"), (50, "0.2"))
    assert job.kinds == ("image", "video", "video", "audio")
    assert job.prompt == 10 + 350
    assert job.works[:3] == (100, 100, 100)
    assert job.works[3] == pytest.approx(50 * 0.47, abs=1)
    spans = work_of(job, 0, shared=True).media
    assert [(span.kind, span.offset, span.tokens) for span in spans] == [
        ("image", 0, 100),
        ("video", 100, 100),
        ("video", 200, 100),
        ("audio", 300, 50),
    ]


@pytest.mark.parametrize(
    ("model", "media", "said"),
    [
        ("llava-1.5-7b", {"videos": [TraceVideo(frames=2)]}, "with videos, and it takes none"),
        ("llava-1.5-7b", {"audio": [TraceAudio(seconds=2)]}, "with audio, and it takes none"),
        ("ultravox-v0.3", {"images": [TraceImage(tokens=9)]}, "with images, and it takes none"),
        ("qwen2-vl-7b", {"videos": [TraceVideo(frames=2, width=9000, height=9)]}, "no rule for"),
        ("minicpm-v-2.6", {"videos": [TraceVideo(frames=MOST_FRAMES)]}, "with prompts of its context"),
    ],
)
def test_what_a_model_cannot_take_is_refused_by_name(model: str, media: dict[str, Any], said: str) -> None:
    (job,) = jobs_of(Trace([row(**media)]), get_model_shape(model))
    assert said in job.refused
    assert job.images == ()


# ---------------------------------------------------------------- time


@pytest.mark.parametrize(("encoders", "spread"), [(1, 1), (4, 1), (4, 4)])
def test_frames_of_a_video_are_encoded_at_once_where_several_help(encoders: int, spread: int) -> None:
    found = simulator(MINICPM, encoders + 2, spread=spread).replay(
        Trace([row(videos=[TraceVideo(frames=18)])]), f"{encoders}E1P1D"
    )
    first = found.outcomes[0].ttft_s
    assert first == pytest.approx(ceil(18 / spread) * FRAME_S + COST.step_s, abs=0.01)


def test_a_clip_that_is_padded_takes_the_time_of_a_whole_window() -> None:
    cost = LinearCost(step_s=0.125, media_s=0.25 / 750)
    short, whole = (
        simulator(QWEN_AUDIO, 1, cost=cost)
        .replay(Trace([row(audio=[TraceAudio(seconds=each)])]), "EPD")
        .outcomes[0]
        .ttft_s
        for each in (1.0, 30.0)
    )
    assert short == whole == pytest.approx(0.375)
    own = simulator(ULTRAVOX, 1, cost=cost).replay(Trace([row(audio=[TraceAudio(seconds=1.0)])]), "EPD")
    assert own.outcomes[0].ttft_s == pytest.approx(0.125 + 7 * 0.25 / 750)


def test_frames_that_are_cached_are_not_encoded_again() -> None:
    videos = [TraceVideo(frames=16, content="v")]
    once, twice = (
        simulator(MINICPM, 3)
        .replay(Trace([row(5.0 * n, videos=videos) for n in range(count)]), "1E1P1D")
        .busy_s["E0"]["E"]
        for count in (1, 2)
    )
    assert once == twice == pytest.approx(16 * FRAME_S)


# ---------------------------------------------------------------- conservation


@pytest.mark.parametrize("placement", ["EPD", "2E1P1D", "EP+D", "3EP+D"])
@pytest.mark.parametrize("model", [OMNI, MINICPM, ULTRAVOX], ids=lambda model: str(model.name))
def test_every_request_ends_once_and_nothing_is_left(model: Any, placement: str) -> None:
    """The replay itself raises where a request did not end, a block was not given back or an instance is not idle."""
    trace = mixed(60)
    devices = {"EPD": 1, "2E1P1D": 4, "EP+D": 2, "3EP+D": 4}[placement]
    spread = 2 if placement in ("2E1P1D", "3EP+D") else 1
    found = simulator(model, devices, spread=spread, backend="python", budgets=None, cost=None).replay(trace, placement)
    refused = [bool(job.refused) for job in jobs_of(trace, model)]
    assert [each.finish_reason == "length" for each in found.outcomes] == [not each for each in refused]
    assert any(not each for each in refused)


# ---------------------------------------------------------------- the compiled engine

compiled = pytest.mark.skipif(bool(compiled_engine.why_unavailable()), reason="needs the compiled engine")


@compiled
@pytest.mark.parametrize("model", [MINICPM, ULTRAVOX], ids=lambda model: str(model.name))
def test_items_whose_tokens_are_their_work_are_replayed_compiled(model: Any) -> None:
    trace = mixed(80)
    fast, slow = (simulator(model, 4, backend=each, cost=None, budgets=None) for each in ("compiled", "python"))
    assert slow.replay(trace, "2E1P1D").outcomes == fast.replay(trace, "2E1P1D").outcomes


@compiled
def test_items_with_work_of_their_own_are_replayed_on_the_cores() -> None:
    trace, plain = mixed(30), Trace([row(images=[TraceImage(width=640, height=480)])])
    asked = simulator(OMNI, 4)
    assert "encoding" in asked.why_python("2E1P1D", trace=trace)
    assert asked.why_python("2E1P1D", trace=plain) == ""
    cores = simulator(OMNI, 4, backend="python").replay(trace, "2E1P1D").outcomes
    for backend in ("auto", "screening"):
        assert simulator(OMNI, 4, backend=backend).replay(trace, "2E1P1D").outcomes == cores
    with pytest.raises(ConfigError, match="encoding"):
        simulator(OMNI, 4, backend="compiled").replay(trace, "2E1P1D")
    serve = asked.serve("2E1P1D")
    assert prepare_requests(trace, OMNI).weighed
    points = [
        measure_point(each.serve("2E1P1D"), trace, SLO(1.0, 0.1))
        for each in (asked, simulator(OMNI, 4, backend="python"))
    ]
    assert points[0].attainment == points[1].attainment
    assert serve.point(trace, SLO(1.0, 0.1), None) is None  # type: ignore[attr-defined]


# ---------------------------------------------------------------- a stage that is not built


def test_a_fourth_stage_encodes_the_clips() -> None:
    asked: list[dict[str, Any]] = [
        {"images": [TraceImage(width=280, height=280)]},
        {"audio": [TraceAudio(seconds=2.0)]},
        {},
    ]
    trace = Trace([row(0.2 * number, **asked[number % 3]) for number in range(30)])
    with audio_stage():
        plain = simulator(OMNI, 4)
        assert "EAPD" in plain.why_python("E+A+P+D", trace=trace)
        found, both = plain.replay(trace, "E+A+P+D"), simulator(OMNI, 2).replay(trace, "EA+PD")
        assert plain.settings("E+A+P+D")[1].pools.keys() == {"audio"}
    ended = [*found.outcomes, *both.outcomes]
    assert [(len(each.itl_s), each.finish_reason) for each in ended] == [(1, "length")] * 60
    assert found.busy_s["A0"].keys() == {"A"}
    assert found.busy_s["A0"]["A"] > 0
    assert found.moved_bytes["image"] == 2 * found.moved_bytes["audio"] > 0
    assert both.moved_bytes == {**found.moved_bytes, "kv": 0}
