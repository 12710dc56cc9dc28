"""FrontendHost: runs a pipeline's front end on its event loop, between the readers' streams and the instances."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

from trinity.connector import Connector
from trinity.core.fair_turns import FairJob
from trinity.core.frontend import Abort, Deliver, End, FrontendCore
from trinity.core.frontend.decode_moves import is_empty
from trinity.core.frontend.messages import MoveEnd, MoveRequest, Prepare, Prepared
from trinity.core.messages import Failure, PeerDown, PeerRemoved, PeerUp, Send, Submit, Tick, Value
from trinity.core.progress import PartProgress, StalledPart
from trinity.errors import ClosedError, ConfigError, MoveError, Overloaded, RequestError, TrinityError, describe_error
from trinity.metrics import Metrics
from trinity.pipeline.journal import RequestJournal
from trinity.pipeline.request_map import ServeOne
from trinity.pipeline.stream import Stream, make_error, make_late_failure, reduce_deadline
from trinity.preprocess.preparation_lanes import run_beside_loop, takes_long
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.preprocess.text.detokenizer import TextStream
from trinity.preprocess.text.grammars import TRIAL_PATIENCE_S
from trinity.remote.supervision.instance_client import InstanceClient
from trinity.request import Output, Request, check_request
from trinity.runtime.host import InstanceHandle
from trinity.traces.media import describe_media
from trinity.traces.trace import Trace

MOVED = ("pulled", "store")  # outcomes of transfers that have moved blocks
logger = logging.getLogger("trinity")
PipelineState = Literal["new", "starting", "running", "failed", "closed"]


def record_end(stream: Stream, metrics: Metrics, trace: Trace) -> None:
    """Count a request that has ended, and add it to the trace. What cannot be recorded is logged: its reader waits."""
    try:
        error = type(stream.error).__name__ if isinstance(stream.error, RequestError) else ""
        metrics.add(stream.output, stream.encode_only, error)
        if not stream.encode_only:  # a row is a prompt and an output, to plan on
            trace.append(make_trace_row(stream))
    except Exception:
        logger.exception("request %s has ended and could not be recorded", stream.request.request_id)


def record_refused(stream: Stream, error: RequestError, metrics: Metrics) -> None:
    """Count a request that never started."""
    metrics.add_refused(error, stream.encode_only)


def make_trace_row(stream: Stream) -> dict[str, Any]:
    """Make the trace row of a request that has ended."""
    output, work = stream.output, stream.processed.work if stream.processed else None
    media = work.media if work else ()
    return {
        "timestamp": max(0.0, stream.arrived_at * 1000),  # a wall clock may stand before 1970
        "request_id": output.request_id,
        "session": stream.request.session,
        "input_length": output.prompt_tokens,
        "text_length": output.prompt_tokens - output.media_tokens,
        "output_length": len(output.token_ids),
        "max_tokens": output.max_tokens,
        **describe_media(media),
        "finish_reason": output.finish_reason,
        "ttft_s": output.ttft_s,
        "itl_s": output.itl_s,
        "latency_s": output.latency_s,
        "spans": output.spans,
        "emulated": output.emulated,
    }


class TransferWays:
    """Ways that blocks have gone: kind of block, hosts, and transport. Each new one is a line at INFO."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str, str, str]] = set()

    def note(self, transfers: Iterable[Mapping[str, Any]], peers: Mapping[str, PeerUp]) -> None:
        """Note what moved for a request that has ended. ``peers``: instances by name; those on no host say nothing."""
        for each in transfers:
            source, target = (peers.get(str(each.get(end))) for end in ("source", "target"))
            if each.get("outcome") not in MOVED or source is None or target is None:
                continue
            way = (str(each.get("kind")), source.host, target.host, str(each.get("scheme")))
            if way not in self._known and source.host and target.host:
                self._known.add(way)
                _log_way(*way)


def _log_way(kind: str, source: str, target: str, scheme: str) -> None:
    where = f"stay on host {source}, moved" if source == target else f"go from host {source} to host {target}"
    logger.info("blocks of kind %s %s by %s", kind, where, scheme)


def preparing_part(request: Request, processor: RequestProcessor) -> tuple[str, float]:
    """Name the part that prepares a request, and the seconds that this may take beyond what a step may."""
    long = _has_parts(request.messages) or takes_long(request)
    allowed_s = processor.limits.preprocess_timeout_s if long else 0.0
    if request.sampling.structured is not None:
        return "preparing forms", TRIAL_PATIENCE_S + allowed_s
    return "preparing media" if long else "preparing text", allowed_s


def _has_parts(messages: Sequence[object] | None) -> bool:
    """Tell whether a chat has parts other than text. Its form is not checked yet."""
    parts = [part for each in _listed(messages) if isinstance(each, Mapping) for part in _listed(each.get("content"))]
    kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
    return any(not isinstance(kind, str) or kind != "text" for kind in kinds)


def _listed(content: object) -> Sequence[object]:
    return content if isinstance(content, (list, tuple)) else ()


class FrontendHost:
    """Passes events to a ``FrontendCore`` and carries out its commands; the network of the instances of this process.

    - ``core``: decides.
    - ``connector``: moves blocks between the instances.
    - ``metrics``, ``trace``: take every request that has ended.
    - ``streams``: of the requests that are served, by request id.
    - ``reached``: instances within reach, by name.
    - ``journal``: tells a buddy of the requests, where there is one.
    - ``processor`` (None): there once the pipeline has loaded it.
    - ``preparing``, ``departures``: requests that are being processed, and those that have left this or the front end.

    All is called on the loop's thread, but ``send_to_peer``.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, core: FrontendCore, connector: Connector, metrics: Metrics, trace: Trace) -> None:
        self.core, self.connector, self._metrics, self._trace = core, connector, metrics, trace
        self.streams: dict[str, Stream] = {}
        self.reached: dict[str, InstanceHandle] = {}
        self.processor: RequestProcessor | None = None
        self.progress = PartProgress(time.monotonic)
        self._lanes: set[str] = set()
        self.journal = RequestJournal()
        self.opened: PipelineState = "new"
        self.preparing = self.departures = 0
        self._waiting: dict[str, str] = {}  # client of each request that has no token yet, by request id
        self._waiting_of: Counter[str] = Counter()  # the same, by client
        self._prepared: dict[str, FairJob] = {}  # inputs that are not yet submitted, by request id
        self._held: dict[str, FairJob] = {}  # inputs that the front end has, by request id
        self._preparing_again: set[asyncio.Task[None]] = set()
        self._events: deque[Value] = deque()
        self._carrying = self._emptying = False
        self._moves = Moves()
        self._broken: BaseException | None = None
        self._ways = TransferWays()
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # clock time at which the timer is, so that it is set anew only for another
        self._departed = asyncio.Event()

    @property
    def state(self) -> PipelineState:
        """State of the pipeline: "failed" once an instance's thread has failed, until it is closed."""
        return "failed" if self._broken is not None and self.opened == "running" else self.opened

    def announce(self) -> None:
        """Make the instances within reach known to the front end."""
        for each in self.reached.values():
            self.core.handle(each.announcement(), time.monotonic())

    @property
    def multimodal(self) -> bool:
        """True where the model takes media."""
        return self.processor is not None and self.processor.multimodal

    # ---------------------------------------------------------------- requests come in

    async def submit(self, stream: Stream) -> None:
        """Check, process (on a thread) and submit a stream's request."""
        self.check_open()
        try:
            request = stream.request = await run_beside_loop(check_request, stream.request)
            self.check_open()
            self._check_room(request)
        except RequestError as error:
            record_refused(stream, error, self._metrics)
            raise
        self.streams[request.request_id] = stream
        self._begin_wait(request)
        try:
            processed = await self._prepare(stream)
            if processed is None:
                stream.end(End(request.request_id, "deadline", make_late_failure(request)))
                return
            self.post(Submit(processed.work, processed.inputs, input_bytes=processed.input_bytes))
            self.hold_inputs(request)
        except BaseException:
            self._end_wait(request.request_id)
            raise
        finally:
            if (job := self._prepared.pop(request.request_id, None)) is not None:
                self._let_go(job)

    def hold_inputs(self, request: Request) -> None:
        """Count the inputs that the front end has of a request until an encoder has had them."""
        entry = self.core.entries.get(request.request_id)
        if self.processor is not None and entry is not None and entry.input_bytes and entry.id not in self._held:
            self._held[entry.id] = self.processor.room.hold(entry.input_bytes, request.client)

    def _let_go(self, job: FairJob) -> None:
        assert self.processor is not None, "it prepared them"
        self.processor.room.let_go(job)

    def _let_go_freed(self) -> None:
        """Let go of what the front end has no more."""
        entries = self.core.entries
        for request_id in [each for each in self._held if each not in entries or not entries[each].input_bytes]:
            self._let_go(self._held.pop(request_id))

    def check_open(self) -> None:
        """Raise ``ClosedError`` unless requests are served, ``ConfigError`` on another event loop."""
        if self._broken is not None:
            raise ClosedError(f"the pipeline failed ({self._broken}); close it and make a new one") from self._broken
        if self.opened != "running":
            hint = "make a new one" if self.opened == "closed" else "use it inside a with block, or call its start()"
            raise ClosedError(f"the pipeline is {'closed' if self.opened == 'closed' else 'not started'}; {hint}")
        if asyncio.get_running_loop() is not self.loop:
            raise ConfigError("the pipeline runs on another event loop; use it there, or make a new one on this loop")

    def _check_room(self, request: Request) -> None:
        if request.request_id in self.streams:
            raise RequestError(f"request_id {request.request_id!r} is in use; give another", request.request_id)
        waiting = self.core.waiting + self.preparing
        if waiting >= self.core.options.max_waiting:
            raise Overloaded(f"{waiting} requests wait already; try later or raise max_waiting", request.request_id)
        own = self._waiting_of[request.client] if request.client else 0
        left = self.core.options.max_waiting - waiting
        if own >= left:  # so whatever one client sends, there is room for another one's
            text = f"{own} requests of this client wait already, and {left} more may wait"
            raise Overloaded(f"{text}; try later or raise max_waiting", request.request_id)

    def _begin_wait(self, request: Request) -> None:
        """Count a request as one of its client's that wait, until its first token comes or it ends."""
        self._waiting[request.request_id] = request.client
        self._waiting_of[request.client] += 1

    def _end_wait(self, request_id: str) -> None:
        """Count a request no longer among those that wait; it may be called again."""
        client = self._waiting.pop(request_id, None)
        if client is not None:
            self._waiting_of[client] -= 1
            if not self._waiting_of[client]:
                del self._waiting_of[client]

    async def _prepare(self, stream: Stream) -> ProcessedRequest | None:
        """Process a request, with what is left of its deadline; None if that passed meanwhile."""
        request, processor = stream.request, self.processor
        assert processor is not None
        self.preparing += 1
        try:
            async with asyncio.timeout(request.deadline_s) as limit:
                await self.until(lambda: request.request_id not in self.core.entries)
                part, allowed_s = preparing_part(request, processor)
                with self.progress.working(part, allowed_s):
                    processed = await processor.aprocess(request)
                if processed.input_bytes:
                    self._prepared[request.request_id] = processor.room.hold(processed.input_bytes, request.client)
            self.check_open()
            processed = stream.begin(
                processed, lambda stop: TextStream(processor.tokenizer, stop, processed.work.prompt)
            )
            await self.journal.note(stream, reduce_deadline(processed, time.monotonic() - stream.arrived))
        except TimeoutError:
            if limit.expired():
                return None
            raise
        except BaseException as error:
            self._refuse(stream, error)
            raise
        finally:
            self.preparing -= 1
            self._note_departure()
        return reduce_deadline(processed, time.monotonic() - stream.arrived)

    def find_stalled(self, after_s: float) -> list[StalledPart]:
        """List the parts that make no progress: what prepares requests, and lanes of instances, by their reports."""
        found: dict[str, Hashable] = {
            f"{load.name} {lane}": (load.epoch, step)
            for load in self.core.router.loads.values()
            for lane, step in load.running.items()
        }
        predicted: dict[str, float] = {}
        for name, each in self.reached.items():
            for lane, (step, predicted[f"{name} {lane}"]) in each.lane_steps().items():
                found.setdefault(f"{name} {lane}", step)
        for gone in self._lanes - found.keys():
            self.progress.forget(gone)
        self._lanes = set(found)
        for part, oldest in found.items():
            self.progress.observe(part, oldest, predicted.get(part, 0.0))
        for part, (prepares, allowed_s) in ({} if self.processor is None else self.processor.lanes).items():
            self.progress.observe(part, prepares.ended, allowed_s)
        return self.progress.find_stalled(after_s)

    def _refuse(self, stream: Stream, error: BaseException) -> None:
        """Count a request that never started, by its own fault or because its reader or the pipeline has gone."""
        if isinstance(error, RequestError):
            self.streams.pop(stream.request.request_id, None)
            record_refused(stream, error, self._metrics)
        else:
            stream.end(End(stream.request.request_id, "cancelled"))

    def on_end(self, stream: Stream) -> None:
        """Count a request that has ended, and add it to the trace. Its inputs are prepared no further."""
        for task in self._preparing_again:
            if task.get_name() == stream.request.request_id:
                task.cancel()
        self.streams.pop(stream.request.request_id, None)
        self._end_wait(stream.request.request_id)
        self.journal.end(stream)
        record_end(stream, self._metrics, self._trace)
        self._ways.note(stream.output.transfers, self.core.router.peers)

    def watch_logits(self, observe: Callable[..., None] | None) -> Callable[..., None] | None:
        """Call ``observe`` with the id of each request in place of its life's name."""
        if observe is None:
            return None
        return lambda name, *seen: observe(self.core.reader_of(name), *seen)

    def find_place(self, request_id: str) -> str:
        """Name the instance that has a request, as far as the front end knows; "" where none has."""
        entry = self.core.entries.get(request_id)
        return "" if entry is None else entry.holder

    async def move(self, request_id: str, to: str, within_s: float) -> None:
        """Have a request that decodes go on at another instance. Raises what ``Stream.move`` does."""
        self.check_open()
        await self._moves.ask(self.post, request_id, to, within_s)

    # ---------------------------------------------------------------- events and commands

    def post(self, event: Value) -> None:
        """Pass an event to the front end and carry out its commands.

        One that comes meanwhile, as of a reader whose stop string a token ends, is handled behind the last command:
        what it commands must not overtake them.
        """
        self._events.append(event)
        if self._carrying:
            return
        self._carrying = True
        try:
            while self._events:
                self._carry_out(self._events.popleft())
        finally:
            self._carrying = False

    def _carry_out(self, event: Value) -> None:
        before, held, now = len(self.core.entries), self.core.inputs.waiting_bytes, time.monotonic()
        for command in self.core.handle(event, now):
            if isinstance(command, Deliver):  # most
                if not command.index:
                    self._end_wait(command.request)
                stream = self.streams.get(command.request)
                if stream is not None:
                    stream.deliver(command, now)
            else:
                self._carry_out_other(command)
        if isinstance(event, PeerRemoved):
            self.reached.pop(event.name, None)
        self._arm()
        if self.core.inputs.waiting_bytes < held:
            self._let_go_freed()
        if len(self.core.entries) < before:
            self._note_departure()
        elif self._emptying:
            self._departed.set()

    def _carry_out_other(self, command: Value) -> None:
        if isinstance(command, End):
            stream = self.streams.get(command.request)
            if stream is not None:
                stream.end(command)
        elif isinstance(command, Send):
            self.send_to_peer(command.to, command.message)
        elif isinstance(command, Prepare):
            self._start_to_prepare(command.request, command.life)
        elif isinstance(command, MoveEnd):
            self._moves.answer(command)

    def _start_to_prepare(self, request_id: str, life: str) -> None:
        """Make the inputs of a request once more, of which none are left, and send it on with them."""
        stream, processor = self.streams.get(request_id), self.processor
        if stream is not None and processor is not None:  # else its reader has left meanwhile
            task = asyncio.create_task(self._prepare_again(stream.request, life, processor), name=request_id)
            self._preparing_again.add(task)
            task.add_done_callback(self._preparing_again.discard)
            task.add_done_callback(lambda _: self._note_departure())

    async def _prepare_again(self, request: Request, life: str, processor: RequestProcessor) -> None:
        with self.progress.working(*preparing_part(request, processor)):
            prepared = await prepare_again(request, life, processor)
        self.post(prepared)
        self.hold_inputs(request)

    def _note_departure(self) -> None:
        self.departures += 1
        self._departed.set()

    def _arm(self) -> None:
        due = self.core.next_timer()
        if due == self._due:
            return
        self.cancel_timer()
        self._due = due
        if due is not None:
            self._timer = self.loop.call_later(max(0.0, due - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._due = None
        self.post(Tick())

    def cancel_timer(self) -> None:
        self._due = None
        if self._timer is not None:
            self._timer.cancel()

    def send_to_peer(self, name: str, message: Value) -> None:
        """Pass a message on; one for an instance that was removed is dropped."""
        handle = self.reached.get(name)
        if handle is not None:
            handle.post(message)

    def send_to_frontend(self, messages: list[Value]) -> None:
        """Pass the instances' messages to the front end."""
        for message in messages:
            self.post(message)

    # ---------------------------------------------------------------- instances that fail

    def on_lost(self, name: str, why: str, *, planned: bool) -> None:
        """Send the requests of an instance whose life has ended elsewhere, or end them with an error."""
        if planned:
            logger.info("instance %s was ended: %s", name, why)
        else:
            logger.error("instance %s was lost: %s", name, why)
        self.post(PeerDown(name, why, planned))

    def on_back(self, member: InstanceClient) -> None:
        """Announce an instance whose process runs again."""
        self.reached[member.name] = member
        self.post(member.announcement())

    def report_crash(self, name: str, error: BaseException) -> None:
        """End every request with an error, refuse new ones and stop all threads, as an instance's thread failed."""
        if self._broken is not None:
            return
        self._broken, said = error, describe_error(error)
        for host in self.reached.values():
            host.stop(at_once=True)
        for stream in list(self.streams.values()):
            if stream.processed is not None:
                stream.end(End(stream.request.request_id, "error"))
                text = f"instance {name} failed ({said}); close the pipeline and make a new one"
                stream.fail(RequestError(text, stream.request.request_id), error)
        self._moves.give_up(f"instance {name} failed ({said})")
        self._departed.set()

    # ---------------------------------------------------------------- waits and ends

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until ``reached()``, which is checked whenever a request has left the front end or its processing."""
        while not reached() and self._broken is None:
            self._departed.clear()
            await self._departed.wait()

    async def wait_idle(self) -> None:
        """Wait until no instance has a request."""
        await self.until(lambda: not self.core.entries and not self._preparing_again)

    async def wait_empty(self, name: str, most_s: float) -> bool:
        """Wait until no request is at an instance, as far as is known; False where ``most_s`` passed."""
        self._emptying = True
        try:
            async with asyncio.timeout(most_s):
                await self.until(lambda: is_empty(self.core.entries, name))
            return True
        except TimeoutError:
            return False
        finally:
            self._emptying = False

    async def wait_room(self) -> None:
        """Wait until a request would not be refused for the number of those that wait."""
        await self.until(lambda: self.core.waiting + self.preparing < self.core.options.max_waiting)

    async def serve_in_turn(self, serve: ServeOne, request: Request) -> Output:
        """Serve a request once there is room: it is refused only if it is too large by itself."""
        while True:
            await self.wait_room()
            seen = self.departures
            try:
                return await serve(request)
            except Overloaded:
                if not await self.wait_departure(seen):
                    raise

    async def wait_departure(self, since: int) -> bool:
        """Wait until ``departures`` is no longer ``since``; False where no request is left that could depart."""
        if self.departures == since and not (self.core.entries or self.preparing):
            return False
        await self.until(lambda: self.departures != since)
        return True

    def end_all(self) -> None:
        """End every request, as the pipeline closes."""
        for task in self._preparing_again:
            task.cancel()
        for stream in list(self.streams.values()):
            stream.close()
            self.post(Abort(stream.request.request_id, "cancelled"))


class Moves:
    """Moves of decodes that readers have asked for, each until it is answered or its time is up."""

    def __init__(self) -> None:
        self._answers: dict[str, asyncio.Future[Failure | None]] = {}

    async def ask(self, post: Callable[[Value], None], request_id: str, to: str, within_s: float) -> None:
        """Have the front end move a request, and wait so long (seconds). Raises ``MoveError``."""
        if request_id in self._answers:
            raise MoveError("the request is moving just now", request_id, "moving")
        answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                post(MoveRequest(request_id, to))
                failure = await answer
        except TimeoutError:
            text = f"no answer within {within_s:g} s: Stream.place says where the request is once it is known"
            raise MoveError(text, request_id, "late") from None
        finally:
            self._answers.pop(request_id, None)
        if failure is not None:
            raise make_error(failure, request_id)

    def answer(self, end: MoveEnd) -> None:
        """Pass the answer to whoever waits for it still."""
        answer = self._answers.get(end.request)
        if answer is not None and not answer.done():
            answer.set_result(end.failure)

    def give_up(self, why: str) -> None:
        """End all: nobody answers any more."""
        for request_id in self._answers:
            self.answer(MoveEnd(request_id, Failure("MoveError", why, {"reason": "ended"})))


async def prepare_again(request: Request, life: str, processor: RequestProcessor) -> Prepared:
    """Prepare a request once more for this life of it, off the loop: its media's inputs went with an instance.

    Only its inputs are taken: its tokens and its seed stay as they are. A file or an address may have other
    content by now: ``Prepared.contents`` tells. Raises nothing.
    """
    try:
        # one that was adopted comes from a journal
        made = await processor.aprocess(await run_beside_loop(check_request, request))
    except TrinityError as error:
        kind = type(error).__name__ if isinstance(error, RequestError) else "RequestError"
        text = f"an instance was lost with the request, and its media cannot be read once more: {error}"
        return Prepared(life, failure=Failure(kind, text))
    contents = tuple(span.content for span in made.work.media)
    return Prepared(life, made.inputs, contents, input_bytes=made.input_bytes)
