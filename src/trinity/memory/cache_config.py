"""CacheConfig: sizes of the image and KV caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trinity.core.messages import IMAGE, KV, STATE
from trinity.errors import UnknownName
from trinity.errors.arguments import Count, Whole, check_arguments

_KINDS = (IMAGE, KV, STATE)
KvDtype = Literal["auto", "fp8_e4m3"]


@check_arguments
@dataclass(frozen=True)
class CacheConfig:
    """Sizes of the caches of every instance that sets none itself.

    - ``pools`` (blocks by kind, None): for example ``{"image": 64, "kv": 1024}``; "state" is for models whose layers
      keep states, one block for each request at a time.
    - ``memory_bytes`` (bytes, None): memory of each instance, its weights included, that pools are sized for. With
      neither, pools are sized for the memory that is free.
    - ``image_block_size`` (rows of image features, 576): one block of the image cache.
    - ``kv_block_size`` (tokens, 16): one block of the KV cache.
    - ``kv_dtype`` ("auto"): "auto" keeps keys and values in the model's dtype, exactly. "fp8_e4m3" rounds them to 8
      bits: twice to four times the tokens fit, and what is generated may differ from the model's own.

    Raises ``ConfigError`` for sizes that are no whole numbers of at least 1, and ``UnknownName`` for another kind of
    block.
    """

    pools: Mapping[str, Count] | None = None
    memory_bytes: Whole | None = None
    image_block_size: Whole = 576
    kv_block_size: Whole = 16
    kv_dtype: KvDtype = "auto"

    def __post_init__(self) -> None:
        for kind in self.pools or ():
            if kind not in _KINDS:
                raise UnknownName("kind of block", kind, _KINDS)
