"""Lane: runs an instance's stages on a thread, one step at a time, and checks what a stage returns for its rows."""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from msgspec.structs import replace

from trinity.core.messages import (
    UNFIT,
    Close,
    Encode,
    Failure,
    Grow,
    LayersWritten,
    Open,
    Sampled,
    Step,
    Stepped,
    Value,
)
from trinity.core.scheduler import units
from trinity.errors import RequestError, StageError, TrinityError, describe_error
from trinity.errors.arguments import show
from trinity.runtime.cpu_affinity import pin_thread
from trinity.runtime.cuda_stream import LaneStream
from trinity.stage_kinds import order_letters, roles_of, stage_of
from trinity.stages.base import (
    CleanableStage,
    FailedSample,
    GrowableStage,
    LaunchableStage,
    LayerReporter,
    NoTokenDrawn,
    PendingStep,
    Stage,
)
from trinity.timeline import Timeline

SAMPLED_ONLY = {Sampled}
LARGEST_VOCABULARY = 1 << 31


_OF_VALUES = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
# torch raises a bare RuntimeError for shapes that do not fit, and for all else as well.
_SHAPES = re.compile(r"shape|size|dimension|\bdim\b|view|broadcast|out of (range|bounds)|index|numel|elements")
_DEVICES = re.compile(r"cuda|cublas|cudnn|nccl|\bhip|xpu|memory|alloc|device|driver|illegal|dnn|mmap", re.IGNORECASE)
logger = logging.getLogger("trinity")
POLL_S = 0.0002  # between two polls of a launched step, while another may still be launched behind it


def is_of_values(error: BaseException) -> bool:
    """True for an error of shapes or values, which the inputs of a step may have brought about.

    Not of memory, devices and files, and no fault of this library's own code: those say nothing of the inputs.
    """
    if isinstance(error, (TrinityError, OSError, MemoryError)):
        return False
    if isinstance(error, (AssertionError, LookupError, TypeError)) and _raised_here(error):
        return False
    said = describe_error(error)
    plain = type(error) is RuntimeError and _SHAPES.search(said) is not None
    return (plain or isinstance(error, _OF_VALUES)) and _DEVICES.search(said) is None


def _raised_here(error: BaseException) -> bool:
    """True where the innermost frame of Python code is one of this library."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__", "")).partition(".")[0] == "trinity"


def describe_unfit(encode: Encode, error: BaseException) -> str:
    """Describe a media item that an encoder cannot take, with what that raised."""
    span = encode.span
    size = f" of {span.width} x {span.height} pixels" if span.width and span.height else ""
    return (
        f"the model's encoder cannot take the {span.kind}{size} ({describe_error(error, 200)}); give it in another size"
    )


class NoTokenLeft(RequestError):
    """A request's own rules left it no token (``FailedSample.refused``): no stage is at fault."""


def check_sampled(sampled: dict[str, Sampled]) -> dict[str, Sampled]:
    """Check what a stage returned. Raises ``TypeError`` if it is not a dict of ``Sampled`` by request.

    Raises ``StageError`` for a ``FailedSample``, which says why, or ``NoTokenLeft`` for one that is refused.
    """
    kinds = set(map(type, sampled.values())) if isinstance(sampled, dict) else {type(sampled)}
    if not all(issubclass(kind, Sampled) for kind in kinds):
        raise TypeError(f"Stage.forward() must return a dict of Sampled by request, got {show(sampled)}")
    if FailedSample in kinds:
        failed = next(one for one in sampled.values() if isinstance(one, FailedSample))
        raise (NoTokenLeft if failed.refused else StageError)(failed.why)
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
    does = roles_of(letters)
    if step.decodes and not (step.encodes or step.prefills) and does.decodes:
        return step  # most steps
    encodes = step.encodes if does.encodes else ()
    prefills = step.prefills if does.prefills else ()
    decodes = step.decodes if does.decodes else ()
    return Step(step.id, step.lane, encodes, prefills, decodes, step.group) if encodes or prefills or decodes else None


def leave_out(step: Step, failed: Collection[str]) -> Step | None:
    """Leave out the rows of requests that have ``failed``; None if no others are there."""
    encodes = tuple(row for row in step.encodes if row.request not in failed)
    prefills = tuple(row for row in step.prefills if row.request not in failed)
    decodes = tuple(each for each in step.decodes if each not in failed)
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


def split_by_item(step: Step) -> list[Step]:
    """Split a request's step into one for each media item that is encoded, and one of its other rows."""
    parts = [Step(step.id, step.lane, (row,), (), (), step.group) for row in step.encodes]
    if step.prefills or step.decodes:
        parts.append(Step(step.id, step.lane, (), step.prefills, step.decodes, step.group))
    return parts


def name_letters(step: Step) -> str:
    """Name the letters of the stages that a step's rows need."""
    return order_letters(units(step))


def name_stages(step: Step) -> str:
    """Name the stages that a step's rows need, as in "prefill+decode"."""
    return "+".join(stage_of(letter).name for letter in name_letters(step))


def describe_rows(step: Step) -> tuple[str, dict[str, float]]:
    """Name a step and count its rows, for the timeline."""
    return name_stages(step), {
        "media tokens": sum(row.span.tokens for row in step.encodes),
        "prefill tokens": sum(row.length for row in step.prefills),
        "decodes": len(step.decodes),
    }


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
        self._depth, self._flight = depth, deque[InFlightStep]()
        self._free_at = 0.0  # when the last step ended
        self._post, self._failed, self._timeline, self._threads = post, failed, timeline, threads
        self._decide, self._vocabulary = decide or post, vocabulary
        self._emulated = any(getattr(stage, "emulated", False) for stage in self.stages)
        self._launchable = [stage for stage in self.stages if isinstance(stage, LaunchableStage)]
        self._with_remarks: list[Any] = [stage for stage in self.stages if hasattr(stage, "remarks")]
        self._reporting: Step | None = None  # the step whose layers are reported
        self._reported = False
        self._suspicious = False  # rows of this step may have left something in blocks
        for stage in self.stages:
            if isinstance(stage, LayerReporter):
                stage.on_layers = self._report_layers
        self._queue: SimpleQueue[Value | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"trinity-{instance}-{name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def post(self, command: Value) -> None:
        self._queue.put(command)

    def stop(self) -> None:
        """End the thread after the commands that wait."""
        self._queue.put(None)

    def join(self) -> None:
        if self.thread.ident is not None:
            self.thread.join()
        for each in (self.stages, self._launchable, self._with_remarks):
            each.clear()  # stages hold weights and pools

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
            except BaseException:  # run as any other step, it shows which request is at fault
                logger.exception("step %d of %s could not be launched", step.id, self.name)
            else:
                self._flight.append(InFlightStep(step, pending, since, self._mark()))
                return True
        while self._flight:
            self._finish()
        return False

    def _mark(self) -> Callable[[], None]:
        """Mark the end of a launched step. Where even that fails, the step has: it is told when it is waited for."""
        try:
            return self._stream.mark()
        except BaseException as error:
            return partial(_raise, error)

    def _finish(self) -> None:
        """Answer the oldest launched step. If it failed, undo it and all behind it, and run them one after the other.

        The device comes first: once ``wait`` has returned, nothing can fail any more.
        """
        first = self._flight.popleft()
        try:
            first.settle()
            found = first.pending.wait()
        except BaseException as error:
            shown = not isinstance(error, NoTokenDrawn)  # which may be of a request's own bans: run again, it is told
            level = logging.ERROR if shown else logging.INFO
            logger.log(level, "step %d of %s failed after its launch", first.step.id, self.name, exc_info=shown)
            again = [first, *self._flight]
            self._flight.clear()
            refused = self._undo(again)
            for each in again:
                self._reply(each.step, self._run_step(each.step) if refused is None else self._give_up(each, refused))
        else:
            sampled, failed = self._judge(first.step, found)
            if failed:
                for each in self._flight:  # no step may write while blocks are cleaned
                    with suppress(Exception):
                        each.settle()
                self._clean(failed)
            self._reply(first.step, self._make_answer(first.step, max(first.since, self._free_at), sampled, failed))

    def _undo(self, steps: Sequence[InFlightStep]) -> BaseException | None:
        """Drop launched steps, the youngest first; return what one that cannot be undone raises.

        None of them may run again then: a token that was sampled already would be sampled twice.
        """
        refused: BaseException | None = None
        for each in reversed(steps):
            try:
                each.pending.drop()
            except BaseException as error:
                logger.exception("step %d of %s cannot be undone: its requests fail", each.step.id, self.name)
                refused = refused or error
        return refused

    def _give_up(self, launched: InFlightStep, error: BaseException) -> Stepped:
        """Answer that every row of a step has failed."""
        failed = self._fail_all(launched.step, error)
        self._clean(failed)
        return self._make_answer(launched.step, launched.since, {}, failed)

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
        """Run a step's stages one after the other. A stage that returned has gone on, and never runs again."""
        started = time.perf_counter()
        sampled: dict[str, Sampled] = {}
        failed: dict[str, Failure] = {}
        self._reporting, self._reported, self._suspicious = step, False, False
        rows: Step | None = None
        try:
            if self._streams:
                self._stream.begin()
            for stage in self.stages:
                own = select_rows(step, stage.letters)
                own = leave_out(own, failed) if failed and own is not None else own
                if own is not None:
                    good, bad = self._run_stage(stage, rows := own)
                    sampled = {**sampled, **good} if sampled else good
                    failed.update(bad)
            if rows is not step:  # of several stages, or none: has each row found one?
                failed.update(self._judge(leave_out(step, failed) or Step(step.id, step.lane), sampled)[1])
            if self._streams:
                self._stream.settle()
        except BaseException as error:  # the device's: nobody knows what it has written
            logger.exception("step %d of %s has failed on its device", step.id, self.name)
            self._revoke_layers(step)
            sampled, failed, self._suspicious = {}, self._fail_all(step, error), True
        if self._suspicious:
            self._clean(failed)
            sampled = {request: one for request, one in sampled.items() if request not in failed}
        return self._make_answer(step, started, sampled, failed)

    def _run_stage(self, stage: Stage, rows: Step) -> tuple[dict[str, Sampled], dict[str, Failure]]:
        """Run a stage's rows, after a failure each request's alone; return the good ones and the failed ones."""
        try:
            found = stage.forward(rows)
        except BaseException:  # a stage that calls sys.exit() must not end the lane: its requests would wait for ever
            logger.exception(
                "step %d of %s failed; its requests run alone to find the one at fault", rows.id, self.name
            )
            self._revoke_layers(rows)
            return self._run_alone(stage, rows)
        return self._judge(rows, found)

    def _revoke_layers(self, step: Step) -> None:
        """Take back what was reported of a step; nothing more of it is."""
        self._reporting = None
        if self._reported:
            self._reported = False
            self._post(LayersWritten(step.id, self.name, None))

    def _judge(self, step: Step, found: Any) -> tuple[dict[str, Sampled], dict[str, Failure]]:
        """Part what a stage returned for a step into good rows and failed ones.

        Nothing runs again: the stage has gone on with every row, and a second token would follow one that nobody saw.
        """
        found = {} if found is None else found
        try:
            return check_complete(step, found, self._vocabulary), {}
        except Exception as error:  # a foreign object may raise anything when it is looked at
            shown = not isinstance(error, NoTokenLeft)
            level = logging.ERROR if shown else logging.INFO
            logger.log(level, "step %d of %s has no token for some row", step.id, self.name, exc_info=shown)
        self._suspicious = True
        sampled: dict[str, Sampled] = {}
        failed: dict[str, Failure] = {}
        for rows in split_by_request(step):
            request = list_requests(rows)[0]
            try:
                own = {each: found[each] for each in (request,) if each in found} if isinstance(found, dict) else found
                sampled.update(check_complete(rows, own, self._vocabulary))
            except Exception as error:
                failed[request] = self._describe_failure(rows, error)
        return sampled, failed

    def _fail_all(self, step: Step, error: BaseException) -> dict[str, Failure]:
        return {list_requests(rows)[0]: self._describe_failure(rows, error) for rows in split_by_request(step)}

    def _describe_failure(self, rows: Step, error: BaseException) -> Failure:
        if isinstance(error, NoTokenLeft):
            return Failure("RequestError", str(error))
        text = f"{name_stages(rows)} on {self.instance} raised {describe_error(error)}"
        return Failure("StageError", text, {"stage": name_letters(rows)})

    def _make_answer(
        self, step: Step, started: float, sampled: dict[str, Sampled], failed: dict[str, Failure]
    ) -> Stepped:
        self._free_at = time.perf_counter()
        seconds = self._free_at - started
        if step.encodes or step.prefills:
            title, said = describe_rows(step)
        else:  # most steps
            title, said = "decode", {"media tokens": 0, "prefill tokens": 0, "decodes": len(step.decodes)}
        if self._emulated:  # must not be taken for computed
            title = f"emulated {title}"
        for stage in self._with_remarks:
            said.update(stage.remarks)
        self._timeline.add(self.instance, self.name, title, started, seconds, said)
        return Stepped(step.id, self.name, sampled, failed, seconds)

    def _run_alone(self, stage: Stage, step: Step) -> tuple[dict[str, Sampled], dict[str, Failure]]:
        """Run each request's rows alone, and of those each media item: only what fails alone has failed."""
        self._suspicious = True
        sampled: dict[str, Sampled] = {}
        failed: dict[str, Failure] = {}
        for rows in split_by_request(step):
            request = list_requests(rows)[0]
            for part in split_by_item(rows):
                encoded = bool(part.encodes)
                try:
                    found = self._stream.run(partial(stage.forward, part))
                    encoded = False
                    sampled.update(check_complete(part, {} if found is None else found, self._vocabulary))
                except BaseException as error:
                    why = self._describe_failure(part, error)
                    if encoded and is_of_values(error):
                        why = replace(why, fields={**why.fields, UNFIT: describe_unfit(part.encodes[0], error)})
                    failed[request] = why
                    break
        return sampled, failed

    def _clean(self, failed: Collection[str]) -> None:
        """Have stages clear what was left in blocks before the core hears of it: they soon belong to others."""
        for stage in self.stages:
            if isinstance(stage, CleanableStage):
                try:
                    self._stream.run(partial(stage.clean, failed))
                except BaseException:
                    logger.exception("stage %s of %s could not clean up", stage.letters, self.instance)


def _raise(error: BaseException) -> None:
    raise error
