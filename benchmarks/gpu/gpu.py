"""On a GPU: a random model of LLaVA-1.5-7B's shape in bfloat16, every figure beside the limit measured with it.

python benchmarks/run.py --only gpu --minutes 8 --results FOLDER. Each case is kept in FOLDER as it ends: a call that
has no time left for a case names it, and the next call goes on from there. ``--quick`` runs a tiny model on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import beside_vllm, figures, placements
from benchmarks.gpu import moves as gpu_moves
from benchmarks.gpu import serving as gpu_serving
from benchmarks.gpu.cases import Cases, digest_sources
from benchmarks.gpu.full_load import FullLoad
from benchmarks.gpu.model import folder, limits, random_weights, write_weights
from benchmarks.gpu.steps import StepBench
from benchmarks.report import Result
from benchmarks.setting import Setting
from trinity.costs.model_config import read_model_shape
from trinity.costs.step_cost import Device
from trinity.errors import TrinityError
from trinity.stages.attention.backends import BACKENDS, choose_backends, pick_backend
from trinity.stages.attention.choice import CacheKind
from trinity.stages.models import load_model
from trinity.transport import make_transport

MISSING = "No GPU: torch sees none on this machine, and nothing here has been run."
KEPT = "gpu-cases.jsonl"
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
    chunks: tuple[int, ...] = (64, 128, 256)
    mixed: tuple[int, ...] = (128,)
    beside: int = 32
    repeats: int = 7
    reads: int = 100
    rounds: int = 2
    generate: gpu_serving.Load = LONG_PROMPTS
    dual: gpu_serving.Load = IMAGES
    media: tuple[str, ...] = ("inproc", "cuda_ipc", "nixl", "ucx")
    placed: tuple[placements.PlacedRun, ...] = field(default_factory=lambda: tuple(placements.list_runs()))


TINY = Sizes(
    device="cpu",
    dtype="float32",
    tiny=True,
    context=24,
    rows=(1, 3),
    prefills=(20,),
    images=(1, 2),
    chunks=(8,),
    mixed=(6,),
    beside=3,
    repeats=1,
    reads=3,
    rounds=1,
    generate=gpu_serving.Load(2, 12, 4),
    dual=gpu_serving.Load(2, 3, 3),
    media=("inproc", "shm"),
    placed=(placements.PlacedRun("EPD", "thread", 1), placements.PlacedRun("1E1P1D", "process", 2)),
)


class Work:
    """A benchmark under way: the model's folder, the device's limits, its cases and what has been found."""

    def __init__(self, sizes: Sizes, model: Path, limit: Device, cases: Cases) -> None:
        self.sizes, self.model, self.limit, self.cases = sizes, model, limit, cases
        self.shape = read_model_shape(model)
        self.found: dict[str, Any] = {"run": True, "limit": limit_of(limit)}
        self._held: Any = None

    def hold(self) -> None:
        """Keep one set of weights, which all pipelines in threads share from now on."""
        if self._held is None:
            self._held = load_model(self.model, "EPD", dtype=self.sizes.dtype, device=self.sizes.device)
            self.found["weight_bytes"] = self._held.weight_bytes

    def release(self) -> None:
        self._held = None

    def section(self, name: str, run: Callable[[], Any], seconds: float) -> None:
        """Run a section of one case on weights that are held."""

        def held() -> Any:
            self.hold()
            return run()

        found = self.cases.run(name, held, seconds)
        if found is not None:
            self.found[name] = found


def run(setting: Setting) -> Result:
    """Everything that is not known yet, where there is a GPU; what is missing, where not."""
    if setting.quick:
        return measure(TINY, setting.minutes)
    if not torch.cuda.is_available():
        return Result(figures.NAME, figures.TITLE, MISSING, notes=[MISSING], values={"run": False})
    return measure(Sizes(), setting.minutes, setting.kept)


def measure(sizes: Sizes, minutes: float, kept: Path | None = None) -> Result:
    """Measure what is not in the folder ``kept`` yet, for at most ``minutes``."""
    until = time.monotonic() + 60 * minutes
    clean = torch.cuda.empty_cache if sizes.device.startswith("cuda") else (lambda: None)
    device = torch.cuda.get_device_name(sizes.device) if sizes.device.startswith("cuda") else "cpu"
    key = f"{digest_sources()} {torch.__version__} {device} {json.dumps(asdict(sizes))}"
    cases = Cases(kept / KEPT if kept is not None else None, key, until, clean)
    with tempfile.TemporaryDirectory() as scratch:
        model = folder(Path(scratch), sizes.tiny)
        known = cases.run("limits", lambda: limit_of(limits(sizes.device, sizes.tiny)), 0)
        if known is None:
            return Result(figures.NAME, figures.TITLE, "", notes=[f"{each}" for each in cases.failed.values()])
        work = Work(sizes, model, device_of(known), cases)
        with random_weights(sizes.device):
            measure_one_process(work)
        work.release()
        measure_placements(work)
    return figures.result(sizes.dtype, sizes.tiny, work.found, cases)


def measure_one_process(work: Work) -> None:
    """Measure sections whose instances are all in this process, on weights made where they run."""
    sizes, common = work.sizes, (work.model, work.sizes.device, work.sizes.dtype)
    work.section("attention", lambda: attention(work), 20)
    work.found["steps"] = steps(work)
    work.found["moves"] = moves(work)
    generate = partial(gpu_serving.beside_generate_batch, *common, sizes.generate, sizes.rounds)
    work.section("generate_batch", lambda: asyncio.run(generate()), 90)
    work.found["full_load"] = full_load(work)
    dual = partial(gpu_serving.dual_stream, *common, sizes.dual, sizes.rounds)
    work.section("dual_stream", lambda: asyncio.run(dual()), 90)


def limit_of(limit: Device) -> dict[str, Any]:
    return {"device": limit.name, "flops": limit.flops, "bytes_per_s": limit.bandwidth, "memory": limit.memory}


def device_of(known: dict[str, Any]) -> Device:
    """Make the device again that ``limit_of`` has described."""
    shares: dict[str, Any] = {"flops_share": 1.0, "bandwidth_share": 1.0, "pass_s": 0.0, "row_s": 0.0}
    return Device(
        name=known["device"], flops=known["flops"], bandwidth=known["bytes_per_s"], memory=known["memory"], **shares
    )


def attention(work: Work) -> dict[str, str]:
    """What each backend says of a cache of this model on this device: "runs", or why not. What auto takes."""
    model = load_model(work.model, "PD", dtype=work.sizes.dtype, device=work.sizes.device)
    heads = model.adapter.text_config.num_attention_heads
    kind = CacheKind(model.kv_shape().shape, model.dtype, torch.device(work.sizes.device), heads)
    said = {}
    for name in BACKENDS:
        try:
            pick_backend(name, kind)
            said[name] = "runs"
        except TrinityError as error:
            said[name] = str(error)
    said["auto"] = str(choose_backends("auto", kind))
    return said


def steps(work: Work) -> list[dict[str, Any]]:
    """Steps of one EPD instance, with CUDA graphs and without, each a case of its own."""
    bench, rows = StepBench(work.model, work.limit, work.sizes, work.hold), []
    try:
        for each in bench.list_cases():
            found = work.cases.run(f"steps: {each.name}", partial(bench.measure, each), 15 if bench.loaded else 45)
            rows += [found] if found is not None else []
    finally:
        bench.close()
    return rows


def full_load(work: Work) -> list[dict[str, Any]]:
    """Encode beside decode, on one lane in turns and on two at once; half the memory for each of two instances."""
    sizes, half = work.sizes, 0.3 * work.limit.memory
    rows = [n for n in sizes.rows if n * (sizes.context + 32) * work.shape.kv_bytes < half]
    bench, found = FullLoad(work.model, sizes.device, sizes.dtype, sizes.context, work.hold), []
    try:
        for n in rows:
            measure_rows = partial(bench.measure, n, max(rows), sizes.repeats)
            seen = work.cases.run(f"full load: decode {n}", measure_rows, 40)
            found += [seen] if seen is not None else []
    finally:
        bench.close()
    return found


def moves(work: Work) -> list[dict[str, Any]]:
    """Migrations of a prompt's KV and of an image's features, by every medium that is there."""
    model, sizes = work.shape, work.sizes
    cases = [(f"KV of {n} tokens", -(-n // 16), 16 * model.kv_bytes) for n in sizes.prefills]
    cases.append(("an image's features", 1, model.image_tokens * model.feature_bytes))
    found: list[dict[str, Any]] = []
    for medium in sizes.media:

        def measure_medium(medium: str = medium) -> list[dict[str, Any]]:
            make_transport(medium)  # raises where it is not there, before a process is started
            made = gpu_moves.measure(sizes.device, medium, cases, sizes.reads, work.limit.bandwidth)
            return [{**asdict(each), "p95_s": each.p95_s} for each in made]

        found += work.cases.run(f"moves by {medium}", measure_medium, 40) or []
    return found


def measure_placements(work: Work) -> None:
    """Measure sections with instances in processes, and vLLM, on a checkpoint that is written once."""
    sizes, common = work.sizes, (work.model, work.sizes.device, work.sizes.dtype)
    written = partial(write_weights, work.model, sizes.device, sizes.dtype)
    found = []
    for run in sizes.placed:

        def measure_run(run: placements.PlacedRun = run) -> dict[str, Any]:
            written()
            return asyncio.run(placements.serve_placed(*common, run, sizes.dual, sizes.rounds))

        kept = work.cases.run(f"served: {run.name}", measure_run, 90)
        found += [{"way": run.name, "placement": run.placement, **kept}] if kept is not None else []
    work.found["placements"] = found
    if beside_vllm.is_installed():
        vllm = work.cases.run("vllm", lambda: compare_vllm(work, written), 200)
        work.found |= {"vllm": vllm} if vllm is not None else {}


def compare_vllm(work: Work, written: Callable[[], object]) -> dict[str, Any]:
    """Serve the prompts of ``generate_batch`` here and with vLLM, on the same checkpoint."""
    written()
    common, load = (work.model, work.sizes.device, work.sizes.dtype), work.sizes.generate
    ours = asyncio.run(gpu_serving.serve_texts(*common, load, work.sizes.rounds))
    torch.cuda.empty_cache()
    theirs = beside_vllm.generate_with_vllm(work.model, work.sizes.dtype, ours["ids"], load.outputs, work.sizes.rounds)
    return gpu_serving.compare(load, ours, theirs)
