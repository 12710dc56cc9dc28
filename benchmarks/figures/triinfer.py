"""Directions of TriInfer's figures 5, 6, 9 and 10 and table 4, on rooflines.

Devices are the paper's H20, but for table 4, whose rates an H20's peak does not allow: H100. Rates are Poisson.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.figures.claims import (
    Claim,
    Scale,
    Shown,
    Traces,
    above,
    correlation,
    goodput_of,
    lengthened,
    listed,
    mean_gap,
    mean_ttft,
    more_than,
    replayed,
)
from benchmarks.paper_devices import paper_cluster
from benchmarks.rank.ranking import MODELS, SETS, SETTINGS, slo_of
from trinity import traces
from trinity.core.messages import IMAGE
from trinity.core.scheduler import BatchRules
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import get_model_shape
from trinity.errors import TraceTooShort
from trinity.metrics import percentile
from trinity.placement import Placement
from trinity.planner.candidates import PAPER_METHODS, list_placements
from trinity.planner.hardware import Hardware
from trinity.planner.problem import GoodputCriterion, PlanningProblem
from trinity.planner.race import race
from trinity.simulation.simulator import Replay
from trinity.timeline import Slice
from trinity.traces.trace import SLO, Trace

NEXT, LLAVA, IMAGE_TOKENS = "llava-next-7b", "llava-1.5-7b", 576
BASELINES = {"EPDServe": "4E8P20D", "DistServe": "12EP20D", "32 x EPD": "32EPD"}
UNSCHEDULED = BatchRules(policy="prefill_first", chunked=False, limit_encodes=False)  # no stage-level batching

D_KEEPS_UP = "one D's roofline gives some 1,700 tokens/s of the 640 asked for, and prefill never waits for decode"
LIGHT_E = (
    "TBT rises, TTFT does not: encoding 8 images/s takes a third of one ED, so that fewer P, not fewer ED, cost TTFT"
)
IDLE_E = "encoding takes a tenth of prefill here, so that an E of its own is idle where an EP would prefill as well"
SHORT = "LLaVA-1.5 on MME puts out two tokens: there is one gap to stall, and 32 whole devices all prefill"
EQUAL = "for LLaVA-1.5 on MME, Algorithm 2's best candidate and 12EP20D have equal goodputs"
ONE_STAGE = "an instance of E+P+D has one stage, with nothing to interleave: without budgets its batches only grow"
NO_WAIT = (
    "a pull waits only for pulls into the same instance, and image pulls between four hosts almost never meet there"
)
FIGURE_5 = (
    Claim("TriInfer figure 5", "1EP7D has a higher mean TTFT than 4EP4D", "few EP raise TTFT"),
    Claim("TriInfer figure 5", "among EP+D, mean TBT rises as D fall: rank correlation with D below 0", "TBT rises"),
    Claim("TriInfer figure 5", "7EP1D has a higher mean TTFT than 4EP4D", "lack of D raises TTFT", D_KEEPS_UP),
    Claim("TriInfer figure 5", "1ED7P has a higher mean TTFT and TBT than 4ED4P", "few ED raise both", LIGHT_E),
    Claim("TriInfer figure 5", "7ED1P has a higher mean TTFT than 4ED4P", "few P raise TTFT"),
    Claim("TriInfer figure 5", "among E+P+D, mean TBT falls with D: rank correlation below 0", "negative"),
    Claim("TriInfer figure 5", "at D = 2, the best ratio of E to P halves the worst one's TTFT", "much less"),
)
STRINGENT, LOOSE, TBTS = 1.0, 8.0, (0.06, 0.15, 0.60)  # seconds; TTFT of one request alone is about 0.5
FIGURE_6 = (
    Claim(
        "TriInfer figure 6",
        f"at TTFT {STRINGENT:g} s, E+P+D has the highest goodput in most cells",
        "E+P+D leads",
        IDLE_E,
    ),
    Claim("TriInfer figure 6", f"at TTFT {LOOSE:g} s, EP+D or ED+P is at least as good as E+P+D in every cell", "so"),
    Claim("TriInfer figure 6", "no method has the highest goodput in every cell", "each is best somewhere"),
)
FIGURE_9 = (
    *(
        Claim("TriInfer figure 9", f"Algorithm 2's choice has a higher goodput than {name} on every set", *rest)
        for name, *rest in (
            ("4E8P20D", "above EPDServe's"),
            ("12EP20D", "above DistServe's", EQUAL),
            ("32 EPD without stage-level batching", "1.2 to 7.9 times vLLM or SGLang", SHORT),
        )
    ),
    Claim("TriInfer figure 9", "over 32 EPD, the mean gain is smallest on MME", "smallest on MME"),
)
FIGURE_10 = (
    Claim("TriInfer figure 10", "Algorithm 2's choice has a higher goodput than an even E+P+D", "3.9 against 2.6"),
    Claim(
        "TriInfer figure 10", "an even E+P+D loses goodput without stage-level batching", "2.6 against 2.2", ONE_STAGE
    ),
)
RATES_4 = {"1E3P4D": (16.0, 80.0), "4E12P16D": (64.0, 320.0)}
TABLE_4 = (
    Claim("TriInfer table 4", "P95 of PD migration is above that of EP migration in every column", "6.4 to 1.2 ms"),
    Claim("TriInfer table 4", "both P95 grow with the rate", "EP 1.2 to 1.8, PD 6.4 to 7.6 ms", NO_WAIT),
    Claim("TriInfer table 4", "both P95 are higher on four hosts than on one", "EP 1.2 to 2.6, PD 6.4 to 8.4 ms"),
    Claim("TriInfer table 4", "TTFT is violated by no more than 0.5 %, TBT by no more than 1 %", "0 %, 0.1 to 0.9 %"),
)


def of_set(model: str, dataset: str, rate: float = 10.0, seed: int = 0) -> Traces:
    rule = get_model_shape(model).visual_tokens
    return lambda count: traces.synthesise(dataset, count, visual_tokens=rule, rate=rate, seed=seed)


# ---------------------------------------------------------------- figure 5


def figure_5(scale: Scale) -> Iterator[Shown]:
    """LLaVA-NeXT-7B, TextCaps, 8 requests/s, N = 8: mean TTFT and TBT of all 35 ratios."""
    slo, cluster = slo_of(NEXT, "TextCaps", SETTINGS[0]), paper_cluster("H20", 8)
    trace = of_set(NEXT, "TextCaps", rate=8.0)(scale.requests(1500))
    ttft: dict[str, float] = {}
    gap: dict[str, float] = {}
    for placement in map(str, list_placements(8, PAPER_METHODS)):
        outcomes = replayed(NEXT, placement, slo, trace, cluster=cluster).outcomes
        ttft[placement], gap[placement] = mean_ttft(outcomes), mean_gap(outcomes)
    yield from claims_5(ttft, gap)


def claims_5(ttft: dict[str, float], gap: dict[str, float]) -> Iterator[Shown]:
    """By mean TTFT and TBT (s) of every placement."""

    def compared(claim: Claim, one: str, other: str, *figures: dict[str, float]) -> Shown:
        ours = "; ".join(listed({name: each[name] for name in (one, other)}, unit=" s") for each in figures)
        return Shown(claim, ours, all(each[one] > each[other] for each in figures))

    def with_d(claim: Claim, method: str) -> Shown:
        names = list(map(str, list_placements(8, [method])))
        found = correlation([decoding(name) for name in names], [gap[name] for name in names])
        return Shown(claim, f"{found:+.2f} over {len(names)} ratios", found < 0)

    yield compared(FIGURE_5[0], "1EP7D", "4EP4D", ttft)
    yield with_d(FIGURE_5[1], "EP+D")
    yield compared(FIGURE_5[2], "7EP1D", "4EP4D", ttft)
    yield compared(FIGURE_5[3], "1ED7P", "4ED4P", ttft, gap)
    yield compared(FIGURE_5[4], "7ED1P", "4ED4P", ttft)
    yield with_d(FIGURE_5[5], "E+P+D")
    two = {name: ttft[name] for name in map(str, list_placements(8, ["E+P+D"])) if decoding(name) == 2}
    ends = {name: two[name] for name in (min(two, key=two.__getitem__), max(two, key=two.__getitem__))}
    yield Shown(FIGURE_5[6], listed(ends, unit=" s"), 2 * min(two.values()) <= max(two.values()))


def decoding(placement: str) -> int:
    """Instances that decode and do nothing else."""
    return int(placement[placement.index("D") - 1]) if placement[placement.index("D") - 1].isdigit() else 0


# ---------------------------------------------------------------- figure 6


def figure_6(scale: Scale) -> Iterator[Shown]:
    """LLaVA-NeXT-7B, N = 8: the best ratio of each method on two sets, by TTFT and TBT bound."""
    found: dict[tuple[str, float, float], dict[str, float]] = {}
    for dataset in scale.few(("TextCaps", "POPE")):
        for ttft in (STRINGENT, LOOSE):
            for tbt in scale.few(TBTS):
                found[dataset, ttft, tbt] = best_of_methods(dataset, SLO(ttft, tbt), scale)
    yield from claims_6(found)


def best_of_methods(dataset: str, slo: SLO, scale: Scale) -> dict[str, float]:
    """Goodput (requests/s) of each method's best ratio."""
    hardware = Hardware(get_model_shape(NEXT), paper_cluster("H20", 8), None, {}, {})
    question = GoodputCriterion(slo, least_requests=scale.least_requests, least_ttfts=scale.least_ttfts)

    def search(count: int) -> dict[str, float]:
        trace = of_set(NEXT, dataset)(count)
        case = PlanningProblem(hardware, trace, question, None)
        entries = case.bound_deployments(hardware.names)
        try:
            raced = {
                method: race(case.trials, [each for each in entries if each.deployment.method == method])
                for method in PAPER_METHODS
            }
        except TraceTooShort as error:
            raise more_than(trace, error) from error
        return {method: found[0].rate for method, found in raced.items()}

    return lengthened(search, scale.requests(2000))


def claims_6(found: dict[tuple[str, float, float], dict[str, float]]) -> Iterator[Shown]:
    """By the goodput of each method in each cell; cells where no method serves anything count for nothing."""
    cells = {cell: rates for cell, rates in found.items() if max(rates.values()) > 0}
    strict = [rates for (_, ttft, _), rates in cells.items() if ttft == STRINGENT]
    loose = [rates for (_, ttft, _), rates in cells.items() if ttft == LOOSE]
    leads = sum(rates["E+P+D"] > max(rates["EP+D"], rates["ED+P"]) for rates in strict)
    ours = f"in {leads} of {len(strict)}"
    if strict:
        ours += f"; {listed(strict[0], unit=' req/s')} in the first"
    yield Shown(FIGURE_6[0], ours, 2 * leads > len(strict))
    others = sum(max(rates["EP+D"], rates["ED+P"]) >= rates["E+P+D"] for rates in loose)
    yield Shown(FIGURE_6[1], f"in {others} of {len(loose)}", others == len(loose) > 0)
    won = {method: sum(rates[method] == max(rates.values()) for rates in cells.values()) for method in PAPER_METHODS}
    yield Shown(FIGURE_6[2], f"best in {listed(won, 'd')} of {len(cells)}", max(won.values(), default=0) < len(cells))


# ---------------------------------------------------------------- figures 9 and 10


def planned(model: str, dataset: str, slo: SLO, cluster: Cluster, scale: Scale) -> str:
    """Algorithm 2's choice from one tenth of the requests that it is judged on."""
    hardware = Hardware(get_model_shape(model), cluster, None, {}, {})
    question = GoodputCriterion(slo, least_requests=scale.least_requests, least_ttfts=scale.least_ttfts)

    def search(count: int) -> str:
        trace = of_set(model, dataset, seed=1)(count)
        case = PlanningProblem(hardware, trace, question, None)
        try:
            return str(
                race(case.trials, case.bound_paper_choices(hardware.names, "largest_remainder"))[0].entry.deployment
            )
        except TraceTooShort as error:
            raise more_than(trace, error) from error

    return lengthened(search, scale.requests(1000))


def figure_9(scale: Scale) -> Iterator[Shown]:
    """32 devices on 4 hosts, every model and set at the SLO of table 5."""
    cluster = paper_cluster("H20", 32, per_host=8)
    gains: dict[tuple[str, str], dict[str, float]] = {}
    for model in scale.few(MODELS):
        for dataset in scale.few(SETS):
            slo, made = slo_of(model, dataset, SETTINGS[0]), of_set(model, dataset)
            ours = planned(model, dataset, slo, cluster, scale)
            rate = goodput_of(model, ours, slo, made, cluster=cluster, scale=scale)
            gains[model, dataset] = {}
            for name, placement in BASELINES.items():
                rules = UNSCHEDULED if placement == "32EPD" else BatchRules()
                theirs = goodput_of(model, placement, slo, made, cluster=cluster, scale=scale, rules=rules)
                gains[model, dataset][name] = rate / theirs if theirs else float("inf")
    yield from claims_9(gains)


def claims_9(gains: dict[tuple[str, str], dict[str, float]]) -> Iterator[Shown]:
    """By how many times the goodput of each baseline ours is, for each model and set."""
    for claim, name in zip(FIGURE_9, BASELINES, strict=False):
        values = [each[name] for each in gains.values()]
        higher = sum(above(value, 1.0) for value in values)
        ours = f"{min(values):.2f} to {max(values):.2f} times, higher in {higher} of {len(values)}"
        yield Shown(claim, ours, higher == len(values))
    by_set: dict[str, list[float]] = {}
    for (_, dataset), each in gains.items():
        by_set.setdefault(dataset, []).append(each["32 x EPD"])
    means = {dataset: sum(values) / len(values) for dataset, values in by_set.items()}
    yield Shown(FIGURE_9[3], listed(means, ".2f"), min(means, key=means.__getitem__) == "MME")


def figure_10(scale: Scale) -> Iterator[Shown]:
    """LLaVA-NeXT-7B, TextCaps, 32 devices on 4 hosts; the even split is 11E11P10D."""
    slo, cluster, made = (
        slo_of(NEXT, "TextCaps", SETTINGS[0]),
        paper_cluster("H20", 32, per_host=8),
        of_set(NEXT, "TextCaps"),
    )
    best = planned(NEXT, "TextCaps", slo, cluster, scale)
    even = "11E11P10D"

    def rate(placement: str, rules: BatchRules) -> float:
        return goodput_of(NEXT, placement, slo, made, cluster=cluster, scale=scale, rules=rules)

    whole, split, unscheduled = rate(best, BatchRules()), rate(even, BatchRules()), rate(even, UNSCHEDULED)
    yield Shown(FIGURE_10[0], f"{best} {whole:.3g}, {even} {split:.3g} req/s", above(whole, split))
    yield Shown(FIGURE_10[1], f"{split:.3g}, without {unscheduled:.3g} req/s", above(split, unscheduled))


# ---------------------------------------------------------------- table 4


class Migrated(NamedTuple):
    """95th percentiles of migrations (s), from when the blocks are ready until they have arrived, and violations."""

    ep: float
    pd: float
    ttft: float
    tbt: float


def table_4(scale: Scale) -> Iterator[Shown]:
    """LLaVA-1.5-7B, TextCaps, on H100 (see above), 8 to a host."""
    slo, found = slo_of(LLAVA, "TextCaps", SETTINGS[0]), {}
    for placement, rates in RATES_4.items():
        cluster = paper_cluster("H100", Placement.parse(placement).size, per_host=8)
        for rate in rates:
            trace = of_set(LLAVA, "TextCaps", rate)(scale.requests(1500))
            replay = replayed(LLAVA, placement, slo, trace, cluster=cluster, record=True)
            found[placement, rate] = migrated(replay, trace, slo, cluster.message_s)
    yield from claims_4(found)


def migrated(replay: Replay, trace: Trace, slo: SLO, message_s: float) -> Migrated:
    """EP: from the end of the request's encode step; PD: from the end of its prefill."""
    moves = [each for each in replay.timeline if each.lane == "migration"]
    ready = encoded(replay.timeline)
    ep, pd = [], []
    for each in moves:
        done, number = each.start_s + each.duration_s, int(each.args["request"])
        first = replay.outcomes[number].ttft_s
        if each.name == IMAGE:
            ep.append(done - ready[number])
        elif first is not None:
            pd.append(done - (trace[number].timestamp / 1000 + first - message_s))
    gaps = [gap for each in replay.outcomes for gap in each.itl_s]
    late = sum(each.ttft_s is None or each.ttft_s >= slo.ttft for each in replay.outcomes)
    slow = sum(gap >= slo.tbt for gap in gaps)
    ep_p95, pd_p95 = (percentile(sorted(each), 95) for each in (ep, pd))
    return Migrated(ep_p95, pd_p95, late / len(replay.outcomes), slow / max(1, len(gaps)))


def encoded(timeline: Sequence[Slice]) -> dict[int, float]:
    """Find when each request's image was ready: an instance encodes in the order of their numbers, one image each."""
    ends: dict[str, list[float]] = {}
    numbers: dict[str, list[int]] = {}
    for each in timeline:
        if "encode" in each.name:
            images = each.args["media tokens"] // IMAGE_TOKENS
            ends.setdefault(each.instance, []).extend([each.start_s + each.duration_s] * images)
        elif each.lane == "migration" and each.name == IMAGE:
            numbers.setdefault(each.args["source"], []).append(int(each.args["request"]))
    pairs = ((sorted(found), ends[source]) for source, found in numbers.items())
    return {number: end for found, times in pairs for number, end in zip(found, times, strict=True)}


def claims_4(found: dict[tuple[str, float], Migrated]) -> Iterator[Shown]:
    """By placement and rate, in the order of ``RATES_4``."""
    (low, high), (low_4, high_4) = ([found[name, rate] for rate in rates] for name, rates in RATES_4.items())
    columns = (low, high, low_4, high_4)
    ep = "EP " + " / ".join(f"{each.ep * 1e3:.2f}" for each in columns)
    pd = "PD " + " / ".join(f"{each.pd * 1e3:.2f}" for each in columns) + " ms"

    def higher(one: Migrated, two: Migrated) -> bool:
        return two.ep > one.ep and two.pd > one.pd

    grows = higher(low, high) and higher(low_4, high_4)
    spans = higher(low, low_4) and higher(high, high_4)
    yield Shown(TABLE_4[0], f"{ep}; {pd}", all(each.pd > each.ep for each in columns))
    yield Shown(TABLE_4[1], f"{ep}; {pd}", grows)
    yield Shown(TABLE_4[2], f"{ep}; {pd}", spans)
    ours = f"TTFT at most {max(each.ttft for each in columns):.1%}, TBT {max(each.tbt for each in columns):.1%}"
    yield Shown(TABLE_4[3], ours, all(each.ttft <= 0.005 and each.tbt <= 0.01 for each in columns))


FIGURES: Sequence[Callable[[Scale], Iterator[Shown]]] = (figure_5, figure_6, figure_9, figure_10, table_4)
