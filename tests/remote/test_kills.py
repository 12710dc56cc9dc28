"""A short sweep of kills under load; ``make kills`` is the long one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sweeps.kills import KINDS, Tally, main, sweep


def test_the_report_has_each_kind_and_what_went_wrong() -> None:
    tally = Tally({"shm: kill": [0.5, 3.0, 1.0]}, whole=7, wrong=["a token"])
    assert tally.strikes == 3
    rows = tally.report().splitlines()
    assert rows[1].split() == ["shm:", "kill", "3", "1.00", "3.00"]
    assert rows[-1] == "WRONG: a token"


@pytest.mark.parametrize(("tally", "code"), [(Tally(), 0), (Tally(wrong=["x"]), 1), (Tally(slow=["y"]), 1)])
def test_what_went_wrong_or_took_too_long_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tally: Tally, code: int
) -> None:
    async def swept(strikes: int, seed: int, schemes: Sequence[str]) -> Tally:
        assert (strikes, seed, schemes) == (3, 5, ["shm"])
        return tally

    monkeypatch.setattr("sweeps.kills.sweep", swept)
    assert main(["--strikes", "3", "--seed", "5", "--schemes", "shm"]) == code


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", ["shm", "auto"])
async def test_each_kind_of_strike(scheme: str) -> None:
    tally = await sweep(2 * len(KINDS), random.randrange(1 << 30), [scheme])
    assert not tally.wrong, tally.report()
    assert not tally.failed, "each request survives, or waits"
    assert tally.strikes >= 2 * len(KINDS)
