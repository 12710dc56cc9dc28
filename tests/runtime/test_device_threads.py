"""Threads that trinity starts, and the door that those which touch a GPU pass: one that does not is on device 0.

torch.cuda is a stand-in with a current device for each thread. A thread that is started anywhere in trinity has its
line here: what it is on, or that it touches no device.
"""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import trinity
from support.lazy_cuda import LazyCuda, replace_cuda
from trinity.core.messages import Sampled, Step
from trinity.core.scheduler import BatchRules
from trinity.errors import TransportError
from trinity.instance import Instance
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.runtime import host, loader
from trinity.runtime.compose import LoadedStage
from trinity.runtime.cuda_stream import make_lane_stream
from trinity.runtime.lane import Lane
from trinity.runtime.profiler_lanes import LaneThreads
from trinity.stages import models
from trinity.timeline import Timeline
from trinity.transport.link import Link
from trinity.transport.nixl import agent as nixl_agent
from trinity.transport.nixl import source as nixl_source
from trinity.transport.ucx import source as ucx_source

STARTERS = {"Thread", "ThreadPoolExecutor", "to_thread", "run_to_end", "run_in_executor"}
NONE = "touches no device"
DIGESTS = "tests/memory/test_devices.py: copies, buffers and digests pass the door themselves"
DRIVER = "tests/transport/test_cuda_ipc.py: over a stand-in for the driver"
CALLER = "what its caller runs: listed there"
KV_SHAPE = BlockShape("kv", (1, 2, 1, 16, 8), torch.float32)
Seen = list[int]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LazyCuda:
    return replace_cuda(monkeypatch)


# ---------------------------------------------------------------- what each thread is on


def lane(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen: Seen = []

    class Noting:
        letters = "D"

        def forward(self, step: Step) -> dict[str, Sampled]:
            seen.append(cuda.current_device())
            return {each: Sampled(1) for each in step.decodes}

    stream = make_lane_stream("cuda:1", "joint", "D")
    stage: Any = Noting()
    made = Lane("D0", "joint", [stage], lambda answer: None, lambda error: None, Timeline(), 0, stream=stream)
    made.start()
    made.post(Step(1, "joint", decodes=("a",)))
    made.stop()
    made.join()
    return seen


def probe(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> Seen:
    threads = LaneThreads(("vision", "language"), (), 1, "cuda:1")
    seen = [threads.run(letter, lambda stream: cuda.current_device()) for letter in "EPD"]
    threads.close()
    return seen


def stage_by_hand(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> Seen:
    loaded: Any = SimpleNamespace(spec=Instance("D", device="cuda:1"), memory={}, model=None, stages=[])
    settled: Seen = []

    def launch() -> int:
        cuda.launch(lambda: settled.append(1), 1)
        return cuda.current_device()

    async def main() -> Seen:
        async with LoadedStage(loaded) as made:
            found = await made._call(launch)
            return [found, *settled]  # settled: `Connector.move` may read at once

    return asyncio.run(main())


def loading(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen: Seen = []

    def note(*_: Any, **__: Any) -> Any:
        seen.append(cuda.current_device())
        return SimpleNamespace(
            image_shape=lambda *_: None, kv_shape=lambda *_: KV_SHAPE, state_shape=lambda: None, weight_bytes=0
        )

    monkeypatch.setattr(models, "load_model", note)
    monkeypatch.setattr(host, "_make_stages", lambda *_: note() and [])
    monkeypatch.setattr(host, "BlockMemory", lambda shape, blocks, *_, **__: note() and BlockMemory(shape, blocks))
    config = loader.ServingConfig(Path("somewhere"), device="cuda:1")
    specs = [Instance("D", name="D0", device="cuda:1", pools={"kv": 2})]
    monkeypatch.setattr(loader, "_make_rules", lambda *_: BatchRules())
    run_on_thread(lambda: loader.load_instances(config, specs, None))
    return seen


def link(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen: Seen = []

    class Noting(Link):
        def _connect(self) -> None:
            seen.append(cuda.current_device())
            raise TransportError("enough", "nixl")

        def _disconnect(self, handles: list[Any]) -> None:
            seen.append(cuda.current_device())

    made = Noting("nixl", "a peer", 1)
    made.begin()
    made.join()
    return seen


class Agent:
    """A nixl agent that notes on which device it is asked."""

    name, metadata = "agent", b""

    def __init__(self, cuda: LazyCuda, seen: Seen) -> None:
        self.cuda, self.seen, self.asked = cuda, seen, threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            if name in ("register_memory", "get_new_notifs", "deregister_memory"):
                self.seen.append(self.cuda.current_device())
            if name == "get_new_notifs":
                self.asked.set()
            return {} if name == "get_new_notifs" else b""

        return call


VRAM = nixl_agent.Region(0, 8, 4, "VRAM", 1)


def nixl_sources(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen: Seen = []
    agent = Agent(cuda, seen)
    monkeypatch.setattr(nixl_source, "make_agent", lambda gpu: agent)
    made = nixl_source.NixlSource(VRAM.gpu)
    made.register(VRAM)
    assert agent.asked.wait(120)
    made.stop()
    made.join()
    return seen


def nixl_agents(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen: Seen = []
    api: Any = SimpleNamespace(
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_RW=0),
        nixl_agent_config=lambda **_: None,
        nixl_agent=lambda *_: seen.append(cuda.current_device()),
    )
    monkeypatch.setattr(nixl_agent, "load_nixl", lambda: api)
    nixl_agent.make_agent(VRAM.gpu)  # on the thread of the event loop, whose device stays as it was
    return seen


def ucx_sources(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen: Seen = []
    asked = threading.Event()

    class Worker:
        address = b""

        def __init__(self) -> None:
            seen.append(cuda.current_device())

        def wait(self, timeout_s: float) -> None:
            seen.append(cuda.current_device())
            asked.set()

        def take_message(self, tag: int) -> None:
            return None

        def wake(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(ucx_source, "UcxWorker", Worker)
    made = ucx_source.UcxSource(1)
    assert asked.wait(120)
    made.stop()
    made.join()
    return seen


SCENES = [lane, probe, stage_by_hand, loading, link, nixl_sources, nixl_agents, ucx_sources]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_thread_that_touches_a_gpu_is_on_it(
    scene: Callable[..., Seen], cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scene(cuda, monkeypatch)
    assert set(found) == {1}, f"{scene.__name__} touched devices {found}"
    assert cuda.current_device() == 0, "the thread that started it is where it was"


# ---------------------------------------------------------------- no thread is left out

THREADS: dict[tuple[str, str], Any] = {
    ("adapt/auto.py", "self.plan_on"): NONE,
    ("adapt/proposals.py", "plan"): NONE,
    ("connector.py", "digest_rows"): DIGESTS,
    ("connector.py", "verify_pull"): DIGESTS,
    ("connector.py", "wait_for_default_stream"): DIGESTS,
    ("memory/weight_shelf.py", "self._listen"): NONE,
    ("memory/weight_shelf.py", "self._serve"): NONE,
    ("pipeline/served_instances.py", "loader.load_instances"): loading,
    ("pipeline/pipeline.py", "loader.profile_copies"): loading,
    ("pipeline/pipeline.py", "self._load_processor"): NONE,
    ("pipeline/live_plan.py", "_plan_on_rows"): NONE,
    ("pipeline/loop_thread.py", "serving.run"): NONE,
    ("pipeline/request_map.py", "ResultsFile"): NONE,
    ("pipeline/request_map.py", "next"): NONE,
    ("pipeline/request_map.py", "self._file.close"): NONE,
    ("pipeline/request_map.py", "self._file.find"): NONE,
    ("pipeline/request_map.py", "self._file.keep"): NONE,
    ("preprocess/text/grammar_check.py", "work"): NONE,
    ("preprocess/fetch/url_fetch.py", "resolve"): NONE,
    ("preprocess/processor.py", "self.close"): NONE,
    ("preprocess/text/generation_config.py", "1"): NONE,
    ("preprocess/text/generation_config.py", "self._pool"): NONE,
    ("preprocess/fetch/url_fetch.py", "1"): NONE,
    ("preprocess/preparation_lanes.py", "places"): NONE,
    ("preprocess/preparation_lanes.py", "None"): NONE,
    ("server/application.py", "make_embedding_request"): NONE,
    ("server/reply_loop.py", "write"): NONE,
    ("server/loop_watch.py", "self._thread.join"): NONE,
    ("server/loop_watch.py", "self._watch"): NONE,
    ("remote/channel/agreement.py", "_hash"): NONE,
    ("remote/supervision/fork_client.py", "self.__exit__"): NONE,
    ("remote/supervision/fork_client.py", "self._read"): NONE,
    ("remote/supervision/fork_client.py", "self.close"): NONE,
    ("remote/supervision/fork_supply.py", "leave_launcher"): NONE,
    ("remote/supervision/instance_processes.py", "self._shelf.close"): NONE,
    ("remote/ray/ray_driver.py", "_fence"): NONE,
    ("remote/ray/ray_driver.py", "ray.shutdown"): NONE,
    ("remote/ray/ray_driver.py", "remove_placement_group"): NONE,
    ("remote/instance_loading.py", "hold_instance_weights"): NONE,  # nothing on a GPU: ``fits_beside``
    ("remote/instance_loading.py", "identify_model"): NONE,
    ("remote/worker.py", "identify_model"): NONE,
    ("remote/instance_loading.py", "known_whole_digest"): NONE,
    ("remote/instance_loading.py", "load_instance"): loading,
    ("remote/instance_loading.py", "prepare_transports"): NONE,
    ("runtime/compose.py", "1"): stage_by_hand,
    ("runtime/compose.py", "loader.load_instances"): loading,
    ("runtime/compose.py", "self._thread.shutdown"): NONE,
    ("runtime/core_thread.py", "self._run"): DIGESTS,
    ("runtime/feature_copies.py", "_copy"): DIGESTS,
    ("runtime/host.py", "self._join"): NONE,
    ("runtime/lane.py", "self._run"): lane,
    ("runtime/profiler_lanes.py", "1"): probe,
    ("runtime/profiler_lanes.py", "again"): NONE,
    ("runtime/shielded_wait.py", "function"): CALLER,
    ("server/batch.py", "BatchRequests"): NONE,
    ("server/batch.py", "batch.take"): NONE,
    ("transport/base.py", "copier.copy"): DIGESTS,
    ("transport/cuda_ipc/transport.py", "self._copy"): DRIVER,
    ("transport/link.py", "link.join"): NONE,
    ("transport/link.py", "self._run"): link,
    ("transport/link_transport.py", "self._source.join"): NONE,
    ("transport/nixl/source.py", "self._run"): nixl_sources,
    ("transport/ucx/link.py", "make"): DIGESTS,
    ("transport/ucx/source.py", "self._run"): ucx_sources,
}


def threads_of(path: Path) -> set[str]:
    """What a module runs on other threads: the target, or the first argument, of each call that starts or uses one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in STARTERS:
                targets = [each.value for each in node.keywords if each.arg == "target"]
                found.add(ast.unparse((targets or node.args)[0]))
    return found


def test_every_thread_is_listed() -> None:
    """A new one needs a line: a scene above, if it may touch a GPU."""
    root = Path(trinity.__file__).parent
    modules = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] != "bench"]
    found = {(str(path.relative_to(root)), target) for path in modules for target in threads_of(path)}
    assert found == set(THREADS)
    assert all(scene in SCENES for scene in THREADS.values() if not isinstance(scene, str))


def test_a_loader_thread_keeps_weights_once_for_both_names_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of one process on one GPU share a copy of the weights, be it "cuda" or "cuda:0"."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    from trinity.stages.models.loader import check_device

    assert check_device("cuda") == check_device("cuda:0") != check_device("cuda:1")


def run_on_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_pool_says_on_which_gpu_it_is() -> None:
    shape = BlockShape("kv", (8,), np.dtype("float32"))
    assert nixl_agent.pool_region(BlockMemory(shape, 2)).gpu is None
    assert VRAM.gpu == 1
