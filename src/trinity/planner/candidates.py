"""Every placement that a planner may choose from: methods, ratios, and which device has which roles.

At N = 8 the paper's space (TriInfer 5.4) has 35 placements: 2 (N - 1) + (N - 1)(N - 2) / 2. With the monolith (N x EPD)
and PD+E there are 43, and those are often the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, groupby, pairwise, permutations, product
from typing import NamedTuple

from trinity.errors import ConfigError
from trinity.placement import Group, Placement

PAPER = ("E+P+D", "EP+D", "ED+P")
EVERY = (*PAPER, "PD+E", "EPD")
TEXT = ("P+D", "PD")


class Deployment(NamedTuple):
    """A placement, and the device of each of its instances in the order of ``placement.instances()``, by name."""

    placement: Placement
    devices: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.placement)


def placements(count: int, methods: Sequence[str] = EVERY) -> list[Placement]:
    """Every ratio of each method that has an instance for each of its groups. Raises ``ConfigError`` for count < 1."""
    if count < 1:
        raise ConfigError(f"a plan is for at least 1 instance, got {count}")
    return [placed for method in methods for placed in _ratios(count, method)]


def _ratios(count: int, method: str) -> Iterator[Placement]:
    roles = method.split("+")
    for cuts in combinations(range(1, count), len(roles) - 1):
        edges = (0, *cuts, count)
        sizes = [high - low for low, high in pairwise(edges)]
        yield Placement.of(Group(size, each) for size, each in zip(sizes, roles, strict=True))


def deployments(devices: Sequence[str], methods: Sequence[str] = EVERY) -> list[Deployment]:
    """Every placement on these devices; where they differ, also which group of instances has which of them.

    With several kinds, groups are laid out one after the other along the devices sorted by kind, in every order: at
    each border between two kinds at most one group is split. An optimum of the stages' linear program is of that form.
    """
    kinds = Counter(devices)
    if len(kinds) == 1:
        return [Deployment(placement, tuple(devices)) for placement in placements(len(devices), methods)]
    if not kinds:
        raise ConfigError("a plan is for at least 1 instance, got none")
    found: dict[tuple[str, tuple[str, ...]], Deployment] = {}
    for order in permutations(sorted(kinds)):
        line = [name for name in order for _ in range(kinds[name])]
        for method in methods:
            for each in _laid_out(line, method):
                found.setdefault((str(each.placement), each.devices), each)
    return list(found.values())


def _laid_out(line: Sequence[str], method: str) -> Iterator[Deployment]:
    roles = method.split("+")
    for order in permutations(roles):
        for placement in _ratios(len(line), "+".join(order)):
            start, stretches = 0, {}
            for group in placement.groups:
                stretches[group.roles] = sorted(line[start : start + group.count])
                start += group.count
            usual = Placement.of(Group(len(stretches[each]), each) for each in roles)
            yield Deployment(usual, tuple(name for each in roles for name in stretches[each]))


def subsets(available: Mapping[str, int], most: int) -> Iterator[tuple[str, ...]]:
    """Every choice of at most ``most`` of the available devices, fewest first."""
    names = sorted(available)
    ranges = [range(min(available[name], most) + 1) for name in names]
    chosen = [counts for counts in product(*ranges) if 1 <= sum(counts) <= most]
    for counts in sorted(chosen, key=lambda counts: (sum(counts), counts)):
        yield tuple(name for name, count in zip(names, counts, strict=True) for _ in range(count))


def in_groups(deployment: Deployment) -> list[tuple[int, str, str]]:
    """(how many, roles, device) of each run of equal instances."""
    pairs: Iterable[tuple[str, str]] = zip(
        (roles for _, roles in deployment.placement.instances()), deployment.devices, strict=True
    )
    return [(len(list(run)), roles, name) for (roles, name), run in groupby(pairs)]
