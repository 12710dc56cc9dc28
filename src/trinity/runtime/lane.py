"""Lane: runs an instance's stages on a thread, one step at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from trinity.core.messages import Close, Failure, Grow, LayersWritten, Open, Sampled, Step, Stepped, Value
from trinity.errors import describe_error
from trinity.errors.arguments import show
from trinity.runtime.cpu_affinity import pin_thread
from trinity.runtime.cuda_stream import LaneStream
from trinity.stages.base import CleanableStage, GrowableStage, LaunchableStage, LayerReporter, PendingStep, Stage
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
SAMPLED_ONLY = {Sampled}
LARGEST_VOCABULARY = 1 << 31
POLL_S = 0.0002  # between two polls of a launched step, while another may still be launched behind it


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that a stage has launched (at ``since``) and whose tokens have not been read.

    ``settle`` waits until the device has run all that the launch queued.
    """

    step: Step
    pending: PendingStep
    since: float
    settle: Callable[[], None]


class Lane:
    """Runs Open, Grow, Close and Step commands in order, and answers each Step with one Stepped.

    - ``instance``, ``name``: name of the instance and of this lane.
    - ``stages``: stages that this lane runs.
    - ``post``: takes messages to the core.
    - ``failed``: called with the error that ends the thread.
    - ``timeline``: records steps.
    - ``threads`` (threads, 1): intra-op threads of torch; 0 if no stage uses torch, which is then not imported.
    - ``cores`` (any): processors for the thread and for the OpenMP threads of its operators, which inherit them: the
      first operator that it runs creates these.
    - ``stream`` (none): its CUDA stream. The core hears of a step once the device has run all that the step queued.
    - ``depth`` (steps, 1): launched steps in flight, as in vLLM's async scheduling.
    - ``decide`` (``post``): like ``post``, and has the core decide at once, on this thread.
    - ``vocabulary`` (2**31): the model's tokens; a stage of someone's own that samples another id has failed.
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
        vocabulary: int = LARGEST_VOCABULARY,
    ) -> None:
        self.instance, self.name, self.cores = instance, name, tuple(cores)
        self.stages, self._stream = list(stages), stream or LaneStream()
        self._streams = type(self._stream) is not LaneStream  # a CPU's has nothing to wait for
        self.cpu_s = 0.0
        self._depth, self._flight = depth, deque[InFlightStep]()
        self._free_at = 0.0  # when the last step ended
        self._post, self._failed, self._timeline, self._threads = post, failed, timeline, threads
        self._decide, self._vocabulary = decide or post, vocabulary
        self._emulated = any(getattr(stage, "emulated", False) for stage in self.stages)
        self._launchable = [stage for stage in self.stages if isinstance(stage, LaunchableStage)]
        self._with_remarks: list[Any] = [stage for stage in self.stages if hasattr(stage, "remarks")]
        self._reporting: Step | None = None  # the step whose layers are reported
        self._reported = False
        for stage in self.stages:
            if isinstance(stage, LayerReporter):
                stage.on_layers = self._report_layers
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
                    self._apply(command)
                elif not (self._launchable and self._launch(command)):
                    self._reply(command, self._run_step(command))

    def _reply(self, step: Step, answer: Stepped) -> None:
        """Answer the core, which decides on this thread if nothing else is queued here.

        Not after a prefill or an encode: what follows from those, such as digests for peers, takes longer than waking
        another thread.
        """
        if not (step.prefills or step.encodes) and self._queue.empty():
            self._decide(answer)
        else:
            self._post(answer)

    def _next(self) -> Value | None:
        """Wait for the next command. Launched steps are finished once nothing more can be launched behind them."""
        while self._flight:
            if len(self._flight) < self._depth and not self._flight[0].pending.ready():
                try:
                    command = self._queue.get(timeout=POLL_S)
                except Empty:
                    continue
                if command is not None:
                    return command
                self._queue.put(None)  # stop only after the steps in flight
            self._finish()
        if self._queue.empty():
            self.cpu_s = time.thread_time()
        return self._queue.get()

    def _launch(self, step: Step) -> bool:
        """Launch a step of a single stage that can. Returns False, with nothing in flight any more, if it was not."""
        rows = [(stage, found) for stage in self.stages if (found := select_rows(step, stage.letters)) is not None]
        stage, only = rows[0] if len(rows) == 1 else (None, step)
        launching = next((each for each in self._launchable if each is stage), None)
        if launching is not None and not step.group:
            try:
                self._stream.begin()
                pending, since = launching.launch(only), time.perf_counter()
                self._flight.append(InFlightStep(step, pending, since, self._stream.mark()))
                return True
            except BaseException:  # run as any other step, it shows which request is at fault
                logger.exception("step %d of %s could not be launched", step.id, self.name)
        while self._flight:
            self._finish()
        return False

    def _finish(self) -> None:
        """Answer the oldest launched step. If it failed, run it and all behind it again, one after the other."""
        first = self._flight.popleft()
        try:
            found = first.pending.wait() or {}
            first.settle()
        except BaseException:
            logger.exception("step %d of %s failed after its launch", first.step.id, self.name)
            again = [first, *self._flight]
            self._flight.clear()
            for each in reversed(again):
                each.pending.drop()
            for each in again:
                self._reply(each.step, self._run_step(each.step))
        else:
            judged = self._judge(first.step, found)
            self._reply(first.step, self._make_answer(first.step, max(first.since, self._free_at), *judged))

    def _apply(self, command: Value) -> None:
        for stage in self.stages:
            try:
                if isinstance(command, Open):
                    stage.open(command)
                elif isinstance(command, Grow) and isinstance(stage, GrowableStage):
                    stage.grow(command)
                elif isinstance(command, Close):
                    stage.close(command.request)
            except BaseException:  # its rows fail in the next step, which is reported
                logger.exception("stage %s of %s could not %s", stage.letters, self.instance, type(command).__name__)

    def _report_layers(self, first: int, end: int) -> None:
        """Report layers that are written. Not while rows run again alone: the first report has been revoked."""
        step = self._reporting
        if step is not None:
            self._reported = True
            self._post(LayersWritten(step.id, self.name, (first, end)))

    def _run_step(self, step: Step) -> Stepped:
        started = time.perf_counter()
        self._reporting, self._reported = step, False
        try:
            found = self._forward(step)
        except BaseException:  # a stage that calls sys.exit() must not end the lane: its requests would wait for ever
            logger.exception(
                "step %d of %s failed; its requests run alone to find the one at fault", step.id, self.name
            )
            self._reporting = None
            if self._reported:
                self._post(LayersWritten(step.id, self.name, None))
            judged = self._run_alone(step)
        else:
            judged = self._judge(step, found)
        return self._make_answer(step, started, *judged)

    def _judge(self, step: Step, found: dict[str, Sampled]) -> tuple[dict[str, Sampled], dict[str, Failure]]:
        """Part what a stage returned for a step into good rows and failed ones.

        Nothing runs again: the stage has gone on with every row, and a second token would follow one that nobody saw.
        """
        try:
            return check_complete(step, found, self._vocabulary), {}
        except (TypeError, RuntimeError):
            logger.exception("step %d of %s returned what is no token", step.id, self.name)
        sampled: dict[str, Sampled] = {}
        failed: dict[str, Failure] = {}
        for rows in split_by_request(step):
            request = list_requests(rows)[0]
            own = {request: found[request]} if type(found) is dict and request in found else {}
            try:
                sampled.update(check_complete(rows, own if type(found) is dict else found, self._vocabulary))
            except (TypeError, RuntimeError) as error:
                failed[request] = self._describe_failure(rows, error)
        self._clean(failed)
        return sampled, failed

    def _describe_failure(self, rows: Step, error: BaseException) -> Failure:
        text = f"{_title(rows)} on {self.instance} raised {describe_error(error)}"
        return Failure("StageError", text, {"stage": _letters(rows)})

    def _make_answer(
        self, step: Step, started: float, sampled: dict[str, Sampled], failed: dict[str, Failure]
    ) -> Stepped:
        self._free_at = time.perf_counter()
        seconds = self._free_at - started
        if step.encodes or step.prefills:
            title, said = _describe_step(step)
        else:  # most steps
            title, said = "decode", {"media tokens": 0, "prefill tokens": 0, "decodes": len(step.decodes)}
        if self._emulated:  # must not be taken for computed
            title = f"emulated {title}"
        for stage in self._with_remarks:
            said.update(stage.remarks)
        self._timeline.add(self.instance, self.name, title, started, seconds, said)
        return Stepped(step.id, self.name, sampled, failed, seconds)

    def _forward(self, step: Step) -> dict[str, Sampled]:
        sampled: dict[str, Sampled] = {}
        if self._streams:
            self._stream.begin()
        try:
            for stage in self.stages:
                rows = select_rows(step, stage.letters)
                if rows is not None:
                    found = stage.forward(rows) or {}
                    sampled = check_sampled(sampled) | check_sampled(found) if sampled else found
        finally:
            if self._streams:
                self._stream.settle()  # after a failure too: its blocks soon belong to another request
        return sampled

    def _run_alone(self, step: Step) -> tuple[dict[str, Sampled], dict[str, Failure]]:
        """Run each request's rows alone: only those that fail alone have failed."""
        sampled: dict[str, Sampled] = {}
        failed: dict[str, Failure] = {}
        for rows in split_by_request(step):
            request = list_requests(rows)[0]
            try:
                sampled.update(check_complete(rows, self._forward(rows), self._vocabulary))
            except BaseException as error:
                failed[request] = self._describe_failure(rows, error)
        self._clean(failed)
        return sampled, failed

    def _clean(self, failed: Collection[str]) -> None:
        """Have stages clear what was left in blocks before the core hears of it: they soon belong to others."""
        for stage in self.stages:
            if isinstance(stage, CleanableStage):
                try:
                    self._stream.run(partial(stage.clean, failed))
                except BaseException:
                    logger.exception("stage %s of %s could not clean up", stage.letters, self.instance)


def check_sampled(sampled: dict[str, Sampled]) -> dict[str, Sampled]:
    """Check what a stage returned. Raises ``TypeError`` if it is not a dict of ``Sampled`` by request."""
    kinds = set(map(type, sampled.values())) if isinstance(sampled, dict) else {type(sampled)}
    if not all(issubclass(kind, Sampled) for kind in kinds):
        raise TypeError(f"Stage.forward() must return a dict of Sampled by request, got {sampled!r:.200}")
    return sampled


def check_tokens(sampled: dict[str, Sampled], vocabulary: int = LARGEST_VOCABULARY) -> dict[str, Sampled]:
    """Check that tokens are plain ids of the vocabulary. Raises ``TypeError`` if not."""
    tokens = [one.token for one in sampled.values()]
    if tokens and (set(map(type, tokens)) != {int} or not 0 <= min(tokens) <= max(tokens) < vocabulary):
        wrong = next(each for each in tokens if type(each) is not int or not 0 <= each < vocabulary)
        raise TypeError(
            f"Sampled.token must be an int from 0 to {vocabulary - 1}, got {show(wrong)}; give an id of the vocabulary"
        )
    return sampled


def check_complete(step: Step, sampled: dict[str, Sampled], vocabulary: int = LARGEST_VOCABULARY) -> dict[str, Sampled]:
    """Check that each row that needs a token has one. Raises ``RuntimeError`` if not, ``TypeError`` as above."""
    if not step.prefills and type(sampled) is dict and set(map(type, map(sampled.get, step.decodes))) == SAMPLED_ONLY:
        return check_tokens(sampled, vocabulary)  # most steps
    check_tokens(check_sampled(sampled), vocabulary)
    missing = {row.request for row in step.prefills if row.last}.union(step.decodes) - sampled.keys()
    if missing:
        raise RuntimeError(f"Stage.forward() returned no token for {', '.join(sorted(missing))}")
    return sampled


def select_rows(step: Step, letters: str) -> Step | None:
    """Select the rows of a step that a stage with these letters runs; None if there are none."""
    if step.decodes and not (step.encodes or step.prefills) and "D" in letters:
        return step  # most steps
    encodes = step.encodes if "E" in letters else ()
    prefills = step.prefills if "P" in letters else ()
    decodes = step.decodes if "D" in letters else ()
    return Step(step.id, step.lane, encodes, prefills, decodes, step.group) if encodes or prefills or decodes else None


def list_requests(step: Step) -> list[str]:
    """List the requests that have rows in a step, each once."""
    rows = [row.request for row in step.encodes] + [row.request for row in step.prefills]
    return list(dict.fromkeys(rows + list(step.decodes)))


def split_by_request(step: Step) -> list[Step]:
    """Split a step into one per request."""
    return [
        Step(
            step.id,
            step.lane,
            tuple(row for row in step.encodes if row.request == request),
            tuple(row for row in step.prefills if row.request == request),
            tuple(each for each in step.decodes if each == request),
            step.group,
        )
        for request in list_requests(step)
    ]


def _letters(step: Step) -> str:
    present = (("E", step.encodes), ("P", step.prefills), ("D", step.decodes))
    return "".join(letter for letter, rows in present if rows)


def _title(step: Step) -> str:
    names = {"E": "encode", "P": "prefill", "D": "decode"}
    return "+".join(names[letter] for letter in _letters(step))


def _describe_step(step: Step) -> tuple[str, dict[str, float]]:
    """Name a step and count its rows, for the timeline."""
    return _title(step), {
        "media tokens": sum(row.span.tokens for row in step.encodes),
        "prefill tokens": sum(row.length for row in step.prefills),
        "decodes": len(step.decodes),
    }
