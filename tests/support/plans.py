"""Plans and candidates for tests, with figures made up by hand."""

from __future__ import annotations

from typing import Any

import msgspec

from trinity.planner.plan import Candidate, Plan
from trinity.traces.goodput import RatePoint
from trinity.traces.trace import SLO, SLO_RULES, Trace, TraceImage, TraceRow


def point(rate: float, share: float) -> RatePoint:
    return RatePoint(rate=rate, duration_s=60, attainment=dict.fromkeys(SLO_RULES, share), completed=1.0)


BEST = Candidate(
    placement="2EP2D",
    method="EP+D",
    devices=("H100",) * 4,
    exact=True,
    score=12.5,
    goodput={"p90": 14.0, "p99": 9.0, "guard": 12.5, "tpot": 13.0},
    bound=16.0,
    nominal=15.0,
    attainment=(point(10, 0.99), point(12.5, 0.91), point(12.75, 0.88)),
    bottleneck="D",
    utilisation={"EP0": {"E": 0.1, "P": 0.5}, "EP1": {"E": 0.1, "P": 0.4}, "D0": {"D": 0.9}, "D1": {"D": 0.8}},
    memory={"EP0": {"weights": 14e9, "kv_peak": 0.2, "image_peak": 0.05}, "D0": {"weights": 13e9, "kv_peak": 0.75}},
    spread=(12.0, 12.4, 13.1),
    price=8.0,
)
PAPER = Candidate(
    placement="1E1P2D", method="E+P+D", devices=("H100",) * 4, exact=True, score=10.0, goodput={"guard": 10.0}
)
LOWER = Candidate(placement="4EPD", method="EPD", devices=("H100",) * 4, bound=12.5, nominal=11.0)


def trace(count: int = 4) -> Trace:
    return Trace(
        TraceRow(timestamp=250.0 * n, input_length=600, output_length=8, images=[TraceImage(tokens=576)] * (n % 2))
        for n in range(count)
    )


def plan(**changes: Any) -> Plan:
    made = Plan(
        model="llava-1.5-7b",
        objective="goodput",
        strategy="race",
        rule="guard",
        slo=SLO(ttft=1.0, tbt=0.05),
        devices=("H100",) * 4,
        best=BEST,
        candidates=(BEST, PAPER, LOWER),
        paper=PAPER,
        trace=trace().statistics(),
        seeds=(1, 2, 3),
        runs=17,
        backend="python",
    )
    return msgspec.structs.replace(made, **changes)
