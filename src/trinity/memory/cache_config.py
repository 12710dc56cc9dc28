"""CacheConfig: sizes of the image and KV caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trinity.core.instance.settings import BlockSizes, PoolSizes
from trinity.core.messages import IMAGE, KV, STATE
from trinity.errors import UnknownName
from trinity.errors.arguments import check_arguments

_KINDS = (IMAGE, KV, STATE)
KvDtype = Literal["auto", "fp8_e4m3"]


@check_arguments
@dataclass(frozen=True)
class CacheConfig(PoolSizes, BlockSizes):
    """Sizes of the caches of every instance that sets none itself.

    - ``pools``, ``memory_bytes`` (None): as ``PoolSizes`` has them. ``image_block_size`` (rows of image features, 576),
      ``kv_block_size`` (tokens, 16): of one block.
    - ``kv_dtype`` ("auto"): "auto" keeps keys and values in the model's dtype, exactly. "fp8_e4m3" rounds them to 8
      bits: twice to four times the tokens fit, and what is generated may differ from the model's own.

    Raises ``ConfigError`` for sizes that are no whole numbers of at least 1, and ``UnknownName`` for another kind of
    block.
    """

    kv_dtype: KvDtype = "auto"

    def __post_init__(self) -> None:
        for kind in self.pools or ():
            if kind not in _KINDS:
                raise UnknownName("kind of block", kind, _KINDS)
