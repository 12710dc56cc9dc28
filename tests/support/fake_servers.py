"""Servers of the fake engine, and requests for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity.bench.servers import BenchRequest, EngineSpec, Server

FAKE = Path(__file__).resolve().parent / "fake_engine.py"


class FakeServer(Server):
    """Whatever the engine is, the fake one serves."""

    def _command(self, python: Path) -> list[str]:
        return [sys.executable, str(FAKE)]


def engine(label: str = "fake", **options: Any) -> EngineSpec:
    return EngineSpec(kind="generate_batch", label=label, options=options)


def asked(number: int = 0, tokens: int = 4, text: str = "") -> BenchRequest:
    return BenchRequest(text, [number, number + 1], [], [], tokens)


def right(request: BenchRequest) -> list[int]:
    return [(sum(request.ids) + n) % 97 for n in range(request.tokens)]


def starter(*wrong: str) -> Callable[[EngineSpec, Path], Server]:
    """Starts fakes; those of these names give wrong tokens."""

    def start(engine: EngineSpec, checkpoint: Path) -> Server:
        options = {**engine.options, "wrong": 1} if engine.name in wrong else engine.options
        import msgspec

        return FakeServer(msgspec.structs.replace(engine, options=options), checkpoint)

    return start
