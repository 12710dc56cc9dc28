"""Stages of the user's own: what an instance accepts, in whose place they run, and what is said about a wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.core.messages import Grow, Open, Sampled, Step
from trinity.errors import ConfigError, UnknownName, UnsupportedModel
from trinity.instance import Instance
from trinity.runtime.custom_stages import make_custom_stages
from trinity.stages.base import StageSetup


class Own:
    """A stage that does nothing."""

    def __init__(self, letters: str) -> None:
        self.letters = letters

    def open(self, request: Open) -> None: ...

    def close(self, request: str) -> None: ...

    def forward(self, step: Step) -> dict[str, Sampled]:
        return {}


def made(roles: str, *factories: Callable[[StageSetup], Any]) -> Sequence[Any]:
    setup = StageSetup(roles, SimpleNamespace(), {})  # type: ignore[arg-type]
    return make_custom_stages(Instance(roles, "mine", stages=factories), setup)


def own(letters: str) -> Callable[[StageSetup], Own]:
    return lambda setup: Own(letters)


@pytest.mark.parametrize(
    ("roles", "letters"),
    [
        ("E", ["E"]),
        ("EPD", ["E"]),
        ("EPD", ["PD"]),
        ("EPD", ["E", "PD"]),
        ("EPD", ["EPD"]),
        ("EP", ["P"]),
        ("D", ["D"]),
    ],
)
def test_fitting(roles: str, letters: list[str]) -> None:
    assert [stage.letters for stage in made(roles, *map(own, letters))] == letters


def test_none() -> None:
    assert list(made("EPD")) == []


def fail(setup: StageSetup) -> Any:
    raise LookupError("no weights here")


def leave(setup: StageSetup) -> Any:
    raise SystemExit(3)


def refuse(setup: StageSetup) -> Any:
    raise UnsupportedModel("only for cats")


@pytest.mark.parametrize(
    ("roles", "factories", "says"),
    [
        ("E", [own("P")], "stages= of mine .* do not fit its roles E"),
        ("EP", [own("E"), own("EP")], "do not fit"),
        ("PD", [own("P")], "one stage with letters 'PD'"),
        ("EPD", [own("ED")], "one stage with letters 'PD'"),
        ("E", [lambda setup: None], "None is not a Stage"),
        ("E", [lambda setup: SimpleNamespace(letters="E")], "needs letters .*, open, close and forward"),
        ("E", [lambda setup: SimpleNamespace(letters=7, open=id, close=id, forward=id)], r"needs letters \(a text\)"),
        ("E", [fail], "failed: LookupError: no weights here"),
        ("E", [leave], "failed: SystemExit: 3"),
        ("E", [lambda setup: [0] * (1 << 60)], "failed: MemoryError"),
        ("E", [refuse], "^only for cats"),
    ],
)
def test_wrong(roles: str, factories: list[Callable[[StageSetup], Any]], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(roles, *factories)
    assert re.search(says, str(caught.value))


def test_one_that_decodes_must_grow_where_blocks_come_as_requests_decode() -> None:
    class Grows(Own):
        def grow(self, more: Grow) -> None: ...

    setup = StageSetup("PD", SimpleNamespace(), {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="grow"):
        make_custom_stages(Instance("PD", "mine", stages=[own("PD")], reservation="optimistic"), setup)
    assert make_custom_stages(Instance("PD", "mine", stages=[lambda _: Grows("PD")], reservation="optimistic"), setup)
    assert make_custom_stages(Instance("EP", "mine", stages=[own("E")], reservation="optimistic"), setup)


def test_an_unknown_reservation_is_refused() -> None:
    with pytest.raises(UnknownName, match="optimistic"):
        Instance("PD", reservation="greedy")  # type: ignore[arg-type]
