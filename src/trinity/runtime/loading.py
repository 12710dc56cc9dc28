"""From a deployment to running instances: weights, pools, budgets, hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity.core.messages import IMAGE, KV
from trinity.core.routing import RoutingPolicy
from trinity.core.scheduler import BatchRules, latency_bound
from trinity.core.transfers import TransferPolicy
from trinity.costs.budgets import StepBudgets
from trinity.costs.pool_sizes import available_memory, size_pools
from trinity.costs.step_cost import CostTables
from trinity.emulation.model import EmulatedModel
from trinity.emulation.processor import EmulatedProcessor
from trinity.errors import ConfigError
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.preprocess.loader import check_directory
from trinity.preprocess.media import MediaLimits
from trinity.preprocess.processor import RequestProcessor
from trinity.runtime.host import InstanceHost, Loaded, Network, block_shapes, build
from trinity.runtime.profiler import paced_budgets, profile_budgets, profile_tables
from trinity.timeline import Timeline
from trinity.traces.trace import SLO

if TYPE_CHECKING:
    from trinity.stages.models import LoadedModel

DEFAULT_CACHE_BYTES = 1 << 30  # an instance's pools on a CPU where nobody says, or an eighth of what is free
DEFAULT_BLOCKS = 8192  # and never more blocks than this of a kind
PROBED = {IMAGE: 64, KV: 512}  # blocks of each kind, of an instance that is there to be measured
DEFAULT_RULES = BatchRules()
DEFAULT_TRANSFERS = TransferPolicy()
DEFAULT_CACHE = CacheConfig()


@dataclass(frozen=True)
class Deployment:
    """What all instances of a pipeline share: the model and everything that they are started with."""

    model: Path | EmulatedModel
    dtype: str = "auto"
    device: str = "cpu"
    slo: SLO | None = None
    budgets: StepBudgets | None = None
    rules: BatchRules = DEFAULT_RULES
    cache: CacheConfig = DEFAULT_CACHE
    observe: Callable[..., None] | None = None
    transfers: TransferPolicy = DEFAULT_TRANSFERS
    shared: bool = False  # pools in memory files, which other processes can map


def config_digest(model: Path | EmulatedModel) -> str:
    """What front end and instances must agree on before weights are compared: the checkpoint's config.json."""
    if isinstance(model, EmulatedModel):
        return model.fingerprint
    try:
        return hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"{model} has no config.json that can be read: {error}") from error


def model_of(model: str | Path | EmulatedModel) -> Path | EmulatedModel:
    """A checkpoint's directory, or an emulated model. Raises ``ConfigError`` where there is none."""
    if isinstance(model, EmulatedModel):
        return model
    check_directory(Path(model))
    return Path(model)


def make_processor(model: Path | EmulatedModel, limits: MediaLimits | None = None) -> RequestProcessor:
    """The model's request processor. Blocks: run it on a thread."""
    if isinstance(model, EmulatedModel):
        return EmulatedProcessor(model, limits=limits)
    return RequestProcessor(model, limits=limits)


def load(deployment: Deployment, instances: Sequence[Instance], processor: RequestProcessor | None) -> list[Loaded]:
    """Load weights (of each instance's roles only), allocate pools, search budgets. Blocks: run it on a thread."""
    loaded: list[Loaded] = []
    for spec in instances:
        spec = _settled(deployment, spec, instances)
        model = _model(deployment, spec)
        pools = _pools(deployment, spec, model, len(instances))
        blocks = (deployment.cache.image_block_size, deployment.cache.kv_block_size)
        instance = build(spec, model, pools, deployment.rules, blocks, deployment.observe, deployment.shared)
        rules = _rules(deployment, instance, processor)
        transfers = deployment.transfers
        instance.settings = replace(instance.settings, rules=rules, transfers=transfers, lease_s=transfers.lease_s)
        loaded.append(instance)
    return loaded


def profiled(
    deployment: Deployment,
    instances: Sequence[Instance],
    processor: RequestProcessor,
    hosts: Mapping[str, InstanceHost],
    path: str | Path | None = None,
    **counts: Any,
) -> CostTables:
    """``profile_tables`` of copies of these instances, with pools of their own: what is cached stays as it is.

    Each stage is measured on the first instance that has it. Weights are those of ``hosts``, or loaded here. Blocks:
    run it on a thread. Raises ``ConfigError`` where costs were given by hand, or instances run elsewhere or differ.
    """
    if isinstance(deployment.model, EmulatedModel):
        raise ConfigError("an emulated pipeline waits for given costs (Pipeline.cost): there is nothing to measure")
    away = [spec.name for spec in instances if spec.address]
    devices = {spec.device or deployment.device for spec in instances}
    if away or len(devices) > 1:
        why = f"{', '.join(away)} run elsewhere" if away else f"they run on {', '.join(sorted(devices))}"
        raise ConfigError(f"one table is of one device, and these instances are not on one here: {why}; profile alone")
    copies = [_copy(deployment, _settled(deployment, spec, instances), hosts, len(instances)) for spec in instances]
    tables = profile_tables(copies, processor, **counts)
    if path is not None:
        tables.save(path)
    return tables


def _copy(deployment: Deployment, spec: Instance, hosts: Mapping[str, InstanceHost], count: int) -> Loaded:
    model = hosts[spec.name].loaded.model if spec.name in hosts else _model(deployment, spec)
    pools = {kind: min(blocks, PROBED[kind]) for kind, blocks in _pools(deployment, spec, model, count).items()}
    return build(
        spec, model, pools, deployment.rules, (deployment.cache.image_block_size, deployment.cache.kv_block_size), None
    )


def _settled(deployment: Deployment, spec: Instance, here: Sequence[Instance]) -> Instance:
    """What the instance leaves open. Weights are packed where somebody of this process decodes: all share one copy."""
    pack = any("D" in each.roles for each in here) if spec.pack is None else spec.pack
    return replace(spec, device=spec.device or deployment.device, pack=pack)


def _model(deployment: Deployment, spec: Instance) -> LoadedModel | EmulatedModel:
    if isinstance(deployment.model, EmulatedModel):
        return deployment.model
    from trinity.stages.models import load_model

    device, packed = spec.device or "cpu", bool(spec.pack)
    return load_model(deployment.model, spec.roles, dtype=deployment.dtype, device=device, packed=packed)


def make_hosts(
    loaded: Sequence[Loaded], network: Network, timeline: Timeline, policy: Callable[[], RoutingPolicy]
) -> dict[str, InstanceHost]:
    """Publish every pool, introduce the instances to each other. Their threads start when the network knows them."""
    hosts = {each.spec.name: InstanceHost(each, network, timeline, policy()) for each in loaded}
    for host in hosts.values():
        network.connector.bind(host.name, host.loaded.memory)
        for peer in hosts.values():
            host.post(peer.announcement())
    return hosts


def _pools(
    deployment: Deployment, spec: Instance, model: LoadedModel | EmulatedModel, instances: int
) -> dict[str, int]:
    """Blocks by kind: by hand, from a memory budget, or a share of what is free."""
    pools = spec.pools if spec.pools is not None else deployment.cache.pools if spec.memory_bytes is None else None
    if pools is not None:
        return dict(pools)
    shapes = block_shapes(spec.roles, model, deployment.cache.image_block_size, deployment.cache.kv_block_size)
    bytes_of = {kind: shape.block_bytes for kind, shape in shapes.items()}
    memory = spec.memory_bytes or deployment.cache.memory_bytes
    if memory is None:
        memory = model.weight_bytes + _default_cache(spec.device or "cpu", instances)
        sized = size_pools(spec.roles, memory, model.weight_bytes, bytes_of.get(IMAGE), bytes_of.get(KV))
        return {kind: min(count, DEFAULT_BLOCKS) for kind, count in sized.items()}
    return size_pools(spec.roles, memory, model.weight_bytes, bytes_of.get(IMAGE), bytes_of.get(KV))


def _default_cache(device: str, instances: int) -> int:
    """Bytes for an instance's pools where nobody says; weights are loaded by now."""
    if device == "cpu":
        return min(DEFAULT_CACHE_BYTES, available_memory() // 8 // instances)
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free * 8 // 10 // instances


def _rules(deployment: Deployment, instance: Loaded, processor: RequestProcessor | None) -> BatchRules:
    """The scheduler's rules with the budgets given by hand, or searched under the SLO, or the defaults.

    The instance's own batch limits go before each of them.
    """
    rules = instance.spec.rules or deployment.rules
    budgets = deployment.budgets
    if budgets is None and deployment.slo is not None and instance.spec.rules is None:
        limit = latency_bound(instance.spec.roles, deployment.slo.ttft, deployment.slo.tbt)
        if isinstance(instance.model, EmulatedModel):
            budgets = paced_budgets(instance.model, instance, limit)
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
    """Visual tokens of a usual image; 1 where the model has none."""
    if isinstance(model, EmulatedModel):
        return model.shape.image_tokens if model.multimodal else 1
    assert processor is not None
    return processor.dummy_inputs()[0].tokens if processor.multimodal else 1
