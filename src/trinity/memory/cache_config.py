"""CacheConfig: sizes of the image and KV caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trinity.core.messages import IMAGE, KV
from trinity.errors import ConfigError, UnknownName

_KINDS = (IMAGE, KV)


@dataclass(frozen=True)
class CacheConfig:
    """Sizes of the caches of every instance that sets none itself.

    - ``pools`` (blocks by kind, None): for example ``{"image": 64, "kv": 1024}``.
    - ``memory_bytes`` (bytes, None): memory of each instance, its weights included, that pools are sized for. With
      neither, pools are sized for the memory that is free.
    - ``image_block_size`` (rows of image features, 576): one block of the image cache.
    - ``kv_block_size`` (tokens, 16): one block of the KV cache.

    Raises ``ConfigError`` for sizes that are no whole numbers of at least 1, and ``UnknownName`` for another kind of
    block.
    """

    pools: Mapping[str, int] | None = None
    memory_bytes: int | None = None
    image_block_size: int = 576
    kv_block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("image_block_size", "kv_block_size"):
            _check_count(name, getattr(self, name), 1)
        if self.memory_bytes is not None:
            _check_count("memory_bytes", self.memory_bytes, 1)
        if self.pools is not None and not isinstance(self.pools, Mapping):
            raise ConfigError(f'pools are blocks by kind, such as {{"image": 64, "kv": 1024}}; got {self.pools!r}')
        for kind, blocks in (self.pools or {}).items():
            if kind not in _KINDS:
                raise UnknownName("kind of block", str(kind), _KINDS)
            _check_count(f"pools[{kind!r}]", blocks, 0)


def _check_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is a whole number of at least {least}, got {value!r}")
