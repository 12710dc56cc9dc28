"""Loads the instances of a pipeline: weights, pools, budgets and hosts."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from trinity.config_classes import pick_fields
from trinity.core.instance.settings import PoolSizes, SchedulingOptions
from trinity.core.messages import IMAGE, KV, STATE
from trinity.core.routing.router import RoutingPolicy
from trinity.core.scheduler import BatchRules, latency_bound
from trinity.costs.budgets import StepBudgets
from trinity.costs.device_memory import POOL_SHARE, DeviceTenant, free_when_loaded, group_by_device, share_of_pools
from trinity.costs.pool_sizes import available_memory, fits_beside, size_pools
from trinity.costs.step_cost import CostTables
from trinity.demo import SHAPES_MODEL
from trinity.emulation.model import EmulatedModel
from trinity.emulation.processor import EmulatedProcessor
from trinity.errors import ConfigError
from trinity.errors.arguments import DeviceName, DtypeName
from trinity.errors.hub_ids import locate_model
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.memory.devices import ENCODE_BYTES, gpu_number, use_device
from trinity.memory.freed_memory import release_freed_memory
from trinity.preprocess.checkpoint.config_file import check_directory
from trinity.preprocess.loader import ProcessorOptions
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.worker_processes import KillableProcessor
from trinity.runtime.host import InstanceHost, LoadedInstance, Network, build_instance
from trinity.runtime.pool_shapes import add_states, block_shapes, check_pools
from trinity.runtime.profiler import predict_emulated_budgets, profile_budgets, profile_tables
from trinity.stage_kinds import roles_of
from trinity.timeline import Timeline
from trinity.traces.trace import SLO

if TYPE_CHECKING:
    from trinity.stages.models import LoadedModel

DEFAULT_CACHE_BYTES = 1 << 30  # at most, of an instance's pools on a CPU; an eighth of free memory if that is less
SHIPPED_MODEL = "shapes"  # the name of the checkpoint that comes with trinity
DEFAULT_BLOCKS = 8192  # at most, of each kind, in an instance's pools on a CPU
PROBE_BLOCKS = {IMAGE: 64, KV: 512, STATE: 64}  # blocks of each kind in a copy that is only profiled
_GIVE_MODEL = "give a checkpoint's directory or hub name; model.save_pretrained(directory) writes that of a loaded one"
GivenModel = Annotated[str | Path | EmulatedModel, msgspec.Meta(description=_GIVE_MODEL)]


@dataclass(frozen=True, kw_only=True)
class ServingOptions(SchedulingOptions):
    """Settings of a pipeline that all of its instances share.

    - ``dtype`` ("auto"): of weights and caches; "auto" is the checkpoint's own.
    - ``device`` ("cpu"): of instances that have none themselves.
    - ``slo`` (seconds, None): TTFT and TBT bounds; the budgets of Algorithm 1 are profiled at start to keep them.
    - ``budgets`` (None): ``StepBudgets`` by hand. With neither, a step takes 2,048 tokens and one image.
    - ``cache`` (``CacheConfig()``): block sizes, and pools or memory of every instance that sets none itself.
    - ``observe`` (None): called as ``observe(request_id, index, logits)`` with all logits before sampling.
    """

    dtype: DtypeName = "auto"
    device: DeviceName = "cpu"
    slo: SLO | None = None
    budgets: StepBudgets | None = None
    cache: CacheConfig = CacheConfig()
    observe: Callable[..., None] | None = None


@dataclass(frozen=True)
class ServingConfig(ServingOptions):
    """Settings that instances are loaded with.

    - ``model``: a checkpoint's directory, or an emulated model.
    - ``shared`` (False): pools in memory files, which other processes can map.
    - ``beside`` (()): instances in processes of their own that share the device of this one's.
    - ``shelf`` (""): path of the ``WeightShelf`` by which they share weights; "": each has its own.
    """

    model: Path | EmulatedModel
    shared: bool = False
    beside: tuple[DeviceTenant, ...] = ()
    shelf: str = ""


def config_digest(model: Path | EmulatedModel) -> str:
    """Hash the checkpoint's config.json, on which front end and instances must agree before weights are compared.

    Raises ``ConfigError`` if it cannot be read.
    """
    if isinstance(model, EmulatedModel):
        return model.fingerprint
    try:
        return hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(
            f"{model} has no readable config.json ({error}); give the directory of a transformers checkpoint"
        ) from error


def name_weights(model: Path | EmulatedModel) -> str:
    """Name a model for results that are kept: its folder, since models of one config differ in weights, and config."""
    return config_digest(model) if isinstance(model, EmulatedModel) else f"{model.name} {config_digest(model)}"


def resolve_model(model: str | Path | EmulatedModel, download: bool = False) -> Path | EmulatedModel:
    """Return a checkpoint's directory, or an emulated model. ``model``, ``download``: as ``Pipeline`` has them.

    Raises ``ConfigError`` if there is no checkpoint.
    """
    if isinstance(model, EmulatedModel):
        return model
    shipped = model == SHIPPED_MODEL and not os.path.lexists(model)
    folder = SHAPES_MODEL if shipped else locate_model(model, download)
    check_directory(folder)
    return folder.absolute()  # a program may change its directory before the start


def make_processor(
    model: Path | EmulatedModel,
    options: ProcessorOptions = ProcessorOptions(),
    strips: int = 1,
    *,
    here: bool = True,
) -> RequestProcessor:
    """Make the model's request processor; ``here``: its instances are in this process. Blocks: run it on a thread."""
    if isinstance(model, EmulatedModel):
        return EmulatedProcessor(model, limits=options.limits, strips=strips)
    kind = KillableProcessor if options.limits.processes else RequestProcessor
    made = kind(model, strips=strips, **pick_fields(ProcessorOptions, options))
    made.sampling_door.registered = here
    return made


def load_instances(
    config: ServingConfig,
    instances: Sequence[Instance],
    processor: RequestProcessor | None,
    beside: Sequence[Instance] = (),
) -> list[LoadedInstance]:
    """Load the weights of each instance's roles, allocate pools, search budgets. Blocks: run it on a thread.

    ``beside``: further instances of this process, which run already and share the weights.
    """
    loaded: list[LoadedInstance] = []
    specs = [_complete_spec(config, spec, [*instances, *beside]) for spec in instances]
    models = [_get_model(config, spec) for spec in specs]
    for spec, model, pools in zip(specs, models, choose_pools(config, specs, models), strict=True):
        instance = build_instance(spec, model, pools, config.cache, config.observe, config.shared)
        rules = _make_rules(config, instance, processor)
        transfers = config.transfers
        instance.settings = replace(instance.settings, rules=rules, transfers=transfers, lease_s=transfers.lease_s)
        loaded.append(instance)
    release_freed_memory()  # of loading: copies, and trials of kernels
    return loaded


def hold_weights(config: ServingConfig, spec: Instance) -> object | None:
    """Load the weights of an instance that is to follow another; ``load_instances`` finds them while this is held.

    None where memory does not allow them beside those of the other one. Blocks: run it on a thread. Raises
    ``ConfigError`` as ``load_instances`` does for weights, and for pools or a memory that was set and has no room.
    """
    device = spec.device or config.device
    if not fits_beside(device, _count_weights(config, spec.roles, device)):
        return None
    model = _get_model(config, _complete_spec(config, spec, [spec]))
    tenant = describe_tenant(spec, config.cache)
    if tenant.pools is not None or tenant.memory_bytes is not None:
        check_pools(spec, model, _choose_sizes(config, spec, model, tenant, ()), config.cache)
    return model


def profile_copies(
    config: ServingConfig,
    instances: Sequence[Instance],
    processor: RequestProcessor,
    hosts: Mapping[str, InstanceHost],
    path: str | Path | None = None,
    **counts: Any,
) -> CostTables:
    """Profile copies of these instances, with pools of their own so that caches stay as they are.

    Each stage is measured on the first instance that has it. Weights are those of ``hosts``, or loaded here. The tables
    are saved to ``path``, if given; ``counts`` are those of ``CostTables.profile``. Blocks: run it on a thread.

    Raises ``ConfigError`` if the model is emulated, or instances run elsewhere or on different devices.
    """
    if isinstance(config.model, EmulatedModel):
        raise ConfigError(
            "an emulated pipeline waits for the times of its cost model (Pipeline.cost): there is nothing to profile"
        )
    away = [spec.name for spec in instances if spec.address]
    devices = {spec.device or config.device for spec in instances}
    if away or len(devices) > 1:
        why = f"{', '.join(away)} run elsewhere" if away else f"these instances run on {', '.join(sorted(devices))}"
        raise ConfigError(
            f"a cost table describes one device of this machine, but {why}; profile each device by itself"
        )
    specs = [_complete_spec(config, spec, instances) for spec in instances]
    models = [hosts[spec.name].loaded.model if spec.name in hosts else _get_model(config, spec) for spec in specs]
    served = [_count_blocks(hosts[spec.name]) for spec in specs if spec.name in hosts]
    pools = served if len(served) == len(specs) else choose_pools(config, specs, models)
    copies = [_build_copy(config, *each) for each in zip(specs, models, pools, strict=True)]
    tables = profile_tables(copies, processor, **counts)
    if path is not None:
        tables.save(path)
    return tables


def _count_blocks(host: InstanceHost) -> dict[str, int]:
    return {kind: memory.blocks for kind, memory in host.loaded.memory.items()}


def _build_copy(
    config: ServingConfig, spec: Instance, model: LoadedModel | EmulatedModel, pools: Mapping[str, int]
) -> LoadedInstance:
    pools = {kind: min(blocks, PROBE_BLOCKS[kind]) for kind, blocks in pools.items()}
    return build_instance(spec, model, pools, config.cache, None)


def _complete_spec(config: ServingConfig, spec: Instance, here: Sequence[Instance]) -> Instance:
    """Fill in device and packing: weights are packed if an instance here decodes, as all share one copy."""
    pack = any(roles_of(each.roles).decodes for each in here) if spec.pack is None else spec.pack
    return replace(spec, device=spec.device or config.device, pack=pack)


def _get_model(config: ServingConfig, spec: Instance) -> LoadedModel | EmulatedModel:
    if isinstance(config.model, EmulatedModel):
        return config.model
    from trinity.stages.models import load_model
    from trinity.stages.models.loader import check_device

    device, packed = spec.device or "cpu", bool(spec.pack)
    check_device(device)
    with use_device(device):
        return load_model(
            config.model, spec.roles, dtype=config.dtype, device=device, packed=packed, shelf=config.shelf
        )


def make_hosts(
    loaded: Sequence[LoadedInstance], network: Network, timeline: Timeline, policy: Callable[[], RoutingPolicy]
) -> dict[str, InstanceHost]:
    """Make a host for each instance, publish its pools and announce it to the others. The caller starts the threads."""
    hosts = {each.spec.name: InstanceHost(each, network, timeline, policy()) for each in loaded}
    for host in hosts.values():
        network.connector.bind(host.name, host.loaded.memory)
        for peer in hosts.values():
            host.post(peer.announcement())
    return hosts


def choose_pools(
    config: ServingConfig, specs: Sequence[Instance], models: Sequence[LoadedModel | EmulatedModel]
) -> list[dict[str, int]]:
    """Choose the blocks of each kind for instances whose weights are loaded, before any pool of theirs is allocated.

    As the user set them, for a memory budget, or for a share of their device's memory.
    """
    tenants = [describe_tenant(spec, config.cache) for spec in specs]
    sharers = group_by_device(("", spec.device or config.device) for spec in specs)
    chosen = []
    for spec, model, tenant, others in zip(specs, models, tenants, sharers, strict=True):
        beside = [(tenants[other], models[other].weight_bytes) for other in others]
        chosen.append(_choose_sizes(config, spec, model, tenant, beside))
    return chosen


def describe_tenant(spec: Instance, cache: CacheConfig) -> DeviceTenant:
    """Describe an instance to those that share its device: what it has set itself, else what the pipeline has."""
    has_own = spec.pools is not None or spec.memory_bytes is not None
    return DeviceTenant(spec.roles, **pick_fields(PoolSizes, spec if has_own else cache))


def _choose_sizes(
    config: ServingConfig,
    spec: Instance,
    model: LoadedModel | EmulatedModel,
    tenant: DeviceTenant,
    beside: Sequence[tuple[DeviceTenant, int]],
) -> dict[str, int]:
    """``beside``: the other instances of this process on the same device, with the bytes of their weights."""
    if tenant.pools is not None:
        return add_states(tenant.pools, block_shapes(spec.roles, model, config.cache))
    bytes_of = _block_bytes(config, model, spec.roles)
    sizes = (bytes_of.get(IMAGE), bytes_of.get(KV), bytes_of.get(STATE))
    memory = tenant.memory_bytes
    if memory is not None:
        return size_pools(spec.roles, memory, model.weight_bytes, *sizes)
    memory = model.weight_bytes + _default_pool_bytes(config, spec, model, beside)
    sized = size_pools(spec.roles, memory, model.weight_bytes, *sizes)
    most = DEFAULT_BLOCKS if gpu_number(spec.device) is None else sys.maxsize
    return {kind: min(count, most) for kind, count in sized.items()}


def _block_bytes(config: ServingConfig, model: LoadedModel | EmulatedModel, roles: str) -> dict[str, int]:
    shapes = block_shapes(roles, model, config.cache)
    return {kind: shape.block_bytes for kind, shape in shapes.items()}


def _default_pool_bytes(
    config: ServingConfig,
    spec: Instance,
    model: LoadedModel | EmulatedModel,
    beside: Sequence[tuple[DeviceTenant, int]],
) -> int:
    """Return the default size of an instance's pools, in bytes; the weights of this process are loaded already."""
    device, count = spec.device or "cpu", 1 + len(beside) + len(config.beside)
    if gpu_number(device) is None:
        return min(DEFAULT_CACHE_BYTES, available_memory() // 8 // count)
    import torch

    free, total = torch.cuda.mem_get_info(device)
    apart = [(each, _count_weights(config, each.roles, device)) for each in config.beside]
    most = int(max(0, free - _encode_bytes(spec.roles)) * POOL_SHARE)  # of what others, in this pipeline or not, leave
    if apart:
        free = free_when_loaded(total, _list_copies(config, spec, model), 1 + len(apart))
    given = [
        (each.roles, each.fixed_bytes(weights, _block_bytes(config, model, each.roles)))
        for each, weights in (*beside, *apart)
    ]
    others = [roles for roles, fixed in given if fixed is None]
    free -= sum(map(_encode_bytes, (spec.roles, *(roles for roles, _ in given))))
    return min(most, share_of_pools(max(0, free), spec.roles, others, sum(fixed or 0 for _, fixed in given)))


def _encode_bytes(roles: str) -> int:
    """Bytes of a GPU that an instance of these roles needs to encode, whatever its image budget."""
    return ENCODE_BYTES if roles_of(roles).encodes else 0


def _list_copies(config: ServingConfig, spec: Instance, model: LoadedModel | EmulatedModel) -> list[int]:
    """List the bytes of each copy of weights on a GPU that this instance's process uses with others."""
    device = spec.device or "cpu"
    sharing = [each.roles for each in config.beside if each.shares]
    if not (sharing and config.shelf and _can_share(config, spec.device)):
        return [model.weight_bytes, *(_count_weights(config, each.roles, device) for each in config.beside)]
    alone = [_count_weights(config, each.roles, device) for each in config.beside if not each.shares]
    return [_count_weights(config, "".join(sorted({*spec.roles, *"".join(sharing)})), device), *alone]


def _can_share(config: ServingConfig, device: str | None) -> bool:
    if isinstance(config.model, EmulatedModel):
        return False
    from trinity.stages.models.loader import can_share_weights

    return can_share_weights(config.model, device)


def _count_weights(config: ServingConfig, roles: str, device: str) -> int:
    """Count the bytes of weights that another process holds for these roles on ``device``."""
    if isinstance(config.model, EmulatedModel):
        return 0
    import torch

    from trinity.stages.models.loader import count_weight_bytes

    return count_weight_bytes(config.model, roles, dtype=config.dtype, device=torch.device(device))


def _make_rules(config: ServingConfig, instance: LoadedInstance, processor: RequestProcessor | None) -> BatchRules:
    """Make the scheduler's rules, with budgets as the user set them, or profiled for the SLO, or the defaults.

    The instance's own batch limits override all of them.
    """
    rules = instance.spec.rules or config.rules or BatchRules()
    budgets = config.budgets
    if budgets is None and config.slo is not None and instance.spec.rules is None:
        limit = latency_bound(instance.spec.roles, config.slo.ttft, config.slo.tbt)
        if isinstance(instance.model, EmulatedModel):
            budgets = predict_emulated_budgets(instance.model, instance, limit)
        else:
            assert processor is not None
            budgets = profile_budgets(instance, processor, limit)
    if budgets is not None:
        given = {
            "token_budget": budgets.token_budget,
            "image_budget": budgets.image_budget,
            "limit_s": budgets.limit_s,
            "cost": budgets.cost,
        }
        rules = replace(rules, **given)  # type: ignore[arg-type]
    tokens, images = instance.spec.token_budget, instance.spec.image_budget
    media = rules.image_budget if images is None else images * _image_tokens(instance.model, processor)
    return replace(rules, token_budget=tokens or rules.token_budget, image_budget=media)


def _image_tokens(model: LoadedModel | EmulatedModel, processor: RequestProcessor | None) -> int:
    """Count the visual tokens of a usual image; 1 for a text-only model."""
    if isinstance(model, EmulatedModel):
        return model.shape.image_tokens if model.multimodal else 1
    assert processor is not None
    return processor.dummy_inputs()[0].tokens if processor.multimodal else 1
