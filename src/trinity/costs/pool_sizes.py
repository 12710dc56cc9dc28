"""Sizing: blocks per pool from a memory budget and an instance's roles; what each kind of instance can hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from trinity.core.messages import IMAGE, KV
from trinity.errors import ConfigError

IMAGE_SHARE = 0.1  # of what the weights leave, where an instance has both pools


def size_pools(
    roles: str,
    memory_bytes: int,
    weight_bytes: int,
    image_block_bytes: int | None,
    kv_block_bytes: int | None,
    *,
    image_share: float = IMAGE_SHARE,
) -> dict[str, int]:
    """Blocks by kind for an instance of ``roles`` ("E", "PD", ...) that may use ``memory_bytes``, weights included.

    E and P hold images, P and D hold KV; None for a kind that the model has no blocks of. Where both are held, images
    get ``image_share`` of what the weights leave, at least one block, and KV the rest. Raises ``ConfigError`` that
    says how much is missing where not one block of each kind fits.
    """
    if not roles or set(roles) - set("EPD"):
        raise ConfigError(f"roles are letters of EPD, got {roles!r}")
    if not 0 < image_share < 1:
        raise ConfigError(f"image_share must lie between 0 and 1, got {image_share!r}")
    needed = {IMAGE: image_block_bytes if set(roles) & {"E", "P"} else None}
    needed[KV] = kv_block_bytes if set(roles) & {"P", "D"} else None
    block_bytes = {kind: size for kind, size in needed.items() if size is not None}
    free = memory_bytes - weight_bytes
    _check_room(roles, memory_bytes, weight_bytes, sum(block_bytes.values()))
    if len(block_bytes) < 2:
        return {kind: free // size for kind, size in block_bytes.items()}
    most_images = (free - block_bytes[KV]) // block_bytes[IMAGE]
    images = min(max(1, int(free * image_share) // block_bytes[IMAGE]), most_images)
    return {IMAGE: images, KV: (free - images * block_bytes[IMAGE]) // block_bytes[KV]}


def _check_room(roles: str, memory_bytes: int, weight_bytes: int, least_bytes: int) -> None:
    if not least_bytes:
        raise ConfigError(f"an instance of roles {roles} would hold no block: this model has nothing for it to do")
    missing = weight_bytes + least_bytes - memory_bytes
    if missing > 0:
        raise ConfigError(
            f"an instance of roles {roles} needs {as_size(weight_bytes)} for weights and {as_size(least_bytes)} for a "
            f"block of each pool, and may use {as_size(memory_bytes)}: {as_size(missing)} are missing. Raise its "
            "memory, or give it fewer roles."
        )


def check_available(needed_bytes: int, what: str, available_bytes: int | None = None) -> None:
    """Raise ``ConfigError`` where ``what`` needs more than there is: overcommitted memory ends in a killed process."""
    available = available_memory() if available_bytes is None else available_bytes
    if needed_bytes > available:
        raise ConfigError(
            f"{what} needs {as_size(needed_bytes)}, {as_size(available)} are available: "
            f"{as_size(needed_bytes - available)} are missing. Ask for fewer blocks or less memory."
        )


def as_size(size: int) -> str:
    """Bytes for people: "1.5 GiB"."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


# ---------------------------------------------------------------- what an instance can hold (EPDServe tables 2, 3, 8)


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What serving a model takes, in bytes.

    Weights: ``vision_bytes`` and ``language_bytes``. An image has ``image_tokens`` rows of ``feature_bytes`` each in
    the image cache, and takes ``encode_bytes`` of working memory while it is encoded. A token of the prompt takes
    ``kv_bytes`` in the KV cache, and ``prefill_bytes`` of working memory while it is prefilled. A prompt has
    ``text_tokens`` besides its images, and at most ``context`` tokens.
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
    """What one instance holds.

    ``images_per_request`` of one request alone (EPDServe table 2); ``batch`` requests of so many images as were
    asked for (table 3); ``kv_tokens`` in its KV cache; ``kv_share`` the largest share of its free memory that one such
    request leaves for the KV cache (table 8). All 0 where it does not fit.
    """

    images_per_request: int
    batch: int
    kv_tokens: int
    kv_share: float


def capacity(roles: str, model: ModelMemory, memory_bytes: int, *, images: int = 10, kv_share: float = 0.8) -> Capacity:
    """What an instance of ``roles`` holds in ``memory_bytes``, for requests of ``images`` images.

    As is counted there (EPDServe 4.3 and appendix A.2): the images of a request are worked on at once; where images
    and KV share the instance, ``kv_share`` of what the weights leave is for the KV cache; an instance that only
    encodes has no KV cache, and one that only decodes has nothing else. Encoding ends before the prefill begins, so
    the larger of their working memories counts.
    """
    weights = (model.vision_bytes if "E" in roles else 0) + (model.language_bytes if set(roles) & {"P", "D"} else 0)
    free = max(0, memory_bytes - weights)
    cache = int(free * {"E": 0.0, "D": 1.0}.get(roles, kv_share))
    kv_tokens = cache // model.kv_bytes
    per_image = _work_per_image(roles, model)
    per_request = images * model.image_tokens + model.text_tokens
    room = _room_for_images(roles, model, free - cache, kv_tokens)
    fits_context = model.context is None or per_request <= model.context
    batches = [(free - cache) // (images * per_image)] if per_image and images else []
    batches += [kv_tokens // per_request] if roles != "E" and per_request else []
    left = free - images * per_image
    return Capacity(
        images_per_request=max(0, room),
        batch=min(batches, default=0) if fits_context else 0,
        kv_tokens=kv_tokens,
        kv_share=left / free if roles != "E" and fits_context and left > 0 else 0.0,
    )


def _work_per_image(roles: str, model: ModelMemory) -> int:
    """Bytes beside weights and KV cache that one image of a running request takes; 0 where images do not come."""
    if not set(roles) & {"E", "P"}:
        return 0
    encode = model.encode_bytes if "E" in roles else 0
    prefill = model.prefill_bytes * model.image_tokens if "P" in roles else 0
    return model.image_tokens * model.feature_bytes + max(encode, prefill)


def _room_for_images(roles: str, model: ModelMemory, work: int, kv_tokens: int) -> int:
    """Images of one request: bounded by working memory, the KV cache and the context."""
    bounds = []
    if per_image := _work_per_image(roles, model):
        bounds.append(work // per_image)
    if roles != "E":
        bounds.append((kv_tokens - model.text_tokens) // model.image_tokens)
    if model.context is not None:
        bounds.append((model.context - model.text_tokens) // model.image_tokens)
    return min(bounds)


# ---------------------------------------------------------------- what there is


def available_memory(root: str | Path = "/") -> int:
    """Bytes that this process may still use: what the system has, and what each cgroup above it leaves.

    ``root`` is where ``proc`` and ``sys`` are found. A page cache that the kernel would give back counts as free.
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
    """Limit less usage of a cgroup and of each one above it; inside a container only the topmost may be there."""
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
