"""InstanceHost: runs an instance's core and stages on threads of this process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from trinity.config_classes import pick_fields
from trinity.connector import Connector
from trinity.core import InstanceCore
from trinity.core.instance.settings import BlockSizes, CoreOptions, Settings
from trinity.core.messages import (
    FRONTEND,
    IMAGE,
    KV,
    STATE,
    Close,
    Collect,
    Collected,
    Grow,
    Open,
    PeerUp,
    Pull,
    Revoke,
    Send,
    Step,
    Submit,
    Value,
)
from trinity.core.routing.router import RoutingPolicy
from trinity.core.scheduler import units
from trinity.costs.pool_sizes import check_available
from trinity.emulation.model import EmulatedModel
from trinity.emulation.stages import build_emulated_stages
from trinity.errors import ConfigError
from trinity.errors.live_objects import forbid_copies
from trinity.instance import Instance, split_cores
from trinity.memory.block_memory import BlockMemory
from trinity.memory.cache_config import CacheConfig
from trinity.memory.device_blocks import warm_up_blocks
from trinity.memory.devices import use_device
from trinity.memory.digests import Digests
from trinity.runtime.core_thread import CoreThread, Mailbox, StopCore
from trinity.runtime.cpu_affinity import check_cores
from trinity.runtime.cuda_stream import make_lane_stream
from trinity.runtime.custom_stages import make_custom_stages
from trinity.runtime.exit_hook import end_at_exit
from trinity.runtime.feature_copies import copy_features
from trinity.runtime.lane import Lane
from trinity.runtime.pool_shapes import check_pools
from trinity.stage_kinds import roles_of, stage_of
from trinity.stages.attention.backends import make_backend
from trinity.stages.base import Stage, StageSetup
from trinity.timeline import Timeline

if TYPE_CHECKING:
    from trinity.stages.models import LoadedModel

logger = logging.getLogger("trinity")
LONG_STEP_S = 1.0  # a heartbeat: a shorter step needs no word of its own


class Network(Protocol):
    """Connection of an instance to the others, and to whoever submits requests. Any object with these members is one.

    - ``loop``: the event loop that runs transfers and all calls but ``send_to_peer``.
    - ``connector``: moves blocks; instances bind their pools to it.
    """

    loop: asyncio.AbstractEventLoop
    connector: Connector

    def send_to_peer(self, name: str, message: Value) -> None:
        """Carry a message to the instance of this name, where ``post`` takes it. Any thread calls; it must not block.

        Messages from one instance to another arrive in order.
        """

    def send_to_frontend(self, messages: list[Value]) -> None:
        """Take messages for the front end, in order: ``Emit`` has tokens, ``Finished`` a request's end."""

    def report_crash(self, name: str, error: BaseException) -> None:
        """Take note that a thread of this instance has failed: it serves no more."""


class InstanceHandle(Protocol):
    """An instance as its pipeline sees it, on threads of this process or in a process of its own."""

    def post(self, event: Value) -> None: ...

    def stop(self, at_once: bool = False) -> None: ...

    async def join(self) -> None: ...

    def announcement(self) -> PeerUp: ...

    def lane_steps(self) -> dict[str, tuple[Hashable, float]]: ...


@dataclass
class LoadedInstance:
    """An instance with its weights, block memory and stages, ready to run."""

    spec: Instance
    model: LoadedModel | EmulatedModel
    memory: dict[str, BlockMemory]
    stages: list[Stage]
    settings: Settings = field(init=False)

    def release(self) -> None:
        """Drop weights, pools and stages; twice does no harm. Nothing may be asked of them afterwards.

        Host, threads and front end name one another: what one of them holds would stay until Python looks for cycles,
        and a second pipeline would find a GPU full.
        """
        self.stages.clear()
        self.memory.clear()
        self.__dict__.pop("model", None)


def make_built_in_stages(setup: StageSetup, taken: str) -> list[Stage]:
    """Make trinity's stages for the roles that are not in ``taken``, the letters of the user's own stages."""
    from trinity.stages.encode import EncodeStage
    from trinity.stages.gpu.cuda_graphs import make_graph_cache
    from trinity.stages.language import LanguageStage

    letters = "".join(letter for letter in setup.roles if letter not in taken)
    made: list[Stage] = []
    if roles_of(letters).encodes and IMAGE in setup.memory:
        made.append(EncodeStage(setup.model, setup.memory[IMAGE], make_graph_cache(setup.model.device)))
    language = "".join(letter for letter in letters if stage_of(letter).part == "language")
    if language:
        kv, image = setup.memory[KV], setup.memory.get(IMAGE)
        heads = setup.model.adapter.text_config.num_attention_heads
        backend = make_backend(setup.attention, kv.shape.shape, kv.shape.dtype, kv.tensor.device, heads)
        graphs = make_graph_cache(setup.model.device)
        stage = LanguageStage(setup.model, kv, image, language, setup.observe, backend, graphs, setup.memory.get(STATE))
        if graphs is not None:
            stage.warm_up()
        made.append(stage)
    return made


def build_instance(
    spec: Instance,
    model: LoadedModel | EmulatedModel,
    pools: Mapping[str, int],
    cache: CacheConfig,
    observe: Callable[..., None] | None,
    shared: bool = False,
) -> LoadedInstance:
    """Allocate an instance's pools and make its stages.

    ``cache``: sizes and dtype of blocks; ``shared``: pools in memory files, which other processes can map. Raises
    ``ConfigError`` if it cannot run here, or a pool has no block.
    """
    check_cores(spec.cores, spec.name)
    shapes = check_pools(spec, model, pools, cache)
    device = spec.device or "cpu"
    if device == "cpu":
        needed = sum(shape.block_bytes * pools[kind] for kind, shape in shapes.items())
        check_available(needed, f"the pools of instance {spec.name} ({spec.roles})")
    with use_device(device):
        warm_up_blocks(device)
        memory = {kind: BlockMemory(shape, pools[kind], device, shared=shared) for kind, shape in shapes.items()}
        loaded = LoadedInstance(spec, model, memory, _make_stages(spec, model, memory, observe))
    loaded.settings = Settings(
        name=spec.name,
        roles=spec.roles,
        pools={kind: each.blocks for kind, each in memory.items()},
        layers=memory[KV].shape.shape[0] if KV in memory else 1,
        **pick_fields(BlockSizes, cache),
        **pick_fields(CoreOptions, spec) | {"depth": spec.steps_in_flight},
    )
    return loaded


def _make_stages(
    spec: Instance,
    model: LoadedModel | EmulatedModel,
    memory: Mapping[str, BlockMemory],
    observe: Callable[..., None] | None,
) -> list[Stage]:
    """Make the stages of the instance's lanes: its own, and trinity's for the other roles."""
    if isinstance(model, EmulatedModel):
        if spec.stages or observe is not None:
            raise ConfigError(
                "emulated instances compute nothing: stages= and observe= need a checkpoint, not an EmulatedModel"
            )
        return list(build_emulated_stages(model, spec.roles, spec.lanes, memory))
    setup = StageSetup(spec.roles, model, memory, observe, spec.attention)
    own = make_custom_stages(spec, setup)
    return own + make_built_in_stages(setup, "".join(stage.letters for stage in own))


def _drop_tensors(event: Value) -> Value:
    """Return ``event`` without pixels or features: who keeps it would keep them beyond the request's end."""
    if isinstance(event, Submit) and event.inputs:
        return msgspec.structs.replace(event, inputs=())
    return msgspec.structs.replace(event, rows=()) if isinstance(event, Collected) else event


@forbid_copies("pass the Instance that describes it")
class InstanceHost:
    """Runs a loaded instance with one thread for its core and one for each lane.

    - ``loaded``: the instance with its memory and stages.
    - ``network``: connection to peers and front end.
    - ``timeline``: records steps and transfers.
    - ``policy``: chooses the instance for a request's next stage.

    Public methods are safe from any thread.
    """

    def __init__(self, loaded: LoadedInstance, network: Network, timeline: Timeline, policy: RoutingPolicy) -> None:
        self.loaded = loaded
        self.name = loaded.spec.name
        self.core = InstanceCore(loaded.settings, policy)
        self.on_long_step: Callable[[str, float], None] = lambda lane, predicted_s: None  # before it runs; 0.0: unknown
        self.events: deque[Value] = deque(maxlen=256)
        self.steps = 0
        self._network, self._timeline = network, timeline
        self._thread = CoreThread(self.core, self._handle, self._failed, self._stop_lanes, loaded.spec.cores)
        self._lanes = self._make_lanes()
        self._mail = Mailbox(network.send_to_frontend)
        verified = {kind: loaded.memory[kind] for kind in network.connector.verified if kind in loaded.memory}
        keys = {kind: network.connector.verification_key(kind) for kind in verified}
        self._verified = verified
        self._digests = Digests(verified, keys) if verified else None
        self._tasks: set[asyncio.Task[None]] = set()

    def _make_lanes(self) -> dict[str, Lane]:
        from trinity.core.instance.lanes import LANE_PARTS

        spec = self.loaded.spec
        return {
            lane: Lane(
                self.name,
                lane,
                [stage for stage in self.loaded.stages if roles_of(stage.letters).parts & {*LANE_PARTS[lane]}],
                self.post,
                self._failed,
                self._timeline,
                0 if isinstance(self.loaded.model, EmulatedModel) else spec.threads,
                cores,
                make_lane_stream(spec.device, lane, spec.roles),
                self.loaded.settings.steps_in_flight,
                self._thread.decide,
                self.loaded.model.vocabulary,
            )
            for lane, cores in zip(spec.lanes, split_cores(spec.cores, len(spec.lanes)), strict=True)
        }

    def start(self) -> None:
        """Start the threads; call it on the loop's thread."""
        self._mail.open(self._network.loop)
        for lane in self._lanes.values():
            lane.start()
        self._thread.start()
        end_at_exit(self)

    def post(self, event: Value) -> None:
        self._thread.post(event)

    def stop(self, at_once: bool = False) -> None:
        """End the threads once no request is left here, or ``at_once`` after the steps in flight."""
        self._thread.post(StopCore(at_once))

    def end_now(self) -> list[threading.Thread]:
        """As ``Endable``: stop at once; returns the threads."""
        self.stop(at_once=True)
        return [self._thread.thread, *(lane.thread for lane in self._lanes.values())]

    async def join(self) -> None:
        """Wait for the threads to end, and cancel the transfers that an instance stopped at once has left."""
        await asyncio.to_thread(self._join)
        self._mail.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._verified.clear()
        self.loaded.release()

    def _join(self) -> None:
        self._thread.join()
        self._stop_lanes()  # the thread has done so when it ended, but it may never have started
        for lane in self._lanes.values():
            lane.join()

    def announcement(self) -> PeerUp:
        return self.core.announcement()

    def lane_steps(self) -> dict[str, tuple[Hashable, float]]:
        """Return of each lane's present step a name and its predicted seconds, 0.0 where none like it has run."""
        return {lane: (step, seconds) for (lane, step), seconds in self.predict_steps().items()}

    @property
    def blocks_digested(self) -> int:
        """Digests that the core's thread has computed so far: it grows while that thread does nothing else."""
        return 0 if self._digests is None else self._digests.computed

    def predict_steps(self) -> dict[tuple[str, int], float]:
        """Predict the seconds of each lane's present step, by the lane and its id; 0.0 where none like it has run."""
        found = {}
        for flight in self.core.state.lanes.values():
            with suppress(IndexError):  # the core's thread may take it out meanwhile
                step = flight[0].step
                found[step.lane, step.id] = self._predict(step)
        return found

    def _predict(self, step: Step) -> float:
        rates = self.core.state.rates
        seconds = [rates.seconds(letter, count) for letter, count in units(step).items()]
        return sum(seconds) if all(seconds) else 0.0

    def _stop_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.stop()

    def _failed(self, error: BaseException) -> None:
        """Report the error that ended a thread, or every reader would wait for ever."""
        error.add_note(f"last events of {self.name}: {list(self.events)[-16:]}")
        if self._network.loop.is_closed():  # the program ended without aclose(): there is no one to report to
            return
        logger.error("%s failed", threading.current_thread().name, exc_info=error)
        self._network.loop.call_soon_threadsafe(self._crashed, error)

    def _crashed(self, error: BaseException) -> None:
        self._mail.drain()
        self._network.report_crash(self.name, error)

    def _handle(self, event: Value, now: float) -> None:
        self.events.append(_drop_tensors(event))
        if self._digests is not None:
            self._digests.observe(event)
        self._execute(self.core.handle(event, now))

    def _execute(self, commands: list[Value]) -> None:
        to_frontend: list[Value] = []
        for command in commands:
            if isinstance(command, Send):
                if command.to == FRONTEND:
                    to_frontend.append(command.message)
                else:
                    self._network.send_to_peer(command.to, self._verifiable(command))
            elif isinstance(command, Step):
                self.steps += 1
                if command.encodes or command.prefills:
                    predicted_s = self._predict(command)
                    if not 0.0 < predicted_s < LONG_STEP_S:
                        self.on_long_step(command.lane, predicted_s)
                self._lanes[command.lane].post(command)
            elif isinstance(command, Pull):
                pull = command if self._digests is None else self._digests.add_expected(command)
                self._network.loop.call_soon_threadsafe(self._begin, self._pull, pull, "pull")
            elif isinstance(command, Collect):
                self._network.loop.call_soon_threadsafe(self._begin, self._collect, command, "collect")
            elif isinstance(command, Revoke):
                generations = self.loaded.memory[command.kind].generations
                generations[list(command.blocks)] = command.generation
            elif isinstance(command, (Open, Grow, Close)):
                self._lanes["language" if "language" in self._lanes else "joint"].post(command)
        if to_frontend:
            self._mail.put(to_frontend)

    def _verifiable(self, send: Send) -> Value:
        """Add digests of the blocks that a message says are ready, where blocks are verified."""
        return send.message if self._digests is None else self._digests.add_digests(send, self.core.state.outgoing)

    def _begin(self, run: Callable[[Any], Coroutine[Any, Any, None]], command: Value, what: str) -> None:
        task = self._network.loop.create_task(run(command), name=f"trinity-{what}-{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pull(self, pull: Pull) -> None:
        started = time.perf_counter()
        answer = await self._network.connector.pull(self.name, pull)
        title = f"pull {pull.kind} from {pull.source}"
        self._timeline.add(self.name, "migration", title, started, time.perf_counter() - started, answer.record)
        self.post(answer)

    async def _collect(self, command: Collect) -> None:
        self.post(await copy_features(self.loaded.memory[IMAGE], command, self.name))
