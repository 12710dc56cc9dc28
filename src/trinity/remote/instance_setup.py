"""Setup of an instance: its message becomes a connector and a loaded instance on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from trinity.config_classes import pick_fields, unpack_config
from trinity.connector import Connector
from trinity.core.messages import IMAGE, KV
from trinity.errors import ConfigError, LayoutMismatch
from trinity.instance import Instance
from trinity.memory.weight_digests import LoadedFiles, identify_files, known_whole_digest, whole_digest
from trinity.preprocess.processor import RequestProcessor
from trinity.remote.channel.agreement import CHANGED, check_served
from trinity.remote.channel.handshake import derive_block_key
from trinity.remote.channel.wire import Layout, ModelIdentity, Setup
from trinity.runtime.host import LoadedInstance
from trinity.runtime.loader import ServingConfig, ServingOptions, config_digest, hold_weights, load_instances
from trinity.runtime.model_classes import fingerprint_model
from trinity.stage_kinds import roles_of


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
        sampled = ModelIdentity(fingerprint_model(directory, _read_config(setup).dtype))
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


def read_instance(setup: Setup) -> Instance:
    """Read the settings of the instance. Raises ``ConfigError``."""
    return unpack_config(Instance, setup.instance)


def _read_config(setup: Setup) -> ServingConfig:
    serving = unpack_config(ServingOptions, setup.serving)
    model = setup.paced or Path(setup.model)
    return ServingConfig(
        model, shared=True, beside=setup.beside, shelf=setup.shelf, **pick_fields(ServingOptions, serving)
    )


def hold_instance_weights(setup: Setup) -> object | None:
    """Load what an instance may have beside the life that it follows; None for no weights. Blocks, as below."""
    return hold_weights(_read_config(setup), read_instance(setup))


def prepare_transports(connector: Connector, roles: str) -> None:
    """Have the transports of these roles' pools start what they can before there is a pool. Blocks, as below."""
    kinds = [kind for kind in (IMAGE, KV) if kind in roles_of(roles).kinds]
    for transport in {id(each): each for each in (connector.routes[kind].transport for kind in kinds)}.values():
        getattr(transport, "prepare", lambda: None)()


def load_instance(setup: Setup) -> LoadedInstance:
    """Load weights, make pools and profile budgets. Blocks: run it on a thread."""
    check_model(setup)
    spec, config = read_instance(setup), _read_config(setup)
    measured = (config.slo is not None and config.budgets is None) or spec.image_budget is not None
    processor = RequestProcessor(setup.model) if measured and setup.paced is None else None
    try:
        loaded = load_instances(config, [spec], processor)[0]
        loaded.settings = replace(loaded.settings, epoch=setup.epoch, host=setup.host)
        return loaded
    finally:
        if processor is not None:
            processor.close()
