"""Instance: settings of one instance of a pipeline."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trinity.core.instance.settings import Reservation, check_depth, check_limits, check_reservation
from trinity.core.scheduler import BatchRules
from trinity.core.values import FRONTEND, is_frontend
from trinity.errors import ConfigError, PlacementError, show
from trinity.errors.arguments import DeviceName, InstanceName, check_arguments
from trinity.placement import Group, Placement
from trinity.stages.attention.backends import AUTO, check_name
from trinity.stages.base import StageFactory


@check_arguments
@dataclass
class Instance:
    """One instance of a pipeline: ``roles`` such as "E", "EP" or "PD".

    - ``name`` (""): its name in routes, timelines and errors, of letters, digits, dots, dashes and underscores; "E0",
      "PD1", ... where it has none.
    - ``pools`` (blocks by kind, None): for example ``{"image": 64, "kv": 1024}``.
    - ``memory_bytes`` (bytes, None): memory, weights included, that pools are sized for. With neither, as the pipeline
      has them.
    - ``rules`` (None): ``BatchRules`` of its own (Algorithm 1 and its ablations); the pipeline's where it has none.
    - ``lanes`` (("joint",)): ("vision", "language") is the paper's dual stream (TriInfer 4.4).
    - ``stages`` (()): factories of your own stages, or names of the entry point ``trinity.stages``; they replace the
      built-in stages of the same letters.
    - ``threads`` (1): intra-op threads of each lane.
    - ``cores`` (()): processors that its threads are kept on: one for all lanes, or equally many for each, in the order
      of the lanes. With none, the system places them.
    - ``device`` (None): "cpu", "cuda:0", ...; the pipeline's where it has none.
    - ``prefix_cache`` (True): keep KV blocks of finished prompts for requests that begin alike.
    - ``image_cache`` (True): keep image features for requests with the same image (an encoder cache).
    - ``reservation`` ("full"): KV blocks for prompt and ``max_tokens`` at once. "optimistic" adds blocks as a request
      decodes; where there are none, the youngest request is preempted and recomputed.
    - ``may`` (None): the roles that it may ever switch to, such as "PD"; None: any.
    - ``address`` (None): "tcp:host:port" or "unix:/path" of an instance that runs already, started there by
      ``trinity instance --listen ADDRESS``; for ``hosting="process"``.
    - ``attention`` ("auto"): a backend by name: "native" (CPUs), "torch", and others by device, see
      ``trinity.stages.attention.backends``; on a GPU "auto" is the fastest by measurement, "fastest" on a CPU too.
    - ``depth`` (None): steps in flight on a lane. With 2 the next step is decided while one runs (async scheduling), so
      that the lane never waits for the core; a request that a stop token ends is over one step later. None: 2 on a GPU,
      which computes while the host decides, and 1 on a CPU.
    - ``pack`` (None): give linear layers on a CPU a copy of their weights in oneDNN's order, which makes decode steps
      faster and serves this process alone. None: where an instance of the process decodes.
    - ``token_budget`` (tokens, None): prefill tokens and decodes in one step, and so requests that decode at once.
    - ``image_budget`` (images of usual size, None): images that one step encodes. Both go before budgets that are
      searched or the pipeline's.

    Raises ``ConfigError``.
    """

    roles: str
    name: InstanceName = ""
    pools: Mapping[str, int] | None = None
    memory_bytes: int | None = None
    rules: BatchRules | None = None
    lanes: tuple[str, ...] = ("joint",)
    stages: Sequence[StageFactory | str] = ()
    threads: int = 1
    cores: tuple[int, ...] = ()
    device: DeviceName | None = None
    prefix_cache: bool = True
    image_cache: bool = True
    reservation: Reservation = "full"
    address: str | None = None
    attention: str = AUTO
    depth: int | None = None
    pack: bool | None = None
    token_budget: int | None = None
    image_budget: int | None = None
    may: str | None = None

    def __post_init__(self) -> None:
        self.roles = Group.parse(self.roles).roles
        self.may = check_capability(self.may, self.roles)
        check_name(self.attention)
        check_reservation(self.reservation)
        check_limits(self.token_budget, self.image_budget, self.rules is not None)
        if self.lanes not in (("joint",), ("vision", "language")):
            raise ConfigError(f"lanes must be ('joint',) or ('vision', 'language'), got {show(self.lanes)}")
        if self.lanes != ("joint",) and ("E" not in self.roles or self.roles == "E"):
            self.lanes = ("joint",)  # with one kind of work there is nothing to run beside it
        check_depth(self.steps_in_flight)
        self.cores = check_core_numbers(self.cores, len(self.lanes), self.threads)

    @property
    def steps_in_flight(self) -> int:
        """Steps in flight on a lane of an instance whose device is known."""
        on_gpu = (self.device or "cpu").startswith("cuda")
        return (2 if on_gpu else 1) if self.depth is None else self.depth

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
