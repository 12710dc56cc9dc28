"""Measures that compare live and simulated runs of a trace, and the judgement of a comparison's row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trinity.metrics import percentile
from trinity.traces.trace import COMPLETE, SLO, ServedRequest, attainment

PERCENTS = (50, 90, 99)
METRICS = tuple((name, percent) for name in ("TTFT", "TPOT") for percent in PERCENTS)
JUDGED = tuple(each for each in METRICS if each[1] != 99)
Metric = tuple[str, int]


@dataclass(frozen=True)
class Seen:
    """Percentiles in seconds by (latency, percent), attainment by the guard, requests that did not end well."""

    seconds: dict[Metric, float]
    attainment: float
    failed: int


def seen(outcomes: Sequence[ServedRequest], slo: SLO) -> Seen:
    """Of one serving. TTFT counts from the scheduled arrival; TPOT is a request's mean gap."""
    done = [each for each in outcomes if each.finish_reason in COMPLETE and each.ttft_s is not None]
    found = {
        "TTFT": sorted(each.ttft_s for each in done if each.ttft_s is not None),
        "TPOT": sorted(sum(each.itl_s) / len(each.itl_s) for each in done if each.itl_s),
    }
    seconds = {(name, percent): percentile(found[name], percent) for name, percent in METRICS}
    return Seen(seconds, attainment(outcomes, slo, "guard"), len(outcomes) - len(done))


@dataclass
class Load:
    """One load: a ``share`` of the simulated goodput; live repeats, and the share of the machine that others took."""

    share: float
    requests: int
    simulated: Seen
    live: list[Seen] = field(default_factory=list)
    foreign: float = 0.0

    def middle(self, metric: Metric) -> float:
        return median(each.seconds[metric] for each in self.live)

    def off(self, metric: Metric) -> float:
        """Live over simulated, less 1."""
        return self.middle(metric) / self.simulated.seconds[metric] - 1

    def spread(self, metric: Metric) -> float:
        """Of the live repeats: the largest less the smallest, over the median."""
        every = [each.seconds[metric] for each in self.live]
        return (max(every) - min(every)) / self.middle(metric)

    def values(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "requests": self.requests,
            "foreign_load": self.foreign,
            "simulated": _plain(self.simulated),
            "live": [_plain(each) for each in self.live],
        }


def _plain(one: Seen) -> dict[str, Any]:
    seconds = {f"{name} p{percent}": value for (name, percent), value in one.seconds.items()}
    return {"seconds": seconds, "attainment": one.attainment, "failed": one.failed}


@dataclass(frozen=True)
class Row:
    """A load of one placement, judged: each percentile but p99 within ``tolerance`` or the live repeats' spread."""

    name: str
    load: Load
    tolerance: float

    HEADER = ("placement", "load", *(f"{name} p{percent}" for name, percent in METRICS), "attainment", "")

    def allowed(self, metric: Metric) -> float:
        return max(self.tolerance, self.load.spread(metric))

    @property
    def passed(self) -> bool:
        within = all(abs(self.load.off(metric)) <= self.allowed(metric) for metric in JUDGED)
        return within and not any(each.failed for each in self.load.live)

    @property
    def worst(self) -> float:
        """Largest error of the judged percentiles."""
        return max(abs(self.load.off(metric)) for metric in JUDGED)

    def cells(self) -> list[str]:
        load = self.load
        shown = [
            f"{load.middle(each) * 1e3:.0f} / {load.simulated.seconds[each] * 1e3:.0f} {load.off(each):+.1%}"
            for each in METRICS
        ]
        met = f"{median(each.attainment for each in load.live):.1%} / {load.simulated.attainment:.1%}"
        return [self.name, f"{load.share:g}", *shown, met, "PASS" if self.passed else "FAIL"]
