"""Choice of an attention backend by kind of step, by measured times that are kept on disk.

A choice is kept under everything that decides it: device, versions, the source of the kernels, shape and dtype. So the
second start measures nothing, and any change measures anew. A file can name candidates alone, which a GPU tries
beside torch before they serve; one that cannot be read is measured again and written over.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trinity.errors.cache_files import cache_folder, read_cached, write_cached
from trinity.memory import native

if TYPE_CHECKING:
    import torch

    from trinity.stages.attention.measurement import CaseTimes

PACKAGES = ("trinity-epd", "torch", "triton", "flash-attn", "flash-attn-3", "flashinfer-python", "flashinfer-jit-cache")
NOISE_MARGIN = 0.03  # a backend that is slower than the fastest by less may be chosen: the first in line
MOST_CHOICES = 64  # files
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class CacheKind:
    """KV cache that a backend must serve.

    - ``shape``: a block's, [layers, 2, kv_heads, rows, head_dim].
    - ``heads`` (None): query heads of a layer; None: as many as KV heads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    heads: int | None = None

    @property
    def query_heads(self) -> int:
        return self.heads or self.shape[2]


class StepChoice(msgspec.Struct, frozen=True):
    """Backends by name: ``decodes`` for steps of decodes alone, ``chunks`` for steps with prefill chunks."""

    decodes: str
    chunks: str

    def __str__(self) -> str:
        if self.decodes == self.chunks:
            return self.decodes
        return f"{self.decodes} for steps of decodes, {self.chunks} for steps with chunks"


class ChoiceKey(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides which backend is the fastest, and which there are."""

    device: str
    versions: dict[str, str]
    kernels: str
    shape: tuple[int, ...]
    heads: int
    dtype: str
    threads: int
    candidates: tuple[str, ...]


class MeasuredChoice(msgspec.Struct, frozen=True):
    """A choice as it is kept: with its key, and the seconds of each case by backend."""

    key: ChoiceKey
    choice: StepChoice
    times: dict[str, dict[str, float]]


def make_choice_key(kind: CacheKind, candidates: Sequence[str]) -> ChoiceKey:
    """Make the key of the choice for a cache, here and now; ``candidates``: backends that are looked at."""
    import torch

    return ChoiceKey(
        device=_describe_device(kind),
        versions={name: _find_version(name) for name in PACKAGES} | {"torch": str(torch.__version__)},
        kernels=_digest_kernels(),
        shape=kind.shape,
        heads=kind.query_heads,
        dtype=str(kind.dtype),
        threads=torch.get_num_threads() if kind.device.type == "cpu" else 0,
        candidates=tuple(candidates),
    )


def choice_path(key: ChoiceKey) -> Path:
    """Return the file in which the choice of ``key`` is kept."""
    return cache_folder() / "attention" / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:32]}.json"


def read_choice(key: ChoiceKey) -> StepChoice | None:
    """Read the choice that an earlier start has kept under ``key``; None if there is none that names candidates."""
    try:
        found = msgspec.json.decode(read_cached(choice_path(key), _MOST_BYTES) or b"", type=MeasuredChoice)
    except (ValueError, RecursionError):
        return None
    choice = found.choice
    known = found.key == key and {choice.decodes, choice.chunks} <= set(key.candidates)
    return choice if known else None


def keep_choice(key: ChoiceKey, choice: StepChoice, times: CaseTimes) -> bool:
    """Keep a choice for later starts; returns False where that cannot be done."""
    content = msgspec.json.encode(MeasuredChoice(key, choice, times))
    return write_cached(choice_path(key), content, MOST_CHOICES)


def choose_fastest(times: CaseTimes, candidates: Sequence[str], recordable: Sequence[str]) -> StepChoice:
    """Choose by measured ``times``: the least mean, over cases, of the time over the fastest one's.

    ``candidates`` stand in order of preference, which decides where two are alike, or nothing was measured.
    ``recordable`` (may be empty): those that CUDA graphs can hold; decodes go to them alone, since a step outside of a
    graph waits for the host's launches in all its other parts.
    """
    chunked = {case: each for case, each in times.items() if "chunk" in case}
    alone = {case: each for case, each in times.items() if case not in chunked}
    return StepChoice(_choose_one(alone, recordable or candidates), _choose_one(chunked, candidates))


def _choose_one(times: CaseTimes, candidates: Sequence[str]) -> str:
    measured = [name for name in candidates if times and all(name in each for each in times.values())]
    if not measured:
        return candidates[0]
    best = {case: min(each[name] for name in measured) for case, each in times.items()}
    means = {name: sum(each[name] / best[case] for case, each in times.items()) / len(times) for name in measured}
    least = min(means.values())
    return next(name for name in measured if means[name] <= least * (1 + NOISE_MARGIN))


def describe_times(times: CaseTimes) -> str:
    """Describe measured times in microseconds, a case behind the other."""
    return "; ".join(
        f"{case}: " + ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in each.items())
        for case, each in times.items()
    )


def _describe_device(kind: CacheKind) -> str:
    import torch

    if kind.device.type != "cuda":
        return f"{platform.machine()} {_read_processor()}, {native.describe()}"
    found = torch.cuda.get_device_properties(kind.device)
    capability = f"{found.major}.{found.minor}"
    return f"{found.name}, sm {capability}, {found.multi_processor_count} processors, CUDA {torch.version.cuda}"


@cache
def _read_processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


@cache
def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _digest_kernels() -> str:
    """Digest the sources of the backends, and the compiled extension."""
    found = hashlib.sha256()
    built = [native.extension.__file__] if native.extension is not None else []
    for path in [*sorted(Path(__file__).parent.rglob("*.py")), *map(Path, built)]:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
