"""The benchmark of switches of roles under load: what it would call a failure, and that it runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving.switches import PAIRS, ROUTE, Load, Measured, result, run, summed
from benchmarks.setting import Setting
from trinity.core.role_changes import Switch
from trinity.errors import StageError
from trinity.request import Request


def switch(pair: str, change_s: float = 0.5, drain_s: float = 2.0) -> Switch:
    parts = {"migration_s": change_s - 0.01, "prepare_s": 4 * change_s}
    return Switch("E1", pair[0], pair[2], drain_s, change_s, emptied=True, **parts)


def measured(change_s: float = 0.5, wrong: int = 0, lost: int = 0) -> Measured:
    return Measured("shm", [switch(pair, change_s) for pair in PAIRS], 100, wrong, lost, 2)


def test_the_route_has_every_ordered_pair_once() -> None:
    found = []
    for name, route in ROUTE:
        roles = name[0]
        for after in route:
            found.append(f"{roles}>{after}")
            roles = after
    assert sorted(found) == sorted(PAIRS) == sorted(f"{a}>{b}" for a in "EPD" for b in "EPD" if a != b)


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (measured(), [True, True, True]),
        (measured(change_s=0.71), [False, True, True]),
        (measured(lost=1), [True, False, True]),
        (measured(wrong=1), [True, True, False]),
    ],
)
def test_a_slow_switch_a_lost_request_and_a_wrong_token_fall_short(found: Measured, met: list[bool]) -> None:
    assert [aim.met for aim in result([found]).aims] == met


def test_parts_are_medians_of_a_pair() -> None:
    switches = [switch("E>P", each) for each in (0.1, 0.9, 0.3)] + [switch("P>E", 5.0)]
    parts = summed(switches, "E>P")
    assert (parts.beside, parts.most, parts.drain, parts.prepare) == (0.3, 0.9, 2.0, 1.2)
    assert parts.migration + parts.onload == pytest.approx(parts.beside)


async def test_what_became_of_each_request_is_counted() -> None:
    asked: list[str] = []
    answers: list[Any] = [
        SimpleNamespace(token_ids=[1, 2], lives=1),
        SimpleNamespace(token_ids=[1, 3], lives=2),
        StageError("it failed"),
    ]

    class Pipe:
        async def complete(self, request: Request) -> Any:
            asked.append(request.request_id)
            answer = answers.pop(0)
            if not answers:
                load.stop()
            if isinstance(answer, Exception):
                raise answer
            return answer

    load = Load(Pipe(), [Path("a.jpg")] * 3, [[1, 2]])  # type: ignore[arg-type]
    await load.ask(0)
    assert (load.served, load.wrong, load.lost, load.recovered) == (2, 1, 1, 1)
    assert len(set(asked)) == 3, "one that is asked twice is refused"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs() -> None:
    found = run(Setting(quick=True))
    assert [row[1] for row in found.tables[0].rows] == list(PAIRS)
    assert [aim.met for aim in found.aims[1:]] == [True, True]
