"""Lists the screening engine's stand-ins for settings that it lacks: one row a setting, in ``SCREENED_AS``.

The engine (``trinity.simulation.compiled_engine``) has a frozen scope: Algorithm 1, pull migration, caches, both
reservations, routing in turn or to the least loaded. A search over placements runs on the nearest settings that it has;
the best are then replayed on the cores with the true ones (``trinity.planner.confirmation``). Each stand-in is earned:
it loses at most ``MOST_LOST`` of the goodput that a search on the cores finds (``benchmarks/planning/screening.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, NamedTuple

from trinity.core.instance.settings import Settings
from trinity.core.scheduler import BatchRules, StepTime
from trinity.core.transfers import TransferPolicy
from trinity.simulation.compiled_engine import COSTS, name_cost, other_pools

MOST_LOST = 0.03  # of the goodput, by a stand-in that is earned
LEAST_LOADED = "least_loaded, loads known at once"


@dataclass(frozen=True)
class ScreeningRow:
    """Values of one setting that the screening engine has, and its stand-ins for others.

    - ``exact``: values whose replays are the cores' own to the bit; None: every value.
    - ``stand_ins``: the nearest value that the engine has, by value.
    - ``lost``: the largest share of the goodput that a plan with the stand-in lost in the benchmark, by value.
    - ``note``: the reason, where one is needed.

    A value in neither ``exact`` nor ``stand_ins`` is not screened.
    """

    exact: tuple[Any, ...] | None = None
    stand_ins: Mapping[Any, Any] = field(default_factory=dict)
    lost: Mapping[Any, float] = field(default_factory=dict)
    note: str = ""

    def has(self, value: Any) -> bool:
        return self.exact is None or value in self.exact


ANY_VALUE, AT_DEFAULT = ScreeningRow(), ScreeningRow(())
DECODE_MOVES = "decodes move only where instances switch roles, which the cores replay"
REPORTS = ScreeningRow(note="only reports hang on it, and none are sent where loads are known at once")

SCREENED_AS: Mapping[str, ScreeningRow] = {
    "Settings.name": ANY_VALUE,
    "Settings.roles": ANY_VALUE,
    "Settings.pools": ScreeningRow(note="of images and KV: where requests hold states, the cores replay"),
    "Settings.rules": ScreeningRow(note="by their own rows"),
    "Settings.host": ScreeningRow(("",), note="a Simulator names none: in turn over all hosts, each move at its price"),
    "Settings.lanes": ANY_VALUE,
    "Settings.depth": ScreeningRow((None, 1), note="with 1 in place of 2, up to 85 % of the goodput were lost"),
    "Settings.image_block_size": ScreeningRow(note="equal on all instances"),
    "Settings.kv_block_size": ScreeningRow(note="equal on all instances"),
    "Settings.image_cache": ScreeningRow(note="equal on all instances"),
    "Settings.prefix_cache": ScreeningRow(note="equal on all instances"),
    "Settings.epoch": ScreeningRow(note="only where instances switch roles, which the cores replay"),
    "Settings.layers": ScreeningRow(note="only TransferPolicy.kv hangs on it"),
    "Settings.reservation": ScreeningRow(note="equal on all instances"),
    "Settings.transfers": ScreeningRow(note="by their own rows, equal on all instances"),
    "Settings.lease_s": ScreeningRow((inf,), note="leases do not end in a simulation"),
    "Settings.report_s": ScreeningRow(
        (inf,), {Settings.report_s: inf}, note="what it loses is in the row of Simulator.routing"
    ),
    "Settings.heartbeat_s": REPORTS,
    "Settings.digest_keys": REPORTS,
    "BatchRules.token_budget": ANY_VALUE,
    "BatchRules.image_budget": ANY_VALUE,
    "BatchRules.policy": ANY_VALUE,
    "BatchRules.order": ANY_VALUE,
    "BatchRules.chunked": ANY_VALUE,
    "BatchRules.limit_encodes": ANY_VALUE,
    "BatchRules.limit_decodes": ANY_VALUE,
    "BatchRules.leading_text": ScreeningRow(note="a simulated prompt has its images first: no text leads"),
    "BatchRules.limit_s": ANY_VALUE,
    "BatchRules.cost": ScreeningRow((None, *COSTS), note="by its type"),
    "TransferPolicy.prefetch": ANY_VALUE,
    "TransferPolicy.early": ANY_VALUE,
    "TransferPolicy.kv": ScreeningRow(
        ("off",),
        {"layer": "off", "grouped": "off", "auto": "off"},
        {"layer": 0.0, "grouped": 0.0, "auto": 0.0},
        note="a Simulator makes off of auto",
    ),
    "TransferPolicy.store": ScreeningRow(note="features are looked for where there are reports: see Simulator.routing"),
    "TransferPolicy.precopy": ScreeningRow(note=DECODE_MOVES),
    "TransferPolicy.move_s": ScreeningRow(note=DECODE_MOVES),
    "TransferPolicy.hand_over": ScreeningRow((False,), note="the engine's queues are each instance's own"),
    "TransferPolicy.lease_s": ScreeningRow(note="leases do not end in a simulation"),
    "Simulator.routing": ScreeningRow(
        ("round_robin",),
        {"least_loaded": LEAST_LOADED, "prefix_hits": LEAST_LOADED},
        {"least_loaded": 0.0, "prefix_hits": 0.0},
        "random, two_choices: with round_robin in place of random up to 47 % of the goodput were lost",
    ),
    "Simulator.spread": ScreeningRow((1,), note="with 1 in place of 4, up to 79 % of the goodput were lost"),
    "Simulator.cost": ScreeningRow(tuple(COSTS), note="by its type; a mixture of experts is not screened"),
    "Simulator.interference": ANY_VALUE,
    "Simulator.step_factor": ANY_VALUE,
    "Simulator.max_waiting": ANY_VALUE,
    "Simulator.ask": ANY_VALUE,
    "Cluster.devices": ANY_VALUE,
    "Cluster.hosts": ANY_VALUE,
    "Cluster.link": ANY_VALUE,
    "Cluster.network": ANY_VALUE,
    "Cluster.message_s": ANY_VALUE,
}
ALIKE = ("image_block_size", "kv_block_size", "image_cache", "prefix_cache", "transfers", "reservation")


class StandIn(NamedTuple):
    """A value of a setting, its stand-in (``stands``) and the share of goodput it may lose (``ScreeningRow.lost``)."""

    setting: str
    value: Any
    stands: Any
    lost: float

    @property
    def label(self) -> str:
        return _format_setting(self.setting, self.value)

    def __str__(self) -> str:
        return f"{self.label} as {self.stands}"


class ScreenedInstances(NamedTuple):
    """Instances with the nearest settings that the screening engine has, and the stand-ins used.

    ``missing``: the setting that it has no stand-in for, so that nothing is screened; "" where there is none.
    """

    settings: list[Settings]
    least_loaded: bool
    stand_ins: tuple[StandIn, ...]
    missing: str

    @property
    def inexact(self) -> str:
        """Reason why its replays differ from the Python engine's; "" where they are equal to the bit."""
        return self.missing or ", ".join(each.label for each in self.stand_ins)


def screen_settings(
    settings: Sequence[Settings], costs: Sequence[StepTime], routing: str, spread: int = 1
) -> ScreenedInstances:
    """Find the nearest settings that the screening engine has.

    ``costs``: of the steps, by instance. ``routing``: the policy's name. ``spread``: encoders of a request.
    """
    found: dict[tuple[str, Any], StandIn | None] = {}
    near = [_nearest(each, found) for each in settings]
    for cost in costs:
        _look_up("Simulator.cost", name_cost(cost), found)
    _look_up("Simulator.spread", spread, found)
    alone = len(settings) == 1  # then there is nothing to route
    policy = "round_robin" if alone else _look_up("Simulator.routing", routing, found)
    missing = next((_format_setting(*key) for key, stand_in in found.items() if stand_in is None), "")
    if len({tuple(getattr(each, name) for name in ALIKE) for each in near}) > 1:
        missing = missing or "instances with other blocks, caches, transfers or reservation than the rest"
    missing = missing or other_pools(settings)
    stand_ins = tuple(each for each in found.values() if each is not None and each.stands != each.value)
    said = tuple(each for each in stand_ins if each.setting != "Settings.report_s")
    return ScreenedInstances(near, policy == LEAST_LOADED, said, missing)


def _nearest(value: Any, found: dict[tuple[str, Any], StandIn | None]) -> Any:
    """Copy settings, rules or transfers, each field as its row says."""
    kind, changed = type(value).__name__, {}
    for each in fields(value):
        own = getattr(value, each.name)
        if isinstance(own, BatchRules | TransferPolicy):
            changed[each.name] = _nearest(own, found)
        elif (row := find_row(f"{kind}.{each.name}")).exact is not None and (
            row is not AT_DEFAULT or own != each.default
        ):
            asked = name_cost(own) if each.name == "cost" and own is not None else own
            stands = _look_up(f"{kind}.{each.name}", asked, found)
            changed[each.name] = own if each.name == "cost" else stands
    return replace(value, **changed)


def find_row(setting: str) -> ScreeningRow:
    """Return a setting's row. One without a row is screened at its default alone: any other value goes to the cores."""
    return SCREENED_AS.get(setting, AT_DEFAULT)


def _look_up(setting: str, value: Any, found: dict[tuple[str, Any], StandIn | None]) -> Any:
    """Return a value's stand-in and note it in ``found``; the value itself where there is none (noted as None)."""
    row = find_row(setting)
    if row.has(value):
        return value
    known = value in row.stand_ins
    stands = row.stand_ins[value] if known else value
    found[setting, value] = StandIn(setting, value, stands, row.lost.get(value, 0.0)) if known else None
    return stands


def _format_setting(setting: str, value: Any) -> str:
    shown = value.__name__ if isinstance(value, type) else value
    return f"{setting.rpartition('.')[2]}={shown}"
