"""Files that an earlier release has written are read, or refused by name: tests/api/saved is of commit 7278c239."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

import trinity
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.step_cost import CostTables
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.errors import HandshakeError
from trinity.remote.channel import handshake
from trinity.remote.channel.wire import decode
from trinity.simulation.simulator import Simulator

SAVED = Path(__file__).parent / "saved"


def test_a_saved_plan_is_served_with_its_settings() -> None:
    plan = trinity.Plan.load(SAVED / "plan.json")
    pipe = trinity.Pipeline(EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost()), plan)
    assert str(pipe.placement) == "2EPD"
    for each in pipe.instances:
        assert (each.token_budget, each.image_budget, each.reservation, each.depth) == (64, 2, "optimistic", 2)
    assert (pipe.routing, pipe._config.spread) == ("least_loaded", 2)
    assert pipe._config.rules is not None
    assert pipe._config.rules.order == "sjf"


def test_a_saved_profile_and_a_saved_trace_are_replayed() -> None:
    tables, trace = CostTables.load(SAVED / "costs.json"), trinity.Trace.load(SAVED / "trace.jsonl")
    assert len(trace) == 24
    simulator = Simulator("llava-1.5-7b", trinity.SLO(9.0, 1.0), cluster=Cluster.of("H100", 2), cost=tables)
    assert len(simulator.replay(trace, "2EPD").outcomes) == 24


def test_a_saved_file_of_hosts_is_read() -> None:
    table = trinity.read_hosts(SAVED / "hosts.toml")
    assert [(each.name, each.device) for each in table.placement] == [
        ("P0", "cuda:0"),
        ("D0", "cuda:1"),
        ("E0", "cuda:0"),
        ("E1", "cuda:1"),
    ]


def test_the_setup_of_another_release_is_refused() -> None:
    """Its greeting is refused before, by the number of its version."""
    assert handshake.VERSION > 7
    with pytest.raises(HandshakeError, match="instance"):
        decode(base64.b64decode((SAVED / "setup-7.base64").read_text(encoding="ascii")))
