"""Pipeline: a model served by instances under a placement, inside the user's own asyncio program."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from trinity.budget import Budgets
from trinity.connector import Connector
from trinity.errors import ClosedError, ConfigError, RequestError, TrinityError
from trinity.frontend import Abort, Deliver, End, FrontendCore, Tick
from trinity.hosting import Deployment, load, start_hosts
from trinity.instance import Instance, InstanceHost, named
from trinity.messages import Failure, Send, Submit, Value
from trinity.metrics import Metrics
from trinity.placement import Placement
from trinity.processor import Limits, RequestProcessor
from trinity.request import Output, Request, check_request
from trinity.routing import RoutingPolicy, routing_policy
from trinity.scheduler import Rules
from trinity.stream import Stream
from trinity.text import TextStream
from trinity.timeline import Timeline
from trinity.trace import SLO, Trace
from trinity.transport.base import Transport


class Pipeline:
    """Encode, prefill and decode of one model, on instances placed as you say.

    ``model`` is a directory in transformers' format. ``placement`` is "EPD", "1EP1D", "2ED1P", "1E3P4D", ... or a list
    of ``Instance``. ``slo`` (TTFT and TBT, seconds) has the budgets of Algorithm 1 profiled at start; ``budgets`` gives
    them by hand; neither means 2,048 tokens and one image a step. ``rules`` has the scheduler's policy, queue order and
    switches.
    ``pools`` (blocks by kind) or ``memory_bytes`` (weights included) size every instance that says nothing itself.
    ``observe(request_id, index, logits)`` sees every row of logits before sampling.

    ::

        async with trinity.Pipeline("path/to/llava", placement="1E1P1D") as pipe:
            output = await pipe.complete(trinity.Request("<image> What is this?", images=["cat.jpg"]))

    Raises ``PlacementError``, ``UnsupportedModel`` and other ``ConfigError`` on construction or at start.
    """

    def __init__(
        self,
        model: str | Path,
        placement: str | Placement | Sequence[Instance] = "EPD",
        *,
        connector: str | Transport | Connector = "inproc",
        slo: SLO | None = None,
        budgets: Budgets | None = None,
        rules: Rules | None = None,
        routing: str | RoutingPolicy = "round_robin",
        lanes: tuple[str, ...] = ("joint",),
        pools: Mapping[str, int] | None = None,
        memory_bytes: int | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        threads: int = 1,
        limits: Limits | None = None,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        image_cache: bool = True,
        media_block: int = 576,
        kv_block: int = 16,
        observe: Callable[..., None] | None = None,
    ) -> None:
        common: dict[str, Any] = {"lanes": lanes, "threads": threads, "device": device}
        caches = {"prefix_cache": prefix_cache, "image_cache": image_cache}
        self.instances = named(_instances(placement, {**common, **caches}))
        self.placement = Placement.of(each.group for each in self.instances)
        self.connector = connector if isinstance(connector, Connector) else Connector(connector)
        self.slo, self.routing = slo, routing
        self.processor = RequestProcessor(model, limits=limits or Limits())
        self.placement.check(self.processor.multimodal)
        self.trace, self.metrics, self.timeline = Trace(), Metrics(slo), Timeline()
        self._deployment = Deployment(
            model=Path(model),
            dtype=dtype,
            slo=slo,
            budgets=budgets,
            rules=rules or Rules(),
            media_block=media_block,
            kv_block=kv_block,
            observe=observe,
            pools=pools,
            memory_bytes=memory_bytes,
            device=device,
        )
        self.hosts: dict[str, InstanceHost] = {}
        self._frontend = FrontendCore(routing_policy(routing), max_waiting)
        self._streams: dict[str, Stream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._state = "new"
        self._broken: TrinityError | None = None
        self.loop: asyncio.AbstractEventLoop

    async def __aenter__(self) -> Pipeline:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Load the weights, profile budgets where an SLO asks for it, start the instances."""
        if self._state != "new":
            raise ClosedError("a pipeline starts once; make a new one")
        self._state = "running"
        self.loop = asyncio.get_running_loop()
        loaded = await asyncio.to_thread(load, self._deployment, self.instances, self.processor)
        self.hosts = start_hosts(loaded, self, self.timeline, lambda: routing_policy(self.routing))
        for host in self.hosts.values():
            self._frontend.handle(host.announcement(), time.monotonic())

    def stream(self, request: Request) -> Stream:
        """The request's tokens, as they come: a context manager and iterator. Leaving it ends the request."""
        return Stream(self, request)

    async def complete(self, request: Request) -> Output:
        """Serve the request to its end."""
        async with self.stream(request) as tokens:
            async for _ in tokens:
                pass
            return tokens.output

    async def submit(self, stream: Stream) -> None:
        """Check, process (off the loop) and submit a stream's request."""
        request = stream.request
        self._check_open()
        check_request(request)
        if request.request_id in self._streams:
            raise RequestError(f"request {request.request_id} is being served already", request.request_id)
        self._streams[request.request_id] = stream
        try:
            processed = await self.processor.aprocess(request)
            self._check_open()
        except BaseException as error:
            self._streams.pop(request.request_id, None)
            self.metrics.refused(error)
            raise
        stream.begin(processed, lambda stop: TextStream(self.processor.tokenizer, stop, processed.work.prompt))
        self.post(Submit(processed.work, processed.inputs))

    def _check_open(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._state != "running":
            hint = "use it inside 'async with'" if self._state == "new" else "make a new one"
            raise ClosedError(f"the pipeline is {'not started' if self._state == 'new' else 'closed'}; {hint}")

    def post(self, event: Value) -> None:
        """Give an event to the front end, on the loop's thread."""
        for command in self._frontend.handle(event, time.monotonic()):
            if isinstance(command, Deliver):
                self._streams[command.request].deliver(command)
            elif isinstance(command, End):
                self._streams[command.request].end(command)
            elif isinstance(command, Send):
                self.to_peer(command.to, command.message)
        self._arm()
        if not self._frontend.entries:
            self._quiet.set()

    def _arm(self) -> None:
        due = self._frontend.next_timer()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if due is not None:
            self._timer = self.loop.call_later(max(0.0, due - time.monotonic()), self.post, Tick())

    def ended(self, stream: Stream) -> None:
        self._streams.pop(stream.request.request_id, None)
        self.metrics.add(stream.output)
        self.trace.append(trace_row(stream))

    def to_peer(self, name: str, message: Value) -> None:
        self.hosts[name].post(message)

    def to_frontend(self, messages: list[Value]) -> None:
        self.loop.call_soon_threadsafe(self._from_instance, messages)

    def _from_instance(self, messages: list[Value]) -> None:
        for message in messages:
            self.post(message)

    def crashed(self, name: str, error: BaseException) -> None:
        """An instance's core failed: end every request with an error, refuse new ones."""
        self._broken = TrinityError(f"instance {name} failed and the pipeline must be closed: {error!r}")
        self._broken.__cause__ = error
        for stream in list(self._streams.values()):
            if stream.processed is not None:
                stream.end(End(stream.request.request_id, "error", Failure("TrinityError", str(self._broken))))
        self._quiet.set()

    async def idle(self) -> None:
        """Wait until no request is anywhere: readers may be gone while steps in flight still end."""
        while self._frontend.entries and self._broken is None:
            self._quiet.clear()
            await self._quiet.wait()

    async def aclose(self) -> None:
        """End every request, wait for what is in flight, stop the threads. Twice is once."""
        if self._state == "closed":
            return
        self._state = "closed"
        try:
            await asyncio.shield(asyncio.ensure_future(self._close()))
        finally:
            self.processor.close()

    async def _close(self) -> None:
        for stream in list(self._streams.values()):
            stream.close()
            self.post(Abort(stream.request.request_id, "cancelled"))
        await self.idle()
        for host in self.hosts.values():
            host.stop()
        if self._broken is None:
            for host in self.hosts.values():
                await asyncio.to_thread(host.join)
        if self._timer is not None:
            self._timer.cancel()
        await self.connector.aclose()


def _instances(placement: str | Placement | Sequence[Instance], common: dict[str, Any]) -> list[Instance]:
    """Instances of a placement, or the user's own as they are."""
    if isinstance(placement, str):
        placement = Placement.parse(placement)
    if isinstance(placement, Placement):
        return [Instance(roles, name, **common) for name, roles in placement.instances()]
    if not placement:
        raise ConfigError("a pipeline needs at least one instance")
    return list(placement)


def trace_row(stream: Stream) -> dict[str, Any]:
    """The row of the trace for a request that has ended."""
    output, work = stream.output, stream.processed.work if stream.processed else None
    media = work.media if work else ()
    return {
        "timestamp": stream.arrived_at * 1000,
        "request_id": output.request_id,
        "input_length": output.prompt_tokens,
        "text_length": output.prompt_tokens - output.media_tokens,
        "output_length": len(output.token_ids),
        "max_tokens": output.max_tokens,
        "images": [{"tokens": span.tokens, "content": span.content, **span.meta} for span in media],
        "finish_reason": output.finish_reason,
        "ttft_s": output.ttft_s,
        "itl_s": output.itl_s,
        "latency_s": output.latency_s,
        "spans": output.spans,
    }
