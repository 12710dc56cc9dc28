"""Rank of what Algorithm 2 and the race choose, among every placement at N = 8 (TriInfer 5.4, table 3).

A case plans on one tenth of a trace and is judged on the held-out rest, whose requests come from another seed. Cases
run in two processes until ``minutes`` are over; what is done is kept, and the next run goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rank_tables import tabled
from benchmarks.ranking import DEVICES, SETTINGS, Setup, drawn
from benchmarks.report import Result
from benchmarks.setting import ROOT, Setting
from trinity import traces
from trinity.errors import TraceTooShort, TrinityError
from trinity.goodput import LEAST_REQUESTS, LEAST_TTFTS
from trinity.model_shapes import model as model_named
from trinity.planner.case import Case, Question
from trinity.planner.draw import long_enough
from trinity.planner.hardware import Hardware, cluster_of
from trinity.planner.race import Entry, Found, exhaustive, race
from trinity.planner.trials import Trials, rate_of, step_of
from trinity.trace import Trace

INSTANCES = 8
PROCESSES = 2
ORDER_SEED, PLAN_SEED, HELD_SEED = 0, 1, 2
HELD_REQUESTS = 9 * LEAST_REQUESTS  # of which a ninth is what is planned on
FARTHEST = 256  # steps of 2 %, at which a search downwards gives up
SPARE = 1.3  # times the shortest trace that has an answer
SOURCES = (
    "src/trinity/planner/*.py",
    "src/trinity/core/*.py",
    "src/trinity/traces/*.py",
    "csrc/sim_*",
    "src/trinity/*.py",
)
Record = dict[str, Any]


class OutOfTimeError(Exception):
    """The benchmark's minutes are over."""


class Sizes(NamedTuple):
    """How much a case is: instances, requests of the held-out trace at least, and how long traces must be."""

    instances: int = INSTANCES
    held: int = HELD_REQUESTS
    least_requests: int = LEAST_REQUESTS
    least_ttfts: float = LEAST_TTFTS


SMALL = Sizes(3, 240, 120, 0.3)


def ranked_case(setup: Setup, sizes: Sizes, until: float) -> Record:
    """What each strategy chose on the planning trace, and every placement's goodput on both traces.

    Raises ``OutOfTimeError`` when ``time.monotonic()`` passes ``until``.
    """
    began = time.monotonic()

    def tell(*_: object) -> None:
        if time.monotonic() > until:
            raise OutOfTimeError

    hardware = Hardware(model_named(setup.model), cluster_of(setup.device, sizes.instances), None, {}, {})
    asked = Question(setup.slo, least_requests=sizes.least_requests, least_ttfts=sizes.least_ttfts)

    def case_of(trace: Trace) -> Case:
        return Case(hardware, trace, asked, tell)

    early, late = traces.shipped("servegen-image-1h").split(0.1)
    count = requests_needed(setup, sizes, case_of(requests(setup, sizes.held, early, PLAN_SEED)))
    seen = requests(setup, max(sizes.least_requests, math.ceil(count / 9)), early, PLAN_SEED)
    planned = long_enough(seen, PLAN_SEED, True, lambda drawn: chosen_on(case_of(drawn.trace)))
    held, rates = held_out(lambda n: case_of(requests(setup, n, late, HELD_SEED)), count, planned["plan"])
    sized = {"seen": len(seen), "held": held}
    return {"setup": list(setup), **planned, "held": rates, "requests": sized, "seconds": time.monotonic() - began}


def requests(setup: Setup, count: int, arrivals: Trace, seed: int) -> Trace:
    rule = model_named(setup.model).visual_tokens
    return traces.synthesise(setup.dataset, count, visual_tokens=rule, arrivals=arrivals, seed=seed)


def requests_needed(setup: Setup, sizes: Sizes, case: Case) -> int:
    """So that the best placement's requests take the TTFT bounds that a trace must last, by its nominal rate."""
    best = max(entry.nominal for entry in case.entries(case.hardware.names))
    return max(sizes.held, math.ceil(SPARE * sizes.least_ttfts * setup.slo.ttft * best))


def chosen_on(case: Case) -> Record:
    """Algorithm 2's choice and the race's, as ``HybridPlanner`` makes them, then the goodput of every placement."""
    names = case.hardware.names
    known = race(case.trials, case.paper(names, "largest_remainder"))
    paper_runs = case.trials.runs
    raced = case.searched("race", case.entries(names), known)
    race_runs = case.trials.runs
    picks = {"paper": [str(known[0].entry.deployment), paper_runs], "race": [str(raced[0].entry.deployment), race_runs]}
    rates = goodputs(exhaustive(case.trials, case.entries(names)))
    return {"picks": picks, "plan": rates, "planned_on": len(case.trace), "exhaustive_runs": case.trials.runs}


def goodputs(found: Sequence[Found]) -> dict[str, float]:
    return {str(each.entry.deployment): each.rate for each in found}


def held_out(case_of: Callable[[int], Case], count: int, seen: Mapping[str, float]) -> tuple[int, dict[str, float]]:
    """(requests, goodput of every placement) of a trace with an upper limit for each; ``seen``: on another trace."""
    while True:
        case = case_of(count)
        try:
            entries = case.entries(case.hardware.names)
            return count, {
                str(each.deployment): near(case.trials, each, seen[str(each.deployment)]) for each in entries
            }
        except TraceTooShort as error:
            span = (case.trace[-1].timestamp - case.trace[0].timestamp) / 1000
            count = math.ceil(SPARE * count * max(1.0, error.needed_s / span))


def near(trials: Trials, entry: Entry, rate: float) -> float:
    """Goodput, looked for around a rate that another trace gave: some four replays in place of seven."""
    if not rate:
        step = trials.limit(entry.deployment, entry.nominal)
        return 0.0 if step is None else rate_of(step)
    low, stride = step_of(rate), 1
    if trials.holds(entry.deployment, low):
        while trials.holds(entry.deployment, low + stride):
            low, stride = low + stride, 2 * stride
    else:
        while not trials.holds(entry.deployment, low - stride):
            low, stride = low - stride, 2 * stride
            if stride > FARTHEST:
                return 0.0
        low -= stride
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trials.holds(entry.deployment, middle) else (low, middle)
    return rate_of(low)


# ---------------------------------------------------------------- many cases


def tried(setup: Setup, sizes: Sizes, until: float) -> Record:
    """A case's record or, where trinity refuses it, why. Raises ``OutOfTimeError`` as ``ranked_case`` does."""
    try:
        return ranked_case(setup, sizes, until)
    except TrinityError as error:  # one that needs arguments does not come back from a process
        return {"setup": list(setup), "error": f"{type(error).__name__}: {error}"}


def spread(setups: Sequence[Setup], sizes: Sizes, until: float) -> Iterator[Record]:
    """The cases' records as they end, in two processes, until the time is over."""
    context = multiprocessing.get_context("spawn")
    waiting = iter(setups)
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        running: set[Future[Record]] = set()
        while True:
            while len(running) < PROCESSES and time.monotonic() < until and (setup := next(waiting, None)):
                running.add(pool.submit(tried, setup, sizes, until))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                try:
                    yield each.result()
                except OutOfTimeError:
                    continue


class Kept:
    """Records in a file, one JSON object a line; those of other sources or sizes are left out. None: kept nowhere."""

    def __init__(self, path: Path | None, sizes: Sizes) -> None:
        self.path, self.key = path, f"{sources()} {list(sizes)}"
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        found = [json.loads(line) for line in lines]
        self.records = {Setup(*each["setup"]): each for each in found if each["key"] == self.key}

    def add(self, record: Record) -> None:
        record["key"] = self.key
        self.records[Setup(*record["setup"])] = record
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def sources(root: Path = ROOT) -> str:
    """A digest of the code that a record hangs on."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(root.glob(pattern)):
            digest.update(path.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:16]


def run(setting: Setting) -> Result:
    sizes, until = SMALL if setting.quick else Sizes(), time.monotonic() + 60 * setting.minutes
    order = drawn(ORDER_SEED)[:2] if setting.quick else drawn(ORDER_SEED)
    kept = Kept(setting.kept and setting.kept / "rank-cases.jsonl", sizes)
    for record in spread([each for each in order if each not in kept.records], sizes, until):
        kept.add(record)
    done = [kept.records[each] for each in order if each in kept.records]
    result = Result(
        "rank",
        "Rank of the planner's choice among every placement",
        f"{len(order)} cases: 3 models, 5 datasets, {len(SETTINGS)} SLO settings, {' and '.join(DEVICES)}, "
        f"N = {sizes.instances}; goodput by the guarded rule on a grid of rates 2 % apart, rooflines. Each plans on a "
        "tenth of the requests (drawn longer by the planner where ten TTFT bounds ask for it) and is ranked on the "
        "held-out rest, of another seed and of later arrivals of the shipped hour.",
    )
    tabled(result, done, len(order), None if setting.quick else PROCESSES)
    return result
