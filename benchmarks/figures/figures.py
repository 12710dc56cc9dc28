"""Directions of the papers' figures and tables: each claim is stated in its file, then run, and passes or fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.figures import epdserve as figures_epdserve
from benchmarks.figures import others as figures_others
from benchmarks.figures import triinfer as figures_triinfer
from benchmarks.figures.claims import Scale, Shown
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting

FIGURES: Sequence[Callable[[Scale], Iterator[Shown]]] = (
    *figures_triinfer.FIGURES,
    *figures_epdserve.FIGURES,
    *figures_others.FIGURES,
)


def run(setting: Setting) -> Result:
    scale = Scale(setting.quick)
    found: list[Shown] = []
    seconds: dict[str, float] = {}
    for figure in FIGURES:
        began = time.perf_counter()
        found += figure(scale)
        seconds[found[-1].claim.figure] = time.perf_counter() - began
    result = shown(found, setting.quick)
    result.values["seconds"] = seconds
    return result


def shown(found: Sequence[Shown], quick: bool = False) -> Result:
    """One row a claim; a quick run decides none of them."""
    result = Result(
        "figures",
        "Directions of the papers' figures",
        "Simulated on rooflines of the papers' devices and engines; each claim names its engine. It is a direction, "
        "stated in the benchmark's file "
        "before the run; absolute figures are not comparable. Goodput by the guarded rule, for EPDServe by TTFT and "
        "mean TPOT.",
    )
    rows = [
        [f"{each.claim.figure}: {each.claim.says}", each.claim.engine, each.claim.paper, each.ours, each.verdict]
        for each in found
    ]
    result.tables.append(Table("Claims", ("claim", "engine", "paper", "ours", ""), rows))
    result.notes += [
        f"FAIL, {each.claim.figure} ({each.claim.says}), probably because {each.claim.because}."
        for each in found
        if not each.holds and each.claim.because
    ]
    result.values["claims"] = [
        {"figure": each.claim.figure, "says": each.claim.says, "ours": each.ours, "holds": each.holds} for each in found
    ]
    passed = sum(each.holds for each in found)
    verdict = None if quick else passed == len(found)
    result.aims.append(
        Aim("directions of the papers' figures", "all", f"{passed} of {len(found)} claims pass", verdict)
    )
    return result
