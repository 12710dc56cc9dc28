"""Pipeline: serves one model on instances under a placement, inside the user's own asyncio program."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from trinity.adapt.auto import resolve_auto_placement
from trinity.connector import Medium, make_connector
from trinity.core.frontend import MAX_WAITING_BYTES, Abort, Deliver, End, FrontendCore
from trinity.core.messages import PeerDown, PeerLoad, Send, Submit, Tick, Value
from trinity.core.routing import RoutingPolicy, routing_policy
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.costs.budgets import StepBudgets
from trinity.costs.step_cost import CostModel, CostTables
from trinity.deploy import InstanceOptions, choose_rules_and_routing, make_instances
from trinity.emulation.model import EmulatedModel
from trinity.errors import ClosedError, ConfigError, Overloaded, RequestError
from trinity.errors.arguments import Whole, check_arguments
from trinity.instance import Instance, name_instances
from trinity.memory.cache_config import CacheConfig
from trinity.memory.digests import Verify
from trinity.metrics import Metrics
from trinity.placement import Placement
from trinity.planner import Plan
from trinity.preprocess.detokenizer import TextStream
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.remote import instance_processes, supervisor
from trinity.remote.instance_client import InstanceClient
from trinity.remote.supervisor_messages import InstanceHealth
from trinity.request import Output, Request, check_request
from trinity.runtime import loader
from trinity.runtime.host import InstanceHandle, InstanceHost
from trinity.runtime.shielded_wait import run_to_end, wait_shielded
from trinity.stream import Stream, make_late_failure, record_end, reduce_deadline
from trinity.timeline import Timeline
from trinity.traces.trace import SLO, Trace

logger = logging.getLogger("trinity")
TRACE_ROWS = 1_000_000  # a pipeline keeps the rows of its last requests, to bound memory


@check_arguments
class Pipeline:
    """Encode, prefill and decode of one model, on instances placed as you say.

    - ``model``: a directory in transformers' format, or ``EmulatedModel`` (stages wait in place of computing).
    - ``placement`` ("EPD"): "1EP1D", "2ED1P", "1E3P4D", ..., a ``Plan`` (its best placement), a list of ``Instance``,
      or "auto": ``instances`` of EPD, recorded traffic, and a plan of it in ``pipe.auto``, which is not applied.
    - ``instances`` (count, None): how many to start with under "auto".
    - ``hosting`` ("thread"): "thread" runs instances in this process, "process" each in a process of its own.
    - ``processes`` (None): ``ProcessConfig``, the shared secret and the longest silence of such a process.
    - ``connector`` (None): transport of blocks, a name, a ``Transport``, a ``Connector``, or these by kind of block,
      such as ``{"image": "shm", "kv": "nixl"}``; "inproc" for threads and "auto" for processes.
    - ``verify`` (None): blocks compared with the source's digests on arrival, "always", "network" or "never"; as the
      connector has it, else "network".
    - ``transfers`` (None): ``TransferPolicy``, when blocks start to move.
    - ``slo`` (seconds, None): TTFT and TBT bounds; the budgets of Algorithm 1 are profiled at start to keep them.
    - ``budgets`` (None): ``StepBudgets`` by hand. With neither, a step takes 2,048 tokens and one image.
    - ``rules`` (None): ``BatchRules``, the scheduler's policy, queue order and switches.
    - ``routing`` (None): a routing policy or its name; a plan's, else "round_robin".
    - ``cache`` (None): ``CacheConfig``, block sizes, and pools or memory of every instance that sets none itself.
    - ``dtype`` ("auto"), ``device`` ("cpu"): of weights and caches; "auto" is the checkpoint's own dtype.
    - ``limits`` (None): ``MediaLimits``, the largest images, prompts and counts that a request may have.
    - ``ignore_generation_config`` (none): fields of the checkpoint's generation config not to follow; True for all.
    - ``max_waiting`` (requests, 1024), ``max_waiting_bytes`` (4 GiB, of pixels): more waiting is ``Overloaded``.
    - ``observe`` (None): called as ``observe(request_id, index, logits)`` with all logits before sampling.
    - ``lanes``, ``threads``, ``prefix_cache``, ``image_cache``, ``reservation``, ``attention``, ``depth``, ``pack``,
      ``token_budget`` and ``image_budget``: as ``Instance`` has them, for every instance that a placement or a plan
      names; they go before the plan's own settings.

    ::

        async with trinity.Pipeline("path/to/llava", placement="1E1P1D") as pipe:
            output = await pipe.complete(trinity.Request("<image> What is this?", images=["cat.jpg"]))

    The constructor is quick; weights and processor are loaded at start, on a thread. Both raise ``ConfigError``.
    """

    loop: asyncio.AbstractEventLoop
    _processes: instance_processes.InstanceSupervisor | None = None
    _processor: RequestProcessor | None = None
    _timer: asyncio.TimerHandle | None = None
    _broken: BaseException | None = None
    _starting: asyncio.Task[None] | None = None
    _closing: asyncio.Task[None] | None = None

    def __init__(
        self,
        model: str | Path | EmulatedModel,
        placement: str | Placement | Plan | Sequence[Instance] = "EPD",
        *,
        hosting: Literal["thread", "process"] = "thread",
        connector: Medium | Mapping[str, Medium] | None = None,
        verify: Verify | None = None,
        slo: SLO | None = None,
        budgets: StepBudgets | None = None,
        rules: BatchRules | None = None,
        routing: str | RoutingPolicy | None = None,
        cache: CacheConfig | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        limits: MediaLimits | None = None,
        ignore_generation_config: Sequence[str] | bool = (),
        max_waiting: Whole = 1024,
        max_waiting_bytes: Whole = MAX_WAITING_BYTES,
        observe: Callable[..., None] | None = None,
        transfers: TransferPolicy | None = None,
        processes: supervisor.ProcessConfig | None = None,
        instances: Whole | None = None,
        **options: Unpack[InstanceOptions],
    ) -> None:
        cache, processes = cache or CacheConfig(), processes or supervisor.ProcessConfig()
        source = loader.resolve_model(model)
        self.auto, placement = resolve_auto_placement(source, placement, instances, slo, cache.memory_bytes)
        limited = rules is not None or budgets is not None
        self.instances = name_instances(make_instances(placement, options, limited=limited))
        rules, routing = choose_rules_and_routing(placement, rules, routing)
        self.placement = Placement.of(each.group for each in self.instances)
        self.slo, self.routing, self._processing = slo, routing, (limits, ignore_generation_config)
        self.hosting = supervisor.check_hosting(hosting, self.instances)
        self.connector = make_connector(connector, verify, hosting)
        self._process_config = processes
        self._secret = supervisor.resolve_secret(self.instances, processes.secret)
        self.trace, self.metrics, self.timeline = Trace(limit=TRACE_ROWS), Metrics(slo), Timeline()
        rest = (cache, observe, transfers or TransferPolicy(), self.connector.shared)
        self._serving_config = loader.ServingConfig(source, dtype, device, slo, budgets, rules, *rest)
        self.cost: CostModel | None = model.cost if isinstance(model, EmulatedModel) else None  # or profile()'s last
        self.hosts: dict[str, InstanceHost] = {}  # instances of this process
        self._reached: dict[str, InstanceHandle] = {}
        self._frontend = FrontendCore(routing_policy(routing), max_waiting, max_waiting_bytes)
        self._streams: dict[str, Stream] = {}
        self._departed, self._state, self._preparing = asyncio.Event(), "new", 0

    async def __aenter__(self) -> Pipeline:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def processor(self) -> RequestProcessor:
        """The request processor. Raises ``ClosedError`` before the start."""
        if self._processor is None:
            raise ClosedError("the pipeline is not started: its tokenizer is loaded by start() or 'async with'")
        return self._processor

    async def start(self) -> None:
        """Load the weights, profile budgets for the SLO, if there is one, and start the instances.

        Raises ``ClosedError`` if the pipeline is closed meanwhile. A start that fails or is cancelled leaves nothing
        behind: it returns only once what a thread of it loads is there, and closed.
        """
        if self._state != "new":
            raise ClosedError("a pipeline starts once; make a new Pipeline")
        self._state, self.loop = "starting", asyncio.get_running_loop()
        self._starting = asyncio.ensure_future(self._start())
        try:
            await asyncio.wait([self._starting])
            if self._closing is not None:
                raise ClosedError("the pipeline was closed while it started")
            self._starting.result()
        except BaseException:
            await self.aclose()
            raise

    async def _start(self) -> None:
        await run_to_end(self._load_processor)
        await (self._start_processes() if self.hosting == "process" else self._start_threads())
        for host in self._reached.values():
            self._frontend.handle(host.announcement(), time.monotonic())
        self._state = "running"
        if self._processes is not None:  # only now: the front end must know an instance before it is lost
            self._processes.watch()
        if self.auto is not None:
            await self.auto.begin(self)

    def _load_processor(self) -> None:
        self._processor = loader.make_processor(self._serving_config.model, *self._processing)
        self.placement.check(self._processor.multimodal)

    async def _start_threads(self) -> None:
        loaded = await run_to_end(loader.load_instances, self._serving_config, self.instances, self._processor)
        self.hosts = loader.make_hosts(loaded, self, self.timeline, lambda: routing_policy(self.routing))
        self._reached.update(self.hosts)
        for host in self.hosts.values():
            host.start()

    async def _start_processes(self) -> None:
        setups = supervisor.make_setups(self.instances, self._serving_config, self.connector, str(self.routing))
        self._processes = instance_processes.InstanceSupervisor(
            self, self.timeline, supervisor.parse_addresses(self.instances), self._secret, self._process_config
        )
        self._reached.update(await self._processes.start(setups))

    @property
    def processes(self) -> dict[str, InstanceClient]:
        """The instances in processes of their own, by name."""
        return self._processes.members if self._processes is not None else {}

    @property
    def health(self) -> dict[str, InstanceHealth]:
        """State of the instances in processes of their own, by name: who is away, why, and when it is started again."""
        return self._processes.health() if self._processes is not None else {}

    @property
    def loads(self) -> dict[str, PeerLoad]:
        """Last report of each instance: waiting work in seconds, free blocks, cached content."""
        return dict(self._frontend.router.loads)

    async def profile(self, path: str | Path | None = None, **counts: Any) -> CostTables:
        """Measure step times by stage, batch and context on copies of these instances; save them as JSON to ``path``.

        They become ``cost``, for a planner. Weights are shared with instances of this process; ``counts`` are those of
        ``CostTables.profile``. Serve nothing meanwhile. Raises ``ConfigError`` if nothing can be measured here.
        """
        self._check_open()
        await self.wait_idle()
        given = (self._serving_config, self.instances, self.processor, self.hosts)
        self.cost = tables = await run_to_end(loader.profile_copies, *given, path, **counts)
        return tables

    def stream(self, request: Request) -> Stream:
        """Make a stream of the request's tokens: a context manager and iterator. Leaving it ends the request."""
        return Stream(self, request)

    async def complete(self, request: Request) -> Output:
        """Serve the request to its end. Raises the request's own error (``RequestError``), or ``ClosedError``."""
        async with self.stream(request) as tokens:
            return await tokens.collect()

    async def submit(self, stream: Stream) -> None:
        """Check, process (on a thread) and submit a stream's request."""
        self._check_open()
        try:
            request = stream.request = check_request(stream.request)
            self._check_room(request)
        except RequestError as error:
            self.metrics.add_refused(error)
            raise
        self._streams[request.request_id] = stream
        processed = await self._prepare(stream)
        if processed is None:
            stream.end(End(request.request_id, "deadline", make_late_failure(request)))
            return
        self.post(Submit(processed.work, processed.inputs, input_bytes=processed.input_bytes))

    def _check_open(self) -> None:
        if self._broken is not None:
            raise ClosedError(f"the pipeline failed ({self._broken}); close it and make a new one") from self._broken
        if self._state != "running":
            hint = "make a new one" if self._state == "closed" else "use it inside 'async with', or await start()"
            raise ClosedError(f"the pipeline is {'closed' if self._state == 'closed' else 'not started'}; {hint}")
        if asyncio.get_running_loop() is not self.loop:
            raise ConfigError("the pipeline runs on another event loop; use it there, or make a new one on this loop")

    def _check_room(self, request: Request) -> None:
        if request.request_id in self._streams:
            raise RequestError(f"request_id {request.request_id!r} is in use; give another", request.request_id)
        waiting = self._frontend.waiting + self._preparing
        if waiting >= self._frontend.max_waiting:
            raise Overloaded(f"{waiting} requests wait already; try later or raise max_waiting", request.request_id)

    async def _prepare(self, stream: Stream) -> ProcessedRequest | None:
        """Process a request, with what is left of its deadline; None if that passed meanwhile."""
        request = stream.request
        self._preparing += 1
        try:
            async with asyncio.timeout(request.deadline_s) as limit:
                await self._until(lambda: request.request_id not in self._frontend.entries)
                processed = await self.processor.aprocess(request)
            self._check_open()
            stream.begin(processed, lambda stop: TextStream(self.processor.tokenizer, stop, processed.work.prompt))
        except TimeoutError:
            if limit.expired():
                return None
            raise
        except BaseException as error:
            self._refuse(stream, error)
            raise
        finally:
            self._preparing -= 1
        return reduce_deadline(processed, time.monotonic() - stream.arrived)

    def _refuse(self, stream: Stream, error: BaseException) -> None:
        """Count a request that never started, by its own fault or because its reader or the pipeline has gone."""
        if isinstance(error, RequestError):
            self._streams.pop(stream.request.request_id, None)
            self.metrics.add_refused(error)
        else:
            stream.end(End(stream.request.request_id, "cancelled"))

    def post(self, event: Value) -> None:
        """Pass an event to the front end, on the loop's thread, and carry out its commands."""
        before = len(self._frontend.entries)
        for command in self._frontend.handle(event, time.monotonic()):
            if isinstance(command, Deliver) and command.request in self._streams:
                self._streams[command.request].deliver(command)
            elif isinstance(command, End) and command.request in self._streams:
                self._streams[command.request].end(command)
            elif isinstance(command, Send):
                self.send_to_peer(command.to, command.message)
        self._arm()
        if len(self._frontend.entries) < before:
            self._departed.set()

    def _arm(self) -> None:
        due = self._frontend.next_timer()
        if self._timer is not None:
            self._timer.cancel()
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        self._timer = None if wait_s is None else self.loop.call_later(wait_s, self.post, Tick())

    def on_end(self, stream: Stream) -> None:
        """Count a request that has ended, and add it to the trace."""
        self._streams.pop(stream.request.request_id, None)
        record_end(stream, self.metrics, self.trace)

    def send_to_peer(self, name: str, message: Value) -> None:
        self._reached[name].post(message)

    def send_to_frontend(self, messages: list[Value]) -> None:
        """Pass the instances' messages to the front end, on the loop's thread."""
        for message in messages:
            self.post(message)

    def on_lost(self, name: str, why: str) -> None:
        """End the requests of an instance whose process is gone with an error."""
        logger.error("instance %s was lost: %s", name, why)
        self.post(PeerDown(name, why))

    def on_back(self, member: InstanceClient) -> None:
        """Announce an instance whose process runs again."""
        self._reached[member.name] = member
        self.post(member.announcement())

    def report_crash(self, name: str, error: BaseException) -> None:
        """End every request with an error, refuse new ones and stop all threads, as an instance's thread failed."""
        if self._broken is not None:
            return
        self._broken = error
        for host in self._reached.values():
            host.stop(at_once=True)
        for stream in list(self._streams.values()):
            if stream.processed is not None:
                stream.end(End(stream.request.request_id, "error"))
                text = f"instance {name} failed ({error!r}); close the pipeline and make a new one"
                stream.fail(RequestError(text, stream.request.request_id), error)
        self._departed.set()

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait until ``reached()``, which is checked whenever a request has left the front end."""
        while not reached() and self._broken is None:
            self._departed.clear()
            await self._departed.wait()

    async def wait_idle(self) -> None:
        """Wait until no instance has a request: steps in flight may run on after their readers have gone."""
        await self._until(lambda: not self._frontend.entries)

    async def aclose(self) -> None:
        """End every request, wait for steps and transfers in flight, stop the threads. May be called twice.

        A caller that is cancelled returns only afterwards: work in flight would use memory that has been freed.
        """
        if self._closing is None:
            self._state = "closed"
            if self._starting is not None:
                self._starting.cancel()  # at once: it starts nothing more
            self._closing = asyncio.ensure_future(self._close())
        await wait_shielded(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*filter(None, [self._starting]), return_exceptions=True)
        if self.auto is not None:
            await self.auto.aclose()
        for stream in list(self._streams.values()):
            stream.close()
            self.post(Abort(stream.request.request_id, "cancelled"))
        try:
            await (self.wait_idle() if self._processes is None else self._processes.drain(self.wait_idle()))
        finally:
            for host in self._reached.values():
                host.stop(at_once=bool(self._frontend.entries))
        await asyncio.gather(*(host.join() for host in self._reached.values()))
        if self._timer is not None:
            self._timer.cancel()
        if self._processes is not None:
            await self._processes.aclose()
        await self.connector.aclose()
        if self._processor is not None:
            await self._processor.aclose()
