"""Explains a plan in plain words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from trinity.placement import Placement
from trinity.planner.prices import PRICED_ROWS, format_ms, list_prices

if TYPE_CHECKING:
    from trinity.planner.plan import Candidate, Plan

STAGE_NAMES = {"E": "encode", "P": "prefill", "D": "decode"}
UNITS = {
    "goodput": "requests/s",
    "goodput_per_cost": "requests per unit of price",
    "fewest_instances": "requests/s",
    "throughput": "requests/s",
    "effective_throughput": "tokens/s a device in time",
}


def format_figure(value: float | None) -> str:
    """Format a figure with four digits; "" for None."""
    return "" if value is None else f"{value:.4g}"


def devices_in_words(devices: Sequence[str]) -> str:
    """Format device names as "4 x H100 + 4 x L40S"."""
    return " + ".join(f"{count} x {name}" for name, count in Counter(devices).items())


def arrangement(each: Candidate) -> str:
    """Format the roles of each device as "2EP: H100, 1D: H100, 1D: L40S"; "" where all devices are equal."""
    if len(set(each.devices)) < 2:
        return ""
    roles = [own for _, own in Placement.parse(each.placement).instances()]
    runs = groupby(zip(roles, each.devices, strict=True))
    return ", ".join(f"{len(list(run))}{own}: {device}" for (own, device), run in runs)


def format_score(plan: Plan, each: Candidate) -> str:
    return f"{format_figure(each.score)} {UNITS[plan.objective]}"


def is_same_candidate(one: Candidate, other: Candidate) -> bool:
    """Check if both are the same placement on the same devices with the same settings."""
    return (one.placement, one.devices, one.settings) == (other.placement, other.devices, other.settings)


def headline(plan: Plan) -> str:
    """Return one line that says what to run."""
    on = devices_in_words(plan.best.devices or plan.devices)
    if not plan.met:
        best = plan.best.best_attainment(plan.rule)
        reached = "" if best is None else f"; the best attainment is {best:.1%}, of {plan.best.placement}"
        return f"No candidate for {plan.model} on {on} meets the SLO at any rate{reached}."
    by = f" by the rule {plan.rule!r}" if plan.slo is not None else ""
    mixed = arrangement(plan.best)
    on = f"{on} ({mixed})" if mixed else on
    return (
        f"Run {plan.best.placement} ({plan.best.method}) for {plan.model} on {on}: {format_score(plan, plan.best)}{by}."
    )


def explain_plan(plan: Plan) -> str:
    """Return the sentences, one a line."""
    return "\n".join(_sentences(plan))


def _sentences(plan: Plan) -> Iterator[str]:
    yield headline(plan)
    if not plan.met:
        yield from _unmet_lines(plan)
    if plan.slo is not None:
        yield f"SLO: first token within {plan.slo.ttft:g} s, {plan.slo.tbt:g} s between tokens."
    trace = plan.trace
    shares = [("images", trace.image_share), ("videos", trace.video_share), ("audio", trace.audio_share)]
    having = ", ".join(f"{share:.0%} of them with {kind}" for kind, share in shares if share or kind == "images")
    yield f"Planned on {trace.requests:,} requests, {having}."
    yield from list_prices(plan.priced)
    if plan.met:
        yield from _compare_lines(plan)
        yield from _spread_lines(plan)
    yield from _longer_lines(plan.best)
    yield from _confirmation_lines(plan)
    if plan.met:
        yield from _limit_lines(plan.best)
    yield from _search_lines(plan)
    yield from plan.notes if plan.met else ()


def _unmet_lines(plan: Plan) -> Iterator[str]:
    """Say why no placement would do: requests that the model never takes, or steps longer than the SLO's bounds."""
    yield from plan.notes
    if plan.slo is None:
        return
    for each in plan.priced:
        bounds = ((each.encode_s + each.prefill_s, plan.slo.ttft), (each.decode_s, plan.slo.tbt))
        words = ("to the first token of a mean prompt", f"for a decode of {PRICED_ROWS} requests")
        for (needed, bound), what in zip(bounds, words, strict=True):
            if needed > bound:
                has = f"{each.device} needs {format_ms(needed)} {what}"
                yield f"What limits it: {has}, and the SLO is {format_ms(bound)}."


def _compare_lines(plan: Plan) -> Iterator[str]:
    rival = next((each for each in plan.candidates[1:] if each.exact and each.score), None)
    for each, name in ((plan.paper, "Algorithm 2's own choice"), (rival, "the next best that was searched to the end")):
        if each is None or not each.score or not plan.best.score:
            continue
        if is_same_candidate(each, plan.best):
            yield f"It is {name} too."
        elif each.score <= plan.best.score:  # else a note says what is wrong with it
            more = plan.best.score / each.score
            yield f"That is {more:.2f} times {name}, {each.placement} ({format_score(plan, each)})."


def _confirmation_lines(plan: Plan) -> Iterator[str]:
    """Name the stand-ins of the search, and the goodput of the best on the cores with the true settings."""
    if not plan.stand_ins:
        return
    yield f"The search ran on the screening engine, with {', '.join(plan.stand_ins)}."
    best, runs = plan.best, f"{plan.core_runs} replays of {plan.core_requests:,} requests"
    if best.gap is not None and best.screened:
        reached = f"{format_figure(best.screened * (1 + best.gap))} requests/s, where the screening engine has"
        gap = f"{format_figure(best.screened)} ({best.gap:+.1%})"
        yield f"On the cores that serve, with the settings themselves ({runs}), it reaches {reached} {gap}."


def _spread_lines(plan: Plan) -> Iterator[str]:
    spread = plan.best.spread
    if spread:
        yield (
            f"On {len(spread)} redrawn trace(s) (seeds {', '.join(map(str, plan.seeds))}) its goodput is "
            f"{format_figure(min(spread))} to {format_figure(max(spread))} requests/s."
        )


def _longer_lines(best: Candidate) -> Iterator[str]:
    if best.longer_steps:
        rates = ", ".join(f"{format_figure(rate)} with {factor - 1:.0%}" for factor, rate in best.longer_steps)
        yield f"With steps longer than these costs at the same budgets, in requests/s: {rates}."


def _limit_lines(best: Candidate) -> Iterator[str]:
    if not best.bottleneck:
        return
    busy = _busiest(best)
    share = f", {busy:.0%} busy at that rate" if busy else ""
    yield f"What limits it: {STAGE_NAMES[best.bottleneck]} ({best.bottleneck}){share}."
    for kind, name in (("kv", "KV cache"), ("image", "image cache")):
        peaks = [held[f"{kind}_peak"] for held in best.memory.values() if f"{kind}_peak" in held]
        if peaks:
            yield f"Its fullest {name} was {max(peaks):.0%} held."


def _busiest(best: Candidate) -> float:
    """Average the busy share of the instances that serve the bottleneck stage, over all of their stages."""
    serving = [name for name, roles in Placement.parse(best.placement).instances() if best.bottleneck in roles]
    shares = [sum(best.utilisation[name].values()) for name in serving if name in best.utilisation]
    return sum(shares) / len(shares) if shares else 0.0


def _search_lines(plan: Plan) -> Iterator[str]:
    exact = sum(each.exact for each in plan.candidates)
    rest = len(plan.candidates) - exact
    more = f", and {plan.more_runs} for Algorithm 2 and the figures of the best" if plan.more_runs else ""
    yield f"Strategy {plan.strategy!r}: {plan.runs} replays over {len(plan.candidates)} candidates{more}."
    if rest and plan.stand_ins:
        yield f"{rest} have no score of their own: the screening engine or the cores have them behind."
    elif rest:
        yield f"{rest} were not searched to the end: each failed at the rate of a better one, or cannot reach it."
