"""CacheConfig: sizes of the image and KV caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trinity.errors import ConfigError


@dataclass(frozen=True)
class CacheConfig:
    """Sizes of the caches of every instance that sets none itself.

    - ``pools`` (blocks by kind, None): for example ``{"image": 64, "kv": 1024}``.
    - ``memory_bytes`` (bytes, None): memory of each instance, its weights included, that pools are sized for. With
      neither, pools are sized for the memory that is free.
    - ``image_block_size`` (rows of image features, 576): one block of the image cache.
    - ``kv_block_size`` (tokens, 16): one block of the KV cache.

    Raises ``ConfigError`` for a block size below 1.
    """

    pools: Mapping[str, int] | None = None
    memory_bytes: int | None = None
    image_block_size: int = 576
    kv_block_size: int = 16

    def __post_init__(self) -> None:
        if self.image_block_size < 1 or self.kv_block_size < 1:
            sizes = f"image_block_size={self.image_block_size}, kv_block_size={self.kv_block_size}"
            raise ConfigError(f"a block holds at least 1 row or token, got {sizes}")
