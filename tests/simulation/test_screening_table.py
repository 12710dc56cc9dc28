"""The table of what the screening engine has for each setting: each has a row, and the rows are what is run."""

from __future__ import annotations

import inspect
from dataclasses import fields, make_dataclass, replace
from math import inf
from typing import Any

import pytest

from support.virtual.cluster import make_settings
from trinity.core.instance.settings import CoreOptions, Settings
from trinity.core.messages import STATE
from trinity.core.routing.router import ROUTING_POLICIES
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.errors import ConfigError
from trinity.simulation.compiled_engine import CompiledPlacement
from trinity.simulation.screening_table import LEAST_LOADED, MOST_LOST, SCREENED_AS, ScreeningRow, screen_settings
from trinity.simulation.simulator import Simulator

COST = LinearCost(step_s=1.0)
INTO_SETTINGS = {"rules", "budgets", "transfers", "memory_share", *(each.name for each in fields(CoreOptions))}
SAID = {"self", "model", "slo", "cluster", "backend"}  # what is simulated, and on what


def plain(**changes: Any) -> list[Settings]:
    fixed = {"transfers": TransferPolicy(kv="off"), "lease_s": inf, "report_s": inf, **changes}
    return make_settings("E+P+D", {"image": 8, "kv": 40}, **fixed)


def near(settings: list[Settings], routing: str = "round_robin", cost: Any = COST) -> Any:
    return screen_settings(settings, [cost] * len(settings), routing)


@pytest.mark.parametrize("kind", [Settings, BatchRules, TransferPolicy])
def test_every_row_is_of_a_field_of_the_cores_settings(kind: Any) -> None:
    assert _rows(kind.__name__) <= {f"{kind.__name__}.{each.name}" for each in fields(kind)}


def test_every_field_of_a_cluster_and_keyword_of_a_simulator_has_a_row() -> None:
    assert {f"Cluster.{name}" for name in Cluster.__struct_fields__} == _rows("Cluster")
    keywords = set(inspect.signature(Simulator.__init__).parameters) - INTO_SETTINGS - SAID
    assert {f"Simulator.{name}" for name in keywords} == _rows("Simulator")


def _rows(kind: str) -> set[str]:
    return {name for name in SCREENED_AS if name.startswith(f"{kind}.")}


def test_every_routing_policy_is_exact_has_a_stand_in_or_is_said_not_to() -> None:
    row = SCREENED_AS["Simulator.routing"]
    assert {*(row.exact or ()), *row.stand_ins, *row.note.partition(":")[0].split(", ")} == set(ROUTING_POLICIES)


def test_a_stand_in_is_a_value_that_the_engine_has_and_what_it_lost_is_said() -> None:
    for name, row in SCREENED_AS.items():
        assert all(row.has(stands) or stands == LEAST_LOADED for stands in row.stand_ins.values()), name
        assert not any(row.has(value) for value in row.stand_ins), name
        assert set(row.lost) <= set(row.stand_ins), name
        assert all(0 <= lost <= MOST_LOST for lost in row.lost.values()), name


def test_a_setting_without_a_row_is_screened_at_its_default_alone() -> None:
    grown = make_dataclass("Settings", [("newest", int, 3)], bases=(Settings,), frozen=True)
    of = {each.name: getattr(plain()[0], each.name) for each in fields(Settings)}
    assert near([grown(**of)]).inexact == ""
    assert near([grown(**of, newest=4)]).missing == "newest=4"


def test_what_the_engine_has_stays_as_it_is() -> None:
    for settings in (plain(), plain(reservation="optimistic"), plain(lanes=("vision", "language"))):
        found = near(settings)
        assert (found.settings, found.least_loaded, found.inexact) == (settings, False, "")


@pytest.mark.parametrize("kv", ["layer", "grouped", "auto"])
def test_kv_that_streams_is_screened_as_kv_that_moves_after_prefill(kv: Any) -> None:
    found = near(plain(transfers=TransferPolicy(kv=kv, early=False)))
    assert [each.transfers for each in found.settings] == [TransferPolicy(early=False, kv="off")] * 3
    assert (found.missing, found.inexact) == ("", f"kv={kv}")
    assert [str(each) for each in found.stand_ins] == [f"kv={kv} as off"]


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_hits"])
def test_informed_routing_is_screened_by_loads_known_at_once(policy: str) -> None:
    found = near(plain(report_s=Settings.report_s), policy)
    assert (found.least_loaded, found.missing) == (True, "")
    assert [each.label for each in found.stand_ins] == [f"routing={policy}"], "reports are told with their policy"
    assert {each.report_s for each in found.settings} == {inf}


def test_on_one_instance_there_is_nothing_to_route() -> None:
    one = make_settings("EPD", {"image": 8, "kv": 40}, lease_s=inf, report_s=inf, transfers=TransferPolicy(kv="off"))
    assert near(one, "prefix_hits").inexact == ""


def test_what_has_no_stand_in_is_not_screened() -> None:
    assert near(plain(depth=2)).missing == "depth=2"
    assert near(plain(lease_s=3.0)).missing == "lease_s=3.0"
    assert near(plain(), "mine").missing == "routing=mine"
    assert near(plain(), "random").missing == "routing=random"
    assert screen_settings(plain(), [COST] * 3, "round_robin", 2).missing == "spread=2"
    for other in (replace(plain()[1], kv_block_size=8), replace(plain()[1], reservation="optimistic")):
        assert "than the rest" in near([plain()[0], other]).missing

    class Other(LinearCost, frozen=True, kw_only=True):
        """Costs of its own, which nobody has written in C++."""

    assert near(plain(), cost=Other()).missing == "cost=Other"
    assert near(plain(rules=BatchRules(policy="time", cost=Other(), limit_s=1.0))).missing == "cost=Other"


def test_states_are_left_to_the_cores_and_never_left_out() -> None:
    hybrid = [replace(each, pools={**each.pools, STATE: 2}) for each in plain()]
    assert near(hybrid).missing == "pools of state blocks"
    given: dict[str, Any] = {"cluster": None, "model": None, "max_waiting": 4, "interference": 1.0}
    with pytest.raises(ConfigError, match="no pools of state blocks"):  # before anything else is read
        CompiledPlacement(hybrid, costs=[COST] * 3, **given)


def test_a_row_has_every_value_or_those_that_it_names() -> None:
    assert ScreeningRow().has(object())
    assert ScreeningRow((1, 2)).has(2)
    assert not ScreeningRow((1, 2)).has(3)
