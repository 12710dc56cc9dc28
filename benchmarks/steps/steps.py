"""Decode step, prefill and encode of llava-110m on one thread, beside what this machine could do at best.

Roofline of a decode step: weights and keys and values read once, at the bandwidth of a buffer of the weights' size. Of
prefill and encode: the operations of their products, at the best rate of a large one. Both measured in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.kernels.limits import alternate, gemm_gflops, read_gb_s
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import ForeignLoad, Setting, disturbed, prompt_of
from trinity.memory.cache_config import CacheConfig

BATCHES, CONTEXT, PROMPT, HEIGHT = (1, 8, 32), 640, 600, 16
AIMS = {"decode": 0.6, "prefill": 0.8, "encode": 0.8}
LONG_GFLOP = 200.0  # more is measured once, and not warmed up for
Figure = tuple[str, str, int]  # dtype, stage, batch


class Stages:
    """A loaded model in one dtype, as an instance has it (packed, best attention), and plainly."""

    def __init__(self, directory: Any, dtype: Any) -> None:
        import torch

        from trinity.stages.attention.backends import make_backend
        from trinity.stages.attention.torch_reference import TorchAttention
        from trinity.stages.models import load_model

        self.dtype = dtype
        self.models = {
            way: load_model(directory, "EPD", dtype=dtype, packed=way == "ours") for way in ("ours", "plain")
        }
        self.model = self.models["ours"]
        shape = self.model.kv_shape(HEIGHT).shape
        self.backends: dict[str, Any] = {
            "ours": make_backend("auto", shape, dtype, torch.device("cpu")),
            "plain": TorchAttention(),
        }
        self.layers, _, self.kv_heads, _, self.width = shape
        self.heads = self.model.adapter.text_config.num_attention_heads

    def streamed(self, batch: int) -> int:
        """Bytes that a decode step must read: the language part without its input embeddings, and the KV cache."""
        model = self.models["plain"]
        text = model.adapter.language(model.language)
        embeddings = text.get_input_embeddings().weight
        tied = model.language.get_output_embeddings().weight is embeddings
        weights = sum(each.nbytes for each in model.language.parameters()) - (0 if tied else embeddings.nbytes)
        return weights + batch * CONTEXT * self.layers * 2 * self.kv_heads * self.width * self.dtype.itemsize

    def decode(self, way: str, batch: int) -> Callable[[], object]:
        import numpy as np
        import torch

        from trinity.stages.batch import Decodes, build_batch

        blocks = batch * (CONTEXT // HEIGHT)
        kv = self._blocks(blocks)
        lengths = np.full(batch, CONTEXT)
        tables = np.random.default_rng(0).permutation(blocks).reshape(batch, -1)
        rows = Decodes(np.arange(batch) + 5, lengths - 1, lengths, tables)
        model, backend = self.models[way], self.backends[way]
        place = torch.device("cpu")
        return lambda: model.forward(build_batch(rows, [], HEIGHT, 1, place), kv, None, backend)

    def prefill(self, way: str, batch: int, tokens: int = PROMPT) -> Callable[[], object]:
        import numpy as np
        import torch

        from trinity.stages.batch import NO_DECODES, Chunk, build_batch

        each = -(-tokens // HEIGHT)
        kv = self._blocks(batch * each)
        ids, at = np.arange(tokens) % 32 + 5, np.arange(tokens)
        chunks = [Chunk(ids, at, 0, np.arange(number * each, (number + 1) * each)) for number in range(batch)]
        model, backend = self.models[way], self.backends[way]
        place = torch.device("cpu")
        return lambda: model.forward(build_batch(NO_DECODES, chunks, HEIGHT, 1, place), kv, None, backend)

    def encode(self, way: str, batch: int) -> Callable[[], object]:
        import torch

        vision = self.model.config.vision_config
        side, patch = vision.image_size, vision.patch_size
        image = {"pixel_values": torch.rand(1, 3, side, side)}
        count = (side // patch) ** 2
        return lambda: self.models[way].encode("image", [image] * batch, [count] * batch)

    def _blocks(self, count: int) -> Any:
        import torch

        shape = self.model.kv_shape(HEIGHT)
        return torch.zeros((count, *shape.shape), dtype=shape.dtype)

    def gflop(self, stage: str, batch: int) -> float:
        """1e9 operations of the products of a prefill or an encode, attention's included, of the layers that run.

        The last language layer attends for one row alone, and what is behind the vision layer taken is left out.
        """
        vision = self.model.config.vision_config
        if stage == "prefill":
            attention = 4 * (self.layers - 1) * self.heads * self.width * PROMPT * (PROMPT + 1) / 2
            part, run = self.models["plain"].language, self.prefill("plain", 1)
        else:
            rows = (vision.image_size // vision.patch_size) ** 2 + 1
            taken = self.model.config.vision_feature_layer % (vision.num_hidden_layers + 1)
            attention = 4 * taken * vision.hidden_size * rows**2
            part, run = self.models["plain"].vision, self.encode("plain", 1)
        return batch * (attention + _product_flops(part, run)) / 1e9


def _product_flops(part: Any, run: Callable[[], object]) -> float:
    """Operations of all linear layers and convolutions in one run."""
    from torch import nn

    found = 0.0

    def count(module: Any, given: Any, made: Any) -> None:
        nonlocal found
        found += 2 * made.numel() * module.weight[0].numel()

    kinds = (nn.Linear, nn.Conv2d)
    hooks = [each.register_forward_hook(count) for each in part.modules() if isinstance(each, kinds)]
    run()
    for hook in hooks:
        hook.remove()
    return found


def run(setting: Setting) -> Result:
    """Every stage in both dtypes at every batch; greedy tokens of the same model against ``generate()``."""
    import torch

    directory = setting.pick("llava-110m", "llava")
    batches = (1, 2) if setting.quick else BATCHES
    figures: dict[Figure, dict[str, float]] = {}
    busy: list[str] = []
    limits: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        stages = Stages(directory, dtype)
        limits[name] = gemm_gflops(dtype, 1 if setting.quick else 5)
        for stage in AIMS:
            for batch in batches:
                setting.settle()
                with ForeignLoad() as load:
                    figures[name, stage, batch] = _measured(stages, stage, batch, limits[name], setting.quick)
                busy += [f"{name} {stage} {batch}"] if load.share > 0.1 else []
    return result(figures, limits, asyncio.run(_exact(directory)), busy)


def _measured(stages: Stages, stage: str, batch: int, gflops: float, quick: bool) -> dict[str, float]:
    """Seconds of ours, of torch alone where that differs, and at best."""
    make = getattr(stages, stage)
    if stage == "decode":
        size = stages.streamed(batch)
        found = alternate({way: make(way, batch) for way in ("ours", "plain")}, 2 if quick else 9)
        return {**found, "limit": size / read_gb_s(min(size, 400_000_000)) / 1e9}
    work = stages.gflop(stage, batch)
    short = work <= LONG_GFLOP
    ways = ("ours", "plain") if stage == "prefill" and short else ("ours",)
    found = alternate({way: make(way, batch) for way in ways}, 3 if short and not quick else 1, warm=short)
    return {**found, "limit": work / gflops}


async def _exact(directory: Any) -> bool:
    """Test whether a pipeline of all three stages gives the greedy tokens of ``generate()`` in float32."""
    from benchmarks.setting import PHOTOS
    from trinity import Pipeline, Request, Sampling
    from trinity.testing.oracle import Oracle

    async with Pipeline(directory, "1E1P1D", dtype="float32", cache=CacheConfig(pools={"image": 4, "kv": 128})) as pipe:
        text = prompt_of(pipe.processor.tokenizer, 24, 1)
        greedy = Sampling(ignore_eos=True)
        asked = [
            Request(text, max_tokens=16, sampling=greedy),
            Request(f"<image> {text}", images=sorted(PHOTOS.glob("*.jpg"))[:1], max_tokens=16, sampling=greedy),
        ]
        outputs = [await pipe.complete(request) for request in asked]
    wanted = await asyncio.to_thread(lambda: Oracle(directory).generate_all(asked))
    return [list(output.token_ids) for output in outputs] == [list(tokens) for tokens in wanted]


def result(figures: dict[Figure, dict[str, float]], limits: dict[str, float], exact: bool, busy: list[str]) -> Result:
    """Tables and aims of what was measured."""
    header = ("stage, batch", "ms", "at best, ms", "share of it", "torch alone / ours")
    tables = []
    for dtype in limits:
        rows = []
        for (name, stage, batch), found in figures.items():
            if name == dtype:
                plain = f"{found['plain'] / found['ours']:.2f}" if "plain" in found else "-"
                share = f"{found['limit'] / found['ours']:.0%}"
                ours, best = f"{found['ours'] * 1e3:.1f}", f"{found['limit'] * 1e3:.1f}"
                rows.append([f"{stage}, {batch}", ours, best, share, plain])
        tables.append(Table(f"{dtype} (best product {limits[dtype]:.0f} GFLOP/s)", header, rows))
    return Result(
        "steps",
        "Steps of a small LLaVA on one thread",
        f"llava-110m: decode at a context of {CONTEXT}, prefill of {PROMPT} tokens a request, encode of images of 336 "
        "pixels; thread CPU time, medians of alternating runs. At best: bytes of weights and KV over the bandwidth of "
        "a buffer that is summed (decode), operations over the rate of the best large product (prefill, encode), all "
        "measured in this process. Torch alone: plain weights, torch's attention, the same model otherwise.",
        tables,
        [
            *_aims(figures),
            Aim("steps: greedy float32 tokens equal to generate()", "equal", "equal" if exact else "differ", exact),
        ],
        disturbed(busy),
        {"figures": [[*figure, found] for figure, found in figures.items()], "gemm_gflops": limits, "exact": exact},
    )


def _aims(figures: dict[Figure, dict[str, float]]) -> list[Aim]:
    aims = []
    for stage, aim in AIMS.items():
        shares = {
            (name, batch): found["limit"] / found["ours"]
            for (name, each, batch), found in figures.items()
            if each == stage and (stage != "decode" or batch <= 8)
        }
        (name, batch), least = min(shares.items(), key=lambda item: item[1])
        of = "batches to 8" if stage == "decode" else "all batches"
        text = f"{stage} step, {of}, both dtypes: share of the roofline"
        aims.append(Aim(text, f"≥ {aim:.0%}", f"{least:.0%} ({name}, batch {batch})", least >= aim))
    return aims
