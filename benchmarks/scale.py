"""32 instances of LLaVA-1.5-7B without the hardware: paced pipelines served live, beside the simulator's goodput.

Emulation, and labelled so: see ``scale_live`` for what is real. For each of TriInfer's workloads every method (its best
ratio by the planner), an even split, and the paper's baselines. Each is replayed live at rates around the simulated
goodput, 10 % apart, until one holds and the next does not. Replays run in processes of their own, a few at a time,
until ``minutes`` are over; what is done is kept, and the next run goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import scale_live
from benchmarks.claims import lengthened, more_than, nominal
from benchmarks.report import Result
from benchmarks.scale_live import DEVICE, MODEL, PER_HOST, Task, bounds, requests, simulator
from benchmarks.scale_tables import Line, Workload, tabled
from benchmarks.setting import ROOT, Setting
from trinity.cluster import Cluster
from trinity.errors import TraceTooShort
from trinity.goodput import LEAST_REQUESTS, LEAST_TTFTS, goodput, measure
from trinity.goodput import STEP as GOODPUT_STEP
from trinity.planner.candidates import PAPER
from trinity.planner.case import Case, Question
from trinity.planner.hardware import Hardware
from trinity.planner.race import race
from trinity.traces.synthetic import DATASETS

WORKLOADS = ("POPE", "MME", "TextVQA", "VizWiz", "TextCaps")  # from few tokens to many
STEP = 1.1  # between two rates that are tried live; the two around the simulated goodput are its neighbours
FARTHEST = 5  # steps away from it, where a search gives up
TRIES = 2  # of a rate at which the CPU was saturated
PLANNING_S = 60.0  # that a workload's rows take before anything is served
LOAD = 0.5  # of the cores, that replays may take together by what is expected of them
ALONE = 0.5  # of a core, that one may take: what dilation is for
AT_ONCE = 6
CPU_S = (2e-3, 5e-5)  # of a request, and of each of its tokens, before anything was measured
SPARE = 1.02  # times the shortest trace that has an answer, at the rate above the simulated goodput
MORE = 1.1  # times as many requests as are needed do no harm
FULL_EVERY = 50  # of the requests: one whose blocks are moved at full size
FULL_OF = 1000
Record = dict[str, Any]


class Sizes(NamedTuple):
    """How many instances, and how long traces must be."""

    instances: int = 32
    least_requests: int = LEAST_REQUESTS
    least_ttfts: float = LEAST_TTFTS
    workloads: tuple[str, ...] = WORKLOADS


SMALL = Sizes(4, 60, 0.2, WORKLOADS[:1])


class Row(NamedTuple):
    """What is compared: a method's best ratio, or a baseline. ``rate``: simulated goodput, of ``asked`` requests."""

    name: str
    placement: str
    scheduled: bool
    rate: float
    asked: int
    expected: tuple[dict[str, float], ...] = ()  # at the rates of steps 0 and 1


# ---------------------------------------------------------------- before anything is served


def baselines(instances: int) -> list[tuple[str, str, bool]]:
    """(name, placement, stage-level batching); for 32 instances TriInfer's own (5.2, 5.6)."""
    if instances < 32:
        return [("EPDServe's", "1E1P2D", True), ("without stage-level batching", f"{instances}EPD", False)]
    return [
        ("even E+P+D", "11E11P10D", True),
        ("EPDServe's", "4E8P20D", True),
        ("DistServe's", "12EP20D", True),
        ("vLLM's: no stage-level batching", "32EPD", False),
    ]


def planned(dataset: str, sizes: Sizes, pool: Executor) -> list[Row]:
    """Every method's best ratio and the baselines, with their simulated goodput."""
    best = pool.submit(best_ratios, dataset, sizes).result()
    found = [*((f"best {method}", placement, True) for method, placement in best.items()), *baselines(sizes.instances)]
    return list(pool.map(simulated, repeat(dataset), found, repeat(sizes)))


def best_ratios(dataset: str, sizes: Sizes) -> dict[str, str]:
    """Of each method, as the planner races them on other requests of the dataset."""
    cluster = Cluster.of(DEVICE.name, sizes.instances, per_host=min(PER_HOST, sizes.instances))
    hardware = Hardware(MODEL, cluster, None, {}, {})
    question = Question(bounds(dataset), least_requests=sizes.least_requests, least_ttfts=min(3.0, sizes.least_ttfts))

    def search(count: int) -> dict[str, str]:
        trace = scale_live.requests(dataset, count, seed=1)
        case = Case(hardware, trace, question, None)
        entries = case.entries(hardware.names)
        methods = sorted({each.deployment.method for each in entries}, key=lambda each: (each not in PAPER, each))
        try:
            raced = {
                method: race(case.trials, [each for each in entries if each.deployment.method == method])
                for method in methods
            }
        except TraceTooShort as error:
            raise more_than(trace, error) from error
        return {method: str(found[0].entry.deployment) for method, found in raced.items()}

    return lengthened(search, 4 * sizes.least_requests)


def simulated(dataset: str, found: tuple[str, str, bool], sizes: Sizes) -> Row:
    """Its goodput, on as many requests as it takes to see a rate above it."""
    name, placement, scheduled = found
    engine, slo = simulator(dataset, placement, scheduled), bounds(dataset)

    def search(count: int, bound: float | None = None, ttfts: float = sizes.least_ttfts) -> tuple[float, int]:
        trace = requests(dataset, count)
        try:
            rate = goodput(
                engine.serve(placement),
                trace,
                slo,
                bound=bound or nominal(engine, placement, trace),
                least_requests=sizes.least_requests,
                least_ttfts=ttfts,
                step=STEP if bound else GOODPUT_STEP,
            ).rate
        except TraceTooShort as error:
            raise more_than(trace, error) from error
        return rate, count

    rate, asked = lengthened(lambda count: search(count, ttfts=sizes.least_ttfts / 4), 2 * sizes.least_requests)
    for _ in range(3):  # the rate is that of the very requests that are served live, and those are no more than needed
        needed = max(sizes.least_requests, math.ceil(SPARE * sizes.least_ttfts * slo.ttft * rate * STEP**0.5))
        if needed <= asked <= MORE * needed:
            break
        rate, asked = lengthened(partial(search, bound=rate or None), needed)
    row = Row(name, placement, scheduled, rate, asked)
    return row._replace(expected=tuple(expected(row, step, dataset) for step in (0, 1) if rate))


# ---------------------------------------------------------------- which rates


def rate_at(row: Row, step: int) -> float:
    """Step 0 is the rate below the simulated goodput, step 1 the one above it."""
    return row.rate * STEP ** (step - 0.5)


def wanted(known: Mapping[int, bool]) -> list[int]:
    """Steps to be tried next, by which of those that are known hold; none where the limit is bracketed."""
    if not known:
        return [0, 1]
    lower, upper = bracket(known)
    if lower is None:
        step = min(known) - 1
    elif upper is None:
        step = max(known) + 1
    else:
        return [lower + 1] if upper - lower > 1 else []
    return [step] if abs(step) <= FARTHEST else []


def bracket(known: Mapping[int, bool]) -> tuple[int | None, int | None]:
    """(the highest step that holds below all that do not, the lowest that does not)."""
    upper = min((step for step, holds in known.items() if not holds), default=None)
    lower = max((step for step, holds in known.items() if holds and (upper is None or step < upper)), default=None)
    return lower, upper


# ---------------------------------------------------------------- records


class Kept:
    """Records in a file, one JSON object a line; those of other sources or sizes are left out. None: kept nowhere."""

    def __init__(self, path: Path | None, sizes: Sizes) -> None:
        self.path, self.key = path, f"{sources()} {list(sizes)}"
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self.records = [each for each in map(json.loads, lines) if each["key"] == self.key]

    def add(self, kind: str, dataset: str, record: Record) -> None:
        made = {"key": self.key, "kind": kind, "dataset": dataset, **record}
        self.records.append(made)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(made) + "\n")

    def of(self, kind: str, dataset: str) -> list[Record]:
        return [each for each in self.records if each["kind"] == kind and each["dataset"] == dataset]


def sources(root: Path = ROOT) -> str:
    """A digest of the code that a record hangs on."""
    digest = hashlib.sha256()
    for pattern in ("src/trinity/**/*.py", "csrc/*.?pp", "benchmarks/scale.py", "benchmarks/scale_live.py"):
        for path in sorted(root.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Board:
    """One workload: its rows, what was replayed, what is to be done next."""

    def __init__(self, dataset: str, kept: Kept, sizes: Sizes, pool: Executor) -> None:
        self.dataset, self.kept, self.sizes = dataset, kept, sizes
        known = kept.of("rows", dataset)
        if not known:
            kept.add("rows", dataset, {"rows": [list(row) for row in planned(dataset, sizes, pool)]})
        self.rows = [Row(*each)._replace(expected=tuple(each[-1])) for each in kept.of("rows", dataset)[0]["rows"]]
        self.dilation = self._dilation()
        self.earlier = len(kept.of("replay", dataset))  # of former runs, when the machine may have been busier

    def cpu_s(self, row: Row) -> float:
        """CPU seconds of a request: as replays of this row took, or as a guess says."""
        seen = [each["cpu_s"] / row.asked for each in self.replays(row)]
        return max(seen) if seen else CPU_S[0] + CPU_S[1] * self._tokens

    @property
    def _tokens(self) -> float:
        return DATASETS[self.dataset].output[0]

    def _dilation(self) -> int:
        """The same for every row of the workload: the least power of two at which none takes too much of a core."""
        guess = CPU_S[0] + CPU_S[1] * self._tokens
        busiest = max((row.rate for row in self.rows), default=0.0) * STEP * guess
        return 2 ** max(0, math.ceil(math.log2(max(1.0, busiest / ALONE))))

    def task(self, row: Row, step: int) -> Task:
        return Task(self.dataset, row.placement, row.scheduled, row.asked, rate_at(row, step), self.dilation)

    def replays(self, row: Row) -> list[Record]:
        mine = (row.placement, row.scheduled)
        return [each for each in self.kept.of("replay", self.dataset) if tuple(each["task"][1:3]) == mine]

    def known(self, row: Row) -> dict[int, bool]:
        """Which steps hold; one at which the CPU was saturated does not count unless tried too often."""
        return {each["step"]: each["holds"] for each in self.replays(row) if not each["late"]}

    def spent(self, row: Row) -> set[int]:
        """Steps at which the CPU was saturated each time that this run tried them."""
        now = self.kept.of("replay", self.dataset)[self.earlier :]
        late = [each["step"] for each in self.replays(row) if each["late"] and each in now]
        return {step for step in late if late.count(step) >= TRIES} - set(self.known(row))

    def next(self) -> list[tuple[Row, int]]:
        """Replays that are still missing."""
        found = []
        for row in self.rows:
            if row.rate > 0:
                spent = self.spent(row)
                found += [(row, step) for step in wanted(self.known(row)) if step not in spent]
        return found

    def shown(self) -> Workload:
        """What its tables say."""
        full, lines = self.kept.of("full", self.dataset), list[Line]()
        for row in self.rows:
            low, high = bracket(self.known(row))
            rates = [None if step is None else rate_at(row, step) for step in (low, high)]
            lines.append(Line(row.name, row.placement, row.rate, rates[0], rates[1], self.replays(row)))
        dilations = self.kept.of("dilation", self.dataset)
        return Workload(self.dataset, self.dilation, lines, full[0] if full else None, dilations)


# ---------------------------------------------------------------- all of it


class Crew:
    """Processes that replay, as many at a time as leave the machine room."""

    def __init__(self, until: float) -> None:
        self.until, self.room = until, LOAD * (os.cpu_count() or 1)
        self.running: dict[Future[Record], tuple[float, Callable[[Record], None]]] = {}
        self.pool = ProcessPoolExecutor(AT_ONCE, mp_context=multiprocessing.get_context("spawn"))

    def offer(self, load: float, seconds: float, done: Callable[[Record], None], call: Any, *given: Any) -> bool:
        """Start it where there is room and time for it; whether it was started."""
        busy = sum(each for each, _ in self.running.values())
        full = len(self.running) >= AT_ONCE or (self.running and busy + load > self.room)
        if full or time.monotonic() + seconds > self.until:
            return False
        self.running[self.pool.submit(call, *given)] = (load, done)
        return True

    def settle(self) -> None:
        """Wait for one to end."""
        ended, _ = wait(self.running, return_when=FIRST_COMPLETED)
        for each in ended:
            _, done = self.running.pop(each)
            done(each.result())


class Job(NamedTuple):
    """Something besides the rows' replays: ``kind`` of its record, its load of a core, seconds that it may take."""

    kind: str
    load: float
    seconds: float
    call: Callable[..., Record]
    given: tuple[Any, ...]


def served(board: Board, crew: Crew, *, first: bool) -> None:
    """All that one workload lacks, as far as there is time; of the first one other dilations too."""
    under_way: set[Task] = set()
    jobs = [*full_size(board), *(dilations(board) if first else ())]
    while True:
        for row, step in board.next():
            task = board.task(row, step)
            if task in under_way:
                continue

            def done(found: Record, row: Row = row, step: int = step, task: Task = task) -> None:
                under_way.discard(task)
                near = row.expected[step] if step in range(len(row.expected)) else expected(row, step, board.dataset)
                board.kept.add("replay", board.dataset, {"step": step, **found, "simulated": near})

            load = board.cpu_s(row) * task.rate / task.dilation
            if crew.offer(load, seconds_of(task), done, scale_live.served, task):
                under_way.add(task)
        jobs = [job for job in jobs if not offered(job, board, crew)]
        if not crew.running:
            return
        crew.settle()


def offered(job: Job, board: Board, crew: Crew) -> bool:
    """Whether it was started."""

    def done(found: Record) -> None:
        board.kept.add(job.kind, board.dataset, found)

    return crew.offer(job.load, job.seconds, done, job.call, *job.given)


def full_size(board: Board) -> list[Job]:
    """The sample of requests whose blocks are moved at the model's own size."""
    if board.kept.of("full", board.dataset):
        return []
    asked = (board.dataset, FULL_EVERY, min(FULL_OF, 10 * board.sizes.least_requests))
    return [Job("full", 0.6, 30.0, scale_live.full_size, asked)]


def dilations(board: Board, share: float = 0.8) -> list[Job]:
    """The same requests at a rate that the machine carries undilated, on the row that asks for the least CPU."""
    rows = [row for row in board.rows if row.rate > 0]
    known = [each["task"] for each in board.kept.of("dilation", board.dataset)]
    made = []
    for times in (1, 2, 4) if rows else ():
        row = min(rows, key=lambda each: each.rate * board.cpu_s(each))
        task = board.task(row, 0)._replace(rate=share * row.rate, dilation=times)
        if list(task) not in known:
            load = board.cpu_s(row) * task.rate / times
            made.append(Job("dilation", load, seconds_of(task), scale_live.served, (task,)))
    return made


def seconds_of(task: Task) -> float:
    """What a replay takes, its start and end included."""
    return 8.0 + task.dilation * (task.asked / task.rate + 2 * task.slo.ttft)


def expected(row: Row, step: int, dataset: str) -> dict[str, float]:
    """The simulated attainment of the same requests at the same rate."""
    engine = simulator(dataset, row.placement, row.scheduled)
    seen = measure(engine.serve(row.placement), requests(dataset, row.asked), bounds(dataset), rate_at(row, step))
    return {**seen.attainment, "completed": seen.completed}


def run(setting: Setting) -> Result:
    sizes, until = SMALL if setting.quick else Sizes(), time.monotonic() + 60 * setting.minutes
    kept = Kept(setting.kept and setting.kept / "scale-replays.jsonl", sizes)
    crew, boards = Crew(until), list[Board]()
    with crew.pool:
        for dataset in sizes.workloads:
            missing = bool(boards) and bool(boards[-1].next())
            if not kept.of("rows", dataset) and (missing or time.monotonic() + PLANNING_S > until):
                continue
            boards.append(Board(dataset, kept, sizes, crew.pool))
            if not missing:
                served(boards[-1], crew, first=dataset == sizes.workloads[0])
    return tabled([board.shown() for board in boards], sizes.instances)
