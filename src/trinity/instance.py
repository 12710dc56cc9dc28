"""Instance: settings of one instance of a pipeline."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

from trinity.config_classes import documented_by, set_fields
from trinity.core.instance.settings import CoreOptions, PoolSizes, check_limits
from trinity.core.scheduler import BatchRules
from trinity.core.values import FRONTEND, is_frontend
from trinity.errors import ConfigError, PlacementError
from trinity.errors.arguments import DeviceName, InstanceName, Whole, check_arguments
from trinity.placement import Group, Placement
from trinity.stages.attention.backends import AUTO, check_name
from trinity.stages.base import StageFactory


@dataclass(frozen=True, kw_only=True)
class InstanceOptions(CoreOptions):
    """Settings of an instance that a pipeline may give to all of its instances.

    - ``threads`` (1): intra-op threads of each lane.
    - ``attention`` ("auto"): a backend by name: "native" (CPUs), "torch", and others by device, see
      ``trinity.stages.attention.backends``; on a GPU "auto" is the fastest by measurement, "fastest" on a CPU too.
    - ``pack`` (None): give linear layers on a CPU a copy of their weights in oneDNN's order, which makes decode steps
      faster and serves this process alone. None: where an instance of the process decodes.
    - ``token_budget`` (tokens, None): prefill tokens and decodes in one step, and so requests that decode at once.
    - ``image_budget`` (images of usual size, None): images that one step encodes. Both go before budgets that are
      searched or the pipeline's.
    """

    threads: Whole = 1
    attention: str = AUTO
    pack: bool | None = None
    token_budget: Whole | None = None
    image_budget: Whole | None = None

    def check(self) -> None:
        super().check()
        check_name(self.attention)


@check_arguments
@documented_by(InstanceOptions, PoolSizes)
@dataclass(frozen=True, repr=False)
class Instance(InstanceOptions, PoolSizes):
    """One instance of a pipeline.

    - ``roles``: letters of its stages, such as "E", "EP" or "PD".
    - ``name`` (""): its name in routes, timelines and errors, of letters, digits, dots, dashes and underscores; "E0",
      "PD1", ... where it has none.
    - ``rules`` (None): ``BatchRules`` of its own (Algorithm 1 and its ablations); the pipeline's where it has none.
    - ``stages`` (()): factories of your own stages, or names of the entry point ``trinity.stages``; they replace the
      built-in stages of the same letters.
    - ``cores`` (()): processors that its threads are kept on: one for all lanes, or equally many for each, in the order
      of the lanes. With none, the system places them.
    - ``device`` (None): "cpu", "cuda:0", ...; the pipeline's where it has none.
    - ``may`` (None): the roles that it may ever switch to, such as "PD"; None: any.
    - ``address`` (None): "tcp:host:port" or "unix:/path" of an instance that runs already, started there by
      ``trinity instance --listen ADDRESS``; for ``hosting="process"``.
    {settings}

    Raises ``ConfigError``.
    """

    roles: str
    name: InstanceName = ""
    _: KW_ONLY
    rules: BatchRules | None = None
    stages: Sequence[StageFactory | str] = ()
    cores: tuple[int, ...] = ()
    device: DeviceName | None = None
    address: str | None = None
    may: str | None = None

    def __post_init__(self) -> None:
        self.check()
        roles = Group.parse(self.roles).roles
        check_limits(self.token_budget, self.image_budget, self.rules is not None)
        lanes = self.lanes_of(roles)
        set_fields(
            self,
            roles=roles,
            lanes=lanes,
            may=check_capability(self.may, roles),
            cores=check_core_numbers(self.cores, len(lanes), self.threads),
        )

    def __repr__(self) -> str:
        named = [each for each in fields(self) if each.name != "roles" and getattr(self, each.name) != each.default]
        said = [repr(self.roles), *(f"{each.name}={getattr(self, each.name)!r}" for each in named)]
        return f"Instance({', '.join(said)})"

    @property
    def steps_in_flight(self) -> int:
        """Steps in flight on a lane of an instance whose device is known."""
        return 2 if self.depth is None and (self.device or "cpu").startswith("cuda") else super().steps_in_flight

    @property
    def group(self) -> Group:
        return Group(1, self.roles)


def check_capability(may: str | None, roles: str) -> str | None:
    """Return the roles that an instance may ever have, in the order E, P, D. Raises ``ConfigError``."""
    if may is None:
        return None
    letters = Group.parse(may).roles
    if not set(roles) <= set(letters):
        raise PlacementError(f"may={may!r} must have the roles {roles} that the instance begins with")
    return letters


def check_core_numbers(cores: Sequence[int], lanes: int, threads: int) -> tuple[int, ...]:
    """Check cores: distinct numbers that the lanes can share, one for each intra-op thread of a lane.

    Raises ``ConfigError``. ``check_cores`` checks where the instance runs that the machine has them.
    """
    given = tuple(cores)
    if not all(type(core) is int and core >= 0 for core in given) or len(set(given)) < len(given):
        raise ConfigError(f"cores are numbers of processors, each named once, such as cores=(0, 1); got {cores!r}")
    if len(given) > 1 and len(given) % lanes:
        raise ConfigError(f"{lanes} lanes cannot share {len(given)} cores: give one for all, or as many for each")
    each = len(split_cores(given, lanes)[0])
    if given and threads > each:
        raise ConfigError(
            f"{threads} intra-op threads of a lane do not fit on {each} core(s), where they would wait for each other: "
            "give more cores or fewer threads"
        )
    return given


def split_cores(cores: Sequence[int], lanes: int) -> list[tuple[int, ...]]:
    """Divide cores among lanes, in order and equally many to each; a single core is for all lanes."""
    if len(cores) <= 1:
        return [tuple(cores)] * lanes
    each = len(cores) // lanes
    return [tuple(cores[at : at + each]) for at in range(0, each * lanes, each)]


def name_instances(instances: Sequence[Instance]) -> list[Instance]:
    """Copy the instances, each with a name of its own. Raises ``ConfigError`` for a name used twice."""
    counts: dict[str, int] = {}
    result: list[Instance] = []
    for instance in instances:
        index = counts.get(instance.roles, 0)
        counts[instance.roles] = index + 1
        result.append(replace(instance, name=instance.name or f"{instance.roles}{index}"))
    names = [instance.name for instance in result]
    if len(set(names)) != len(names) or any(map(is_frontend, names)):
        raise ConfigError(f"every instance needs a name of its own (and not {FRONTEND!r}), got {', '.join(names)}")
    return result


GivenPlacement = str | Placement | Sequence[Instance]


def list_instances(placement: GivenPlacement, **options: Any) -> list[Instance]:
    """List the instances of a placement, each with its name. Raises ``ConfigError``.

    ``options``: keywords of all of them; instances that are given have their own.
    """
    if isinstance(placement, str):
        placement = Placement.parse(placement)
    if isinstance(placement, Placement):
        return [Instance(roles, name, **options) for name, roles in placement.instances()]
    return name_instances(placement)


if __name__ == "__main__":  # by name: trinity.remote.server imports this module, not the other way round
    runpy.run_module("trinity.remote.server", run_name="__main__", alter_sys=True)
