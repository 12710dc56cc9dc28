"""Setup of an instance: its message becomes a connector and a loaded instance on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from trinity.connector import Connector
from trinity.core.messages import IMAGE, KV
from trinity.core.scheduler import BatchRules
from trinity.errors import ConfigError, LayoutMismatch
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.memory.weight_digests import LoadedFiles, identify_files, known_whole_digest, whole_digest
from trinity.preprocess.processor import RequestProcessor
from trinity.remote.channel.agreement import CHANGED, check_served
from trinity.remote.channel.handshake import derive_block_key
from trinity.remote.channel.wire import Layout, ModelIdentity, Setup
from trinity.runtime.host import LoadedInstance
from trinity.runtime.loader import ServingConfig, config_digest, hold_weights, load_instances
from trinity.runtime.model_classes import fingerprint_model


def describe_layouts(loaded: LoadedInstance) -> dict[str, Layout]:
    """Describe each kind of block, which peers must have alike."""
    return {
        kind: Layout(memory.shape.shape, str(memory.shape.dtype), memory.block_bytes)
        for kind, memory in loaded.memory.items()
    }


def check_model(setup: Setup) -> None:
    """Raise ``ConfigError`` or ``LayoutMismatch`` if this machine lacks the front end's checkpoint."""
    hint = "give its directory on this machine with --model"
    try:
        mine = config_digest(setup.paced or Path(setup.model))
    except ConfigError as error:
        raise ConfigError(f"instance {setup.name} lacks the model: {error}; {hint}") from error
    if setup.config and mine != setup.config:
        text = f"the front end has config.json {setup.config}, instance {setup.name} has {mine} in {setup.model}"
        raise LayoutMismatch(f"{text}: {CHANGED if setup.serves else f'both must load the same checkpoint; {hint}'}")


def identify_model(setup: Setup) -> LoadedFiles:
    """Identify the checkpoint's files before they are loaded.

    Raises as ``check_model`` does, and ``LayoutMismatch`` where they are not what the pipeline serves already. Every
    byte is read for that where it is known of what serves, and nobody has read these files yet.
    """
    check_model(setup)
    if setup.paced:
        return ()
    directory = Path(setup.model)
    files = identify_files(directory)
    if setup.serves is not None:
        sampled = ModelIdentity(fingerprint_model(directory, setup.dtype))
        check_served(setup.name, directory, setup.serves, sampled)
        if setup.serves.weights:
            whole = known_whole_digest(directory, files) or whole_digest(directory, loaded=files)
            check_served(setup.name, directory, setup.serves, msgspec.structs.replace(sampled, weights=whole))
    return files


def make_instance_connector(setup: Setup, secret: bytes) -> Connector:
    """Make the connector that the front end describes; digests that leave the host get a key out of ``secret``.

    Raises ``ConfigError``, ``TransportUnavailable``.
    """
    routes = list(setup.routes.items())
    made: dict[str, Connector] = {}
    for kind, config in routes:
        alike = next((made[other] for other, same in routes if other in made and same == config), None)
        made[kind] = alike or Connector(
            config.transport, timeout_s=config.timeout_s, verify=config.verify, options=config.options
        )
    whole = Connector(made)
    whole.seal_digests(derive_block_key(secret, setup.pipeline))
    return whole


def _rules_of(setup: Setup) -> BatchRules:
    switches = (setup.chunked, setup.media_budget, setup.decode_budget, setup.leading_text)
    return BatchRules(setup.tokens, setup.media, setup.policy, setup.order, *switches)


def _read_spec(setup: Setup) -> Instance:
    return Instance(
        setup.roles,
        setup.name,
        pools=setup.pools,
        memory_bytes=setup.memory_bytes,
        lanes=setup.lanes,
        depth=setup.depth,
        stages=setup.stages,
        threads=setup.threads,
        cores=setup.cores,
        device=setup.device,
        prefix_cache=setup.prefix_cache,
        image_cache=setup.image_cache,
        reservation=setup.reservation,
        attention=setup.attention,
        pack=setup.pack,
        token_budget=setup.most_tokens,
        image_budget=setup.most_images,
    )


def _read_config(setup: Setup) -> ServingConfig:
    return ServingConfig(
        model=setup.paced or Path(setup.model),
        dtype=setup.dtype,
        slo=setup.slo,
        budgets=setup.budgets,
        rules=_rules_of(setup),
        cache=CacheConfig(
            image_block_size=setup.image_block_size, kv_block_size=setup.kv_block_size, kv_dtype=setup.kv_dtype
        ),
        observe=None,
        device=setup.device,
        shared=True,
        transfers=setup.transfers,
        beside=setup.beside,
        shelf=setup.shelf,
    )


def hold_instance_weights(setup: Setup) -> object | None:
    """Load what an instance may have beside the life that it follows; None for no weights. Blocks, as below."""
    return hold_weights(_read_config(setup), _read_spec(setup))


def prepare_transports(connector: Connector, roles: str) -> None:
    """Have the transports of these roles' pools start what they can before there is a pool. Blocks, as below."""
    kinds = [IMAGE] * bool({*roles} & {*"EP"}) + [KV] * bool({*roles} & {*"PD"})
    for transport in {id(each): each for each in (connector.routes[kind].transport for kind in kinds)}.values():
        getattr(transport, "prepare", lambda: None)()


def load_instance(setup: Setup) -> LoadedInstance:
    """Load weights, make pools and profile budgets. Blocks: run it on a thread."""
    check_model(setup)
    measured = (setup.slo is not None and setup.budgets is None) or setup.most_images is not None
    processor = RequestProcessor(setup.model) if measured and setup.paced is None else None
    try:
        loaded = load_instances(_read_config(setup), [_read_spec(setup)], processor)[0]
        loaded.settings = replace(loaded.settings, epoch=setup.epoch, host=setup.host)
        return loaded
    finally:
        if processor is not None:
            processor.close()
