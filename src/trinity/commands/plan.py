"""Command: ``trinity plan MODEL --trace TRACE --slo TTFT,TBT`` finds the best placement for recorded traffic."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trinity import report, traces
from trinity.costs.model_config import read_model_shape
from trinity.costs.step_cost import CostTables
from trinity.errors import ConfigError
from trinity.planner import OBJECTIVES, HybridPlanner
from trinity.traces.trace import SLO, Trace

_EXAMPLE = """example, eight H100 for ten minutes of production traffic, which comes with trinity:
  trinity plan qwen2-vl-7b --trace servegen-image-1h --minutes 10 --slo 2,0.08 --instances 8 --out plan.json
then: Pipeline(model, placement=Plan.load("plan.json"))"""


def parse_bounds(text: str) -> SLO:
    """Parse ``TTFT,TBT`` in seconds."""
    try:
        ttft, tbt = (float(each) for each in text.split(","))
        return SLO(ttft, tbt)
    except (ValueError, ConfigError) as error:
        raise argparse.ArgumentTypeError(f"give TTFT,TBT in seconds, such as 2,0.08 ({error})") from error


def _make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="trinity plan", description=main.__doc__, epilog=_EXAMPLE, formatter_class=formatter
    )
    parser.add_argument(
        "model", help="a known model's name, such as qwen2-vl-7b, a checkpoint's directory or its hub id"
    )
    parser.add_argument("--trace", required=True, help="a file of requests, or the name of a shipped trace")
    parser.add_argument("--slo", type=parse_bounds, required=True, metavar="TTFT,TBT", help="seconds")
    parser.add_argument("--minutes", type=float, help="plan on the first minutes of the trace")
    parser.add_argument("--instances", type=int, help="how many there are (default: one for each device)")
    parser.add_argument("--device", default="H100", help="what each runs on (default: H100)")
    parser.add_argument("--cost", type=Path, help="step times that pipe.profile(path) measured, in place of a roofline")
    parser.add_argument("--objective", choices=OBJECTIVES, default="goodput")
    parser.add_argument("--rate", type=float, help="requests/s, for objectives that serve a given rate")
    parser.add_argument("--out", type=Path, help="file for the plan, which Pipeline(placement=) takes")
    parser.add_argument("--html", type=Path, help="file for a report with pictures")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Find the disaggregation method and ratio that serve recorded traffic best, in virtual time; no GPU is needed."""
    asked = _make_parser().parse_args(arguments)
    plan = make_planner(asked).plan(read_traffic(asked.trace, asked.minutes))
    print(plan, plan.explain(), sep="\n\n")
    if asked.out:
        plan.save(asked.out)
    if asked.html:
        report.save_report(asked.html, plan)
    return 0


def read_traffic(name: str, minutes: float | None) -> Trace:
    """Read a shipped trace by its name, or a file; the first ``minutes`` of it."""
    trace = traces.read_shipped(name) if name in traces.SHIPPED_TRACES else traces.read_trace(name)
    return trace if minutes is None else trace.window(0, 60 * minutes)


def make_planner(asked: argparse.Namespace) -> HybridPlanner:
    """Make the planner that the arguments ask for. Raises ``ConfigError``."""
    cost = None if asked.cost is None else CostTables.load(asked.cost)
    found = "/" in asked.model or Path(asked.model).is_dir()  # a path or a hub id, and no name of a known shape
    model = read_model_shape(asked.model) if found else asked.model
    return HybridPlanner(
        model,
        asked.slo,
        instances=asked.instances,
        device=asked.device,
        cost=cost,
        objective=asked.objective,
        rate=asked.rate,
    )
