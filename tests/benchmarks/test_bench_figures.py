"""Directions of the papers' figures: each predicate by figures made by hand, their arithmetic, and that all run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from benchmarks.figures import claims, figures
from benchmarks.figures import epdserve as figures_epdserve
from benchmarks.figures import others as figures_others
from benchmarks.figures import triinfer as figures_triinfer
from benchmarks.figures.claims import SAID, Claim, Scale, Shown
from benchmarks.figures.others import Served
from benchmarks.figures.triinfer import Migrated
from benchmarks.setting import Setting
from trinity.errors import TraceTooShort
from trinity.planner.candidates import PAPER_METHODS, list_placements
from trinity.timeline import Slice
from trinity.traces.goodput import RequestOutcome
from trinity.traces.trace import Trace, TraceRow


def holds(shown: Iterable[Shown]) -> list[bool]:
    return [each.holds for each in shown]


# ---------------------------------------------------------------- what claims are checked with


def test_means_of_outcomes() -> None:
    served = [
        RequestOutcome(1.0, (0.1, 0.3)),
        RequestOutcome(3.0, (0.6,)),
        RequestOutcome(None, (), "error"),
        RequestOutcome(2.0, ()),
    ]
    assert claims.mean_ttft(served) == 2.0
    assert claims.mean_gap(served) == pytest.approx(1.0 / 3)
    assert claims.mean_tpot(served) == pytest.approx((0.2 + 0.6) / 2)
    assert claims.mean_ttft([RequestOutcome(None, (), "error")]) == math.inf


@pytest.mark.parametrize(
    ("other", "expected"), [((1, 2, 3, 4), 1.0), ((4, 3, 2, 1), -1.0), ((1, 1, 1, 1), 0.0), ((1, 3, 2, 4), 0.8)]
)
def test_rank_correlation(other: tuple[float, ...], expected: float) -> None:
    assert claims.correlation((10, 20, 30, 40), other) == pytest.approx(expected)


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert claims.ranks([5, 1, 5, 7]) == [2.5, 1, 2.5, 4]


def test_higher_means_by_more_than_a_search_leaves_open() -> None:
    assert not claims.above(1.02, 1.0)
    assert claims.above(1.03, 1.0)
    assert claims.above(0.1, 0.0)


def test_a_trace_that_is_too_short_is_drawn_longer() -> None:
    asked: list[int] = []

    def search(count: int) -> int:
        asked.append(count)
        trace = Trace(TraceRow(timestamp=1000.0 * at, input_length=1, output_length=1) for at in range(count))
        if count < 150:
            raise claims.more_than(trace, TraceTooShort("too short", 198.0))
        return count

    assert claims.lengthened(search, 100) == 260
    assert asked == [100, 260]


def test_requests_are_equal_and_come_at_their_rate() -> None:
    make: dict[str, Any] = {"model": "minicpm-v-2.6", "images": 3, "size": (448, 448), "text": 22, "output": 10}
    trace = claims.asked(2000, rate=5.0, **make)
    assert trace[0].input_length == 22 + 3 * 64
    assert trace[-1].timestamp / 1000 == pytest.approx(400, rel=0.1)
    assert {row.timestamp for row in claims.asked(5, rate=None, **make)} == {0.0}


# ---------------------------------------------------------------- TriInfer


def ratios(value: float, **changed: float) -> dict[str, float]:
    return {str(each): value for each in list_placements(8, PAPER_METHODS)} | changed


def test_figure_5_as_the_paper_has_it_and_not() -> None:
    worse = {"1EP7D": 9.0, "7EP1D": 5.0, "1ED7P": 4.0, "7ED1P": 4.0, "5E1P2D": 3.0}
    gaps = {name: 1.0 / (1 + figures_triinfer.decoding(name)) for name in ratios(0.0)} | {"1ED7P": 3.0}
    assert holds(figures_triinfer.claims_5(ratios(1.0, **worse), gaps)) == [True] * 7
    assert holds(figures_triinfer.claims_5(ratios(1.0), ratios(1.0))) == [False] * 7


@pytest.mark.parametrize(("placement", "count"), [("1E3P4D", 4), ("7EP1D", 1), ("4ED4P", 0), ("8EPD", 0)])
def test_instances_that_decode_alone(placement: str, count: int) -> None:
    assert figures_triinfer.decoding(placement) == count


def cells(strict: tuple[float, float, float], loose: tuple[float, float, float]) -> dict[Any, dict[str, float]]:
    both = ((figures_triinfer.STRINGENT, strict), (figures_triinfer.LOOSE, loose))
    return {("TextCaps", ttft, 0.1): dict(zip(PAPER_METHODS, rates, strict=True)) for ttft, rates in both}


def test_figure_6_as_the_paper_has_it_and_not() -> None:
    assert holds(figures_triinfer.claims_6(cells((3, 2, 1), (2, 3, 1)))) == [True, True, True]
    assert holds(figures_triinfer.claims_6(cells((2, 3, 1), (3, 2, 1)))) == [False, False, True]
    assert holds(figures_triinfer.claims_6(cells((1, 3, 2), (1, 3, 2)))) == [False, True, False]
    assert holds(figures_triinfer.claims_6(cells((0, 0, 0), (1, 3, 2)))) == [False, True, False]


def test_figure_9_needs_every_set_and_the_least_gain_on_mme() -> None:
    def gain(dataset: str, value: float) -> dict[tuple[str, str], dict[str, float]]:
        return {("llava-1.5-7b", dataset): dict.fromkeys(figures_triinfer.BASELINES, value)}

    assert holds(figures_triinfer.claims_9(gain("MME", 1.3) | gain("POPE", 1.5))) == [True] * 4
    assert holds(figures_triinfer.claims_9(gain("MME", 1.3) | gain("POPE", 1.01))) == [False] * 4


def test_table_4_as_the_paper_has_it_and_not() -> None:
    keys = [(name, rate) for name, rates in figures_triinfer.RATES_4.items() for rate in rates]
    paper = [Migrated(1.2, 6.4, 0, 0.001), Migrated(1.8, 7.6, 0, 0.001)]
    paper += [Migrated(2.6, 8.4, 0, 0.004), Migrated(4.2, 14.4, 0, 0.009)]
    assert holds(figures_triinfer.claims_4(dict(zip(keys, paper, strict=True)))) == [True] * 4
    flat = [Migrated(2.0, 2.0, 0.01, 0.0)] * 4
    assert holds(figures_triinfer.claims_4(dict(zip(keys, flat, strict=True)))) == [False] * 4


def test_an_image_is_ready_when_its_instances_step_ends() -> None:
    def step(start: float, images: int) -> Slice:
        return Slice("E0", "joint", "simulated encode", start, 0.5, {"media tokens": 576 * images})

    def pull(request: int) -> Slice:
        return Slice("P0", "migration", "image", 9.0, 0.1, {"source": "E0", "request": str(request), "bytes": 1})

    found = figures_triinfer.encoded([step(0.0, 1), step(1.0, 2), pull(7), pull(3), pull(5)])
    assert found == {3: 0.5, 5: 1.5, 7: 1.5}


# ---------------------------------------------------------------- EPDServe


def test_epdserve_figure_5() -> None:
    def found(two: float, four: float) -> dict[tuple[str, int], dict[str, float]]:
        return {("m", 2): {"5E2P1D": two, "7EP1D": 1.0, "8EPD": 2.0}, ("m", 4): {"5E2P1D": four, "7EP1D": 1, "8EPD": 1}}

    assert holds(figures_epdserve.claims_5(found(3.0, 2.0))) == [True, True, True]
    assert holds(figures_epdserve.claims_5(found(2.0, 0.9))) == [False, False, False]


def test_epdserve_figure_10() -> None:
    def found(e: float, together: float, gain: float, change: float) -> list[bool]:
        shown = figures_epdserve.claims_10({"5E2P1D": e, "2E5P1D": 2.0}, together, {1: gain, 8: 1.0}, {1: 1, 8: change})
        return holds(shown)

    assert found(3.0, 2.5, 1.5, 1.2) == [True] * 4
    assert found(1.0, 2.5, 0.9, 1.3) == [False] * 4


def test_epdserve_table_1() -> None:
    def at(epd: float, other: float) -> dict[str, float]:
        return {"5E2P1D": epd, "7EP1D": other, "8EPD": other}

    paper = {8: at(0.24, 0.42), 16: at(0.30, 0.81), 32: at(0.49, 1.54), 64: at(1.00, 3.08)}
    assert holds(figures_epdserve.claims_1(paper)) == [True, True]
    assert holds(figures_epdserve.claims_1({8: at(0.2, 0.4), 64: at(3.2, 3.1)})) == [False, False]


def test_epdserve_table_4() -> None:
    paper = {2: (1.46, 0.92), 4: (2.47, 1.02), 6: (3.37, 1.14), 8: (4.27, 1.74)}
    assert holds(figures_epdserve.claims_4(paper)) == [True, True]
    assert holds(figures_epdserve.claims_4({2: (3.0, 1.0), 4: (1.0, 1.0), 6: (2.0, 1.0)})) == [False, False]


def test_epdserve_table_5() -> None:
    best = figures_epdserve.Served(1.25, 2.12, 0.031)
    paper, other = ([figures_epdserve.Served(*each)] * 3 for each in ((0.56, 4.48, 0.025), (1.24, 2.0, 0.04)))
    assert holds(figures_epdserve.claims_5_table("6E1P1D", best, paper)) == [True] * 3
    assert holds(figures_epdserve.claims_5_table("6E1P1D", best, other)) == [False] * 3


def test_random_configurations_are_drawn_once_and_for_all() -> None:
    drawn = figures_epdserve.random_configurations(10, seed=0)
    assert drawn == figures_epdserve.random_configurations(10, seed=0)
    assert drawn != figures_epdserve.random_configurations(10, seed=1)
    assert len({name for name, _ in drawn}) > 3


# ---------------------------------------------------------------- EPD-Serve and vLLM encoder separation


def test_epd_serve_table_5_by_its_own_figures() -> None:
    paper = {
        "TP1 x2": Served(9.0, 0.65827, 0.09556, 0.0215, 13.38),
        "(E-PD) x2": Served(9.0, 0.54832, 0.06222, 0.0313, 19.70),
        "EP-D": Served(9.0, 5.52382, 0.02731, 0.0820, 21.54),
        "(E-P)-D": Served(9.0, 2.38685, 0.02840, 0.2617, 77.36),
        "(E-D)-P": Served(9.0, 0.65186, 0.05071, 0.2266, 69.18),
        "E-P-D": Served(9.0, 0.55789, 0.02892, 0.9434, 192.70),
    }
    assert holds(figures_others.claims_5(paper)) == [True] * 6
    assert holds(figures_others.claims_5(dict.fromkeys(paper, Served(1.0, 1.0, 1.0, 1.0, 1.0)))) == [False] * 6


def test_paper_001_by_its_own_figures() -> None:
    def at(*pairs: tuple[float, float]) -> Mapping[str, Served]:
        names = ("1E1PD", "2EPD", "E+PD on 1", "1EPD")
        return {name: Served(rate, 0.0, tpot) for name, (rate, tpot) in zip(names, pairs, strict=True)}

    most = at((15.82, 62.31), (13.34, 146.56), (10.69, 98.28), (9.39, 115.47))
    least = at((13.40, 21.80), (12.10, 45.53), (9.27, 36.09), (9.11, 57.95))
    assert holds(figures_others.claims_vllm({1000: most, 100: least})) == [True] * 4
    slower = at((12.0, 50.0), (12.1, 45.5), (9.1, 58.0), (9.2, 57.9))
    assert holds(figures_others.claims_vllm({1000: most, 100: slower})) == [False] * 4


# ---------------------------------------------------------------- the whole


def test_a_result_says_pass_and_fail_beside_both_figures_and_why() -> None:
    good = Shown(Claim("Paper, figure 1", "A is above B", "2 against 1"), "4 against 3", True)
    bad = Shown(Claim("Paper, figure 2", "B is above C", "3 against 2", "C is better"), "1 against 2", False)
    made = figures.shown([good, bad])
    assert made.tables[0].rows[0] == ["Paper, figure 1: A is above B", SAID, "2 against 1", "4 against 3", "PASS"]
    assert made.tables[0].rows[1][-1] == "FAIL"
    assert made.notes == ["FAIL, Paper, figure 2 (B is above C), probably because C is better."]
    assert (made.aims[0].met, made.aims[0].measured) == (False, "1 of 2 claims pass")
    assert figures.shown([good]).aims[0].met is True
    assert figures.shown([good], quick=True).aims[0].met is None


@pytest.mark.slow
@pytest.mark.slow
def test_every_figure_runs() -> None:
    made = figures.run(Setting(quick=True))
    names = {each["figure"] for each in made.values["claims"]}
    sources = {"TriInfer", "EPDServe", "EPD-Serve", "vLLM encoder separation"}
    assert {re.sub(" (figure|table) .*", "", each) for each in names} == sources
    assert len(made.values["claims"]) == 44
    assert Scale().requests(7) == 7
