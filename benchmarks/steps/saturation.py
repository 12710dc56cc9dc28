"""Saturation of each stage (TriInfer figure 3): throughput and latency over its batch, on one core, by dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.report import Result, Table
from benchmarks.setting import Setting
from trinity.costs.budgets import StepCost
from trinity.instance import Instance, name_instances
from trinity.memory.cache_config import CacheConfig
from trinity.report.plots import plot_saturation, render_svg
from trinity.runtime.loader import ServingConfig, load_instances, make_processor
from trinity.runtime.profiler import Probe
from trinity.stage_kinds import stage_of

Counts = Mapping[str, Sequence[int]]  # batches by stage
DTYPES = ("float32", "bfloat16")
COUNTS: Counts = {"E": (1, 2, 4, 8), "P": (1, 16, 64, 128, 256, 512, 1024, 2048), "D": (1, 2, 4, 8, 16, 32, 64)}
QUICK: Counts = {"E": (1, 2), "P": (1, 16), "D": (1, 2)}
CONTEXT = 640  # tokens that a decode row looks back on
KNEE = 0.95  # of the best throughput, from which on a larger batch only takes longer
REPEATS = 5
Seconds = dict[int, float]
Curves = dict[str, dict[str, Seconds]]  # by stage, dtype and batch


def steps(probe: Probe, counts: Counts, context: int) -> Iterator[tuple[str, int, Callable[[], float]]]:
    """(stage, batch, what runs one such step), small ones first, so that a run that is cut short has all stages."""
    runs: dict[str, Callable[[int], float]] = {"E": probe.encode, "P": probe.prefill}
    runs["D"] = partial(probe.decode, context=context)
    most = max(map(len, counts.values()))
    for place in range(most):
        for letter, known in counts.items():
            if place < len(known):
                yield letter, known[place], partial(runs[letter], known[place])


def measure(probe: Probe, counts: Counts, context: int, until: float) -> dict[str, Seconds]:
    """Median seconds of a step by stage and batch, after one run that is left out; none begins after ``until``."""
    found: dict[str, Seconds] = {letter: {} for letter in counts}
    for letter, count, run in steps(probe, counts, context):
        if time.monotonic() < until:
            run()
            found[letter][count] = median(run() for _ in range(REPEATS))
    return found


def probed(model: Path, dtype: str, counts: Counts, until: float) -> dict[str, Seconds]:
    """All stages of one instance with one intra-op thread, over blocks enough for the largest batch."""
    context = min(CONTEXT, 64) if counts is QUICK else CONTEXT
    pools = {"image": max(counts["E"]), "kv": max(max(counts["D"]) * (context // 16 + 2), max(counts["P"]) // 16 + 2)}
    processor = make_processor(model)
    try:
        (loaded,) = load_instances(
            ServingConfig(model, dtype=dtype, cache=CacheConfig(pools=pools)), name_instances([Instance("EPD")]), None
        )
        with closing(Probe(loaded, processor)) as probe:
            return measure(probe, counts, context, until)
    finally:
        processor.close()


def run(setting: Setting) -> Result:
    model = setting.pick("llava-110m", "llava")
    counts = QUICK if setting.quick else COUNTS
    share = 60 * setting.minutes / len(DTYPES)
    by_dtype = {dtype: probed(model, dtype, counts, time.monotonic() + share) for dtype in DTYPES}
    curves: Curves = {letter: {dtype: found[letter] for dtype, found in by_dtype.items()} for letter in counts}
    if setting.kept is not None:
        setting.kept.mkdir(parents=True, exist_ok=True)
        note = f"{model.name}, one thread; a decode row looks back on {CONTEXT} tokens."
        (setting.kept / "saturation.svg").write_bytes(render_svg(plot_saturation(curves, note)))
    return result(curves, model.name)


def knee(seconds: Seconds) -> int:
    """The smallest batch that does ``KNEE`` of the best throughput."""
    rates = {count: count / each for count, each in seconds.items()}
    return min(count for count, rate in rates.items() if rate >= KNEE * max(rates.values()))


def result(curves: Curves, name: str) -> Result:
    header = ("batch", *(f"{dtype} {what}" for dtype in DTYPES for what in ("ms a step", "a second")))
    return Result(
        name="saturation",
        title="Where each stage saturates (TriInfer figure 3)",
        method=(
            f"{name} on one core and one intra-op thread: medians of {REPEATS} steps after one that is left out, wall "
            f"time. Encode by images of a step, prefill by tokens, decode by rows that look back on {CONTEXT} tokens "
            "each. A stage is saturated from the smallest batch on that does "
            f"{KNEE:.0%} of the best throughput seen. The picture is saturation.svg beside the JSON."
        ),
        tables=[saturated(curves), *(stage_table(letter, each, header) for letter, each in curves.items())],
        values={"seconds": curves, "context": CONTEXT, "cost": {dtype: cost(curves, dtype) for dtype in DTYPES}},
    )


def saturated(curves: Curves) -> Table:
    rows = []
    for letter, by_dtype in curves.items():
        for dtype, seconds in by_dtype.items():
            if seconds:
                at = knee(seconds)
                best = max(count / each for count, each in seconds.items())
                first = min(seconds)
                grown = best / (first / seconds[first])
                cells = [f"{at} {stage_of(letter).unit}", f"{seconds[at] * 1e3:.1f}", f"{best:.4g}", f"{grown:.1f}x"]
                rows.append([f"{stage_of(letter).name.capitalize()}, {dtype}", *cells])
    return Table("Saturation", ("stage", "from", "ms a step there", "best a second", "over a batch of 1"), rows)


def stage_table(letter: str, by_dtype: dict[str, Seconds], header: Sequence[str]) -> Table:
    rows = []
    for count in sorted(set().union(*by_dtype.values())):
        cells = [cell for seconds in by_dtype.values() for cell in shown(count, seconds.get(count))]
        rows.append([f"{count}", *cells])
    kind = stage_of(letter)
    return Table(f"{kind.name.capitalize()}, by {kind.unit} of a step", header, rows)


def shown(count: int, seconds: float | None) -> tuple[str, str]:
    return ("-", "-") if seconds is None else (f"{seconds * 1e3:.1f}", f"{count / seconds:.4g}")


def cost(curves: Curves, dtype: str) -> dict[str, list[list[float]]]:
    """The same as a table of costs, with what is noise taken out."""
    taken = {name: curves[letter][dtype] for letter, name in (("E", "media"), ("P", "prefill"), ("D", "decodes"))}
    measured = StepCost.from_samples(**taken)
    return {name: [list(row) for row in getattr(measured, name)] for name in taken}
