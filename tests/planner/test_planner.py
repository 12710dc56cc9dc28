"""HybridPlanner over queues whose times are a formula: strategies, objectives, bad input, what must not happen."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from support.analytic_simulator import Analytic
from support.planner_options import planner_options
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import MODELS
from trinity.costs.step_cost import DEVICES, Device
from trinity.errors import ConfigError, TraceError, TraceTooShort, UnknownName
from trinity.placement import Placement
from trinity.planner import HybridPlanner, Plan
from trinity.planner.candidates import list_placements
from trinity.traces import synthesise
from trinity.traces.trace import SLO, SLO_RULES, Trace, TraceImage, TraceRow

LLAVA = MODELS["llava-1.5-7b"]
SLOW = SLO(ttft=0.3, tbt=0.5)


@pytest.fixture(autouse=True)
def analytic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.planner.hardware.Simulator", Analytic)


def images(count: int = 250, output: int = 4) -> Trace:
    return (
        synthesise("MME", count, visual_tokens=lambda width, height: 576, rate=10, seed=3)
        if output == 4
        else Trace(
            TraceRow(timestamp=100.0 * n, input_length=600, output_length=output, images=[TraceImage(tokens=576)])
            for n in range(count)
        )
    )


def text(count: int = 250) -> Trace:
    return Trace(TraceRow(timestamp=100.0 * n, input_length=300, output_length=4) for n in range(count))


def planner(instances: int = 3, slo: SLO | None = SLOW, **options: Any) -> HybridPlanner:
    usual = {"seeds": 0, "least_requests": 250, **({} if "cluster" in options else {"engine": "eager"})}
    return HybridPlanner(LLAVA, slo, instances=instances, **planner_options({**usual, **options}))


TRACE = images()


# ---------------------------------------------------------------- strategies


def test_a_plan_has_all_that_was_asked_for() -> None:
    plan = planner(seeds=2).plan(TRACE)
    assert plan.best is plan.candidates[0]
    assert len(plan.candidates) == len(list_placements(3)) == 2 + 2 + 1 + 2 + 1
    assert set(plan.best.goodput) == set(SLO_RULES)
    assert plan.best.score == plan.best.goodput["guard"] > 0
    assert len(plan.best.spread) == 2
    assert plan.seeds == (1, 2)
    assert all(0.5 < each / plan.best.score < 2 for each in plan.best.spread)
    assert set(plan.best.utilisation) == {name for name, _ in Placement.parse(plan.best.placement).instances()}
    assert plan.best.bottleneck in "EPD"
    assert plan.best.memory[next(iter(plan.best.memory))]["kv_peak"] == 0.5
    assert plan.best.attainment
    assert (plan.strategy, plan.objective, plan.rule) == ("race", "goodput", "guard")
    assert plan.devices == ("H100",) * 3
    assert plan.paper is not None
    assert plan.paper in plan.candidates
    assert plan.trace.requests == 250
    assert plan.backend == "python"
    assert plan.met


def test_the_race_finds_what_all_searched_to_the_end_find_with_fewer_replays() -> None:
    raced, searched = (planner(strategy=strategy).plan(TRACE) for strategy in ("race", "exhaustive"))
    assert raced.best.placement == searched.best.placement
    assert raced.best.goodput == searched.best.goodput
    assert raced.runs < searched.runs
    assert all(each.exact for each in searched.candidates)
    scores = [each.score or 0.0 for each in searched.candidates]
    assert scores == sorted(scores, reverse=True)
    assert {each.placement for each in raced.candidates} == {each.placement for each in searched.candidates}


def test_no_goodput_exceeds_its_bound() -> None:
    for each in planner(strategy="exhaustive").plan(TRACE).candidates:
        assert each.bound is not None
        assert each.goodput["guard"] <= each.bound


def test_algorithm_2_keeps_to_its_three_and_is_shown_beside_every_other_strategy() -> None:
    plan = planner(5, strategy="paper").plan(TRACE)
    assert len(plan.candidates) == 3
    assert {each.method for each in plan.candidates} == {"E+P+D", "EP+D", "ED+P"}
    assert plan.paper == plan.best
    raced = planner(5).plan(TRACE)
    assert raced.paper is not None
    assert raced.paper.placement == plan.best.placement
    assert (raced.best.score or 0) >= (raced.paper.score or 0)
    assert "Algorithm 2" in raced.explain()


def test_the_partition_may_be_minimax() -> None:
    assert planner(6, strategy="paper", split="minimax").plan(TRACE).best.instances == 6


def test_algorithm_2s_choice_is_not_lost_where_it_is_beaten() -> None:
    plan = planner(4).plan(TRACE)
    assert plan.paper is not None
    assert plan.paper.exact
    assert set(plan.paper.goodput) == set(SLO_RULES)


def test_many_instances_are_searched_from_coarse_to_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.planner.problem.FINEST", 3)
    monkeypatch.setattr("trinity.planner.hybrid.MOST_LISTED", 10)
    coarse, whole = planner(5).plan(TRACE), planner(5, strategy="exhaustive")
    assert any("For 5 instances ratios were tried in steps of 2" in note for note in coarse.notes)
    assert any("the best 10 are listed" in note for note in coarse.notes)
    assert len(coarse.candidates) == 10
    monkeypatch.undo()
    monkeypatch.setattr("trinity.planner.hardware.Simulator", Analytic)
    assert coarse.best.instances == 5
    assert (coarse.best.score or 0) >= 0.97 * (whole.plan(TRACE).best.score or 0)


def test_many_instances_need_more_room_for_requests_that_wait() -> None:
    assert planner(16).hardware.options["max_waiting"] == 1024
    assert planner(64).hardware.options["max_waiting"] == 4096
    assert planner(64, max_waiting=7).hardware.options["max_waiting"] == 7
    assert planner(2, slo=None, objective="throughput").hardware.options["max_waiting"] > 10**6
    assert (
        "Run it with max_waiting=1088: a pipeline's default of 1024"
        in planner(17, strategy="paper").plan(TRACE).explain()
    )
    assert "max_waiting" not in planner(2).plan(TRACE).explain()
    assert "max_waiting" not in planner(2, slo=None, objective="throughput").plan(TRACE).explain()


# ---------------------------------------------------------------- objectives


def test_goodput_per_cost_may_leave_devices_unused() -> None:
    plan = planner(3, objective="goodput_per_cost", prices={"H100": 2.0}).plan(TRACE)
    best = plan.best
    assert best.score == pytest.approx(best.goodput["guard"] * 3600 / (2.0 * best.instances))
    assert best.price == 2.0 * best.instances
    whole = planner(3).plan(TRACE).best
    assert (best.score or 0) >= (whole.score or 0) * 3600 / 6.0 * (1 - 1e-9)
    assert "requests per unit of price" in plan.explain()


def test_a_device_without_a_price_is_named() -> None:
    with pytest.raises(ConfigError, match="no price is known of H100: give prices="):
        planner(2, objective="goodput_per_cost").plan(TRACE)


def test_mixed_devices_say_which_roles_have_which() -> None:
    both = {"H100": 2, "L40S": 1}
    plan = planner(None, device=both, objective="goodput_per_cost", prices={"H100": 2.0, "L40S": 0.6}).plan(TRACE)  # type: ignore[arg-type]
    assert 1 <= plan.best.instances <= 3
    mixed = planner(None, device=both).plan(TRACE)  # type: ignore[arg-type]
    assert sorted(mixed.best.devices) == ["H100", "H100", "L40S"]
    assert mixed.devices == ("H100", "H100", "L40S")
    assert "H100" in mixed.explain()
    assert "L40S" in mixed.explain()


def test_the_fewest_instances_that_serve_a_rate() -> None:
    one = planner(1).plan(TRACE).best.score or 0
    plan = planner(4, objective="fewest_instances", rate=1.5 * one).plan(TRACE)
    assert plan.best.instances > 1
    assert (plan.best.score or 0) >= 1.5 * one
    fewer = planner(plan.best.instances - 1, strategy="exhaustive").plan(TRACE)
    assert (fewer.best.score or 0) < 1.5 * one


def test_a_rate_that_nothing_serves_is_said_with_the_best_there_is() -> None:
    plan = planner(2, objective="fewest_instances", rate=1e5).plan(TRACE)
    assert "No placement on up to 2 instances serves 100000 requests/s" in plan.explain()
    assert plan.best.score == planner(2).plan(TRACE).best.score


def test_throughput_has_no_slo() -> None:
    plan = planner(3, slo=None, objective="throughput").plan(TRACE)
    assert plan.slo is None
    assert plan.best.score
    every = planner(3, slo=None, objective="throughput", strategy="exhaustive").plan(TRACE)
    assert every.best.placement == plan.best.placement
    assert every.best.score == plan.best.score
    assert plan.runs <= every.runs
    assert plan.best.utilisation
    assert "SLO" not in plan.explain()


def test_throughput_is_no_more_than_the_bound_of_its_stages() -> None:
    for each in planner(3, slo=None, objective="throughput", strategy="exhaustive").plan(TRACE).candidates:
        assert each.bound is not None
        assert each.score is not None
        assert each.score <= each.bound


def test_effective_throughput_counts_tokens_in_time_a_device() -> None:
    plan = planner(3, objective="effective_throughput", rate=5.0).plan(TRACE)
    tokens = sum(row.output_length for row in TRACE)
    duration = 250 / 5.0
    assert plan.best.score == pytest.approx(tokens / duration / plan.best.instances, rel=0.1)
    assert plan.best.instances == 1  # 5 requests/s are little: one device serves them all in time
    crowded = planner(3, objective="effective_throughput", rate=40.0).plan(TRACE)
    assert crowded.best.score
    assert crowded.best.score > (plan.best.score or 0)


# ---------------------------------------------------------------- what must not happen


@pytest.mark.parametrize("strategy", ["race", "paper", "exhaustive"])
def test_text_alone_never_uses_e(strategy: Any) -> None:
    plan = planner(3, strategy=strategy).plan(text())
    assert plan.best.exact
    assert {each.method for each in plan.candidates} == {"P+D", "PD"}


def test_more_instances_never_lower_goodput() -> None:
    scores = [planner(count).plan(TRACE).best.score or 0.0 for count in (1, 2, 3, 4)]
    assert all(more >= 0.98 * fewer for fewer, more in pairwise(scores))


@pytest.mark.parametrize("figure", ["flops", "bandwidth", "pass_s"])
def test_a_faster_device_never_hurts(figure: str) -> None:
    slow = DEVICES["L40S"]
    better = {"flops": 2 * slow.flops, "bandwidth": 2 * slow.bandwidth, "pass_s": slow.pass_s / 2}[figure]
    fast = msgspec.structs.replace(slow, name="fast", **{figure: better})
    slow_score, fast_score = (planner(2, device=each).plan(TRACE).best.score or 0 for each in (slow, fast))
    assert fast_score >= slow_score


def test_the_same_seed_gives_the_same_plan() -> None:
    assert planner(2, seeds=1, seed=5).plan(TRACE) == planner(2, seeds=1, seed=5).plan(TRACE)


def test_the_order_of_rows_does_not_matter() -> None:
    assert planner(2).plan(Trace(reversed(list(TRACE)))).best == planner(2).plan(TRACE).best


def test_a_planner_plans_again_and_again() -> None:
    made = planner(2)
    assert made.plan(TRACE) == made.plan(TRACE)
    assert made.plan(text()).best.method in ("P+D", "PD")


# ---------------------------------------------------------------- bad input


def test_an_empty_trace() -> None:
    with pytest.raises(TraceError, match="empty trace cannot be planned on"):
        planner().plan(Trace())


@pytest.mark.parametrize("count", [1, 2, 99])
def test_a_few_requests_are_too_short_and_too_few_to_draw_from(count: int) -> None:
    with pytest.raises(TraceTooShort, match=r"others can be drawn|no rate"):
        planner().plan(images(count))


def test_requests_that_all_come_at_once_have_no_rate() -> None:
    with pytest.raises(TraceTooShort, match="no rate"):
        planner().plan(Trace(row.request_at(0.0) for row in TRACE))


def test_a_short_trace_is_drawn_longer_and_the_plan_says_so() -> None:
    plan = planner(2).plan(images(200))
    assert plan.trace.requests >= 250
    assert any("200 requests is too short" in note and "seed 0" in note for note in plan.notes)
    with pytest.raises(TraceTooShort, match="is too short"):
        planner(2, resample=False).plan(images(200))


def test_a_loose_slo_needs_a_longer_trace() -> None:
    plan = planner(2, slo=SLO(1.5, 1.0)).plan(TRACE)
    assert plan.trace.requests > 250
    assert "too short for an answer" in plan.explain()


def test_an_slo_that_would_take_a_trace_without_end() -> None:
    with pytest.raises(TraceTooShort, match="more than the 1,000,000 that are drawn at most"):
        planner(2, slo=SLO(1e6, 1e6)).plan(TRACE)


def test_an_slo_that_nothing_meets_gives_the_best_attainment() -> None:
    plan = planner(2, slo=SLO(1e-4, 1e-4)).plan(TRACE)
    assert not plan.met
    assert plan.best.score == 0
    assert "meets the SLO at any rate" in plan.explain()
    assert plan.best.best_attainment("guard") == 0


def test_one_that_some_requests_meet_says_how_many() -> None:
    half = Trace(
        TraceRow(
            timestamp=row.timestamp, input_length=row.input_length, output_length=1 + 40 * (n % 2), images=row.images
        )
        for n, row in enumerate(TRACE)
    )
    plan = planner(2, slo=SLO(0.3, 1e-3)).plan(half)
    assert not plan.met
    assert plan.best.best_attainment("p90") == pytest.approx(0.5)
    assert "50.0%" in plan.explain()


@pytest.mark.parametrize("instances", [0, -1])
def test_no_instance(instances: int) -> None:
    with pytest.raises(ConfigError, match="instances is a whole number of at least 1"):
        planner(instances)


def test_an_unknown_device_model_strategy_objective_rule() -> None:
    with pytest.raises(UnknownName, match="unknown device 'H1000'"):
        planner(device="H1000")
    with pytest.raises(UnknownName, match="unknown model"):
        HybridPlanner("llava-2", SLOW)
    with pytest.raises(UnknownName, match="unknown strategy 'guess'; known: bayesian, exhaustive, paper, race"):
        planner(strategy="guess")
    with pytest.raises(UnknownName, match="unknown objective"):
        planner(objective="fame")
    with pytest.raises(UnknownName, match="unknown rule"):
        planner(rule="p50")
    with pytest.raises(UnknownName, match="unknown split"):
        planner(split="fair")
    with pytest.raises(UnknownName, match="unknown backend"):
        planner(backend="quantum")
    with pytest.raises(UnknownName, match="unknown device 'B900'"):
        planner(prices={"B900": 1.0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slo": None}, "throughput"),
        ({"objective": "throughput"}, "has no SLO"),
        ({"objective": "fewest_instances"}, "needs rate="),
        ({"objective": "fewest_instances", "rate": -1.0}, "rate is a number above 0"),
        ({"objective": "fewest_instances", "rate": math.nan}, "rate is a number above 0"),
        ({"share": 0.0}, "share is a number above 0"),
        ({"seeds": -1}, "seeds is a whole number of at least 0"),
        ({"prices": {"H100": 0.0}}, "price of H100 must be a positive"),
        ({"device": {"H100": 0}}, "at least 1 of each device"),
        ({"device": {}}, "at least 1 of each device"),
        ({"device": {"H100": 4}}, "leave one of both out"),
        ({"strategy": "bayesian", "objective": "goodput_per_cost"}, "an objective of its own"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planner(**{"instances": 3, **options})


def test_two_devices_of_one_name() -> None:
    other = Device(name="H100", flops=1e15, bandwidth=1e12, memory=80e9)
    with pytest.raises(ConfigError, match="two different devices are called 'H100'"):
        planner(None, cluster=Cluster(devices=(DEVICES["H100"], other)))  # type: ignore[arg-type]


def test_a_model_that_fits_no_device_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"llava-1.5-7b fits no placement: on cpu: .* are missing"):
        planner(2, device="cpu").plan(TRACE)


def test_roles_that_do_not_fit_a_device_are_left_out() -> None:
    """14 GB hold the encoder alone: nothing else may be placed there."""
    small = Device(name="small", flops=362e12, bandwidth=0.9e12, memory=10e9)
    plan = planner(None, cluster=Cluster(devices=(small, *[DEVICES["H100"]] * 2))).plan(TRACE)  # type: ignore[arg-type]
    for each in plan.candidates:
        placed = Placement.parse(each.placement).instances()
        on_small = [
            roles for (_, roles), name in zip(placed, each.devices or plan.devices, strict=True) if name == "small"
        ]
        assert on_small == ["E"]


def test_a_plan_is_a_plan() -> None:
    assert isinstance(planner(1).plan(TRACE), Plan)


def test_more_instances_than_a_placement_can_have() -> None:
    with pytest.raises(ConfigError, match="instances is a whole number of at least 1 and of at most 65536"):
        planner(10**8)
