"""Host overhead of steps, measured on an idle live pipeline before anything is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from trinity.bench.live_replay import RequestFactory
from trinity.costs.budgets import StepCost
from trinity.costs.interconnects import Interconnect
from trinity.costs.step_cost import CostTables
from trinity.pipeline import Pipeline
from trinity.request import Output
from trinity.traces.trace import ServedRequest, Trace

APART_MS = 1e5  # between simulated requests of which each is to be alone
PROBE_S = 1e-3  # of a message, to see what it does to a simulated TTFT


@dataclass(frozen=True)
class Host:
    """Seconds of a message, of a pull, and between two steps."""

    message_s: float = 0.0
    pull_s: float = 0.0
    step_s: float = 0.0

    @property
    def link(self) -> Interconnect:
        """Between instances: what a pull takes does not hang on the size that the simulator believes in."""
        return Interconnect(name="this host", bandwidth=1e15, fixed_s=self.pull_s)


async def calibrated(
    pipe: Pipeline, make: RequestFactory, asked: Trace, simulate: Callable[[Host, Trace], Sequence[ServedRequest]]
) -> Host:
    """Serve each request alone; then choose what pulls, steps and messages take so that simulated medians are as live.

    A first round warms up. Pulls are as the transfers' records say, steps as the gaps, messages as what TTFT is left.
    """
    outputs: list[Output] = []
    for turn in range(2):
        outputs = [await pipe.complete(make(row, number + turn * len(asked))) for number, row in enumerate(asked)]
    alone = Trace(row.request_at(number * APART_MS) for number, row in enumerate(asked))
    pulls = [each["seconds"] for output in outputs for each in output.transfers if each.get("bytes")]
    known = Host(pull_s=median(pulls) if pulls else 0.0)
    ideal = [_gap(each) for each in simulate(known, alone)]
    added = median(_gap(output) - gap for output, gap in zip(outputs, ideal, strict=True))
    known = Host(pull_s=known.pull_s, step_s=max(0.0, added))
    return _with_messages(known, [output.ttft_s or 0.0 for output in outputs], alone, simulate)


def _with_messages(
    known: Host, live: Sequence[float], alone: Trace, simulate: Callable[[Host, Trace], Sequence[ServedRequest]]
) -> Host:
    instant, slow = (
        [each.ttft_s or 0.0 for each in simulate(Host(message_s, known.pull_s, known.step_s), alone)]
        for message_s in (0.0, PROBE_S)
    )
    took = median(PROBE_S * (a - b) / (c - b) for a, b, c in zip(live, instant, slow, strict=True))
    return Host(max(0.0, took), known.pull_s, known.step_s)


def _gap(served: ServedRequest) -> float:
    return sum(served.itl_s) / len(served.itl_s) if served.itl_s else 0.0


def slower(tables: CostTables, step_s: float) -> CostTables:
    """The same where every language and every encode pass takes so much longer."""
    costs = tuple((context, _slower(cost, step_s)) for context, cost in tables.costs)
    return msgspec.structs.replace(tables, costs=costs)


def _slower(cost: StepCost, step_s: float) -> StepCost:
    kinds = {kind: getattr(cost, kind) for kind in ("decodes", "prefill", "media")}
    return StepCost(**{kind: tuple((n, seconds + step_s) for n, seconds in rows) for kind, rows in kinds.items()})
