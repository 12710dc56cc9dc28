"""Items of the probe: each looks at one thing on a device and says in a sentence what it saw.

An item raises ``NotHere`` where the machine lacks what it needs, and any other error where something does not work.
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.gpu import model as gpu_model
from benchmarks.gpu import moves as gpu_moves
from trinity.errors import TransportUnavailable
from trinity.instance import Instance, name_instances
from trinity.memory import native
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.request import Request, Sampling
from trinity.stages.attention.backends import BACKENDS, choose_backends, pick_backend
from trinity.stages.attention.choice import CacheKind
from trinity.stages.gpu.cuda_graphs import make_graph_cache
from trinity.testing.checkpoints import build_checkpoint
from trinity.transport import make_transport

OUTPUTS = 8  # tokens
SHAPE = (2, 2, 4, 16, 64)  # of a KV block: layers, keys and values, KV heads, rows, head size
KIB, MIB = 1 << 10, 1 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NotHere(Exception):
    """The machine lacks what an item needs."""


class Item(NamedTuple):
    """A function from a device to a sentence, and the seconds that it may take."""

    run: Callable[[str], str]
    seconds: float


def need_gpu(device: str) -> None:
    """Raise ``NotHere`` if the device is a GPU and torch sees none, or not this one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.startswith("cuda") and count <= (torch.device(device).index or 0):
        raise NotHere(f"no GPU: torch {torch.__version__} sees {count or 'none'}")


def need_cuda(device: str) -> None:
    """Raise ``NotHere`` on a CPU too."""
    if not device.startswith("cuda"):
        raise NotHere("a CPU has none of it")
    need_gpu(device)


def describe_machine(device: str) -> str:
    need_gpu(device)
    import transformers

    there = importlib.util.find_spec("triton") is not None
    triton = __import__("triton").__version__ if there else "none"
    versions = (
        f"torch {torch.__version__}, triton {triton}, transformers {transformers.__version__}; {native.describe()}"
    )
    if not device.startswith("cuda"):
        return f"a CPU; {versions}"
    told = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    count = torch.cuda.device_count()
    return (
        f"{count} GPU{'s' * (count > 1)}, {told.name}, capability {told.major}.{told.minor}, "
        f"{told.multi_processor_count} multiprocessors, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
        f"CUDA {torch.version.cuda}; {versions}"
    )


def measure_limits(device: str) -> str:
    need_gpu(device)
    limit = gpu_model.limits(device, tiny=not device.startswith("cuda"))
    return f"a copy reaches {limit.bandwidth / 1e12:.2f} TB/s, a product in bfloat16 {limit.flops / 1e12:.0f} TFLOP/s"


def pick_attention(device: str) -> str:
    """Compile each backend's kernels, and hold them against torch, in three dtypes."""
    need_gpu(device)
    said = []
    for dtype in DTYPES:
        kind, started = CacheKind(SHAPE, dtype, torch.device(device)), time.perf_counter()
        chosen = choose_backends("auto", kind)
        taken = (chosen.decodes, chosen.chunks)
        others = [name for name in BACKENDS if name not in taken and _runs(name, kind)]
        spent = time.perf_counter() - started
        beside = f"; {', '.join(others)} would run too" if others else ""
        said.append(f"{str(dtype).removeprefix('torch.')} takes {chosen} ({spent:.1f} s{beside})")
    if device.startswith("cuda") and "takes torch" in said[1]:
        raise RuntimeError(f"bfloat16 should take a kernel: {'; '.join(said)}")
    return "; ".join(said)


def _runs(name: str, kind: CacheKind) -> bool:
    try:
        pick_backend(name, kind)
    except Exception:
        return False
    return True


def replay_graphs(device: str) -> str:
    """Record and replay, and see that a recording that fails leaves the stream as it was."""
    need_cuda(device)
    place = torch.device(device)
    cache, before = make_graph_cache(place), torch.cuda.current_stream(place)
    if cache is None:
        raise RuntimeError("there is no recorder for this device")
    weight = torch.randn(64, 64, device=place)
    _check_replays(cache, "product", weight, 0.0)
    looked = cache.call("looks", lambda inputs: [inputs[0] * inputs[0].sum().item()], [torch.ones(3)])
    if torch.cuda.current_stream(place) != before:
        raise RuntimeError("a recording that failed has moved this thread to another stream")
    _check_replays(cache, "another", weight, 1.0)
    torch.cuda.synchronize(place)
    refused = "is refused" if looked is None else "is run"
    return f"graphs are recorded and replayed; a call that looks at values {refused}, and nothing follows from it"


def _check_replays(cache: Any, key: str, weight: torch.Tensor, more: float) -> None:
    for seed in range(3):
        rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        (found,) = cache.call(key, lambda inputs: [inputs[0] @ weight + more], [rows])
        torch.testing.assert_close(found, rows.to(weight.device) @ weight + more, atol=1e-2, rtol=1e-2)


def overlap_streams(device: str) -> str:
    """Run a kernel of one block on one stream, and then one on each of two."""
    need_cuda(device)
    torch.cuda.set_device(device)
    streams: list[Any] = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    alone, both = (min(_seconds_on(some, device) for _ in range(4)) for some in (streams[:1], streams))
    if both > 1.9 * alone:
        raise RuntimeError(f"two streams take {both * 1e3:.1f} ms where one takes {alone * 1e3:.1f}: nothing overlaps")
    return f"twice the work on two streams takes {both / alone:.2f} times as long as on one"


def _seconds_on(streams: list[Any], device: str) -> float:
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # cycles of one block: two fit beside each other on any GPU
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


def serve(
    placement: str, hosting: Literal["thread", "process"], lanes: tuple[str, ...] = ("joint",), depth: int = 1
) -> Callable[[str], str]:
    """Make an item that serves a tiny model with default pools, and compares its tokens with ``generate()``'s."""

    def run(device: str) -> str:
        need_gpu(device)
        with tempfile.TemporaryDirectory() as scratch:
            folder = build_checkpoint("llava", Path(scratch) / "llava")
            specs = [
                Instance(roles, name, device=device, lanes=lanes, depth=depth)
                for name, roles in Placement.parse(placement).instances()
            ]
            wrong, moved = asyncio.run(_serve(folder, name_instances(specs), hosting, device))
        if wrong:
            raise RuntimeError(f"tokens differ from generate()'s: {wrong}")
        return f"tokens of 3 requests, with up to 2 images, are those of generate(); {moved} transfers"

    return run


async def _serve(
    folder: Path, specs: list[Instance], hosting: Literal["thread", "process"], device: str
) -> tuple[list[str], int]:
    from transformers.utils import logging as untyped

    from trinity.testing.oracle import Oracle

    logging: Any = untyped
    logging.disable_progress_bar()
    asked = [_request(count) for count in range(3)]
    wanted = await asyncio.to_thread(lambda: Oracle(folder).generate_all(asked))
    async with Pipeline(folder, specs, hosting=hosting, device=device, dtype="float32") as pipe:
        outputs = await asyncio.gather(*map(pipe.complete, asked))
    pairs = zip(outputs, wanted, strict=True)
    wrong = [
        f"{list(ours.token_ids)} beside {list(theirs)}"
        for ours, theirs in pairs
        if list(ours.token_ids) != list(theirs)
    ]
    return wrong, sum(len(output.transfers) for output in outputs)


def _request(images: int) -> Request:
    from PIL import Image

    pictures = [Image.new("RGB", (56, 56), (60 * number, 90, 200 - 50 * number)) for number in range(images)]
    text = "<image>" * images + " What is there?"
    return Request(text, images=pictures, max_tokens=OUTPUTS, sampling=Sampling(ignore_eos=True))


def move_by(medium: str) -> Callable[[str], str]:
    """Make an item that reads blocks of another process's pool, and compares every one."""

    def run(device: str) -> str:
        need_gpu(device)
        if medium == "cuda_ipc":
            need_cuda(device)
        try:
            make_transport(medium)
        except TransportUnavailable as error:
            raise NotHere(str(error)) from error
        blocks = [("blocks", 64, MIB if device.startswith("cuda") else 64 * KIB)]
        (moved,) = gpu_moves.measure(device, medium, blocks, 10, 1e12)
        best = min(moved.seconds)
        return f"{moved.blocks} blocks in {best * 1e6:.0f} µs, {moved.bytes / best / 1e9:.1f} GB/s, each as it was lent"

    return run


def use_second(device: str) -> str:
    """Serve on the second GPU, while the first is the current one."""
    need_cuda(device)
    if torch.cuda.device_count() < 2:
        raise NotHere("there is one GPU")
    return serve("1E1P1D", "thread")("cuda:1")


ITEMS: dict[str, Item] = {
    "machine": Item(describe_machine, 30),
    "limits": Item(measure_limits, 30),
    "attention": Item(pick_attention, 60),
    "graphs": Item(replay_graphs, 30),
    "EPD in a thread": Item(serve("EPD", "thread"), 60),
    "1E1P1D in threads": Item(serve("1E1P1D", "thread"), 60),
    "1E1P1D in processes": Item(serve("1E1P1D", "process"), 90),
    "two steps deep": Item(serve("EP+D", "thread", depth=2), 60),
    "two lanes": Item(serve("EPD", "thread", lanes=("vision", "language")), 60),
    "streams": Item(overlap_streams, 30),
    "inproc": Item(move_by("inproc"), 30),
    "cuda_ipc": Item(move_by("cuda_ipc"), 40),
    "nixl": Item(move_by("nixl"), 40),
    "ucx": Item(move_by("ucx"), 40),
    "second GPU": Item(use_second, 60),
}
