"""What the screening engine has for each setting of the cores: one row a setting, in ``SCREENED_AS``.

The engine (``trinity.simulation.compiled``) has a frozen scope: Algorithm 1, pull migration, caches, both reservations,
routing in turn or to the least loaded. A search over placements runs on the nearest settings that it has; the best are
then replayed on the cores, with the true ones (``trinity.planner.confirmation``). Each stand-in is earned: both lose at
most ``MOST_LOST`` of the goodput that a search on the cores finds (``benchmarks/planning/screening.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, NamedTuple

from trinity.core.instance.settings import Settings
from trinity.core.scheduler import BatchRules, StepTime
from trinity.core.transfers import TransferPolicy
from trinity.simulation.compiled import COSTS

MOST_LOST = 0.03  # of the goodput, by a stand-in that is earned
LEAST_LOADED = "least_loaded, loads known at once"


@dataclass(frozen=True)
class Row:
    """What stands for the values of one setting.

    ``exact``: the values that the engine has to the bit; None: every one. ``stand_ins``: the nearest one that it has
    for others, and ``lost`` the largest share of the goodput that a plan with it lost in the cases of the benchmark. A
    value that is in neither is not screened. ``note``: why, where that needs saying.
    """

    exact: tuple[Any, ...] | None = None
    stand_ins: Mapping[Any, Any] = field(default_factory=dict)
    lost: Mapping[Any, float] = field(default_factory=dict)
    note: str = ""

    def has(self, value: Any) -> bool:
        return self.exact is None or value in self.exact


EVERY = Row()
REPORTS = Row(note="only reports hang on it, and none are sent where loads are known at once")

SCREENED_AS: Mapping[str, Row] = {
    "Settings.name": EVERY,
    "Settings.roles": EVERY,
    "Settings.pools": EVERY,
    "Settings.rules": Row(note="by their own rows"),
    "Settings.lanes": EVERY,
    "Settings.depth": Row((1,), note="with 1 in place of 2, up to 85 % of the goodput were lost"),
    "Settings.image_block_size": Row(note="equal on all instances"),
    "Settings.kv_block_size": Row(note="equal on all instances"),
    "Settings.image_cache": Row(note="equal on all instances"),
    "Settings.prefix_cache": Row(note="equal on all instances"),
    "Settings.epoch": Row(note="no instance is lost in a simulation"),
    "Settings.layers": Row(note="only TransferPolicy.kv hangs on it"),
    "Settings.reservation": Row(note="equal on all instances"),
    "Settings.transfers": Row(note="by their own rows, equal on all instances"),
    "Settings.lease_s": Row((inf,), note="leases do not end in a simulation"),
    "Settings.report_s": Row((inf,), {Settings.report_s: inf}, note="what it loses is in the row of Simulator.routing"),
    "Settings.heartbeat_s": REPORTS,
    "Settings.digest_keys": REPORTS,
    "BatchRules.token_budget": EVERY,
    "BatchRules.image_budget": EVERY,
    "BatchRules.policy": EVERY,
    "BatchRules.order": EVERY,
    "BatchRules.chunked": EVERY,
    "BatchRules.limit_encodes": EVERY,
    "BatchRules.limit_s": EVERY,
    "BatchRules.cost": Row((None, *COSTS), note="by its type"),
    "TransferPolicy.prefetch": EVERY,
    "TransferPolicy.early": EVERY,
    "TransferPolicy.kv": Row(("off",), {"layer": "off", "grouped": "off"}, {"layer": 0.0, "grouped": 0.0}),
    "TransferPolicy.store": Row(note="features are looked for where there are reports: see Simulator.routing"),
    "TransferPolicy.lease_s": Row(note="leases do not end in a simulation"),
    "Simulator.routing": Row(
        ("round_robin",),
        {"least_loaded": LEAST_LOADED, "prefix_hits": LEAST_LOADED},
        {"least_loaded": 0.0, "prefix_hits": 0.0},
        "random: with round_robin in its place up to 47 % of the goodput were lost",
    ),
    "Simulator.cost": Row(tuple(COSTS), note="by its type"),
    "Simulator.interference": EVERY,
    "Simulator.max_waiting": EVERY,
    "Simulator.ask": EVERY,
    "Cluster.devices": EVERY,
    "Cluster.hosts": EVERY,
    "Cluster.link": EVERY,
    "Cluster.network": EVERY,
    "Cluster.message_s": EVERY,
}
ALIKE = ("image_block_size", "kv_block_size", "image_cache", "prefix_cache", "transfers", "reservation")


class StandIn(NamedTuple):
    """A value of a setting, what the screening engine takes for it, and the most that this lost (``Row.lost``)."""

    setting: str
    value: Any
    stands: Any
    lost: float

    @property
    def asked(self) -> str:
        return _shown(self.setting, self.value)

    def __str__(self) -> str:
        return f"{self.asked} as {self.stands}"


class Screened(NamedTuple):
    """Instances in the nearest form that the screening engine has, and what stands for what.

    ``missing`` says what it has nothing for: then nothing is screened. "" where it has all.
    """

    settings: list[Settings]
    least_loaded: bool
    stand_ins: tuple[StandIn, ...]
    missing: str

    @property
    def inexact(self) -> str:
        """Why its replays are not the Python engine's, to the bit; "" where they are."""
        return self.missing or ", ".join(each.asked for each in self.stand_ins)


def screened(settings: Sequence[Settings], costs: Sequence[StepTime], routing: str) -> Screened:
    """The nearest to these instances, costs of their steps and routing by name. Raises ``KeyError`` for a setting that
    has no row in ``SCREENED_AS``."""
    found: dict[tuple[str, Any], StandIn | None] = {}
    near = [_nearest(each, found) for each in settings]
    for cost in costs:
        _look_up("Simulator.cost", type(cost), found)
    alone = len(settings) == 1  # then there is nothing to route
    policy = "round_robin" if alone else _look_up("Simulator.routing", routing, found)
    missing = next((_shown(*key) for key, stand_in in found.items() if stand_in is None), "")
    if len({tuple(getattr(each, name) for name in ALIKE) for each in near}) > 1:
        missing = missing or "instances with other blocks, caches, transfers or reservation than the rest"
    stand_ins = tuple(each for each in found.values() if each is not None and each.stands != each.value)
    said = tuple(each for each in stand_ins if each.setting != "Settings.report_s")
    return Screened(near, policy == LEAST_LOADED, said, missing)


def _nearest(value: Any, found: dict[tuple[str, Any], StandIn | None]) -> Any:
    """A copy of settings, rules or transfers, each field as its row says."""
    kind, changed = type(value).__name__, {}
    for each in fields(value):
        own = getattr(value, each.name)
        if isinstance(own, BatchRules | TransferPolicy):
            changed[each.name] = _nearest(own, found)
        elif SCREENED_AS[f"{kind}.{each.name}"].exact is not None:
            asked = type(own) if each.name == "cost" and own is not None else own
            stands = _look_up(f"{kind}.{each.name}", asked, found)
            changed[each.name] = own if each.name == "cost" else stands
    return replace(value, **changed)


def _look_up(setting: str, value: Any, found: dict[tuple[str, Any], StandIn | None]) -> Any:
    """What stands for a value; itself where nothing does, which is then said in ``found``."""
    row = SCREENED_AS[setting]
    if row.has(value):
        return value
    known = value in row.stand_ins
    stands = row.stand_ins[value] if known else value
    found[setting, value] = StandIn(setting, value, stands, row.lost.get(value, 0.0)) if known else None
    return stands


def _shown(setting: str, value: Any) -> str:
    shown = value.__name__ if isinstance(value, type) else value
    return f"{setting.rpartition('.')[2]}={shown}"
