"""32 instances of LLaVA-1.5-7B without the hardware: paced pipelines served live, beside the simulator's goodput.

Emulation, and labelled so: see ``scale_live`` for what is real. For each of TriInfer's workloads every method (its best
ratio by the planner), an even split, and the paper's baselines. Each is replayed live a little below the simulated
goodput and a little above it, and further away until one rate holds and the next does not. Replays run in processes of
their own, a few at a time, until ``minutes`` are over: every row of every workload once, before any goes on. What is
done is kept, and the next run goes on from there; a run of one minute plans, and leaves the machine at rest for others.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Result
from benchmarks.scale import live as scale_live
from benchmarks.scale.live import Task
from benchmarks.scale.rows import ABOVE, WORKLOADS, Row, Sizes, bracket, expected, planned, rate_at, wanted
from benchmarks.scale.tables import Line, Workload, tabled
from benchmarks.setting import ROOT, Setting
from trinity.traces.synthetic import DATASETS

TRIES = 2  # of a rate at which the CPU was saturated
LOAD = 0.75  # of the cores, that replays may take together by what is expected of them
LEAST_LOAD, LESS = 0.5, 0.9  # where the machine was saturated all the same, so much less, down to
ALONE = 0.35  # of a core, that one may take: what dilation is for
DILATIONS = (2, 8)  # at least and at most
COMPARED = (2, 3, 6)  # dilations of the same requests at the same rate
AT_ONCE = 12
START_S = 6.0  # of a replay: 32 instances, and the requests
DRAINING = 0.3  # of a replay's load, once its requests are sent
LOOK_S = 2.0  # between two looks at whose requests are sent
FULL_EVERY = 50  # of the requests: one whose blocks are moved at full size
FULL_OF = 1000
PATTERNS = (
    "src/trinity/**/*.py",
    "csrc/**/*.?pp",
    "benchmarks/scale/scale.py",
    "benchmarks/scale/live.py",
    "benchmarks/scale/rows.py",
)
Record = dict[str, Any]
SMALL = Sizes(4, 60, 0.2, WORKLOADS[:1])


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
    for pattern in PATTERNS:
        for path in sorted(root.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Board:
    """One workload: its rows, what was replayed, what is to be done next."""

    def __init__(self, dataset: str, kept: Kept, sizes: Sizes, pool: Executor) -> None:
        self.dataset, self.kept, self.sizes = dataset, kept, sizes
        if not kept.of("rows", dataset):
            kept.add("rows", dataset, {"rows": [list(row) for row in planned(dataset, sizes, pool)]})
        self.rows = [Row(*each)._replace(expected=tuple(each[-1])) for each in kept.of("rows", dataset)[0]["rows"]]
        self.earlier = len(kept.of("replay", dataset))  # of former runs, when the machine may have been busier

    def cpu_s(self, row: Row) -> float:
        """CPU seconds of a request: as replays of this row took, or as is expected."""
        return max((each["cpu_s"] / row.asked for each in self.replays(row)), default=row.cpu_s)

    def dilation(self, row: Row) -> int:
        """The least at which a replay takes no more of a core than ``ALONE``; one more where the CPU was saturated."""
        late = sum(bool(each["late"]) for each in self.replays(row) if each in self.now)
        least, most = DILATIONS
        return min(most, max(least, math.ceil(row.rate * ABOVE * row.cpu_s / ALONE)) + late)

    def task(self, row: Row, step: int) -> Task:
        given = (self.dataset, row.placement, row.scheduled, row.asked)
        return Task(*given, rate_at(row, step), self.dilation(row))

    @property
    def now(self) -> list[Record]:
        """Replays of this run."""
        return self.kept.of("replay", self.dataset)[self.earlier :]

    def replays(self, row: Row) -> list[Record]:
        mine = (row.placement, row.scheduled)
        return [each for each in self.kept.of("replay", self.dataset) if tuple(each["task"][1:3]) == mine]

    def known(self, row: Row) -> dict[int, bool]:
        """Select the steps that hold; one at which the CPU was saturated does not count."""
        return {each["step"]: each["holds"] for each in self.replays(row) if not each["late"]}

    def spent(self, row: Row) -> set[int]:
        """Steps at which the CPU was saturated each time that this run tried them."""
        late = [each["step"] for each in self.replays(row) if each["late"] and each in self.now]
        return {step for step in late if late.count(step) >= TRIES} - set(self.known(row))

    def next(self) -> list[tuple[Row, int]]:
        """Replays that are still missing."""
        found = []
        for row in self.rows:
            if row.rate > 0:
                spent = self.spent(row)
                found += [(row, step) for step in wanted(self.known(row)) if step not in spent]
        return found

    def why(self, row: Row) -> str:
        """Say why its goodput is not bracketed; "" where it is."""
        if not row.rate:
            return "no rate holds in simulation"
        known = self.known(row)
        if None not in bracket(known):
            return ""
        lacking = wanted(known)
        if not lacking:
            return "every rate that was tried does" if all(known.values()) else "no rate that was tried does"
        late = {each["step"] for each in self.replays(row) if each["late"]}.intersection(lacking)
        rates = ", ".join(f"{rate_at(row, step):.0f}" for step in lacking)
        return f"the CPU was saturated at {rates}" if late else f"no time was left for {rates}"

    def shown(self) -> Workload:
        """Summarize its tables."""
        full, lines = self.kept.of("full", self.dataset), list[Line]()
        for row in self.rows:
            low, high = (None if step is None else rate_at(row, step) for step in bracket(self.known(row)))
            given = (row.name, row.placement, row.steady, row.rate, row.asked)
            dilation = max((each["task"][5] for each in self.replays(row)), default=self.dilation(row))
            lines.append(Line(*given, low, high, dilation, self.replays(row), self.why(row)))
        return Workload(self.dataset, lines, full[0] if full else None, self.kept.of("dilation", self.dataset))


# ---------------------------------------------------------------- the order, and what it takes


def missing(boards: Sequence[Board]) -> list[tuple[Board, Row, int]]:
    """Replays that are still missing: the two of every row of every workload, before any row gets its third."""
    found = []
    for place, board in enumerate(boards):
        for row, step in board.next():
            turn = max(0, len(board.replays(row)) - 1)
            found.append(((turn, board.rows.index(row), place, step), (board, row, step)))
    return [each for _, each in sorted(found, key=lambda each: each[0])]


def drain_s(task: Task) -> float:
    """Of the device's time, from the last arrival to the last token where a rate is a little too high."""
    slo, tokens = task.slo, DATASETS[task.dataset].output[0]
    return 1.25 * slo.ttft + tokens * slo.tbt / 2


def seconds_of(task: Task) -> float:
    """Seconds of a replay, its start and end included."""
    return sending_s(task) + task.dilation * drain_s(task)


def sending_s(task: Task) -> float:
    """Until its last request is sent."""
    return START_S + task.dilation * task.asked / task.rate


def budget(boards: Sequence[Board], minutes: float) -> str:
    """What the two replays of every row that are missing take of the machine, in words."""
    left = [(board, board.task(row, step), row) for board, row, step in missing(boards)]
    cpu = sum(task.asked * board.cpu_s(row) for board, task, row in left)
    wall = [seconds_of(task) for _, task, _ in left]
    room = LOAD * (os.cpu_count() or 1)
    longest = max(wall, default=0.0)
    return (
        f"{len(left)} replays are missing, of {min(wall, default=0.0):.0f} to {longest:.0f} s each; they take "
        f"{cpu:.0f} s of CPU time: of {room:.1f} cores {cpu / room / 60 + longest / 120:.1f} minutes, of {minutes:.1f}"
    )


# ---------------------------------------------------------------- all of it


class Running(NamedTuple):
    """A replay: its share of a core, until when its requests are sent, who is told of its end."""

    load: float
    until: float
    done: Callable[[Record], None]

    def now(self) -> float:
        return self.load * (1.0 if time.monotonic() < self.until else DRAINING)


class Crew:
    """Processes that replay, as many at a time as leave the machine room."""

    def __init__(self, until: float) -> None:
        self.until, self.room = until, LOAD * (os.cpu_count() or 1)
        self.running: dict[Future[Record], Running] = {}
        self.pool = ProcessPoolExecutor(AT_ONCE, mp_context=multiprocessing.get_context("spawn"))

    def offer(self, job: Job, done: Callable[[Record], None]) -> bool:
        """Start it where there is room and time for it; whether it was started."""
        busy, now = sum(each.now() for each in self.running.values()), time.monotonic()
        full = len(self.running) >= AT_ONCE or (bool(self.running) and busy + job.load > self.room)
        if full or now + job.seconds > self.until:
            return False
        self.running[self.pool.submit(job.call, *job.given)] = Running(job.load, now + job.sending, done)
        return True

    def settle(self) -> None:
        """Wait for one to end, or a while: others may have sent all their requests."""
        ended, _ = wait(self.running, LOOK_S, FIRST_COMPLETED)
        for each in ended:
            found, done = each.result(), self.running.pop(each).done
            if "machine" in found.get("late", ()):
                self.room = max(LEAST_LOAD * (os.cpu_count() or 1), LESS * self.room)
            done(found)


class Job(NamedTuple):
    """``kind`` of its record, its load of a core, seconds that it may take, and until all its requests are sent."""

    kind: str
    load: float
    seconds: float
    sending: float
    call: Callable[..., Record]
    given: tuple[Any, ...]


def replaying(kind: str, task: Task, cpu_s: float) -> Job:
    """A replay of requests that take so much CPU time each."""
    load = cpu_s * task.rate / task.dilation
    return Job(kind, load, seconds_of(task), sending_s(task), scale_live.served, (task,))


def full_size(dataset: str, sizes: Sizes) -> Job:
    """The sample of requests whose blocks are moved at the model's own size."""
    asked = (dataset, FULL_EVERY, min(FULL_OF, 10 * sizes.least_requests))
    return Job("full", 0.6, 30.0, 30.0, scale_live.full_size, asked)


def dilations(board: Board, share: float = 0.8) -> list[Job]:
    """The same requests at a rate that the machine carries little dilated, on the row that asks for the least CPU."""
    rows = [row for row in board.rows if row.rate > 0]
    known = [each["task"] for each in board.kept.of("dilation", board.dataset)]
    made = []
    for times in COMPARED if rows else ():
        row = min(rows, key=lambda each: each.rate * each.cpu_s)
        task = board.task(row, 0)._replace(rate=share * row.rate, dilation=times)
        if list(task) not in known:
            made.append(replaying("dilation", task, board.cpu_s(row)))
    return made


def prepared(sizes: Sizes, kept: Kept, crew: Crew) -> list[Board]:
    """Boards of all workloads, as far as there is time; meanwhile the sample of full size."""
    jobs = [full_size(dataset, sizes) for dataset in sizes.workloads if not kept.of("full", dataset)]

    def begin() -> None:
        jobs[:] = [job for job in jobs if not crew.offer(job, _also(kept, job.given[0], job.kind))]

    begin()
    boards = [
        Board(dataset, kept, sizes, crew.pool)
        for dataset in sizes.workloads
        if kept.of("rows", dataset) or time.monotonic() < crew.until
    ]
    begin()
    while crew.running:
        crew.settle()
        begin()
    return boards


def serve(boards: Sequence[Board], crew: Crew) -> None:
    """All that the rows lack, as far as there is time; then other dilations of the first workload."""
    under_way: set[tuple[str, str, bool, int]] = set()
    other = dilations(boards[0]) if boards else []
    while True:
        for board, row, step in missing(boards):
            place = (board.dataset, row.placement, row.scheduled, step)
            if place not in under_way and crew.offer(_job(board, row, step), _kept(board, row, step, place, under_way)):
                under_way.add(place)
        other = [job for job in other if not crew.offer(job, _also(boards[0].kept, boards[0].dataset, job.kind))]
        if not crew.running:
            return
        crew.settle()


def _job(board: Board, row: Row, step: int) -> Job:
    return replaying("replay", board.task(row, step), board.cpu_s(row))


def _kept(
    board: Board, row: Row, step: int, place: tuple[str, str, bool, int], under_way: set[tuple[str, str, bool, int]]
) -> Callable[[Record], None]:
    def done(found: Record) -> None:
        under_way.discard(place)
        near = row.expected[step] if step in range(len(row.expected)) else expected(row, step, board.dataset)
        board.kept.add("replay", board.dataset, {"step": step, **found, "simulated": near})

    return done


def _also(kept: Kept, dataset: str, kind: str) -> Callable[[Record], None]:
    def done(found: Record) -> None:
        kept.add(kind, dataset, found)

    return done


def run(setting: Setting) -> Result:
    sizes, until = SMALL if setting.quick else Sizes(), time.monotonic() + 60 * setting.minutes
    kept = Kept(setting.kept and setting.kept / "scale-replays.jsonl", sizes)
    crew = Crew(until)
    with crew.pool:
        boards = prepared(sizes, kept, crew)
        before = budget(boards, (until - time.monotonic()) / 60)
        print(before, flush=True)
        serve(boards, crew)
    after = budget(boards, 0)
    return tabled([board.shown() for board in boards], sizes, [f"Before the run {before}.", f"After it {after}."])
