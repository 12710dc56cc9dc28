"""Profiles a loaded instance's stages on synthetic rows, for the budgets of Algorithm 1 (line 5) and cost tables."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from trinity.core.messages import IMAGE, KV, STATE, Encode, MediaSpan, Open, Prefill, ResolvedSampling, Step, Work
from trinity.core.values import blocks_for
from trinity.costs.budgets import (
    MAX_DECODE_ROWS,
    MAX_PREFILL_TOKENS,
    MAX_STEP_IMAGES,
    BudgetCache,
    BudgetKey,
    BudgetResult,
    StepBudgets,
    combine_budgets,
    predict_budgets,
    search_budget,
)
from trinity.costs.model_config import read_model_shape
from trinity.costs.step_cost import CostTables
from trinity.emulation.model import EmulatedModel
from trinity.errors import ConfigError, warn_caller
from trinity.memory import native
from trinity.preprocess.processor import RequestProcessor
from trinity.runtime.host import LoadedInstance
from trinity.runtime.profiler_lanes import LaneThreads, measure_interference
from trinity.stage_kinds import DECODE, ENCODE, PREFILL, order_letters, roles_of, stage_of
from trinity.stages.attention.backends import choose_backends
from trinity.stages.attention.choice import CacheKind
from trinity.stages.base import Stage

MEAN_CONTEXT = 512  # tokens of context of a profiled decode row, or half the model's context if that is less
PROBE = "trinity-probe"
BESIDE_TOKENS, BESIDE_ROWS = 256, 8  # prefill tokens and decode rows of a usual step beside an encode


def profile_budgets(
    loaded: LoadedInstance, processor: RequestProcessor, limit_s: float, cache: BudgetCache | None = None
) -> StepBudgets:
    """Search the token budget and image budget that keep one step of this instance within ``limit_s`` seconds.

    The token budget counts prefill tokens if the instance prefills, and decode rows at a mean context if it only
    decodes; the image budget counts visual tokens. With two lanes, a step keeps the limit beside a step of the other
    lane: how much longer it takes then is measured first. Results are cached on disk by model, dtype, device, threads,
    cores, lanes, roles and limit. Warns if not even one item fits.
    """
    cache = cache or BudgetCache()
    key = _budget_key(loaded, limit_s)
    known = cache.get(key)
    if known is None:
        with closing(Probe(loaded, processor)) as probe:
            known = _search_budgets(probe, loaded.spec.roles, limit_s)
        cache.put(key, known)
    elif not known.feasible:
        text = (
            f"not even a step of one item stays within {limit_s:.4g} s on {loaded.spec.name}: its SLO will be missed; "
            "relax the SLO or use a faster device"
        )
        warn_caller(text)
    return known


def _describe_kernels(loaded: LoadedInstance) -> str:
    """Describe what else decides a step's time here: kernels, attention backends, layout of weights."""
    weights = "packed" if loaded.spec.pack else "plain"
    return f"{native.describe()}, attention {_describe_attention(loaded)}, {weights} weights"


def _describe_attention(loaded: LoadedInstance) -> str:
    """Name the backends that were chosen: they depend on what is installed, and on a measurement."""
    spec, model, kv = loaded.spec, loaded.model, loaded.memory.get(KV)
    if kv is None or spec.stages or isinstance(model, EmulatedModel):
        return spec.attention
    heads = model.adapter.text_config.num_attention_heads
    kind = CacheKind(tuple(kv.shape.shape), kv.shape.dtype, kv.tensor.device, heads)
    return str(choose_backends(spec.attention, kind))


def profile_tables(loaded: Sequence[LoadedInstance], processor: RequestProcessor, **counts: Any) -> CostTables:
    """Profile steps by stage, batch and context with ``CostTables.profile``, on instances that serve nothing.

    Each stage is measured on the first instance that has it, ``interference`` on the first one with two lanes. The
    tables' ``device`` names the processor and its threads.
    """
    key = _budget_key(loaded[0], 1.0)
    device = f"{_device_name(key.device)} x {key.threads}" if key.device == "cpu" else _device_name(key.device)
    with ExitStack() as stack:
        probes = [stack.enter_context(closing(Probe(each, processor))) for each in loaded]
        tables = CostTables.profile(CombinedProbe(probes), model=key.model, device=device, dtype=key.dtype, **counts)
        beside = next((probe.interference() for probe in probes if probe.dual), 1.0)
    return msgspec.structs.replace(tables, interference=beside, shape=_outline(loaded[0]))


def _outline(loaded: LoadedInstance) -> str:
    """Outline the model that was measured; "" for one whose shape no plan can read."""
    assert not isinstance(loaded.model, EmulatedModel)
    try:
        return read_model_shape(loaded.model.directory).outline
    except ConfigError:
        return ""


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{device} {platform.machine()}"


class CombinedProbe:
    """Combines probes of several instances into one ``trinity.costs.step_cost.CostProbe``.

    Each stage runs on the first instance that has it.
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._having = {letter: probe for probe in reversed(probes) for letter in probe.letters}
        self.letters = order_letters(self._having)
        language = [probe.longest for letter, probe in self._having.items() if stage_of(letter).part == "language"]
        self.longest = min(language, default=1)
        self.image_tokens = self._having[ENCODE.letter].image_tokens if ENCODE.letter in self._having else 1

    def most_images(self) -> int:
        return self._having[ENCODE.letter].most_images()

    def encode(self, images: int) -> float:
        return self._having[ENCODE.letter].encode(images)

    def prefill(self, tokens: int, prefilled: int = 0) -> float:
        return self._having[PREFILL.letter].prefill(tokens, prefilled)

    def decode(self, rows: int, context: int | None = None) -> float:
        return self._having[DECODE.letter].decode(rows, context)


def _budget_key(loaded: LoadedInstance, limit_s: float) -> BudgetKey:
    import torch
    import transformers

    model, spec = loaded.model, loaded.spec
    assert not isinstance(model, EmulatedModel), "an emulated instance takes its budgets from its cost model"
    return BudgetKey(
        model=model.fingerprint,
        dtype=str(model.dtype),
        device=str(model.device),
        threads=spec.threads,
        roles=spec.roles,
        limit_s=limit_s,
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}, {_describe_kernels(loaded)}",
        lanes=spec.lanes,
        cores=spec.cores,
    )


def _search_budgets(probe: Probe, roles: str, limit_s: float) -> StepBudgets:
    found: dict[str, BudgetResult] = {}
    beside = probe.interference() if probe.dual else 1.0
    does = roles_of(roles)
    if does.prefills:
        found["prefill"] = search_budget(probe.prefill, limit_s, high=probe.most_tokens(), interference=beside)
    if does.decodes:
        found["decodes"] = search_budget(probe.decode, limit_s, high=probe.most_rows(), interference=beside)
    if does.encodes and probe.span is not None:
        found["images"] = search_budget(probe.encode, limit_s, high=probe.most_images(), interference=beside)
    return combine_budgets(found, probe.image_tokens, limit_s, beside)


@dataclass
class Probe:
    """Runs synthetic steps on the stages of an instance that serves nothing yet, and times them.

    Each lane has a thread as it will have when it serves; ``close`` ends these threads.
    """

    loaded: LoadedInstance
    processor: RequestProcessor
    span: MediaSpan | None = None
    inputs: Any = None

    def __post_init__(self) -> None:
        spec = self.loaded.spec
        self._threads = LaneThreads(spec.lanes, spec.cores, spec.threads, spec.device)
        if roles_of(self.loaded.spec.roles).encodes and self.processor.multimodal:
            self.span, self.inputs = self.processor.dummy_inputs()

    def close(self) -> None:
        self._threads.close()

    @property
    def dual(self) -> bool:
        """True if an encode may run beside another stage: two lanes, and a model with images."""
        return len(self.loaded.spec.lanes) > 1 and self.span is not None

    def interference(self) -> float:
        """Measure how many times longer a step takes beside a step of the other lane than alone."""
        prefill, decode = partial(self.prefill, min(BESIDE_TOKENS, self.longest)), partial(self.decode, BESIDE_ROWS)
        steps = {PREFILL.letter: prefill, DECODE.letter: decode}
        language = {letter: steps[letter] for letter in self.letters if letter in steps}
        return measure_interference(partial(self.encode, 1), language)

    @property
    def image_tokens(self) -> int:
        return self.span.tokens if self.span is not None else 1

    @property
    def letters(self) -> str:
        """Letters of the stages that can be probed; E only if the model has an encoder."""
        return "".join(each for each in self.loaded.spec.roles if stage_of(each).media is None or self.span is not None)

    @property
    def longest(self) -> int:
        """Length of the longest prompt that a probe can have, in tokens; 1 without a KV cache."""
        return self._context if KV in self.loaded.memory else 1

    @property
    def _context(self) -> int:
        """Longest context of a profiled row, in tokens: the model and the pool, which all rows share, bound it."""
        kv = self.loaded.memory[KV]
        room = kv.blocks * self.loaded.settings.kv_block_size
        return max(1, min(self.processor.context_length, room) - 2)

    def most_tokens(self) -> int:
        return MAX_PREFILL_TOKENS

    def most_rows(self) -> int:
        """Most decode rows of a step: each needs a block of its own for its states, where the model keeps some."""
        states = self.loaded.memory.get(STATE)
        return MAX_DECODE_ROWS if states is None else min(MAX_DECODE_ROWS, states.blocks)

    def most_images(self) -> int:
        blocks = blocks_for(self.image_tokens, self.loaded.settings.image_block_size)
        return max(1, min(MAX_STEP_IMAGES, self.loaded.memory[IMAGE].blocks // blocks))

    def encode(self, images: int) -> float:
        """Time a step that encodes ``images`` images, in seconds."""
        assert self.span is not None
        each = blocks_for(self.image_tokens, self.loaded.settings.image_block_size)
        rows = tuple(
            Encode(f"{PROBE}-{n}", 0, self.span, tuple(range(n * each, (n + 1) * each)), self.inputs)
            for n in range(images)
        )
        return self._run(ENCODE.letter, Step(0, "joint", encodes=rows), [])

    def prefill(self, tokens: int, prefilled: int = 0) -> float:
        """Time a step that prefills ``tokens`` tokens, in prompts no longer than the context, in seconds.

        With ``prefilled``: a chunk of one prompt, behind so many tokens that are in the KV cache already.
        """
        if prefilled:
            one = self._open(0, prefilled + tokens, (), prefilled)
            chunk = Prefill(one.work.request, prefilled, tokens, True)
            return self._run(PREFILL.letter, Step(0, "joint", prefills=(chunk,)), [one])
        lengths = [self._context] * (tokens // self._context)
        if tokens % self._context:
            lengths.append(tokens % self._context)
        opened = [self._open(n, length, ()) for n, length in enumerate(lengths)]
        rows = tuple(Prefill(each.work.request, 0, len(each.work.prompt), True) for each in opened)
        return self._run(PREFILL.letter, Step(0, "joint", prefills=rows), opened)

    def decode(self, rows: int, context: int | None = None) -> float:
        """Time a step that decodes ``rows`` rows at this context (tokens; None: a mean one), in seconds."""
        length = max(1, min(MEAN_CONTEXT, self._context // 2)) if context is None else context
        opened = [self._open(n, length, (0,)) for n in range(rows)]
        return self._run(DECODE.letter, Step(0, "joint", decodes=tuple(each.work.request for each in opened)), opened)

    def mixed(self, rows: int, context: int, tokens: int) -> float:
        """Time a step of ``rows`` decodes at this context beside a prompt of ``tokens`` tokens, in seconds."""
        opened = [self._open(n, context, (0,)) for n in range(rows)]
        one = self._open(rows, tokens, ())
        chunk, names = Prefill(one.work.request, 0, tokens, True), tuple(each.work.request for each in opened)
        return self._run(PREFILL.letter, Step(0, "joint", prefills=(chunk,), decodes=names), [*opened, one])

    def _open(self, number: int, length: int, tokens: tuple[int, ...], prefilled: int = 0) -> Open:
        """Make a request with blocks of its own while there are some; their content does not matter.

        Rows that all read the same blocks would find them in a processor's cache, unlike those of a real batch.
        """
        work = Work(request=f"{PROBE}-{number}", prompt=(0,) * length, max_tokens=2, sampling=ResolvedSampling(seed=0))
        there = self.loaded.memory[KV].blocks
        count = min(blocks_for(length + 1, self.loaded.settings.kv_block_size), there)
        blocks = tuple((number * count + at) % there for at in range(count))
        states = self.loaded.memory.get(STATE)
        held = () if states is None else (number % states.blocks,)
        return Open(work=work, blocks=blocks, tokens=tokens, cached=prefilled, state=held)

    def _run(self, letter: str, step: Step, opened: list[Open]) -> float:
        stage = next(stage for stage in self.loaded.stages if letter in stage.letters)
        return self._threads.run(letter, lambda stream: _time_step(stage, step, opened, stream.settle))


def _time_step(stage: Stage, step: Step, opened: list[Open], settled: Callable[[], None]) -> float:
    for request in opened:
        stage.open(request)
    try:
        settled()
        started = time.perf_counter()
        stage.forward(step)
        settled()
        return time.perf_counter() - started
    finally:
        for request in opened:
            stage.close(request.work.request)


def predict_emulated_budgets(model: EmulatedModel, loaded: LoadedInstance, limit_s: float) -> StepBudgets:
    """Compute the budgets of ``profile_budgets`` for an emulated instance, from its cost model."""
    image = model.shape.image_tokens if model.multimodal else 0
    beside = model.interference if len(loaded.spec.lanes) > 1 else 1.0
    return predict_budgets(model.cost.seconds, loaded.spec.roles, limit_s, image, interference=beside)
