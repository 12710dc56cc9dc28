"""By which transport blocks go between two hosts is said once in the log, of each kind, and again where it changes."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

from support import emulated_pipelines
from support.emulated_pipelines import LIVENESS_S, MODEL, asked, check, serve
from trinity.core.messages import PeerUp
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.pipeline.frontend_host import TransferWays

PEERS = {name: PeerUp(name, name[0], host=host) for name, host in {"E0": "a", "P0": "b", "D0": "b", "X": ""}.items()}


def move(kind: str, source: str, target: str, scheme: str, outcome: str = "pulled") -> dict[str, Any]:
    return {"kind": kind, "source": source, "target": target, "scheme": scheme, "outcome": outcome}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [each.getMessage() for each in caplog.records if each.getMessage().startswith("blocks of kind")]
    caplog.clear()
    return lines


def test_each_way_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trinity")
    ways, way = TransferWays(), [move("image", "E0", "P0", "nixl"), move("kv", "P0", "D0", "shm")]
    ways.note(way, PEERS)
    assert said(caplog) == [
        "blocks of kind image go from host a to host b by nixl",
        "blocks of kind kv stay on host b, moved by shm",
    ]
    for _ in range(3):
        ways.note(way, PEERS)
    assert said(caplog) == []
    ways.note([move("image", "E0", "P0", "ucx"), move("image", "P0", "E0", "nixl", "store")], PEERS)
    assert said(caplog) == [
        "blocks of kind image go from host a to host b by ucx",
        "blocks of kind image go from host b to host a by nixl",
    ]


def test_what_has_not_moved_or_has_no_host_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trinity")
    gone = [move("kv", "E0", "P9", "shm"), move("kv", "X", "P0", "shm"), move("kv", "E0", "P0", "shm", "cached")]
    TransferWays().note([*gone, move("kv", "E0", "P0", "shm", "failed"), {}], PEERS)
    assert said(caplog) == []


@pytest.mark.parametrize("hosting", ["thread", "process"])
async def test_a_pipeline_says_it(hosting: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of threads nothing: their copies stay in the process. Processes here are on one host, which has a name."""
    caplog.set_level(logging.INFO, "trinity")
    cache = CacheConfig(pools=emulated_pipelines.POOLS)
    async with asyncio.timeout(LIVENESS_S), Pipeline(MODEL, "1E1P1D", hosting=hosting, cache=cache) as pipe:
        for requests in (asked(), asked()):
            check(await serve(pipe, requests), requests)
    host = socket.gethostname()
    lines = [f"blocks of kind {kind} stay on host {host}, moved by shm" for kind in ("image", "kv")]
    assert sorted(said(caplog)) == (lines if hosting == "process" else [])
