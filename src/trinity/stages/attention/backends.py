"""Attention backends by name, and the choice of the best one for a cache.

Each backend is a line in ``BACKENDS``. On a CPU ``auto`` takes the first that can serve the cache. On a GPU it takes
the fastest of those that can, by kind of step; so does ``fastest`` everywhere. They are measured at the first start,
and the choice is kept on disk (``choice``, decision 0058). This module does not import torch; the backends do when they
are made.

A GPU kernel can be installed and still not work, because of another driver, GPU or shape. Each is therefore run once
per process and kind of cache on a small random batch and compared with torch (``probe``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trinity.errors import ConfigError, UnknownName, pip_install
from trinity.memory import native
from trinity.stages.attention.choice import CacheKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trinity.stages.attention.choice import StepChoice
    from trinity.stages.attention.interface import AttentionBackend, AttentionParams, PagedRows
    from trinity.stages.attention.measurement import CaseTimes

logger = logging.getLogger("trinity")
AUTO = "auto"
FASTEST = "fastest"  # measured on a CPU too
FLASHINFER_HEADS = (64, 128, 256)  # head sizes of which FlashInfer has kernels
REFERENCE = "torch"  # what the others are held to: in no line of a GPU's while another can serve
FP8_NAME = "torch.float8_e4m3fn"
FP8_CAPABILITY = (8, 9)  # the first with conversions and products of E4M3


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One way to compute paged attention.

    - ``obstacle``: returns the reason why it cannot serve a cache, as words that end a sentence; None if it can.
    - ``make``: makes a backend for a cache without an obstacle.
    - ``missing`` (``obstacle``): as ``obstacle``, but runs nothing.
    - ``slow_start`` (never): returns the reason why only who asks for it by name gets it; None if there is none.
    """

    obstacle: Callable[[CacheKind], str | None]
    make: Callable[[CacheKind], AttentionBackend]
    missing: Callable[[CacheKind], str | None] | None = None
    slow_start: Callable[[CacheKind], str | None] = lambda kind: None


def check_name(name: str) -> str:
    """Return ``name``. Raises ``UnknownName`` (a ``ConfigError``) if there is no such backend."""
    if name not in (AUTO, FASTEST, *BACKENDS):
        raise UnknownName("attention backend", name, [AUTO, FASTEST, *BACKENDS])
    return name


def make_backend(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, heads: int | None = None
) -> AttentionBackend:
    """Make a backend for blocks of ``shape`` [layers, 2, kv_heads, rows, head_dim]; it serves one thread at a time.

    ``heads`` (None): see ``CacheKind``. Raises ``ConfigError`` with the reason if the named backend cannot run here.
    """
    kind = CacheKind(tuple(shape), dtype, device, heads)
    chosen = choose_backends(name, kind)
    if device.type != "cpu" or name == FASTEST:
        logger.info("attention on %s, %s: %s", device, dtype, chosen)
    made = {each: BACKENDS[each].make(kind) for each in {chosen.decodes, chosen.chunks}}
    if len(made) == 1:
        return made[chosen.decodes]

    return PerStepAttention(made[chosen.decodes], made[chosen.chunks])


def choose_backends(name: str, kind: CacheKind) -> StepChoice:
    """Choose the backends of such a cache: ``name`` itself, or the fastest; that is measured where nothing is kept.

    Raises ``ConfigError`` with the reason if the named backend cannot run here.
    """
    from trinity.stages.attention.choice import StepChoice

    if check_name(name) == FASTEST or (name == AUTO and kind.device.type != "cpu"):
        line = [each for each, backend in BACKENDS.items() if _stands_in_line(each, backend, kind)]
        if len(line) > 1:
            return _known.get((kind, *line)) or _find_fastest(kind, line)
    picked = pick_backend(name, kind)
    return StepChoice(picked, picked)


def _stands_in_line(name: str, backend: BackendSpec, kind: CacheKind) -> bool:
    """Tell if a backend may be measured, before anything has run."""
    if name == REFERENCE and kind.device.type != "cpu":
        return False
    return backend.slow_start(kind) is None and (backend.missing or backend.obstacle)(kind) is None


def _find_fastest(kind: CacheKind, line: list[str]) -> StepChoice:
    """Return the choice that is kept if its backends still run and are right, else measure, and keep what is found."""
    from trinity.stages.attention import choice as choices

    key = choices.make_choice_key(kind, line)
    chosen = choices.read_choice(key)
    if chosen is None or any(BACKENDS[each].obstacle(kind) for each in (chosen.decodes, chosen.chunks)):
        chosen, times = _measure(kind, line)
        kept = bool(times) and choices.keep_choice(key, chosen, times)  # what was not measured may be so for the moment
        logger.info("attention, microseconds of a step: %s", choices.describe_times(times) or "none measured")
        logger.info("attention: %s; %s", chosen, f"kept in {choices.choice_path(key)}" if kept else "not kept")
    _known[(kind, *line)] = chosen
    return chosen


def _measure(kind: CacheKind, line: list[str]) -> tuple[StepChoice, CaseTimes]:
    """Measure those in ``line`` that run here and are right, where there are two; no times where that failed."""
    from trinity.stages.attention.choice import StepChoice, choose_fastest
    from trinity.stages.attention.measurement import measure_backends

    able = [each for each in line if BACKENDS[each].obstacle(kind) is None]
    if len(able) < 2:
        (name,) = able or [REFERENCE]
        return StepChoice(name, name), {}
    made = {each: BACKENDS[each].make(kind) for each in able}
    times = measure_backends(made, kind.shape, kind.query_heads, kind.dtype, kind.device) or {}
    recordable = [each for each in able if kind.device.type == "cuda" and getattr(made[each], "supports_graphs", False)]
    return choose_fastest(times, able, recordable), times


def pick_backend(name: str, kind: CacheKind) -> str:
    """Return the name of the first backend in line that serves such a cache, or ``name`` itself if it is one.

    Raises ``ConfigError`` with the reason if the named backend cannot run here.
    """
    if check_name(name) in (AUTO, FASTEST):
        return next(
            each
            for each, backend in BACKENDS.items()
            if backend.slow_start(kind) is None and backend.obstacle(kind) is None
        )
    obstacle = BACKENDS[name].obstacle(kind)
    if obstacle is not None:
        raise ConfigError(f"attention={name!r} cannot run here: {obstacle}; attention='auto' takes a backend that can")
    return name


def _latent_obstacle(kind: CacheKind) -> str | None:
    return "it reads keys and values, and the cache holds latent rows" if kind.shape[1] == 1 else None


def _native_obstacle(kind: CacheKind) -> str | None:
    if kind.device.type != "cpu":
        return f"it is a kernel for CPUs, and the cache is on {kind.device}"
    if str(kind.dtype) not in ("torch.float32", "torch.bfloat16"):
        return f"it computes in float32 and bfloat16, and the cache holds {kind.dtype}"
    if native.extension is None:
        return native.describe()
    if not hasattr(native.extension, "PagedAttention"):
        return "the extension in use was built without it: install trinity again"
    return _latent_obstacle(kind)


def _make_native(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.native import NativeAttention

    return NativeAttention()


def _make_torch(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.torch_reference import TorchAttention

    return TorchAttention()


def _gpu_backend(
    name: str,
    own_obstacle: Callable[[CacheKind], str | None],
    make: Callable[[CacheKind], AttentionBackend],
    slow_start: Callable[[CacheKind], str | None] = lambda kind: None,
) -> BackendSpec:
    """Describe a GPU kernel: ``own_obstacle`` says what it lacks; if it lacks nothing, it is probed."""

    def missing(kind: CacheKind) -> str | None:
        if kind.device.type != "cuda":
            return f"it is a kernel for GPUs, and the cache is on {kind.device}"
        return _gpu_obstacle(kind) or _latent_obstacle(kind) or own_obstacle(kind)

    def obstacle(kind: CacheKind) -> str | None:
        return missing(kind) or probe(kind)

    @cache
    def probe(kind: CacheKind) -> str | None:
        from trinity.stages.attention.probe import find_fault

        fault = find_fault(make(kind), kind.shape, kind.dtype, kind.device)
        if fault is not None:
            logger.warning("attention backend %s is not used: %s", name, fault)
        return fault

    return BackendSpec(obstacle, make, missing, slow_start)


def _gpu_obstacle(kind: CacheKind) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU that torch can use"
    return None


def _triton_obstacle(kind: CacheKind) -> str | None:
    if str(kind.dtype) not in ("torch.float32", "torch.bfloat16", "torch.float16", FP8_NAME):
        return f"it reads FP8 (E4M3), float32, bfloat16 and float16, and the cache holds {kind.dtype}"
    if not find_spec("triton"):
        return f"triton is not installed: {pip_install('cuda')}"
    return explain_no_fp8(kind.device) if str(kind.dtype) == FP8_NAME else None


def explain_no_fp8(device: torch.device) -> str | None:
    """Return why kernels cannot read or write FP8 on a GPU, as words that end a sentence; None if they can."""
    import torch

    found = torch.cuda.get_device_capability(device)
    if found >= FP8_CAPABILITY:
        return None
    return "FP8 takes a GPU of compute capability {}.{} (Ada, Hopper) or later, and this one has {}.{}".format(
        *FP8_CAPABILITY, *found
    )


def _make_triton(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.gpu.triton import TritonAttention

    return TritonAttention()


def _varlen_obstacle(kind: CacheKind) -> str | None:
    from trinity.stages.attention.gpu.flash import varlen_supports_block_tables

    if not varlen_supports_block_tables():
        return "torch.nn.attention.varlen takes a block table from torch 2.12 on"
    return _half_precision_obstacle(kind)


def _make_varlen(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.gpu.flash import FlashAttention, call_torch_varlen

    return FlashAttention(call_torch_varlen, softcap=False)


def _flash_obstacle(kind: CacheKind) -> str | None:
    from trinity.stages.attention.gpu.flash import FLASH_PAGE

    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if kind.shape[3] % FLASH_PAGE:
        return f"flash-attn takes blocks of {FLASH_PAGE} tokens, and these have {kind.shape[3]}: set kv_block_size"
    return _half_precision_obstacle(kind)


def _half_precision_obstacle(kind: CacheKind) -> str | None:
    if str(kind.dtype) not in ("torch.bfloat16", "torch.float16"):
        return f"it computes in bfloat16 and float16, and the cache holds {kind.dtype}"
    return None


def _flash3_obstacle(kind: CacheKind) -> str | None:
    if find_spec("flash_attn_interface") is None:
        return "flash-attn 3 (the module flash_attn_interface) is not installed"
    if kind.shape[4] % 8 or kind.shape[4] > 256:
        return f"flash-attn 3 takes heads of 8, 16, ... 256 numbers, and these have {kind.shape[4]}"
    return _capability_obstacle(kind, (8, 9)) or _triton_obstacle(kind) or _half_precision_obstacle(kind)


def _make_flash3(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.gpu.library import FlashAttention3

    return FlashAttention3()


def _flashinfer_obstacle(kind: CacheKind) -> str | None:
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if kind.shape[4] not in FLASHINFER_HEADS:
        return f"FlashInfer takes heads of 64, 128 or 256 numbers, and these have {kind.shape[4]}"
    return _capability_obstacle(kind, range(8, 100)) or _triton_obstacle(kind) or _half_precision_obstacle(kind)


def _flashinfer_slow_start(kind: CacheKind) -> str | None:
    if find_spec("flashinfer_jit_cache") is None:
        return "it compiles its kernels for minutes where the package flashinfer-jit-cache is not installed"
    return None


def _make_flashinfer(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.gpu.flash_infer import FlashInferAttention

    return FlashInferAttention()


def _capability_obstacle(kind: CacheKind, majors: Collection[int]) -> str | None:
    import torch

    major, minor = torch.cuda.get_device_capability(kind.device)
    return None if major in majors else f"it has no kernels for GPUs of compute capability {major}.{minor}"


def _make_flash(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.gpu.flash import FlashAttention, call_flash_attn

    return FlashAttention(call_flash_attn, softcap=True)


BACKENDS = {  # in order of preference, where nothing is measured or two are as fast
    "native": BackendSpec(_native_obstacle, _make_native),
    "triton": _gpu_backend("triton", _triton_obstacle, _make_triton),
    "flash3": _gpu_backend("flash3", _flash3_obstacle, _make_flash3),
    "flashinfer": _gpu_backend("flashinfer", _flashinfer_obstacle, _make_flashinfer, _flashinfer_slow_start),
    "varlen": _gpu_backend("varlen", _varlen_obstacle, _make_varlen),
    "flash": _gpu_backend("flash", _flash_obstacle, _make_flash),
    "torch": BackendSpec(lambda kind: None, _make_torch),
}
_known: dict[tuple[object, ...], StepChoice] = {}  # of this process, by kind of cache and candidates


class PerStepAttention:
    """``AttentionBackend`` of two that can both write and read: ``decodes`` and, for batches with chunks, ``chunks``.

    Both read and write the same cache, so a request passes from one to the other as it begins to decode. Chunks of a
    recording (``ChunkSlots``), which are few, are for the backend of decodes.
    """

    def __init__(self, decodes: Any, chunks: Any) -> None:
        self._decodes, self._chunks = decodes, chunks
        self.supports_graphs: bool = getattr(decodes, "supports_graphs", False)
        self.supports_chunk_slots: bool = getattr(decodes, "supports_chunk_slots", False)
        self.reads_chunks: bool = all(getattr(each, "reads_chunks", False) for each in (decodes, chunks))

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        seen: Tensor = self._of(rows).attend(rows, cache, qkv, params)
        return seen

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``SplitAttention.write``."""
        self._of(rows).write(rows, cache, key, value, layer)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """See ``SplitAttention.read``."""
        seen: Tensor = self._of(rows).read(rows, cache, query, params)
        return seen

    def warm_up(self, cache: Tensor, chunks: bool, groups: bool) -> None:
        """Warm up both; see ``TritonAttention.warm_up``."""
        for backend, many in ((self._decodes, False), (self._chunks, chunks)):
            if hasattr(backend, "warm_up"):
                backend.warm_up(cache, many, groups and many)

    def _of(self, rows: PagedRows) -> Any:
        return self._chunks if rows.chunks else self._decodes
