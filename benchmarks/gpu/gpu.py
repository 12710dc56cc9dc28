"""On a GPU: a random model of LLaVA-1.5-7B's shape in bfloat16, every figure beside the limit measured with it.

python benchmarks/run.py --only gpu --minutes 8 --results FOLDER. Sections that no time is left for are named.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import moves as gpu_moves
from benchmarks.gpu import serving as gpu_serving
from benchmarks.gpu.model import folder, limits, random_weights
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity.costs.model_config import read_model_shape
from trinity.costs.step_cost import Device, Roofline
from trinity.errors import TrinityError
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.runtime.host import LoadedInstance
from trinity.runtime.loader import ServingConfig, load_instances, make_processor
from trinity.runtime.profiler import Probe
from trinity.stages.attention.backends import BACKENDS, CacheKind, pick_backend
from trinity.stages.base import Stage
from trinity.stages.encode import MOST_GRAPH_ITEMS
from trinity.stages.models import load_model

NAME, TITLE = "gpu", "On a GPU"
AIM = 0.7  # of the limit
MISSING = "No GPU: torch sees none on this machine, and nothing here has been run."


LONG_PROMPTS, IMAGES = gpu_serving.Load(32, 512, 128), gpu_serving.Load(48, 32, 64)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the benchmark. ``tiny``: a small model on the CPU, to see that everything runs."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    tiny: bool = False
    context: int = 1024
    rows: tuple[int, ...] = (1, 8, 32, 128)
    prefills: tuple[int, ...] = (600, 1024)
    images: tuple[int, ...] = (1, 8)
    repeats: int = 7
    reads: int = 100
    rounds: int = 2
    generate: gpu_serving.Load = LONG_PROMPTS
    dual: gpu_serving.Load = IMAGES
    media: tuple[str, ...] = ("inproc", "cuda_ipc")


TINY = Sizes(
    device="cpu",
    dtype="float32",
    tiny=True,
    context=24,
    rows=(1, 3),
    prefills=(20,),
    images=(1, 2),
    repeats=1,
    reads=3,
    rounds=1,
    generate=gpu_serving.Load(2, 12, 4),
    dual=gpu_serving.Load(2, 3, 3),
    media=("inproc", "shm"),
)


@dataclass
class Work:
    """A benchmark under way: the model's folder, the device's limits, what has been found, and until when."""

    sizes: Sizes
    model: Path
    limit: Device
    until: float
    found: dict[str, Any]

    def section(self, name: str, run: Callable[[], Any], seconds: float) -> None:
        """Run one, unless the ``seconds`` that it may take are not left; what fails is told, and ends nothing else."""
        if time.monotonic() + seconds > self.until:
            self.found[name] = {"skipped": "no time was left"}
            return
        started = time.monotonic()
        try:
            self.found[name] = run()
        except Exception as error:
            logging.getLogger("trinity").exception("section %s of the GPU benchmark failed", name)
            self.found[name] = {"failed": f"{type(error).__name__}: {error}"}
        self.found.setdefault("section_s", {})[name] = time.monotonic() - started
        gc.collect()
        if self.sizes.device != "cpu":
            torch.cuda.empty_cache()  # the next one's, and other processes'


def run(setting: Setting) -> Result:
    """Everything, where there is a GPU; what is missing, where not."""
    if not torch.cuda.is_available():
        return Result(NAME, TITLE, MISSING, notes=[MISSING], values={"run": False})
    return measure(Sizes(), setting.minutes)


def measure(sizes: Sizes, minutes: float) -> Result:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, random_weights(sizes.device):
        model = folder(Path(scratch), sizes.tiny)
        limit = limits(sizes.device, sizes.tiny)
        held = load_model(model, "EPD", dtype=sizes.dtype, device=sizes.device)  # one set of weights for all sections
        work = Work(sizes, model, limit, started + 60 * minutes, {"run": True, "limit": limit_of(limit)})
        work.found["model"] = "tiny-llava" if sizes.tiny else "LLaVA-1.5-7B"
        work.section("attention", lambda: attention(work), 20)
        work.section("steps", lambda: steps(work), 120)
        work.section("moves", lambda: moves(work), 40)
        load_ = work.sizes.generate
        common = (model, sizes.device, sizes.dtype)
        work.section(
            "generate_batch",
            lambda: asyncio.run(gpu_serving.beside_generate_batch(*common, load_, sizes.rounds)),
            90,
        )
        work.section("dual_stream", lambda: asyncio.run(gpu_serving.dual_stream(*common, sizes.dual, sizes.rounds)), 90)
    work.found["weight_bytes"] = held.weight_bytes
    return result(sizes, work.found)


def limit_of(limit: Device) -> dict[str, Any]:
    return {"device": limit.name, "flops": limit.flops, "bytes_per_s": limit.bandwidth, "memory": limit.memory}


def attention(work: Work) -> dict[str, str]:
    """What each backend says of a cache of this model on this device: "runs", or why not. What auto takes."""
    model = load_model(work.model, "PD", dtype=work.sizes.dtype, device=work.sizes.device)
    kind = CacheKind(model.kv_shape().shape, model.dtype, torch.device(work.sizes.device))
    said = {}
    for name in BACKENDS:
        try:
            pick_backend(name, kind)
            said[name] = "runs"
        except TrinityError as error:
            said[name] = str(error)
    said["auto"] = pick_backend("auto", kind)
    return said


def steps(work: Work) -> list[dict[str, Any]]:
    """Steps of one EPD instance, with CUDA graphs and without, each beside the model's roofline at these limits."""
    sizes, cost = work.sizes, Roofline(model=read_model_shape(work.model), device=work.limit)
    with_room = [n for n in sizes.rows if n * _block_bytes(work) * _blocks(sizes) < 0.75 * work.limit.memory]
    held = {"kv": max([*with_room, 1]) * _blocks(sizes), "image": max(sizes.images) + 1}
    deployment = ServingConfig(work.model, sizes.dtype, sizes.device, cache=CacheConfig(pools=held))
    processor = make_processor(work.model)
    (loaded,) = load_instances(deployment, [Instance("EPD")], processor)
    probe = Probe(loaded, processor)
    rows: list[dict[str, Any]] = []
    try:
        for graphs in (True, False) if recorded(loaded) else (False,):
            if not graphs:
                without_graphs(loaded)
            for n in with_room:
                limit = cost.at(n, 0, 0, context=sizes.context)
                rows.append(_step("decode", n, graphs, limit, partial(probe.decode, n, sizes.context), sizes))
            for n in sizes.images:
                limit = cost.seconds(0, 0, n * probe.image_tokens)
                rows.append(
                    _step("encode", n, graphs and n <= MOST_GRAPH_ITEMS, limit, partial(probe.encode, n), sizes)
                )
        for n in sizes.prefills:
            rows.append(_step("prefill", n, False, cost.seconds(0, n, 0), partial(probe.prefill, n), sizes))
    finally:
        probe.close()
    return rows


def _blocks(sizes: Sizes) -> int:
    """KV blocks of one decode row."""
    return -(-(sizes.context + 2) // 16)


def _block_bytes(work: Work) -> int:
    return 16 * read_model_shape(work.model).kv_bytes


def recorded(loaded: LoadedInstance) -> list[Stage]:
    """Stages that use CUDA graphs."""
    return [stage for stage in loaded.stages if getattr(stage, "_graphs", None) is not None]


def without_graphs(loaded: LoadedInstance) -> None:
    """Have the stages run as they are from now on."""
    for stage in recorded(loaded):
        vars(stage)["_graphs"] = None


def _step(what: str, n: int, graphs: bool, limit: float, seconds: Callable[[], float], sizes: Sizes) -> dict[str, Any]:
    seconds()  # kernels are compiled, graphs recorded
    seconds()
    found = [seconds() for _ in range(sizes.repeats)]
    return {"what": what, "n": n, "graphs": graphs, "seconds": found, "limit_s": limit}


def moves(work: Work) -> list[dict[str, Any]]:
    """Migrations of a prompt's KV and of an image's features."""
    model, sizes = read_model_shape(work.model), work.sizes
    block = _block_bytes(work)
    cases = [(f"KV of {n} tokens", -(-n // 16), block) for n in sizes.prefills]
    cases.append(("an image's features", 1, model.image_tokens * model.feature_bytes))
    found = []
    for medium in sizes.media:
        for each in gpu_moves.measure(sizes.device, medium, cases, sizes.reads, work.limit.bandwidth):
            found.append({**asdict(each), "p95_s": each.p95_s})
    return found


def result(sizes: Sizes, found: dict[str, Any]) -> Result:
    """Tables and aims of what was found; sections that were skipped or failed are notes."""
    absent = {
        name: each for name, each in found.items() if isinstance(each, dict) and {"skipped", "failed"} & set(each)
    }
    tables, aims = [], []
    if isinstance(found.get("steps"), list):
        tables.append(Table("Steps of one instance", STEPS, [_step_row(each) for each in found["steps"]]))
        aims += [_step_aim(each) for each in found["steps"] if _served(each, found["steps"])]
    if isinstance(found.get("moves"), list):
        tables.append(Table("Migrations", MOVES, [_move_row(each) for each in found["moves"]]))
    for name, row in (("generate_batch", _generate_row), ("dual_stream", _dual_row)):
        if name in found and name not in absent:
            tables.append(Table(name.replace("_", " "), ("what", "trinity", "beside", "ratio"), [row(found[name])]))
    notes = [f"{name}: {next(iter(each.values()))}" for name, each in absent.items()]
    if "attention" not in absent:
        notes += [f"attention {name}: {said}" for name, said in found["attention"].items()]
    limit = found["limit"]
    method = (
        f"{limit['device']}, random weights of {found['model']}'s shape in {sizes.dtype}. Limits, measured here: "
        f"one copy {limit['bytes_per_s'] / 1e12:.2f} TB/s (read and written), "
        f"one product {limit['flops'] / 1e12:.0f} TFLOP/s. "
        "The limit of a step: the larger of its bytes and its operations at these. Medians, host time included."
    )
    return Result(NAME, TITLE, method, tables, aims, notes, found)


STEPS = ("step", "n", "CUDA graph", "ms", "limit ms", "of the limit")
MOVES = ("what", "by", "p50 µs", "p95 µs", "one copy µs")


def _served(each: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    """As instances run it: the first of its kind."""
    return each is next(other for other in steps if (other["what"], other["n"]) == (each["what"], each["n"]))


def _step_row(each: dict[str, Any]) -> list[str]:
    spent = median(each["seconds"])
    share = f"{each['limit_s'] / spent:.0%}"
    yes = "yes" if each["graphs"] else "no"
    return [each["what"], str(each["n"]), yes, f"{spent * 1e3:.2f}", f"{each['limit_s'] * 1e3:.2f}", share]


def _step_aim(each: dict[str, Any]) -> Aim:
    share = each["limit_s"] / median(each["seconds"])
    return Aim(f"GPU: {each['what']} of {each['n']}, of its limit", f"≥ {AIM:.0%}", f"{share:.0%}", share >= AIM)


def _move_row(each: dict[str, Any]) -> list[str]:
    times = (median(each["seconds"]), each["p95_s"], each["one_piece_s"])
    return [each["what"], each["medium"], *(f"{seconds * 1e6:.0f}" for seconds in times)]


def _generate_row(found: dict[str, Any]) -> list[str]:
    ours, theirs = (found["tokens_per_s"][side] for side in ("ours", "theirs"))
    return [
        f"tokens/s, {found['equal_tokens']:.0%} of tokens equal",
        f"{ours:.0f}",
        f"{theirs:.0f}",
        f"{ours / theirs:.2f}",
    ]


def _dual_row(found: dict[str, Any]) -> list[str]:
    dual, one = (median(found[name]) for name in ("dual", "sequential"))
    what = f"requests/s, two lanes beside one; {found['equal_requests']} of {found['requests']} equal"
    return [what, f"{dual:.2f}", f"{one:.2f}", f"{dual / one:.2f}"]
