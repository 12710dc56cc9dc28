"""Lane: the thread on which an instance's stages run, one step at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from trinity.core.messages import Close, Failure, Grow, Open, Progress, Sampled, Step, Stepped, Value
from trinity.runtime.cpu_affinity import pin_thread
from trinity.runtime.cuda_stream import LaneStream
from trinity.stages.base import GrowableStage, LaunchableStage, LayerReporter, PendingStep, Stage
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
PLAIN = {Sampled}
LOOK_S = 0.0002  # between two looks at a launched step, while a command may come that would be launched behind it


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that a stage has begun and whose tokens nobody has read; ``since`` its launch."""

    step: Step
    pending: PendingStep
    since: float


class Lane:
    """Runs Open, Grow, Close and Step commands in order; each Step is answered by one Stepped through ``post``.

    ``threads``: torch's for each operator; 0 where no stage uses torch, which is then not imported. ``cores``: what it
    is kept on, with the OpenMP threads of its operators: they are made by the first operator that it runs, and inherit.
    ``stream``: its own queue on a GPU. ``depth``: of stages that launch steps, so many are begun before the first is
    waited for. ``decide``: as ``post``, and has the core decide at once, on this thread.
    """

    def __init__(
        self,
        instance: str,
        name: str,
        stages: Sequence[Stage],
        post: Callable[[Value], None],
        failed: Callable[[BaseException], None],
        timeline: Timeline,
        threads: int = 1,
        cores: Sequence[int] = (),
        stream: LaneStream | None = None,
        depth: int = 1,
        decide: Callable[[Value], None] | None = None,
    ) -> None:
        self.instance, self.name, self.cores = instance, name, tuple(cores)
        self.stages, self._stream = list(stages), stream or LaneStream()
        self._streams = type(self._stream) is not LaneStream  # whether there is anything to be said to it
        self.cpu_s = 0.0
        self._depth, self._flight = depth, deque[Launched]()
        self._free_at = 0.0  # when the last step ended
        self._post, self._failed, self._timeline, self._threads = post, failed, timeline, threads
        self._decide = decide or post
        self._emulated = any(getattr(stage, "emulated", False) for stage in self.stages)
        self._launching = [stage for stage in self.stages if isinstance(stage, LaunchableStage)]
        self._remarking: list[Any] = [stage for stage in self.stages if hasattr(stage, "remarks")]
        self._telling: Step | None = None  # whose progress is told
        self._told = False
        for stage in self.stages:
            if isinstance(stage, LayerReporter):
                stage.on_layers = self._progress
        self._queue: SimpleQueue[Value | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"trinity-{instance}-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Value) -> None:
        self._queue.put(command)

    def stop(self) -> None:
        """End the thread after the commands that wait."""
        self._queue.put(None)

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._failed(error)

    def _serve(self) -> None:
        pin_thread(self.cores)
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)
        with self._stream:
            while (command := self._next()) is not None:
                if not isinstance(command, Step):
                    self._tell(command)
                elif not (self._launching and self._launch(command)):
                    self._reply(command, self._step(command))

    def _reply(self, step: Step, answer: Stepped) -> None:
        """Tell the core, which decides on this thread where it waits for that alone. Not behind a prefill or an encode:
        what follows from those, such as digests for peers, takes longer than to wake another thread."""
        if not (step.prefills or step.encodes) and self._queue.empty():
            self._decide(answer)
        else:
            self._post(answer)

    def _next(self) -> Value | None:
        """The next command. Launched steps are waited for as soon as nothing more is to be launched behind them."""
        while self._flight:
            if len(self._flight) < self._depth and not self._flight[0].pending.ready():
                try:
                    command = self._queue.get(timeout=LOOK_S)
                except Empty:
                    continue
                if command is not None:
                    return command
                self._queue.put(None)  # the end comes after what is in flight
            self._finish()
        if self._queue.empty():
            self.cpu_s = time.thread_time()
        return self._queue.get()

    def _launch(self, step: Step) -> bool:
        """Begin a step of one stage that can. Where this is False, nothing is in flight any more."""
        rows = [(stage, found) for stage in self.stages if (found := rows_for(step, stage.letters)) is not None]
        stage, only = rows[0] if len(rows) == 1 else (None, step)
        launching = next((each for each in self._launching if each is stage), None)
        if launching is not None and not step.group:
            try:
                self._stream.begin()
                self._flight.append(Launched(step, launching.launch(only), time.perf_counter()))
                return True
            except BaseException:  # running it as any other step tells whose fault it is
                logger.exception("step %d of %s could not be launched", step.id, self.name)
        while self._flight:
            self._finish()
        return False

    def _finish(self) -> None:
        """Answer the oldest launched step. Where it failed, it and all behind it run again, one after the other."""
        first = self._flight.popleft()
        try:
            sampled = complete(first.step, first.pending.wait() or {})
        except BaseException:
            logger.exception("step %d of %s failed after its launch", first.step.id, self.name)
            again = [first, *self._flight]
            self._flight.clear()
            for each in reversed(again):
                each.pending.drop()
            for each in again:
                self._reply(each.step, self._step(each.step))
        else:
            self._reply(first.step, self._answer(first.step, max(first.since, self._free_at), sampled, {}))

    def _tell(self, command: Value) -> None:
        for stage in self.stages:
            try:
                if isinstance(command, Open):
                    stage.open(command)
                elif isinstance(command, Grow) and isinstance(stage, GrowableStage):
                    stage.grow(command)
                elif isinstance(command, Close):
                    stage.close(command.request)
            except BaseException:  # its rows will fail in the next step, and that is reported
                logger.exception("stage %s of %s could not %s", stage.letters, self.instance, type(command).__name__)

    def _progress(self, first: int, end: int) -> None:
        """Some layers are written. While rows run again, alone, nothing is told: it was told once, and is void."""
        step = self._telling
        if step is not None:
            self._told = True
            self._post(Progress(step.id, self.name, (first, end)))

    def _step(self, step: Step) -> Stepped:
        started = time.perf_counter()
        failed: dict[str, Failure] = {}
        self._telling, self._told = step, False
        try:
            sampled = self._forward(step)
        except BaseException:  # a stage that calls sys.exit() must not end the lane: its requests would wait for ever
            logger.exception(
                "step %d of %s failed; its requests run alone to find whose fault it is", step.id, self.name
            )
            self._telling = None
            if self._told:
                self._post(Progress(step.id, self.name, None))
            sampled, failed = self._alone(step)
        return self._answer(step, started, sampled, failed)

    def _answer(self, step: Step, started: float, sampled: dict[str, Sampled], failed: dict[str, Failure]) -> Stepped:
        self._free_at = time.perf_counter()
        seconds = self._free_at - started
        if step.encodes or step.prefills:
            title, said = _shown(step)
        else:  # most steps
            title, said = "decode", {"media tokens": 0, "prefill tokens": 0, "decodes": len(step.decodes)}
        if self._emulated:  # must not pass for computed
            title = f"emulated {title}"
        for stage in self._remarking:
            said.update(stage.remarks)
        self._timeline.add(self.instance, self.name, title, started, seconds, said)
        return Stepped(step.id, self.name, sampled, failed, seconds)

    def _forward(self, step: Step) -> dict[str, Sampled]:
        sampled: dict[str, Sampled] = {}
        if self._streams:
            self._stream.begin()
        try:
            for stage in self.stages:
                rows = rows_for(step, stage.letters)
                if rows is not None:
                    found = stage.forward(rows) or {}
                    sampled = checked(sampled) | checked(found) if sampled else found
        finally:
            if self._streams:
                self._stream.settle()  # of what has failed too: its blocks are soon somebody else's
        return complete(step, sampled)

    def _alone(self, step: Step) -> tuple[dict[str, Sampled], dict[str, Failure]]:
        """Every request's rows by themselves: one that fails alone has failed; the others go on."""
        sampled: dict[str, Sampled] = {}
        failed: dict[str, Failure] = {}
        for rows in split(step):
            request = requests_of(rows)[0]
            try:
                sampled.update(self._forward(rows))
            except BaseException as error:
                text = f"{_title(rows)} on {self.instance} raised {type(error).__name__}: {error}"
                failed[request] = Failure("StageError", text, {"stage": _letters(rows)})
        return sampled, failed


def checked(sampled: dict[str, Sampled]) -> dict[str, Sampled]:
    """What a stage returned. Raises ``TypeError`` where it is not tokens by request: the core must not trip over it."""
    kinds = set(map(type, sampled.values())) if isinstance(sampled, dict) else {type(sampled)}
    if not all(issubclass(kind, Sampled) for kind in kinds):
        raise TypeError(f"Stage.forward() must return a dict of Sampled by request, got {sampled!r:.200}")
    return sampled


def complete(step: Step, sampled: dict[str, Sampled]) -> dict[str, Sampled]:
    """Tokens of every row that asks for one. Raises ``RuntimeError`` where some are missing, ``TypeError`` as above."""
    if not step.prefills and type(sampled) is dict and set(map(type, map(sampled.get, step.decodes))) == PLAIN:
        return sampled  # most steps
    checked(sampled)
    missing = {row.request for row in step.prefills if row.last}.union(step.decodes) - sampled.keys()
    if missing:
        raise RuntimeError(f"no token came back for {', '.join(sorted(missing))}")
    return sampled


def rows_for(step: Step, letters: str) -> Step | None:
    """The rows of a step that a stage with these letters runs; None where there are none."""
    if step.decodes and not (step.encodes or step.prefills) and "D" in letters:
        return step  # most steps
    encodes = step.encodes if "E" in letters else ()
    prefills = step.prefills if "P" in letters else ()
    decodes = step.decodes if "D" in letters else ()
    return Step(step.id, step.lane, encodes, prefills, decodes, step.group) if encodes or prefills or decodes else None


def requests_of(step: Step) -> list[str]:
    rows = [row.request for row in step.encodes] + [row.request for row in step.prefills]
    return list(dict.fromkeys(rows + list(step.decodes)))


def split(step: Step) -> list[Step]:
    """One step per request."""
    return [
        Step(
            step.id,
            step.lane,
            tuple(row for row in step.encodes if row.request == request),
            tuple(row for row in step.prefills if row.request == request),
            tuple(each for each in step.decodes if each == request),
            step.group,
        )
        for request in requests_of(step)
    ]


def _letters(step: Step) -> str:
    present = (("E", step.encodes), ("P", step.prefills), ("D", step.decodes))
    return "".join(letter for letter, rows in present if rows)


def _title(step: Step) -> str:
    names = {"E": "encode", "P": "prefill", "D": "decode"}
    return "+".join(names[letter] for letter in _letters(step))


def _shown(step: Step) -> tuple[str, dict[str, float]]:
    """What the timeline says of a step: its name and its rows."""
    return _title(step), {
        "media tokens": sum(row.span.tokens for row in step.encodes),
        "prefill tokens": sum(row.length for row in step.prefills),
        "decodes": len(step.decodes),
    }
