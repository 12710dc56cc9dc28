"""The benchmarks of EPDServe's tables 1 and 7: what they would call a failure, and that they run."""

from __future__ import annotations

import pytest

from benchmarks.report import Aim
from benchmarks.serving import audio, video
from benchmarks.serving.open_loop import Served, attainment, by_roles, limit_rules, lost, poisson, simulate
from benchmarks.setting import Setting
from trinity.core.scheduler import BatchRules
from trinity.traces.trace import SLO, TraceRow


def met(aims: list[Aim]) -> dict[str, bool | None]:
    return {aim.what: aim.met for aim in aims}


# ---------------------------------------------------------------- requests of a trace


def test_every_stage_works_on_one_request_at_a_time() -> None:
    budgets = by_roles(media=768, prompt=790)
    assert (budgets["E"].image_budget, budgets["P"].token_budget, budgets["D"].token_budget) == (768, 790, 1)
    rules = limit_rules(BatchRules(policy="prefill_first"), budgets["EPD"])
    assert (rules.policy, rules.token_budget, rules.image_budget) == ("prefill_first", 790, 768)


def test_requests_come_at_their_rate() -> None:
    trace = poisson(4.0, 400, lambda at: TraceRow(timestamp=at, input_length=1, output_length=1), seed=0)
    assert trace.statistics().rate == pytest.approx(4.0, rel=0.1)


def test_what_did_not_end_is_lost_and_not_in_time() -> None:
    served = [Served(0.5, (0.01,), "length"), Served(None, (), "PeerLost"), Served(3.0, (0.01,), "length")]
    assert lost(served) == 1
    assert attainment(served, SLO(2.0, 0.025)) == pytest.approx(1 / 3)


# ---------------------------------------------------------------- table 1


def usual(off: float = 1.0) -> dict[str, dict[int, float]]:
    return {
        name: {n: each * off for n, each in zip(video.FRAMES, row, strict=True)} for name, row in video.PAPER.items()
    }


def test_first_tokens_far_from_the_papers_fall_short() -> None:
    assert set(met(list(video.paper_aims(usual()))).values()) == {True}
    assert set(met(list(video.paper_aims(usual(1.2)))).values()) == {False}
    assert set(met(list(video.live_aims(usual(1.2), usual()))).values()) == {False}


def test_frames_are_shared_by_six_encoders() -> None:
    """A video of 12 frames alone: two of them on each encoder."""
    trace = video.videos(12, 1, seed=0)
    budgets = by_roles(video.FRAME, 12 * video.FRAME + video.TEXT)
    (served,) = simulate(video.SHAPE, video.SYSTEMS["EPD"], trace, budgets)
    due = video.EPD_PASS_S + 2 * video.ENCODE_S + 12 * video.PREFILL_S
    assert served.ttft_s == pytest.approx(due, rel=0.05)


@pytest.mark.slow
def test_videos_run() -> None:
    found = video.run(Setting(quick=True))
    assert [len(table.rows) for table in found.tables] == [12, 4]
    assert met(found.aims)["requests lost, live"]


# ---------------------------------------------------------------- table 7


def test_shares_far_from_the_papers_fall_short() -> None:
    paper = {name: dict(zip(audio.RATES, row, strict=True)) for name, row in audio.PAPER.items()}
    aims = met(list(audio.paper_aims(paper)))
    assert all(each for what, each in aims.items() if "in time" in what)
    worse = {**paper, "EPD": {**paper["EPD"], 1.1: 0.7}}
    assert not met(list(audio.paper_aims(worse)))["requests in time of EPD, simulated"]
    assert set(met(list(audio.live_aims({"EPD": 0.5}, {"EPD": 0.9}))).values()) == {False}


def test_goodput_lies_between_the_rates_that_were_tried() -> None:
    assert audio.goodput({0.5: 1.0, 1.0: 0.8}) == pytest.approx(0.75)
    assert audio.goodput({0.5: 1.0, 1.0: 0.95}) == 1.0
    assert audio.goodput({0.5: 0.5}) == 0.0


def test_one_prefill_instance_keeps_decodes_apart() -> None:
    """Why DistServe loses and EPD does not: prompts that end at once wait for the one decode instance."""
    trace = poisson(1.0, 40, lambda at: audio.clips(1.0, 1, 0)[0].request_at(at), seed=1)
    gaps = {
        name: max(sum(each.itl_s) / len(each.itl_s) for each in simulate(audio.SHAPE, system, trace, audio.BUDGETS))
        for name, system in audio.SYSTEMS.items()
        if name != "vLLM"
    }
    assert gaps["EPD"] < audio.BOUNDS.tbt < gaps["DistServe"]


def test_audio_runs() -> None:
    found = audio.run(Setting(quick=True))
    assert [len(table.rows) for table in found.tables] == [3, 3]
    assert met(found.aims)["requests lost, live"]
