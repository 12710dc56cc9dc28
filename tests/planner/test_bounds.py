"""No simulated goodput exceeds the upper bound; what both bounds come to where it can be worked out by hand."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trinity.core.scheduler import BatchRules
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import MODELS, ModelShape
from trinity.costs.step_cost import DEVICES, Roofline
from trinity.errors import TraceTooShort
from trinity.placement import Placement
from trinity.planner.bounds import PULL_S, Bounds, Kind, predict_encode_waits, predict_step_waits
from trinity.planner.candidates import Deployment, list_deployments
from trinity.planner.trials import Trials, rate_of
from trinity.simulation.simulator import Simulator
from trinity.simulation.workload import jobs_of
from trinity.traces.trace import SLO, SLO_RULES, SLORule, Trace, TraceImage, TraceRow

LLAVA, QWEN = MODELS["llava-1.5-7b"], MODELS["qwen2-vl-7b"]
LOOSE = SLO(ttft=2.0, tbt=1.0)


class Straight:
    """Tokens a second of each stage, without overhead: nothing is gained by a batch."""

    def __init__(self, encode: float = 1e4, prefill: float = 1e4, decode: float = 1e3) -> None:
        self.rates = (decode, prefill, encode)

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        return self.at(decodes, prefill_tokens, media_tokens, context=0.0)

    def at(
        self,
        decodes: int,
        prefill_tokens: int,
        media_tokens: int,
        *,
        context: float,
        prefilled: float = 0.0,
        prefills: int = 1,
        image_tokens: float = 0.0,
    ) -> float:
        counts = (decodes, prefill_tokens, media_tokens)
        return sum(count / rate for count, rate in zip(counts, self.rates, strict=True))


def equal(count: int = 2_000, images: int = 1, output: int = 101) -> Trace:
    """500 tokens of visual tokens for each image, 500 of text."""
    shown = [TraceImage(tokens=500)] * images
    return Trace(
        TraceRow(timestamp=100.0 * n, input_length=500 * (images + 1), output_length=output, images=shown)
        for n in range(count)
    )


def bounds(trace: Trace, cost: Any = None, names: str = "A", **options: Any) -> Bounds:
    kinds = {name: Kind(cost or Straight(), 72e9) for name in names}
    return Bounds(trace, LOOSE, LLAVA, kinds, **{"offline": True, "share": 1.0, **options})


def placed(text: str, devices: str = "") -> Deployment:
    placement = Placement.parse(text)
    return Deployment.of(placement, devices or "A" * placement.size)


# ---------------------------------------------------------------- by hand: 0.05 s of E, 0.1 s of P, 0.1 s of D


@pytest.mark.parametrize(
    ("placement", "rate"),
    [
        ("1E1P1D", 10.0),  # P and D take 0.1 s each
        ("1E2P1D", 10.0),
        ("1E2P2D", 20.0),
        ("1E4P4D", 20.0),  # E: 0.05 s
        ("1EP1D", 1 / 0.15),
        ("3EP2D", 20.0),
        ("1ED1P", 1 / 0.15),
        ("1PD1E", 5.0),
        ("4EPD", 16.0),  # 0.25 s of each
    ],
)
def test_every_set_of_stages_against_who_serves_any_of_it(placement: str, rate: float) -> None:
    assert bounds(equal()).upper(placed(placement)) == pytest.approx(rate, rel=0.01)


def test_a_tenth_may_be_late_and_work_may_be_left_at_the_end() -> None:
    trace = equal(1000)
    plain = bounds(trace).upper(placed("1E1P1D"))
    assert bounds(trace, share=0.9).upper(placed("1E1P1D")) == pytest.approx(plain / 0.9)
    late = bounds(trace, offline=False, rule="p90", stable=False).upper(placed("1E1P1D"))
    assert late == pytest.approx(plain / (1 - plain * 3 * 2.0 / 1000))  # r = c (1 + r · 3 TTFT / n), P alone counts
    assert bounds(equal(20_000), offline=False).upper(placed("1E1P1D")) == pytest.approx(plain, rel=0.06)


def test_where_a_starved_decode_goes_unseen_it_bounds_nothing() -> None:
    trace = equal(4_000, output=801)  # 0.8 s of D
    blind = bounds(trace, offline=False, rule="p90", stable=False)
    seeing = bounds(trace, offline=False, rule="p90", stable=True)
    assert blind.upper(placed("1E1P1D")) == pytest.approx(10, rel=0.02)
    assert seeing.upper(placed("1E1P1D")) < 2


def test_two_lanes_do_more_than_one_second_of_work_in_a_second() -> None:
    lanes = ("vision", "language")
    assert bounds(equal(), lanes=lanes).upper(placed("1ED1P")) == pytest.approx(10, rel=0.01)  # no longer 1 / 0.15
    slowed = bounds(equal(), lanes=lanes, interference=1.6).upper(placed("1ED1P"))
    assert slowed == pytest.approx(1.25 / 0.15, rel=0.01)
    assert bounds(equal(), lanes=lanes).upper(placed("1EP1D")) == pytest.approx(10, rel=0.01)


def test_mixed_devices_add_up_at_what_each_is_best_at() -> None:
    made = Bounds(
        equal(),
        LOOSE,
        LLAVA,
        {"A": Kind(Straight(), 72e9), "B": Kind(Straight(prefill=2e4, decode=2e3), 72e9)},
        offline=True,
        share=1.0,
    )
    assert made.upper(placed("1E1P1D", "AAA")) == pytest.approx(10, rel=0.01)
    assert made.upper(placed("1E1P1D", "ABB")) == pytest.approx(20, rel=0.01)
    assert made.upper(placed("1E2P2D", "AABAB")) == pytest.approx(20, rel=0.01)  # E
    assert made.upper(placed("2E2P2D", "AAABAB")) == pytest.approx(30, rel=0.01)
    # A encodes 20 requests/s, B decodes 20: that is more than both doing both (1 / 0.15 + 1 / 0.1).
    assert made.upper(placed("2ED3P", "ABBBB")) == pytest.approx(20, rel=0.01)


def test_content_that_comes_again_is_no_work() -> None:
    same = Trace(
        TraceRow(timestamp=n, input_length=1000, output_length=2, images=[TraceImage(tokens=500, content="x")])
        for n in range(1000)
    )
    assert bounds(same).upper(placed("1E3PD")) > 1.9 * bounds(equal(1000, output=2)).upper(placed("1E3PD"))


def drawn_rows(draw: random.Random, contents: int, hashes: int) -> Trace:
    """Images that may be like others, prefixes that may be, and requests beyond the context."""
    rows = []
    for n in range(60):
        names = [f"image{draw.randrange(contents)}" if contents else None for _ in range(draw.choice([0, 1, 3]))]
        text = draw.choice([1, 700, 5000])
        hashed = [n, *draw.choices(range(1000, 1000 + hashes), k=draw.choice([0, 2]))] if hashes else []
        images = [TraceImage(tokens=100, content=name) for name in names]
        rows.append(
            TraceRow(
                timestamp=100.0 * n,
                input_length=text + 100 * len(names),
                output_length=draw.choice([0, 1, 2, 300]),
                images=images,
                hash_ids=hashed,
            )
        )
    return Trace(rows)


@pytest.mark.parametrize(("contents", "hashes"), [(0, 0), (0, 5), (4, 0), (3, 5)])
@pytest.mark.parametrize("share", [1.0, 0.9])
def test_what_a_request_needs_is_a_mean_over_the_lightest(contents: int, hashes: int, share: float) -> None:
    trace = drawn_rows(random.Random(contents + hashes), contents, hashes)
    lists: list[list[int]] = [[], [], [], []]
    seen: set[str | int] = set()
    for job in jobs_of(trace, LLAVA):
        known = [count for count, name in job.images if name in seen]
        hashed = [each for each in job.hash_ids if each in seen]
        seen.update(name for _, name in job.images)
        seen.update(job.hash_ids)
        later = 0 if job.refused else job.max_tokens - 1
        lists[0].append(sum(count for count, _ in job.images) - sum(known))
        lists[1].append(0 if job.refused else max(1, job.prompt - sum(known) - 512 * len(hashed)))
        lists[2].append(later)
        lists[3].append(0 if known or hashed else later * math.ceil((job.prompt + job.max_tokens) / 16))
    kept = math.ceil(share * len(trace))
    expected = tuple(sum(sorted(each)[:kept]) / len(trace) for each in lists)
    need = bounds(trace, share=share, order="sjf").need
    assert tuple(need)[:4] == expected
    assert need.own_image == 100  # every image's


def test_heavy_requests_may_be_the_late_ones_where_the_queue_is_not_in_order() -> None:
    rows = [*equal(9000, images=0, output=2), *equal(1000, images=6, output=2)]
    in_order, shortest = (bounds(Trace(rows), share=0.9, order=order) for order in ("fcfs", "sjf"))
    assert shortest.upper(placed("1E1P1D")) > 1.5 * in_order.upper(placed("1E1P1D"))


def test_nominal_bounds_are_by_the_slowest_group_and_name_its_stage() -> None:
    made = bounds(equal(), Straight())
    assert made.nominal(placed("1E2P4D")) == pytest.approx(20, rel=0.02)
    assert made.bottleneck(placed("1E4P8D")) == "E"
    assert made.bottleneck(placed("2E1P8D")) == "P"
    assert made.bottleneck(placed("3EP1D")) == "D"
    assert made.bottleneck(placed("1EP3D")) == "P"
    assert bounds(equal(images=0)).bottleneck(placed("2PD")) in "PD"


@pytest.mark.parametrize("model", [LLAVA, QWEN])
def test_the_nominal_bound_is_the_nearer_one(model: ModelShape) -> None:
    kinds = {"A": Kind.of(DEVICES["H100"], Roofline(model=model, device=DEVICES["H100"]), 0.9)}
    made = Bounds(equal(), SLO(1.0, 0.05), model, kinds)
    for each in list_deployments("AAAA"):
        assert 0 < made.nominal(each) <= made.upper(each) * 1.01


# ---------------------------------------------------------------- against the cores that serve


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
@example(4)
@example(11)
def test_no_simulated_goodput_exceeds_it(seed: int) -> None:
    check_one(seed, 40)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6))
def test_no_simulated_goodput_exceeds_it_in_many_cases(seed: int) -> None:
    check_one(seed, 150)


def check_one(seed: int, count: int) -> None:
    draw = random.Random(seed)
    model, names = draw.choice([LLAVA, QWEN]), draw.choice([["H100"] * 2, ["H100"] * 3, ["H100", "L40S"]])
    slo = SLO(draw.choice([0.2, 0.6]), draw.choice([0.03, 0.06, 0.2]))
    rule = draw.choice(SLO_RULES)
    lanes, order = draw.choice([("joint",), ("vision", "language")]), draw.choice(["fcfs", "sjf"])
    trace, stable = drawn(draw, count), draw.random() < 0.6
    kinds = {each: Kind.of(DEVICES[each], Roofline(model=model, device=DEVICES[each]), 0.9) for each in names}
    made = Bounds(trace, slo, model, kinds, rule=rule, stable=stable, lanes=lanes, order=order)
    deployment = draw.choice(list_deployments(names))
    simulator = Simulator(
        model,
        slo,
        cluster=Cluster.of(*[(each, 1) for each in deployment.devices]),
        lanes=lanes,
        rules=BatchRules(order=order),  # type: ignore[arg-type]
    )
    reached = found(simulator, deployment, trace, slo, rule, stable, made.nominal(deployment))
    assert reached <= made.upper(deployment), (str(deployment), deployment.devices, rule, stable)


def drawn(draw: random.Random, count: int) -> Trace:
    longest, images = draw.choice([2, 6, 20]), draw.choice([[0], [1], [0, 1, 3]])
    return Trace(
        TraceRow(
            timestamp=200.0 * n + draw.uniform(0, 150),
            input_length=0,
            text_length=draw.choice([10, 200, 1500]),
            output_length=draw.randint(1, longest),
            images=[TraceImage(tokens=576)] * draw.choice(images),
        )
        for n in range(count)
    )


def found(
    simulator: Simulator, deployment: Deployment, trace: Trace, slo: SLO, rule: SLORule, stable: bool, guess: float
) -> float:
    trials = Trials(
        lambda each: simulator.serve(each.placement),
        trace,
        slo,
        rule=rule,
        stable=stable,
        least_requests=2,
        least_ttfts=3,
    )
    try:
        step = trials.limit(deployment, min(guess, 1e3))
    except TraceTooShort:
        return 0.0  # no goodput by any rule: the trace is over before a queue has built up
    return 0.0 if step is None else rate_of(step)


# ---------------------------------------------------------------- steps in progress

STEP = 0.025
TIGHT = SLO(2.0, 0.04)


def counted(count: int, rate: float, lasting: float, spare: float, draws: int = 40_000) -> float:
    """Share of requests, in turn to so many instances, that find more than ``spare`` of a step left."""
    noise, until, now, late = random.Random(7), [0.0] * count, 0.0, 0
    for number in range(draws):
        now += noise.expovariate(rate)
        place = number % count
        late += now < until[place] and noise.uniform(0, STEP) > spare
        until[place] = now + lasting
    return late / draws


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("gaps", [1, 8])
def test_at_that_rate_a_tenth_meets_a_step_in_progress(count: int, gaps: int) -> None:
    rate = predict_step_waits(count, STEP, Counter({gaps: 100}), TIGHT, "guard", 0.9)
    assert counted(count, rate, gaps * STEP, TIGHT.tbt - STEP - PULL_S) == pytest.approx(0.1, abs=0.015)


def test_what_tolerates_a_late_gap_does_not_count() -> None:
    assert predict_step_waits(2, STEP, Counter({10: 100}), TIGHT, "guard", 0.9) == math.inf
    assert predict_step_waits(2, STEP, Counter({10: 100}), TIGHT, "p99", 0.9) < 10
    assert predict_step_waits(2, STEP, Counter({0: 100}), TIGHT, "guard", 0.9) == math.inf
    assert predict_step_waits(2, STEP, Counter({8: 10, 50: 90}), TIGHT, "guard", 0.9) == math.inf  # a tenth may be late
    assert predict_step_waits(2, STEP, Counter({8: 100}), SLO(2.0, 0.06), "guard", 0.9) == math.inf  # two steps fit
    assert predict_step_waits(2, STEP, Counter({8: 100}), TIGHT, "tpot", 0.9) == math.inf  # seven others make up for it
    assert predict_step_waits(2, STEP, Counter({1: 100}), TIGHT, "tpot", 0.9) < math.inf
    assert predict_step_waits(1, STEP, Counter(), TIGHT, "guard", 0.9) == math.inf


def test_more_instances_serve_more_than_in_proportion_since_each_comes_in_turn() -> None:
    rates = [predict_step_waits(count, STEP, Counter({8: 100}), TIGHT, "guard", 0.9) for count in range(1, 8)]
    assert all(rates[n] / rates[0] > n + 1 for n in range(1, 7))


def test_an_encode_in_between_is_a_late_gap() -> None:
    few, many = Counter({5: 100}), Counter({30: 100})
    rate = predict_encode_waits(4, 0.03, STEP, few, TIGHT, 0.9)
    assert 1 - math.exp(-rate / 4 * 5 * STEP) == pytest.approx(0.1)
    assert predict_encode_waits(4, 0.03, STEP, many, TIGHT, 0.9) == math.inf
    assert predict_encode_waits(4, 0.01, STEP, few, TIGHT, 0.9) == math.inf
