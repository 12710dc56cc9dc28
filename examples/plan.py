"""Plan eight H100 for an hour of production image traffic: which disaggregation method, which ratio, and why.

python examples/plan.py [--instances 8] [--device H100] [--minutes 60] [--html build/plan.html] [--open]

The trace is the one that comes with trinity (ServeGen's, 36,856 requests). It says how many visual tokens each image
has, not its size: up to 1,280, as Qwen2-VL's rule gives them for up to a megapixel, and up to 24,109 a request, which
fit that model's context of 32,768 and no LLaVA's of 4,096. So the model is Qwen2-VL-7B; its costs on the device are a
roofline's, no GPU is needed. The SLO is an interactive one: TriInfer's own for this model (8 s, 0.60 s) nearly every
placement meets.
"""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from trinity import report, traces
from trinity.costs.cluster import Cluster
from trinity.errors import ConfigError
from trinity.planner import HybridPlanner, Plan
from trinity.simulation import compiled_engine
from trinity.simulation.simulator import Replay, Simulator
from trinity.traces.trace import SLO, Trace

MODEL = "qwen2-vl-7b"
INTERACTIVE = SLO(ttft=2.0, tbt=0.08)
SLOW_MINUTES = 5.0  # planned on where the compiled engine is missing: the cores in Python take an hour for the hour
SHOWN = 600  # requests whose timeline the report draws


def traffic(minutes: float | None) -> Trace:
    """The shipped hour, or its first minutes."""
    trace = traces.read_shipped("servegen-image-1h")
    if minutes is None and compiled_engine.why_unavailable():
        print(
            f"no compiled engine ({compiled_engine.why_unavailable()}): planned on the first {SLOW_MINUTES:g} minutes"
        )
        minutes = SLOW_MINUTES
    return trace if minutes is None else trace.window(0, 60 * minutes)


def seen(plan: Plan, trace: Trace, device: str) -> dict[str, dict[float, Replay]]:
    """The best placement at its goodput, and Algorithm 2's at the same rate, with what ran when."""
    rate = plan.best.goodput[plan.rule]
    offered = trace.scale(rate=rate).head(SHOWN)
    chosen = dict.fromkeys([plan.best.placement] + ([plan.paper.placement] if plan.paper else []))
    simulator = Simulator(MODEL, INTERACTIVE, cluster=Cluster.of(device, plan.best.instances))
    return {placement: {rate: simulator.replay(offered, placement, record=True)} for placement in chosen}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--minutes", type=float, help="of the trace that are planned on")
    parser.add_argument("--html", default="build/plan.html", help="where the report goes")
    parser.add_argument("--open", action="store_true", help="show the report in a browser")
    asked = parser.parse_args(arguments)
    try:
        trace = traffic(asked.minutes)
        plan = HybridPlanner(MODEL, INTERACTIVE, instances=asked.instances, device=asked.device).plan(trace)
    except ConfigError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(plan, plan.explain(), sep="\n\n")
    written = Path(asked.html)
    written.parent.mkdir(parents=True, exist_ok=True)
    report.save_report(written, plan, replays=seen(plan, trace, asked.device) if plan.met else None)
    plan.save(written.with_suffix(".json"))
    print(f"\nThe report is {written}, the plan itself {written.with_suffix('.json')}.")
    if asked.open:
        webbrowser.open(written.resolve().as_uri())
    return 0


if __name__ == "__main__":
    sys.exit(main())
