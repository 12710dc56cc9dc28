"""Block shapes of an instance, by kind of block, and the pools that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trinity.core.messages import IMAGE, KV, STATE
from trinity.emulation.model import EmulatedModel
from trinity.errors import ConfigError
from trinity.instance import Instance
from trinity.memory.block_memory import BlockShape
from trinity.memory.cache_config import CacheConfig
from trinity.stage_kinds import roles_of

if TYPE_CHECKING:
    from trinity.stages.models import LoadedModel

DEFAULT_STATES = 16  # blocks, where pools are set by hand without any: requests prefilled or decoded at once


def block_shapes(roles: str, model: LoadedModel | EmulatedModel, cache: CacheConfig) -> dict[str, BlockShape]:
    """List the block shapes that these roles need, by kind: E has no KV cache, D no image cache (TriInfer 3.3, 4.4).

    States are with the KV, where the model's layers keep some.
    """
    shapes, held = dict[str, BlockShape](), roles_of(roles).kinds
    image = model.image_shape(cache.image_block_size)
    if IMAGE in held and image is not None:
        shapes[IMAGE] = image
    if KV in held:
        shapes[KV] = model.kv_shape(cache.kv_block_size, cache.kv_dtype)
        if (states := model.state_shape()) is not None:
            shapes[STATE] = states
    return shapes


def check_pools(
    spec: Instance, model: LoadedModel | EmulatedModel, pools: Mapping[str, int], cache: CacheConfig
) -> dict[str, BlockShape]:
    """Return the shapes of an instance's blocks. Raises ``ConfigError`` where a pool that it needs has none."""
    shapes = block_shapes(spec.roles, model, cache)
    missing = [kind for kind in shapes if pools.get(kind, 0) < 1]
    if missing:
        raise ConfigError(f"instance {spec.name} ({spec.roles}) needs at least one block of {', '.join(missing)}")
    return shapes


def add_states(pools: Mapping[str, int], shapes: Mapping[str, BlockShape]) -> dict[str, int]:
    """Add blocks of states to pools that were set by hand without, where the model's layers keep some."""
    states = {STATE: min(pools.get(KV, 0), DEFAULT_STATES)} if STATE in shapes else {}
    return {**states, **pools}
