"""Rank of what Algorithm 2 and the race choose, among every placement at N = 8 (TriInfer 5.4 and table 3).

Cases run in two processes until ``minutes`` are over; what is done is kept, and the next run goes on from there. The
goodputs of all placements are kept apart from what is chosen: where only the race changes, only that runs again.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from benchmarks.rank.goodputs import (
    SMALL,
    OutOfTimeError,
    Record,
    Sizes,
    case_of,
    planning_trace,
    searched_case,
)
from benchmarks.rank.ranking import DEVICES, SETTINGS, Setup, drawn
from benchmarks.rank.sources import behind, digest
from benchmarks.rank.tables import tabled
from benchmarks.report import Result
from benchmarks.setting import ROOT, Setting
from trinity.errors import TrinityError
from trinity.planner.race import race

PROCESSES = 2
ORDER_SEED = 0
SEARCH = ("trinity.planner.problem", "trinity.planner.resample", "trinity.traces")
CHOICE = ("trinity.planner.race",)  # what no goodput hangs on
Job = tuple[Setup, Record | None]  # a case, and its goodputs where they are known


def choices(setup: Setup, sizes: Sizes, goodputs: Record, until: float) -> Record:
    """What each strategy chooses on the planning trace and in how many replays, each as if it ran alone."""
    began, trace = time.monotonic(), planning_trace(setup, goodputs)
    picks = {}
    for strategy in ("paper", "race"):
        case = case_of(setup, sizes, trace, until)
        names = case.hardware.names
        entries = (
            case.bound_paper_choices(names, "largest_remainder")
            if strategy == "paper"
            else case.bound_deployments(names)
        )
        found = race(case.trials, entries)
        picks[strategy] = [str(found[0].entry.deployment), case.trials.runs]
    return {"setup": list(setup), "picks": picks, "choosing_s": time.monotonic() - began}


# ---------------------------------------------------------------- many cases


def tried(job: Job, sizes: Sizes, until: float) -> tuple[Record, Record]:
    """A case's goodputs and choices or, where trinity refuses it, why. Raises ``OutOfTimeError`` as ``case_of``."""
    setup, goodputs = job
    try:
        goodputs = goodputs or searched_case(setup, sizes, until)
        return goodputs, choices(setup, sizes, goodputs, until) if "error" not in goodputs else goodputs
    except TrinityError as error:  # one that needs arguments does not come back from a process
        refused: Record = {"setup": list(setup), "error": f"{type(error).__name__}: {error}"}
        return goodputs or refused, refused


def spread(jobs: Sequence[Job], sizes: Sizes, until: float) -> Iterator[tuple[Record, Record]]:
    """The cases' records as they end, in two processes, until the time is over."""
    context = multiprocessing.get_context("spawn")
    waiting = iter(jobs)
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        running: set[Future[tuple[Record, Record]]] = set()
        while True:
            while len(running) < PROCESSES and time.monotonic() < until and (job := next(waiting, None)):
                running.add(pool.submit(tried, job, sizes, until))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                try:
                    yield each.result()
                except OutOfTimeError:
                    continue


class Kept:
    """Records in a file, one JSON object a line; those with another key are left out. None: kept nowhere."""

    def __init__(self, path: Path | None, key: str) -> None:
        self.path, self.key = path, key
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        found = [json.loads(line) for line in lines]
        self.records = {Setup(*each["setup"]): each for each in found if each["key"] == self.key}

    def add(self, record: Record) -> None:
        setup = Setup(*record["setup"])
        if setup in self.records:
            return
        self.records[setup] = {**record, "key": self.key}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.records[setup]) + "\n")


def keys(sizes: Sizes, root: Path = ROOT) -> tuple[str, str]:
    """Of goodputs and of choices: digests of the code that they hang on."""
    own = [root / "benchmarks/rank" / f"{name}.py" for name in ("goodputs", "ranking")]
    searching = digest([*behind(SEARCH, CHOICE, root), *own])
    choosing = digest([*behind((*SEARCH, *CHOICE), (), root), *own, root / "benchmarks/rank/rank.py"])
    return f"{searching} {list(sizes)}", f"{choosing} {list(sizes)}"


def run(setting: Setting) -> Result:
    sizes, until = SMALL if setting.quick else Sizes(), time.monotonic() + 60 * setting.minutes
    order = drawn(ORDER_SEED)[:2] if setting.quick else drawn(ORDER_SEED)
    files = ("rank-goodputs.jsonl", "rank-choices.jsonl")
    searched, chosen = (
        Kept(setting.kept and setting.kept / name, key) for name, key in zip(files, keys(sizes), strict=True)
    )
    missing = [each for each in order if each not in searched.records or each not in chosen.records]
    jobs = sorted(((each, searched.records.get(each)) for each in missing), key=lambda job: job[1] is None)
    for goodputs, choice in spread(jobs, sizes, until):
        searched.add(goodputs)
        chosen.add(choice)
    both = searched.records.keys() & chosen.records.keys()
    done = [{**searched.records[each], **chosen.records[each]} for each in order if each in both]
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
