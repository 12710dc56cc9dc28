"""Names that other packages register by entry points are found; unknown ones list those known."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from trinity import plugins
from trinity.core.messages import PeerUp, Work
from trinity.core.routing.router import ROUTING_POLICIES, RoundRobin, routing_policy
from trinity.errors import ConfigError, UnknownName
from trinity.runtime.custom_stages import find_stage_factory
from trinity.transport.inproc import InprocTransport
from trinity.transport.registry import known_transports, make_transport


class LastPeer:
    """Somebody's own routing policy."""

    def choose(self, letter: str, work: Work, peers: list[PeerUp]) -> PeerUp:
        return peers[-1]


class OwnTransport(InprocTransport):
    """Somebody's own transport."""

    scheme = "own"


def own_stage(setup: object) -> str:
    return f"a stage of {setup}"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("last", f"{__name__}:LastPeer", "trinity.routing"),
        EntryPoint("own", f"{__name__}:OwnTransport", "trinity.transports"),
        EntryPoint("own-encoder", f"{__name__}:own_stage", "trinity.stages"),
    ]

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [entry for entry in entries if entry.group == group and name in (None, entry.name)]

    monkeypatch.setattr(plugins, "entry_points", entry_points)


@pytest.mark.usefixtures("registered")
def test_a_registered_name_is_found() -> None:
    assert isinstance(routing_policy("last"), LastPeer)
    assert make_transport("own").scheme == "own"
    assert find_stage_factory("own-encoder")("X") == "a stage of X"  # type: ignore[arg-type,comparison-overlap]
    assert "own" in known_transports()
    assert "inproc" in known_transports()


@pytest.mark.usefixtures("registered")
def test_an_unknown_name_lists_built_in_and_registered_ones() -> None:
    with pytest.raises(UnknownName, match=r"last, .*random, round_robin"):
        routing_policy("nearest")
    with pytest.raises(UnknownName, match=r"inproc, .*own"):
        make_transport("pigeon")
    with pytest.raises(UnknownName, match="own-encoder"):
        find_stage_factory("pigeon")


def test_built_in_names_win_and_objects_pass() -> None:
    assert {"round_robin", "random", "least_loaded", "prefix_hits"} <= set(ROUTING_POLICIES)
    policy = RoundRobin()
    assert routing_policy(policy) is policy
    assert routing_policy("round_robin") is not routing_policy("round_robin")
    assert find_stage_factory(own_stage) is own_stage  # type: ignore[arg-type,comparison-overlap]


def test_a_registered_object_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_module:Thing", "trinity.routing")
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: [broken])
    with pytest.raises(ConfigError, match=r"routing policy 'broken' \(no_such_module:Thing\) cannot be loaded"):
        routing_policy("broken")


def test_a_registered_module_that_exits_as_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_at_once.py").write_text("import sys\n\nsys.exit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("leaves", "leaves_at_once:Thing", "trinity.stages")
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: [entry])
    with pytest.raises(ConfigError, match="cannot be loaded: SystemExit: no licence"):
        find_stage_factory("leaves")
