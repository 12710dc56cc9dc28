"""From a deployment to running instances: weights, pools, budgets, hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.budget import Budgets
from trinity.instance import Instance, InstanceHost, Loaded, Network, block_shapes, build
from trinity.messages import IMAGE, KV
from trinity.processor import RequestProcessor
from trinity.profile import profile_budgets
from trinity.routing import RoutingPolicy
from trinity.scheduler import Rules, latency_bound
from trinity.sizing import available_memory, size_pools
from trinity.timeline import Timeline
from trinity.trace import SLO

if TYPE_CHECKING:
    from trinity.stages.models import LoadedModel

DEFAULT_CACHE_BYTES = 1 << 30  # an instance's pools on a CPU where nobody says, or an eighth of what is free
DEFAULT_BLOCKS = 8192  # and never more blocks than this of a kind
DEFAULT_RULES = Rules()


@dataclass(frozen=True)
class Deployment:
    """What all instances of a pipeline share: the model and everything that they are started with."""

    model: Path
    dtype: str = "auto"
    device: str = "cpu"
    slo: SLO | None = None
    budgets: Budgets | None = None
    rules: Rules = DEFAULT_RULES
    media_block: int = 576
    kv_block: int = 16
    pools: Mapping[str, int] | None = None
    memory_bytes: int | None = None
    observe: Callable[..., None] | None = None
    shared: bool = False  # pools in memory files, which other processes can map


def load(deployment: Deployment, instances: Sequence[Instance], processor: RequestProcessor | None) -> list[Loaded]:
    """Load weights (of each instance's roles only), allocate pools, search budgets. Blocks: run it on a thread."""
    from trinity.stages.models import load_model

    loaded: list[Loaded] = []
    for spec in instances:
        spec = replace(spec, device=spec.device or deployment.device)
        model = load_model(deployment.model, spec.roles, dtype=deployment.dtype, device=spec.device or "cpu")
        pools = _pools(deployment, spec, model, len(instances))
        blocks = (deployment.media_block, deployment.kv_block)
        instance = build(spec, model, pools, deployment.rules, blocks, deployment.observe, deployment.shared)
        instance.settings = replace(instance.settings, rules=_rules(deployment, instance, processor))
        loaded.append(instance)
    return loaded


def start_hosts(
    loaded: Sequence[Loaded], network: Network, timeline: Timeline, policy: Callable[[], RoutingPolicy]
) -> dict[str, InstanceHost]:
    """Publish every pool, introduce the instances to each other, start their threads."""
    hosts = {each.spec.name: InstanceHost(each, network, timeline, policy()) for each in loaded}
    for host in hosts.values():
        network.connector.bind(host.name, host.loaded.memory)
        for peer in hosts.values():
            host.post(peer.announcement())
    for host in hosts.values():
        host.start()
    return hosts


def _pools(deployment: Deployment, spec: Instance, model: LoadedModel, instances: int) -> dict[str, int]:
    """Blocks by kind: by hand, from a memory budget, or a share of what is free."""
    pools = spec.pools if spec.pools is not None else deployment.pools if spec.memory_bytes is None else None
    if pools is not None:
        return dict(pools)
    shapes = block_shapes(spec.roles, model, deployment.media_block, deployment.kv_block)
    bytes_of = {kind: shape.block_bytes for kind, shape in shapes.items()}
    memory = spec.memory_bytes or deployment.memory_bytes
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


def _rules(deployment: Deployment, instance: Loaded, processor: RequestProcessor | None) -> Rules:
    """The scheduler's rules with the budgets given by hand, or searched under the SLO, or the defaults."""
    rules = instance.spec.rules or deployment.rules
    budgets = deployment.budgets
    if budgets is None and deployment.slo is not None and instance.spec.rules is None:
        assert processor is not None
        limit = latency_bound(instance.spec.roles, deployment.slo.ttft, deployment.slo.tbt)
        budgets = profile_budgets(instance, processor, limit)
    if budgets is None:
        return rules
    return replace(rules, tokens=budgets.tokens, media=budgets.media, limit_s=budgets.limit_s, cost=budgets.cost)
