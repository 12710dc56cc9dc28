"""Lists every placement that a planner may choose from: methods, ratios, and the roles of each device.

At N = 8 the paper's space (TriInfer 5.4) has 35 placements: 2 (N - 1) + (N - 1)(N - 2) / 2. With the monolith (N x EPD)
and PD+E there are 43, and those are often the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, groupby, pairwise, permutations, product
from typing import NamedTuple

from trinity.errors import ConfigError
from trinity.placement import Group, Placement

PAPER_METHODS = ("E+P+D", "EP+D", "ED+P")
ALL_METHODS = (*PAPER_METHODS, "PD+E", "EPD")
TEXT_METHODS = ("P+D", "PD")


class Deployment(NamedTuple):
    """A placement, and the device of each of its instances in the order of ``placement.instances()``, by name.

    ``groups``: (count, roles, device) of each run of equal instances. ``settings``: knobs and their values, where they
    differ from the planner's.
    """

    placement: Placement
    devices: tuple[str, ...]
    groups: tuple[tuple[int, str, str], ...]
    settings: tuple[tuple[str, str | int], ...] = ()

    @classmethod
    def of(
        cls, placement: Placement, devices: Sequence[str], settings: tuple[tuple[str, str | int], ...] = ()
    ) -> Deployment:
        roles = [each for _, each in placement.instances()]
        runs = groupby(zip(roles, devices, strict=True))
        return cls(placement, tuple(devices), tuple((len(list(run)), *pair) for pair, run in runs), settings)

    @property
    def method(self) -> str:
        return self.placement.method

    def __str__(self) -> str:
        return str(self.placement)


def methods_for(multimodal: bool) -> tuple[str, ...]:
    """Return the methods for a trace with images, or for one without: those that encode nothing."""
    return ALL_METHODS if multimodal else TEXT_METHODS


def list_placements(count: int, methods: Sequence[str] = ALL_METHODS, step: int = 1) -> list[Placement]:
    """List every ratio of each method with an instance for each of its groups; with ``step``, every ``step``-th.

    Raises ``ConfigError`` for a count below 1.
    """
    if count < 1:
        raise ConfigError(f"a plan is for at least 1 instance, got {count}")
    return [placed for method in methods for placed in _ratios(count, method, step)]


def _ratios(count: int, method: str, step: int = 1) -> Iterator[Placement]:
    roles = method.split("+")
    places = sorted({1, *range(step, count, step), count - 1} & set(range(1, count)))
    for cuts in combinations(places, len(roles) - 1):
        edges = (0, *cuts, count)
        sizes = [high - low for low, high in pairwise(edges)]
        yield Placement.of(Group(size, each) for size, each in zip(sizes, roles, strict=True))


def _alike(placement: Placement, devices: tuple[str, ...]) -> Deployment:
    return Deployment(placement, devices, tuple((group.count, group.roles, devices[0]) for group in placement.groups))


def list_deployments(devices: Sequence[str], methods: Sequence[str] = ALL_METHODS, step: int = 1) -> list[Deployment]:
    """List every placement on these devices and, where they differ, every assignment of groups to them.

    With several kinds, groups are laid out one after the other along the devices sorted by kind, in every order: at
    each border between two kinds at most one group is split. An optimum of the stages' linear program is of that form.
    """
    kinds = Counter(devices)
    if len(kinds) == 1:
        return [_alike(each, tuple(devices)) for each in list_placements(len(devices), methods, step)]
    if not kinds:
        raise ConfigError("a plan is for at least 1 instance, got none")
    found: dict[tuple[str, tuple[str, ...]], Deployment] = {}
    for order in permutations(sorted(kinds)):
        line = [name for name in order for _ in range(kinds[name])]
        for method in methods:
            for each in _laid_out(line, method, step):
                found.setdefault((str(each.placement), each.devices), each)
    return list(found.values())


def _laid_out(line: Sequence[str], method: str, step: int) -> Iterator[Deployment]:
    roles = method.split("+")
    for order in permutations(roles):
        for placement in _ratios(len(line), "+".join(order), step):
            start, stretches = 0, {}
            for group in placement.groups:
                stretches[group.roles] = sorted(line[start : start + group.count])
                start += group.count
            usual = Placement.of(Group(len(stretches[each]), each) for each in roles)
            yield Deployment.of(usual, [name for each in roles for name in stretches[each]])


def iter_device_choices(available: Mapping[str, int], most: int) -> Iterator[tuple[str, ...]]:
    """Iterate over every choice of at most ``most`` of the available devices, fewest first."""
    names = sorted(available)
    ranges = [range(min(available[name], most) + 1) for name in names]
    chosen = [counts for counts in product(*ranges) if 1 <= sum(counts) <= most]
    for counts in sorted(chosen, key=lambda counts: (sum(counts), counts)):
        yield tuple(name for name, count in zip(names, counts, strict=True) for _ in range(count))
