"""Live beside simulated: what the benchmark compares and judges, and an emulated pipeline that takes what it says."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

from benchmarks.fidelity import fidelity
from benchmarks.fidelity import real_model as fidelity_real
from benchmarks.fidelity.comparison import METRICS, Load, Row, Seen, seen
from benchmarks.fidelity.fidelity import Case
from benchmarks.fidelity.host import Host, calibrated, slower
from benchmarks.fidelity.real_model import Costs, Real
from benchmarks.setting import Setting
from support.checkpoint_files import checkpoint
from trinity.bench.live_replay import replay
from trinity.costs.step_cost import CostTables
from trinity.request import Output
from trinity.runtime.loader import load_instances
from trinity.traces.goodput import Goodput, RatePoint, RequestOutcome
from trinity.traces.trace import SLO, SLO_RULES, Trace

NOTHING = Host()
LIVENESS = 120.0


def one(ttft: float = 0.1, tpot: float = 0.02, failed: int = 0, p99: float = 9.0) -> Seen:
    figures = {(name, percent): {"TTFT": ttft, "TPOT": tpot}[name] for name, percent in METRICS if percent != 99}
    return Seen({**figures, ("TTFT", 99): p99, ("TPOT", 99): p99}, 1.0, failed)


def goodput(rate: float) -> Goodput:
    point = RatePoint(rate=rate, duration_s=9.0, attainment=dict.fromkeys(SLO_RULES, 0.95), completed=1.0)
    return Goodput(rate=rate, rule="guard", share=0.9, stable=True, points=(point,))


def case(placement: str, simulated: float, live: float, *loads: Load) -> Case:
    return Case(placement, Trace(), goodput(simulated), goodput(live), list(loads))


# ---------------------------------------------------------------- what is compared


def test_percentiles_are_of_requests_that_ended_and_the_others_are_counted() -> None:
    outcomes = [RequestOutcome(0.1 * n, (0.01, 0.03), "length") for n in range(1, 12)]
    found = seen([*outcomes, RequestOutcome(99.0, (9.0,), "error"), RequestOutcome(None, (), "refused")], SLO(1.0, 1.0))
    assert found.seconds["TTFT", 50] == pytest.approx(0.6)
    assert found.seconds["TTFT", 90] == pytest.approx(1.0)
    assert found.seconds["TPOT", 50] == pytest.approx(0.02)
    assert found.failed == 2
    assert found.attainment == pytest.approx(9 / 13)


@pytest.mark.parametrize(
    ("live", "passed"),
    [
        ([one()], True),
        ([one(ttft=0.109)], True),
        ([one(ttft=0.111)], False),
        ([one(tpot=0.0179)], False),
        ([one(p99=900.0)], True),
        ([one(failed=1)], False),
        ([one(ttft=0.13), one(ttft=0.12), one(ttft=0.09)], True),  # a third apart, a fifth off
        ([one(ttft=0.13), one(ttft=0.12), one(ttft=0.121)], False),
    ],
)
def test_a_row_is_within_a_tenth_or_the_spread_of_its_repeats(live: list[Seen], passed: bool) -> None:
    row = Row("EPD", Load(0.9, 10, one(), live), 0.10)
    assert row.passed is passed
    assert row.cells()[-1] == ("PASS" if passed else "FAIL")
    assert len(row.cells()) == len(Row.HEADER)


def test_the_worst_is_that_of_what_is_judged() -> None:
    row = Row("EPD", Load(0.9, 10, one(), [one(ttft=0.11, tpot=0.015, p99=90.0)]), 0.10)
    assert row.worst == pytest.approx(0.25)
    assert "110 / 100 +10.0%" in row.cells()
    assert row.load.values()["live"][0]["seconds"]["TTFT p50"] == 0.11


def test_placements_are_misplaced_where_their_goodputs_are_apart_and_in_another_order() -> None:
    right = [case("A", 1.0, 2.0), case("B", 1.2, 2.1), case("C", 1.21, 2.05)]
    assert fidelity.misplaced(right) == []
    assert fidelity.misplaced([*right, case("D", 2.0, 2.0)]) == ["A before D", "B before D", "C before D"]


def test_the_simulated_side_is_there_before_anything_is_served() -> None:
    case = fidelity.predicted("1EP1D", NOTHING, 20, (0.5, 0.9))
    assert [(load.share, load.requests, load.live) for load in case.loads] == [(0.5, 20, []), (0.9, 20, [])]
    assert case.loads[0].simulated.seconds["TTFT", 50] < case.loads[1].simulated.seconds["TTFT", 50]
    assert case.simulated.rate > 0


def test_both_sides_have_the_same_budgets() -> None:
    found = fidelity.budgets("1EP1D")
    pipe = fidelity.pipeline("1EP1D")
    settings = {each.roles: each.rules for each in fidelity.simulator("1EP1D", Host(step_s=0.01)).settings("1EP1D")}
    for each in load_instances(pipe._serving_config, pipe.instances, None):
        rules = each.settings.rules
        assert (rules.token_budget, rules.image_budget) == (
            found[each.spec.roles].token_budget,
            found[each.spec.roles].image_budget,
        )
        assert (settings[each.spec.roles].token_budget, settings[each.spec.roles].image_budget) == (
            rules.token_budget,
            rules.image_budget,
        )


def test_the_result_says_pass_and_fail() -> None:
    near, far = Load(0.9, 5, one(), [one()]), Load(0.9, 5, one(), [one(ttft=0.2)])
    tables = {"D": CostTables.from_samples({1: {"decodes": {1: 0.1}}}, model="m", device="cpu", dtype="f")}
    real = Real("small", Costs(tables, Host(1e-4, 1e-3, 2e-3)), SLO(1.0, 1.0), 2.0, [near, far])
    found = fidelity.result(Host(1e-4, 1e-3), [case("2EPD", 1.0, 1.05, near), case("1EP1D", 2.0, 1.0, far)], real)
    assert [aim.met for aim in found.aims] == [True, False, False, False, True, False]
    assert "1EP1D before" not in found.text()
    assert [row[-1] for row in found.tables[1].rows] == ["PASS", "FAIL"]
    assert found.values["paced"]["2EPD"]["goodput"] == {"simulated": 1.0, "live": 1.05}
    assert "small in float32" in found.method


# ---------------------------------------------------------------- what the host adds


class Alone:
    """A pipeline at rest: 50 ms and three messages to the first token, then 10 ms and a step; it is slow at first."""

    def __init__(self) -> None:
        self.served: list[int] = []

    async def complete(self, number: int) -> Output:
        self.served.append(number)
        cold = 9.0 if len(self.served) <= 5 else 0.0
        pulls = [{"kind": "kv", "bytes": 9, "seconds": 0.004}, {"kind": "image", "bytes": 0, "seconds": 0.0}]
        return Output(request_id="r", ttft_s=0.053 + cold, itl_s=[0.012, 0.012], transfers=pulls)


async def test_what_the_host_adds_is_found_from_requests_that_are_alone() -> None:
    def simulate(host: Host, alone: Trace) -> list[RequestOutcome]:
        assert [row.timestamp for row in alone] == [n * 1e5 for n in range(5)]
        return [RequestOutcome(0.046 + host.pull_s + 3 * host.message_s, (0.01 + host.step_s,) * 2)] * len(alone)

    pipe: Any = Alone()
    make: Any = lambda row, number: number  # noqa: E731
    found = await calibrated(pipe, make, fidelity_real.trace(5, 16), simulate)
    assert pipe.served == list(range(10))
    assert (found.pull_s, found.step_s, found.message_s) == pytest.approx((0.004, 0.002, 0.001))


def test_tables_are_slower_by_a_step_for_each_pass() -> None:
    samples = {1: {"decodes": {1: 0.1, 4: 0.2}, "prefill": {8: 0.5}, "media": {16: 0.7}}}
    tables = CostTables.from_samples(samples, model="m", device="cpu", dtype="f")
    for counts, passes in (
        ((1, 0, 0), 1),
        ((3, 0, 0), 1),
        ((0, 8, 0), 1),
        ((2, 8, 0), 1),
        ((2, 8, 16), 2),
        ((0, 0, 0), 0),
    ):
        later = slower(tables, 0.25).seconds(*counts)
        assert later == pytest.approx(tables.seconds(*counts) + 0.25 * passes), counts


# ---------------------------------------------------------------- live and simulated


@pytest.mark.parametrize("placement", ["1E1P1D", "2EPD"])
async def test_a_paced_pipeline_takes_what_the_simulator_says(placement: str) -> None:
    asked = fidelity.trace(14, 12.0, seed=2)
    expected = fidelity.simulator(placement, NOTHING).replay(asked, placement)
    async with fidelity.pipeline(placement) as pipe:
        served = await replay(pipe, asked, late_s=1e9)
    assert [row.output_length for row in served] == [row.output_length for row in asked]
    assert [row.finish_reason for row in served] == [each.finish_reason for each in expected.outcomes]
    live, simulated = seen(served, fidelity.SLO_PACED), seen(expected.outcomes, fidelity.SLO_PACED)
    for metric in (("TTFT", 50), ("TPOT", 50)):
        share = live.seconds[metric] / simulated.seconds[metric]
        assert 0.85 < share < LIVENESS, metric  # stages wait no less than the costs say, however busy the machine is
    other = msgspec.structs.replace(fidelity.COST.device, pass_s=0.4)
    slower = msgspec.structs.replace(fidelity.COST, device=other)
    control = fidelity.simulator(placement, NOTHING)
    control.cost = slower
    outcomes = control.replay(asked, placement).outcomes
    assert median(each.ttft_s or 0.0 for each in outcomes) > 3 * simulated.seconds["TTFT", 50]


# ---------------------------------------------------------------- a real model


def test_every_fourth_request_has_an_image_and_equal_seeds_are_equal() -> None:
    made = fidelity_real.trace(8, 576)
    assert [bool(row.images) for row in made] == [True, False, False, False] * 2
    assert list(made) == list(fidelity_real.trace(8, 576))
    assert all(row.input_length == row.text_tokens + row.visual_tokens for row in made)


def test_tables_are_measured_in_a_process_by_itself(tmp_path: Path) -> None:
    out = tmp_path / "EP.json"
    fidelity_real.profile_alone(checkpoint("llava"), "EP", out, {**fidelity_real.QUICKLY, "tokens": (1, 8)})
    tables = CostTables.load(out)
    assert tables.seconds(0, 8, 16) > 0
    assert tables.seconds(1, 0, 0) == 0


@pytest.mark.slow
def test_the_benchmark_runs_quickly() -> None:
    found = fidelity.run(Setting(quick=True, checkpoint=checkpoint))
    assert set(found.values) == {"host", "paced", "real"}
    assert [len(table.rows) for table in found.tables] == [2, 2, 1]
    assert found.values["real"]["loads"][0]["live"][0]["failed"] == 0
