"""Pipeline: serves one model on instances under a placement, inside the user's own asyncio program."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from trinity.adapt.auto import resolve_auto_placement
from trinity.config_classes import documented_by, pick_fields, takes
from trinity.connector import make_connector
from trinity.core.frontend import FrontendCore
from trinity.core.frontend.journal import JournalStart
from trinity.core.messages import PeerLoad
from trinity.core.progress import StalledPart
from trinity.core.role_changes import Switch
from trinity.core.routing.router import DEFAULT_ROUTING, routing_policy
from trinity.costs.step_cost import CostModel, CostTables
from trinity.emulation.model import EmulatedModel
from trinity.errors import ClosedError
from trinity.errors.arguments import Number, Whole, check_value
from trinity.errors.live_objects import forbid_copies
from trinity.instance import Instance, InstanceOptions, name_instances
from trinity.metrics import Metrics
from trinity.pipeline.adoptions import WITHIN_S, Adoptions, Resumption
from trinity.pipeline.chat import Messages, make_chat_request
from trinity.pipeline.config import PipelineConfig
from trinity.pipeline.copies import serve_copies
from trinity.pipeline.deploy import choose_plan_settings, make_instances
from trinity.pipeline.features import Features, FeatureSource, read_features
from trinity.pipeline.frontend_host import FrontendHost, PipelineState
from trinity.pipeline.placement_changes import DRAIN_S, PlacementChanges
from trinity.pipeline.request_map import MapResult, OnError, Progress, Requests, map_requests
from trinity.pipeline.served_instances import ServedInstances
from trinity.pipeline.stream import Stream
from trinity.placement import Placement
from trinity.planner import Plan
from trinity.preprocess.checkpoint.own_processor import check_processor
from trinity.preprocess.processor import RequestProcessor
from trinity.remote.supervision import attached_instances
from trinity.remote.supervision import process_config as supervisor
from trinity.remote.supervision.instance_client import InstanceClient
from trinity.remote.supervision.supervisor_messages import InstanceHealth
from trinity.request import Output, Request
from trinity.runtime import loader
from trinity.runtime.host import InstanceHost
from trinity.runtime.shielded_wait import run_to_end, wait_shielded
from trinity.stage_kinds import stage_of
from trinity.tables import Table, as_titled_html
from trinity.timeline import Timeline
from trinity.traces.trace import Trace

TRACE_BYTES = 64 << 20  # of the rows of its last requests: some 98,000 of 24 tokens, 13,000 of 500


@documented_by(PipelineConfig)
@forbid_copies("make it where it is used, and pass its arguments")
class Pipeline:
    """Encode, prefill and decode of one model, on instances placed as you say.

    {settings}

    Settings of instances go before a plan's own. Beside a list of instances they are refused: each has its own.

    ::

        async with trinity.Pipeline("path/to/llava", placement="1E1P1D") as pipe:
            output = await pipe.complete(trinity.Request("<image> What is this?", images=["cat.jpg"]))

    The constructor is quick; weights and processor are loaded at start, on a thread. Both raise ``ConfigError``.
    """

    _starting: asyncio.Task[None] | None = None
    _closing: asyncio.Task[None] | None = None
    _adoptions: Adoptions | None = None

    @takes(PipelineConfig)
    def __init__(self, config: PipelineConfig, given: Set[str]) -> None:
        source = self.model = loader.resolve_model(config.model, config.download)
        self.auto, placement = resolve_auto_placement(
            source, config.placement, config.instances, config.slo, config.cache.memory_bytes, config.apply
        )
        options = {name: each for name, each in pick_fields(InstanceOptions, config).items() if name in given}
        specs = name_instances(make_instances(placement, options, limited=bool(config.rules or config.budgets)))
        config = replace(config, **choose_plan_settings(placement, config), processor=check_processor(config.processor))
        placed = Placement.of(each.group for each in specs)
        self.slo, self.routing = config.slo, config.routing or DEFAULT_ROUTING
        self.hosting = supervisor.check_hosting(config.hosting, specs, config.processes)
        self.connector = make_connector(config.connector, config.verify, self.hosting)
        self._secret = supervisor.resolve_secret(specs, config.processes.secret)
        self.trace, self.metrics, self.timeline = Trace(limit_bytes=TRACE_BYTES), Metrics(self.slo), Timeline()
        own = FrontendCore(routing_policy(self.routing), config, attached_instances.name_frontend(config.processes))
        self._frontend = FrontendHost(own, self.connector, self.metrics, self.trace)
        serving = replace(config, observe=self._frontend.watch_logits(config.observe))
        self._config = config
        self._serving_config = loader.ServingConfig(
            source, shared=self.connector.shared, **pick_fields(loader.ServingOptions, serving)
        )
        self._served = ServedInstances(
            specs,
            placed,
            config=self._serving_config,
            connector=self.connector,
            routing=self.routing,
            hosting=self.hosting,
            terms=config.processes,
            secret=self._secret,
            frontend=self._frontend,
            timeline=self.timeline,
        )
        self._changes = PlacementChanges(self._served, self._frontend, self.timeline, options)
        self.cost: CostModel | None = source.cost if isinstance(source, EmulatedModel) else None  # or profile()'s last

    async def __aenter__(self) -> Pipeline:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        name = str(self.model) if isinstance(self.model, EmulatedModel) else self.model.name
        now = f", {len(self.streams)} served now" if self.streams else ""
        return f"Pipeline({name} on {self.placement}, {self.state}{now}, {self.metrics.requests} ended)"

    def _repr_html_(self) -> str:
        return as_titled_html(repr(self), instance_table(self.instances, self.loads, self.health))

    @property
    def processor(self) -> RequestProcessor:
        """The request processor. Raises ``ClosedError`` before the start."""
        if self._frontend.processor is None:
            raise ClosedError("the pipeline is not started: its tokenizer is loaded by start()")
        return self._frontend.processor

    @property
    def instances(self) -> list[Instance]:
        """The instances with their settings, in the order of the placement, and those that were added behind it."""
        return self._served.specs

    @property
    def placement(self) -> Placement:
        """The placement that the instances are now."""
        return self._served.placement

    @property
    def hosts(self) -> dict[str, InstanceHost]:
        """The instances of this process, by name."""
        return self._served.hosts

    @property
    def processes(self) -> dict[str, InstanceClient]:
        """The instances in processes of their own, by name."""
        return self._served.clients

    @property
    def health(self) -> dict[str, InstanceHealth]:
        """State of the instances in processes of their own, by name: who is away, why, and when it is started again."""
        return self._served.health

    @property
    def state(self) -> PipelineState:
        """State: "new", "starting", "running", "failed" (a thread of an instance has), or "closed"."""
        return self._frontend.state

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The requests that are served now."""
        return tuple(self._frontend.streams.values())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the pipeline was started on."""
        return self._frontend.loop

    async def start(self) -> None:
        """Load the weights, profile budgets for the SLO, if there is one, and start the instances.

        Raises ``ClosedError`` if it is closed meanwhile. A start that fails or is cancelled leaves nothing behind.
        """
        if self.state != "new":
            raise ClosedError("a pipeline starts once; make a new Pipeline")
        self._frontend.opened, self._frontend.loop = "starting", asyncio.get_running_loop()
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
        await self._served.start(self.processor)
        self._frontend.announce()
        self._frontend.opened = "running"
        self._served.watch()
        await self._begin_journals()
        if self.auto is not None:
            await self.auto.begin(self)

    def _load_processor(self) -> None:
        here = self.hosting == "thread"
        made = loader.make_processor(self.model, self._config, self._config.spread or 1, here=here)
        self._frontend.processor = made
        made.room.most = self._config.max_waiting_bytes
        self.placement.check(self.processor.multimodal)

    @property
    def loads(self) -> dict[str, PeerLoad]:
        """Last report of each instance: waiting work in seconds, free blocks, cached content."""
        return dict(self._frontend.core.router.loads)

    def find_stalled(self, after_s: float) -> list[StalledPart]:
        """List the parts that make no progress: their oldest work is older, and none has ended for as long.

        - ``after_s``: seconds. A part that is slow, or has a long queue, ends work and is not listed.
        """
        return self._frontend.find_stalled(after_s)

    @property
    def pools(self) -> dict[str, dict[str, int]]:
        """Blocks of each instance, by kind."""
        return {name: dict(each.announcement().pools) for name, each in self._frontend.reached.items()}

    async def profile(self, /, path: str | Path | None = None, **counts: Any) -> CostTables:
        """Measure step times by stage, batch and context on copies of these instances; save them as JSON to ``path``.

        They become ``cost``, for a planner. Weights are shared with instances of this process; ``counts`` are those of
        ``CostTables.profile``. Serve nothing meanwhile. Raises ``ConfigError`` if nothing can be measured here.
        """
        self._frontend.check_open()
        await self.wait_idle()
        self.cost = await run_to_end(
            loader.profile_copies, self._serving_config, self.instances, self.processor, self.hosts, path, **counts
        )
        return self.cost

    def stream(self, request: Request) -> Stream:
        """Make a stream of the request's tokens: a context manager and iterator. Leaving it ends the request."""
        return Stream(self._frontend, request)

    async def complete(self, request: Request) -> Output:
        """Serve the request to its end. Raises the request's own error (``RequestError``), or ``ClosedError``."""
        async with self.stream(request) as tokens:
            return await tokens.collect()

    async def complete_n(self, request: Request, n: int) -> list[Output]:
        """Serve one request ``n`` times (1 to 128), for as many outputs: those of seeds ``seed``, ``seed + 1``, ...

        Without a seed each draws its own. The prompt and its images are computed once where caches are on: the others
        follow once the first has a token. The first error ends all and is raised. Their ids are "id", "id.1", ...
        """
        return await serve_copies(self.stream, request, n)

    async def chat(self, /, messages: Messages, **fields: Any) -> Output:
        """Serve a chat to its end; ``fields`` are those of ``Request`` and of ``Sampling``.

        messages: as in ``Request``; or the text of one user message, before which ``images`` and ``media`` stand.

        ::

            output = await pipe.chat("What is this?", images=["cat.jpg"], max_tokens=64, temperature=0.2)

        Raises what ``complete`` does. To read a chat's tokens as they come, ``stream`` a ``Request(messages=...)``.
        """
        return await self.complete(make_chat_request(messages, **fields))

    async def features(self, /, given: FeatureSource, **fields: Any) -> Features:
        """Encode media alone: the rows that the model puts in place of their placeholders. No token is generated.

        given: an image or several, as in ``Request.images``; messages, for the media in them; or a ``Request``.
        fields: further fields of ``Request``, such as ``deadline_s``.

        ::

            cat, dog = (await pipe.features(["cat.jpg", "dog.jpg"])).rows

        It waits, shares steps and finds cached features as requests do. Raises what ``complete`` does.
        """
        return await read_features(self._frontend, given, fields)

    @overload
    def map(
        self,
        requests: Requests,
        *,
        concurrency: int = ...,
        ordered: bool = ...,
        progress: bool | Progress | None = ...,
        resume: str | Path | None = ...,
        on_error: Literal["raise"] = ...,
    ) -> AsyncGenerator[Output, None]: ...

    @overload
    def map(
        self,
        requests: Requests,
        *,
        concurrency: int = ...,
        ordered: bool = ...,
        progress: bool | Progress | None = ...,
        resume: str | Path | None = ...,
        on_error: Literal["return"],
    ) -> AsyncGenerator[MapResult, None]: ...

    def map(
        self,
        requests: Requests,
        *,
        concurrency: int = 256,
        ordered: bool = True,
        progress: bool | Progress | None = None,
        resume: str | Path | None = None,
        on_error: OnError = "raise",
    ) -> AsyncGenerator[Any, None]:
        """Serve requests of any iterable, asynchronous or not, also of an endless one.

        - ``concurrency`` (requests, 256): served at once, no more than ``max_waiting``. Twice as many are taken ahead
          of the results that were read. It is never ``Overloaded``: it waits until there is room.
        - ``ordered`` (True): outputs in the order of the requests; False: as they come.
        - ``progress`` (None): True shows a bar, None does in a terminal or notebook; or called as ``progress(done,
          total)`` after each, the total None where nobody knows it.
        - ``resume`` (path, None): outputs are kept there as JSON lines, and requests that it has are not served again,
          by ``request_id``, which a program must give itself. Failed ones are not. A file for each model and dtype.
        - ``on_error`` ("raise"): a request's error is raised, which ends the others; "return" gives it as a result.

        ::

            async for output in pipe.map(requests, resume="outputs.jsonl"):
                print(output.request_id, output.text)

        Leaving the loop ends what is in flight (at once by ``contextlib.aclosing``). Raises ``ConfigError`` for a file
        of other content, ``ClosedError`` if the pipeline closes.
        """
        concurrency = min(check_value("concurrency", concurrency, Whole), self._config.max_waiting)
        return map_requests(
            partial(self._frontend.serve_in_turn, self.complete),
            requests,
            concurrency=concurrency,
            ordered=ordered,
            progress=progress,
            resume=resume,
            model="" if resume is None else f"{loader.name_weights(self.model)} {self._serving_config.dtype}",
            on_error=on_error,
        )

    @property
    def change(self) -> str:
        """The change that is under way, "instance E1 switches to D"; "" where none is."""
        return self._changes.under_way

    @property
    def change_obstacle(self) -> str:
        """Reason why no change can be made just now: another one, or an instance that is away; empty if one can."""
        return self._changes.find_obstacle()

    async def switch(self, name: str, roles: str, *, drain_s: float = DRAIN_S) -> Switch:
        """Have an instance switch to other roles: ``await pipe.switch("E1", "D")``; it keeps its name.

        drain_s: how long requests that are there may take to end. Cancelled before it is empty, it stays as it was.

        Raises ``UnknownName``, ``PlacementError`` for roles that it may not have, or a stage that would be left without
        an instance; ``ChangeRefused`` during another change, or while an instance is away; and the error for which its
        next life cannot be loaded, and nothing has changed, or for which it does not come up, in which case it has its
        former roles again.
        """
        return await self._changes.switch(name, roles, drain_s)

    async def add(self, instance: Instance) -> Switch:
        """Add an instance: ``await pipe.add(trinity.Instance("D"))``; it gets the next free name if it has none.

        Raises ``ConfigError`` for a name that is in use, an address without ``ProcessConfig(secret=...)``, or one that
        the transport does not reach; ``PlacementError`` for roles that the model has no use for; ``ChangeRefused`` as
        ``switch`` does; and the error for which it does not come up. Then, or cancelled, all is as it was.
        """
        return await self._changes.add(instance)

    async def remove(self, name: str, *, drain_s: float = DRAIN_S) -> Switch:
        """Remove an instance, as soon as it is empty or ``drain_s`` has passed: ``await pipe.remove("D1")``.

        Cancelled before that, it stays. One that is away itself may be removed. Raises ``UnknownName``;
        ``PlacementError`` for the last one of a stage; ``ChangeRefused`` as ``switch`` does.
        """
        return await self._changes.remove(name, drain_s)

    async def apply(
        self, placement: str | Placement | Plan, *, resize: bool = False, drain_s: float = DRAIN_S
    ) -> list[Switch]:
        """Have instances switch, one after another, until they are this placement; return the switches.

        They are the fewest that do, in an order in which no stage is left without an instance, if there is one: else
        requests wait for that stage meanwhile (``FailurePolicy.wait_s``). Of a ``Plan`` they take its settings, too.

        resize (False): take a placement of another number of instances. Those that lack are added first, as the
        pipeline's own keywords make them; those too many are removed last.

        Raises as ``switch`` and ``add`` do, and ``PlacementError`` for another number of instances without ``resize``,
        or a plan for another model. After an error all changes are undone, the last one first.
        """
        return await self._changes.apply(placement, resize=resize, drain_s=drain_s)

    @property
    def journal_address(self) -> str:
        """Address at which other pipelines bring their journals to this one; "" for none."""
        return self._adoptions.address if self._adoptions is not None else ""

    @property
    def has_buddy(self) -> bool:
        """True while another pipeline is told of this one's requests, and would go on with them."""
        return self._frontend.journal.reached

    def resume(self, /, request_id: str, after: int = -1, within_s: float = WITHIN_S) -> Resumption:
        """Read on a request that was sent to another program, which has died, and whose buddy this pipeline is.

        - ``after`` (index, -1): of the last token that its reader has; the next one is the first that comes.
        - ``within_s`` (seconds, 10): how long to wait until that program's death is noticed here.

        ::

            async with pipe.resume("chat-17", after=41) as tokens:
                async for token in tokens:
                    print(token.index, token.text)

        Its ``output`` has all tokens. Entering raises ``ResumeError``, whose ``reason`` tells why not. A request can be
        resumed once; leaving the block ends it. Raises ``ConfigError`` for an index or seconds that are none.
        """
        check_value("request_id", request_id, str)
        after, within_s = check_value("after", after, int), check_value("within_s", within_s, Number)
        return Resumption(self._adoptions or Adoptions(self._frontend), request_id, after, within_s)

    async def wait_idle(self) -> None:
        """Wait until no instance has a request: steps in flight may run on after their readers have gone."""
        await self._frontend.wait_idle()

    async def aclose(self) -> None:
        """End every request, wait for steps and transfers in flight, stop the threads. May be called twice.

        A caller that is cancelled returns only afterwards: work in flight would use memory that has been freed.
        """
        if self._closing is None:
            self._frontend.opened = "closed"
            if self._starting is not None:
                self._starting.cancel()  # at once: it starts nothing more
            self._closing = asyncio.ensure_future(self._close())
        await wait_shielded(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*filter(None, [self._starting]), return_exceptions=True)
        if self.auto is not None:
            await self.auto.aclose()
        await self._end_journals()
        self._frontend.end_all()
        try:
            await self._served.drain(self.wait_idle())
        finally:
            for host in self._frontend.reached.values():
                host.stop(at_once=bool(self._frontend.core.entries))
        await asyncio.gather(*(host.join() for host in self._frontend.reached.values()))
        self._frontend.cancel_timer()
        await self._served.aclose()
        await self.connector.aclose()
        if self._frontend.processor is not None:
            await self._frontend.processor.aclose()

    async def _begin_journals(self) -> None:
        """Take journals of others, and keep one with the buddy, as far as there are to be any."""
        config, buddy = self._config.processes, self._config.processes.buddy
        if buddy is None or self._secret is None or not self.processes:
            return
        names = tuple(sorted(each.name for each in self.instances))
        model = next(each.fingerprint for each in self.processes.values())  # theirs is one
        start = JournalStart(secrets.token_hex(8), model, names)
        self._adoptions = Adoptions(self._frontend)
        await self._adoptions.start(buddy, start, self._secret, config)
        self._frontend.journal.start(buddy, self._frontend.core.name, start, self._secret, config.tls)

    async def _end_journals(self) -> None:
        """Have the buddy go on with nothing, and take no journals any more."""
        await self._frontend.journal.aclose()
        if self._adoptions is not None:
            await self._adoptions.aclose()


def instance_table(
    instances: Sequence[Instance], loads: Mapping[str, PeerLoad], health: Mapping[str, InstanceHealth]
) -> Table:
    """Tabulate each instance with its stages, its state, the work that waits and the blocks that are free."""
    rows = []
    for each in instances:
        load, life = loads.get(each.name), health.get(each.name)
        waiting = "" if load is None else f"{1e3 * sum(load.predicted_s.values()):.1f} ms"
        free = "" if load is None else ", ".join(f"{count:,} {kind}" for kind, count in load.free.items())
        state = "" if life is None else life.state + (f": {life.why}" if life.why else "")
        rows.append((each.name, ", ".join(stage_of(role).name for role in each.roles), state, waiting, free))
    columns = ("instance", "stages", "process", "work ahead", "free blocks")
    kept = [at for at, _ in enumerate(columns) if at < 2 or any(row[at] for row in rows)]
    return Table(tuple(columns[at] for at in kept), [tuple(row[at] for at in kept) for row in rows])
