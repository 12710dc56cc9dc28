"""Tables of the scale benchmark: goodput live beside simulated, what was moved, and what dilation changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.report import Aim, Result, Table
from benchmarks.scale.live import BUDGETED, LIMITS, PER_HOST, SOURCE, bounds, paced
from benchmarks.scale.rows import ABOVE, BELOW, STEP, Sizes
from trinity.core.messages import IMAGE, KV
from trinity.traces.goodput import LEAST_TTFTS

Record = dict[str, Any]
AGREE = 0.05  # by how much latencies may differ between dilations
GOODPUTS = (
    "row",
    "placement",
    "simulated, long",
    "simulated",
    "live: holds",
    "live: does not",
    "in time there, live / simulated",
    "requests",
    "dilation",
    "most CPU",
    "steps late",
    "not valid",
    "",
)


class Line(NamedTuple):
    """A row of a workload: rates in requests/s of the device's time. ``low`` and ``high`` bracket the live goodput.

    ``simulated``: goodput of the ``asked`` requests that are served live; ``steady``: of a longer trace. ``why``: the
    live one is not bracketed.
    """

    name: str
    placement: str
    steady: float
    simulated: float
    asked: int
    low: float | None
    high: float | None
    dilation: int
    replays: list[Record]
    why: str = ""

    @property
    def valid(self) -> list[Record]:
        return [each for each in self.replays if not each["late"]]

    @property
    def agrees(self) -> bool | None:
        """Test whether the simulated goodput lies between the two; None where the live one is not bracketed."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.simulated < self.high

    def at(self, rate: float | None) -> str:
        """Shares in time at this rate, live and simulated."""
        found = [each for each in self.valid if each["task"][4] == rate]
        return " / ".join(f"{share:.0%}" for share in _shares(found[-1])) if found else "-"

    def cells(self) -> list[str]:
        cpu = max((each["signs"]["cpu"] for each in self.valid), default=0.0)
        late = max((each["signs"]["steps"] for each in self.valid), default=0.0)
        wrong = sorted({f"{each['task'][4]:.0f}" for each in self.replays if each["late"]})
        why = sorted({sign for each in self.replays for sign in each["late"]})
        rates = (self.steady, self.simulated, self.low, self.high)
        shown = [f"{each:.1f}" if each is not None else "-" for each in rates]
        verdict = {True: "agrees", False: "differs", None: f"open: {self.why}"}[self.agrees]
        seen = f"{self.at(self.low)}; {self.at(self.high)}"
        return [
            self.name,
            self.placement,
            *shown,
            seen,
            f"{self.asked:,}",
            f"{self.dilation}",
            f"{cpu:.0%}",
            f"{late:.1%}",
            f"{', '.join(wrong)} ({', '.join(why)})" if wrong else "none",
            verdict,
        ]


def _shares(record: Record) -> tuple[float, float]:
    return record["attainment"]["guard"], record["simulated"]["guard"]


class Workload(NamedTuple):
    """One dataset: what was found of its rows, full-size transfers, and replays at other dilations."""

    dataset: str
    lines: list[Line]
    full: Record | None
    dilations: list[Record]

    def table(self) -> Table:
        slo = bounds(self.dataset)
        title = (
            f"{self.dataset} (SLO {slo.ttft:g} s, {slo.tbt:g} s; emulation): goodput, requests/s of the device, whose "
            "time is dilated live"
        )
        return Table(title, GOODPUTS, [line.cells() for line in self.lines])


def tabled(workloads: Sequence[Workload], sizes: Sizes, notes: Sequence[str] = ()) -> Result:
    """All that is shown."""
    known = [each for each in workloads if any(line.replays for line in each.lines)]
    result = Result(
        "scale",
        f"Scale without the hardware: {sizes.instances} instances of LLaVA-1.5-7B, emulated",
        method(sizes),
        tables=[each.table() for each in known],
        notes=list(notes),
    )
    result.tables += [
        moved([each for each in workloads if each in known or each.full]),
        *(dilated(each) for each in known if each.dilations),
    ]
    result.aims = aims(known, workloads)
    result.values = {
        each.dataset: {
            "full": each.full,
            "dilations": each.dilations,
            "rows": [line._asdict() for line in each.lines],
        }
        for each in workloads
    }
    return result


def method(sizes: Sizes) -> str:
    said = ", ".join(f"{name} {limit:g}" for name, limit in LIMITS.items())
    emulated = paced(1.0)
    return (
        f"EMULATION: {sizes.instances} instances (threads, cores, messages, block pools, leases, transfers with "
        f'verify="always") are live; their stages wait for what {SOURCE} says ({PER_HOST} devices a host). Blocks are '
        f"{emulated.factor(KV):g} times (KV) and {emulated.factor(IMAGE):g} times (images) smaller than the model's; "
        "their transfers take what this machine takes. Costs, bounds and arrivals are dilated by the factor printed "
        "with each row, the larger the more CPU time its requests take. Requests as TriInfer's datasets, Poisson "
        f"arrivals, bounds of its table 5, goodput by the guarded rule, budgets searched for {BUDGETED:g} of the TBT "
        f"bound, live and simulated. A trace is to last {LEAST_TTFTS:g} TTFT bounds (simulated, long); the requests "
        f"that are served live last {sizes.least_ttfts:g}, of every row, in which less of a queue builds up: their "
        "goodput is higher, and is compared with the simulated one of the same requests (simulated). Live rates are "
        f"{BELOW:g} and {ABOVE:g} times that, and {STEP:.3g} times apart beyond. The client and all instances are one "
        "process, in which no search for cyclic garbage runs meanwhile: it would stop all hosts at once. "
        "A rate is not valid, and its replay judges nothing, where a sign of a saturated CPU is passed; stated before "
        f"the run: {said} (CPU of the process over a core, CPU of the machine, client's lateness p99 over the TTFT "
        "bound, steps' time beyond what was to be waited, event loop's lateness p99 over the TBT bound)."
    )


def moved(workloads: Sequence[Workload]) -> Table:
    rows = []
    for each in workloads:
        replays = [record for line in each.lines for record in line.replays]
        total = {name: sum(record[name] for record in replays) for name in ("pulls", "verified", "blocks", "bytes")}
        full = each.full
        sample = f"{full['requests']}: {_gib(full['bytes'])}, {full['gb_s']:.1f} GB/s" if full else "-"
        right = f"{full['verified']}/{full['pulls']}" if full else "-"
        rows.append(
            [
                each.dataset,
                f"{total['blocks']:,}",
                _gib(total["bytes"]),
                f"{total['verified']:,}/{total['pulls']:,}",
                sample,
                right,
            ]
        )
    header = ("workload", "blocks moved", "bytes", "verified pulls", "at full size: requests", "verified")
    return Table("Blocks moved between instances, with digests compared", header, rows)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def dilated(workload: Workload) -> Table:
    """The same requests at the same rate under several dilations."""
    names = list(workload.dilations[0]["latency"])
    base = workload.dilations[0]["latency"]
    rows = []
    for each in sorted(workload.dilations, key=lambda each: each["task"][5]):
        shown = [f"{each['latency'][name] * 1e3:.0f} ({each['latency'][name] / base[name] - 1:+.1%})" for name in names]
        rows.append([f"{each['task'][5]}", *shown, f"{each['signs']['cpu']:.0%}", ", ".join(each["late"]) or "valid"])
    task = workload.dilations[0]["task"]
    title = f"{task[0]} on {task[1]} at {task[4]:.1f} requests/s: ms of the device's time by dilation"
    return Table(title, ("dilation", *names, "CPU", ""), rows)


def differs(dilations: Sequence[Record]) -> float | None:
    """By how much latencies of valid replays differ from the least dilated one's at most; None of fewer than two."""
    valid = sorted((each for each in dilations if not each["late"]), key=lambda each: each["task"][5])
    if len(valid) < 2:
        return None
    base: Mapping[str, float] = valid[0]["latency"]
    return max(abs(each["latency"][name] / base[name] - 1) for each in valid[1:] for name in base)


def aims(known: Sequence[Workload], every: Sequence[Workload]) -> list[Aim]:
    lines = [line for each in known for line in each.lines]
    judged = [line for line in lines if line.agrees is not None]
    agreeing = sum(bool(line.agrees) for line in judged)
    replays = [record for line in lines for record in line.replays]
    intact = all(
        each["exact"] and each["verified"] == each["pulls"] and not (each["holds"] and each["failed"])
        for each in replays
    )
    whole = [each for each in known if all(line.agrees is not None or not line.simulated for line in each.lines)]
    made = [
        Aim(
            f"paced instances: the simulated goodput lies between two live rates {STEP - 1:.0%} apart",
            "every row",
            f"{agreeing} of {len(judged)} rows",
            agreeing == len(judged) if judged else None,
        ),
        Aim(
            "workloads whose every row is bracketed live by valid rates",
            f"{len(every)}",
            f"{len(whole)} ({', '.join(each.dataset for each in whole) or 'none'})",
            len(whole) == len(every) or None,
        ),
        Aim(
            "paced instances: blocks arrive as their digests say, tokens are right, none fails where a rate holds",
            "every replay",
            f"{'all' if intact else 'not all'} of {len(replays)}",
            intact if replays else None,
        ),
    ]
    for each in known:
        off = differs(each.dilations)
        if off is not None:
            aim = f"within {AGREE:.0%}"
            made.append(Aim(f"{each.dataset}: latencies by dilation", aim, f"at most {off:.1%} apart", off <= AGREE))
    return made + [_best(each) for each in whole]


def _best(workload: Workload) -> Aim:
    """The best of the methods' best ratios against the best of the baselines, both live."""
    planned = [line for line in workload.lines if line.name.startswith("best ")]
    ours, theirs = _highest(planned), _highest([line for line in workload.lines if line not in planned])
    measured = ", ".join(f"{line.placement} {line.low or 0.0:.0f}" for line in (*ours, *theirs)) + " requests/s"
    met = sum(line.low or 0.0 for line in ours) > sum(line.low or 0.0 for line in theirs)
    return Aim(f"{workload.dataset}: the planner's ratio against the paper's baselines, live", "ahead", measured, met)


def _highest(lines: Sequence[Line]) -> list[Line]:
    """The one with the highest live goodput; none of none."""
    return sorted(lines, key=lambda line: line.low or 0.0)[-1:]
