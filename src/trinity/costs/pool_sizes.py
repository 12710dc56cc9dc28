"""Sizes of an instance's block pools from its memory and roles, and the capacity of each kind of instance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from trinity.core.messages import KV, STATE
from trinity.errors import ConfigError
from trinity.stage_kinds import all_letters, block_kinds, feature_kinds, roles_of

BESIDE_SHARE = 0.5  # of free memory, for weights that are there twice while one life follows another
IMAGE_SHARE = 0.1  # of the memory left by the weights, where an instance has both pools
KV_PER_STATE = 128  # KV blocks for each block of states: 2,048 tokens of each request that is there at once


def size_pools(
    roles: str,
    memory_bytes: int,
    weight_bytes: int,
    image_block_bytes: int | None,
    kv_block_bytes: int | None,
    state_block_bytes: int | None = None,
    *,
    image_share: float = IMAGE_SHARE,
) -> dict[str, int]:
    """Compute the blocks of each pool of an instance.

    E and P hold images, P and D hold KV. Where an instance holds both, images get ``image_share`` of the memory left by
    the weights, at least one block, and KV the rest. States, of a model whose layers keep some, are with the KV: one
    block for each ``KV_PER_STATE`` blocks of it, at least one. Features of other encoders are sized as images are.

    roles: letters of the instance's stages, such as "E" or "PD".
    memory_bytes (bytes): memory that the instance may use, weights included.
    weight_bytes (bytes): the weights.
    image_block_bytes, kv_block_bytes, state_block_bytes (bytes): size of a block; None where the model has no such
        blocks.
    image_share (share, 0.1): image cache's share of the free memory.

    Returns blocks by kind. Raises ``ConfigError``, with the bytes missing, where one block of each kind does not fit.
    """
    if not roles or set(roles) - set(all_letters()):
        raise ConfigError(f"roles must be letters of {all_letters()}, got {roles!r}")
    if not 0 < image_share < 1:
        raise ConfigError(f"image_share must lie between 0 and 1, got {image_share!r}")
    does = roles_of(roles)
    sizes = {**dict.fromkeys(feature_kinds(), image_block_bytes), KV: kv_block_bytes, STATE: state_block_bytes}
    block_bytes = {kind: size for kind in block_kinds() if kind in does.kinds and (size := sizes[kind]) is not None}
    free = memory_bytes - weight_bytes
    _check_room(roles, memory_bytes, weight_bytes, sum(block_bytes.values()))
    features = [kind for kind in block_bytes if kind in does.features]
    if KV not in block_bytes or len(block_bytes) < 2:
        return {kind: free // len(block_bytes) // size for kind, size in block_bytes.items()}
    pools: dict[str, int] = {}
    for kind in features:
        beside = sum(size for other, size in block_bytes.items() if other != kind and other not in pools)
        pools[kind] = min(max(1, int(free * image_share) // block_bytes[kind]), (free - beside) // block_bytes[kind])
        free -= pools[kind] * block_bytes[kind]
    if STATE in block_bytes:
        pools[STATE] = max(1, free // (block_bytes[STATE] + KV_PER_STATE * block_bytes[KV]))
        free -= pools[STATE] * block_bytes[STATE]
    return {**pools, KV: free // block_bytes[KV]}


def _check_room(roles: str, memory_bytes: int, weight_bytes: int, least_bytes: int) -> None:
    if not least_bytes:
        raise ConfigError(f"an instance of roles {roles} would hold no block: this model has no such stages")
    missing = weight_bytes + least_bytes - memory_bytes
    if missing > 0:
        raise ConfigError(
            f"an instance of roles {roles} needs {format_size(weight_bytes)} for weights and "
            f"{format_size(least_bytes)} for a block of each pool, but may use {format_size(memory_bytes)}: "
            f"{format_size(missing)} are missing. Raise its memory, or give it fewer roles."
        )


def check_available(needed_bytes: int, what: str, available_bytes: int | None = None) -> None:
    """Check that ``what`` fits the available memory: overcommitted memory ends in a killed process.

    Raises ``ConfigError`` with the bytes missing.
    """
    available = available_memory() if available_bytes is None else available_bytes
    if needed_bytes > available:
        raise ConfigError(
            f"{what} needs {format_size(needed_bytes)}, but {format_size(available)} are available: "
            f"{format_size(needed_bytes - available)} are missing. Ask for fewer blocks or less memory."
        )


def fits_beside(device: str, weight_bytes: int, available_bytes: int | None = None) -> bool:
    """Tell if a life may load its weights while the life that it follows has its own, and its pools.

    On a GPU it may not: pools there take what one process of each instance leaves, so that a second one has no room for
    its context (``device_memory``). Elsewhere the weights, as if none were shared, must fit half of what is available:
    packing and converting hold some of them twice.
    """
    available = available_memory() if available_bytes is None else available_bytes
    return device.partition(":")[0] == "cpu" and weight_bytes <= available * BESIDE_SHARE


def format_size(size: int) -> str:
    """Format a number of bytes, as "1.50 GiB"."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


# ---------------------------------------------------------------- capacity of an instance (EPDServe tables 2, 3, 8)


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that serving a model takes.

    vision_bytes, language_bytes (bytes): weights.
    image_tokens (visual tokens): rows of an image in the image cache.
    feature_bytes (bytes): a row of the image cache.
    kv_bytes (bytes): a token in the KV cache.
    encode_bytes (bytes, 0): working memory of an image while it is encoded.
    prefill_bytes (bytes, 0): working memory of a prompt's token while it is prefilled.
    text_tokens (tokens, 0): text of a prompt.
    context (tokens, None): longest prompt; None: unbounded.
    """

    vision_bytes: int
    language_bytes: int
    image_tokens: int
    feature_bytes: int
    kv_bytes: int
    encode_bytes: int = 0
    prefill_bytes: int = 0
    text_tokens: int = 0
    context: int | None = None


class Capacity(NamedTuple):
    """Capacity of one instance; all 0 where nothing fits.

    ``images_per_request``: images of a request that runs alone (EPDServe table 2). ``batch``: requests of the given
    number of images (table 3). ``kv_tokens``: tokens of the KV cache. ``kv_share``: largest share of the free memory
    that one such request leaves for the KV cache (table 8).
    """

    images_per_request: int
    batch: int
    kv_tokens: int
    kv_share: float


def capacity(roles: str, model: ModelMemory, memory_bytes: int, *, images: int = 10, kv_share: float = 0.8) -> Capacity:
    """Compute the capacity of an instance of ``roles`` in ``memory_bytes``, for requests of ``images`` images.

    Counts as EPDServe does (4.3 and appendix A.2): the images of a request are processed at once; where images and KV
    share the instance, ``kv_share`` of the memory left by the weights is for the KV cache; an instance that only
    encodes has no KV cache, and one that only decodes has nothing else. Encoding ends before prefill begins, so the
    larger of their working memories counts.
    """
    does = roles_of(roles)
    weights = model.vision_bytes * ("vision" in does.parts) + model.language_bytes * ("language" in does.parts)
    free = max(0, memory_bytes - weights)
    cache = int(free * (0.0 if does.only_encodes else kv_share if does.features else 1.0))
    kv_tokens = cache // model.kv_bytes
    per_image = _working_bytes_per_image(roles, model)
    per_request = images * model.image_tokens + model.text_tokens
    room = _count_fitting_images(roles, model, free - cache, kv_tokens)
    fits_context = model.context is None or per_request <= model.context
    batches = [(free - cache) // (images * per_image)] if per_image and images else []
    batches += [kv_tokens // per_request] if not does.only_encodes and per_request else []
    left = free - images * per_image
    return Capacity(
        images_per_request=max(0, room),
        batch=min(batches, default=0) if fits_context else 0,
        kv_tokens=kv_tokens,
        kv_share=left / free if not does.only_encodes and fits_context and left > 0 else 0.0,
    )


def _working_bytes_per_image(roles: str, model: ModelMemory) -> int:
    """Bytes that one image of a running request takes beside weights and KV cache; 0 where no images arrive."""
    does = roles_of(roles)
    if not does.features:
        return 0
    encode = model.encode_bytes if does.encodes else 0
    prefill = model.prefill_bytes * model.image_tokens if does.prefills else 0
    return model.image_tokens * model.feature_bytes + max(encode, prefill)


def _count_fitting_images(roles: str, model: ModelMemory, work: int, kv_tokens: int) -> int:
    """Count the images of one request that fit working memory, KV cache and context."""
    bounds = []
    if per_image := _working_bytes_per_image(roles, model):
        bounds.append(work // per_image)
    if not roles_of(roles).only_encodes:
        bounds.append((kv_tokens - model.text_tokens) // model.image_tokens)
    if model.context is not None:
        bounds.append((model.context - model.text_tokens) // model.image_tokens)
    return min(bounds)


# ---------------------------------------------------------------- memory of this process


def available_memory(root: str | Path = "/") -> int:
    """Bytes that this process may still use: the least of the system's free memory and each parent cgroup's headroom.

    ``root``: folder of ``proc`` and ``sys``. Page cache that the kernel would give back counts as free.
    """
    found = [*_system_memory(Path(root)), *_cgroup_memory(Path(root))]
    if not found:
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    return max(0, min(found))


def _system_memory(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _cgroup_memory(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for base in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                yield from _headroom(root / base, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _headroom(root / "sys/fs/cgroup/memory", path, *names)


def _headroom(base: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    """Limit less usage of a cgroup and each of its parents; inside a container only the topmost may be visible."""
    inner = PurePosixPath(path.strip("/"))
    for folder in (base / inner, *(base / parent for parent in inner.parents)):
        limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
            yield int(limit) - int(usage) + int(stat.get(cache_name, 0))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
