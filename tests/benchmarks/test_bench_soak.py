"""The soak, for twenty seconds; and that it can fail."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.serving import soak
from benchmarks.serving.soak import Series, verdict
from support.checkpoint_files import checkpoint


def grown(resident: float = 0.0, descriptors: float = 0.0) -> Series:
    """A process that grew by so much, evenly, over 100 s."""
    seconds = [float(each) for each in range(101)]
    share = [each / 100 for each in seconds]
    return Series(seconds, [100e6 + resident * each for each in share], [20 + descriptors * each for each in share])


def test_a_line_is_fitted_to_the_last_two_thirds() -> None:
    assert soak.slope([0.0, 1.0, 2.0], [5.0, 7.0, 9.0]) == pytest.approx(2.0)
    assert soak.slope([1.0], [3.0]) == 0.0
    assert grown(resident=100e6).growth(grown(resident=100e6).resident) == pytest.approx(67e6)


@pytest.mark.parametrize(
    ("series", "ends", "good"),
    [
        (grown(), {"served": 9, "left": 3}, True),
        (grown(resident=20e6), {"served": 9}, True),
        (grown(resident=40e6), {"served": 9}, False),
        (grown(descriptors=3.0), {"served": 9}, False),
        (grown(), {"served": 9, "StageError": 1}, False),
    ],
)
def test_what_passes(series: Series, ends: dict[str, int], good: bool) -> None:
    table, passed = verdict({"E0": series}, Counter(ends))
    assert passed is good
    assert table.rows[0][-1] == ("flat" if good or "StageError" in ends else "GROWS")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3.0, pytest.param(20.0, marks=pytest.mark.slow)])
async def test_a_short_soak(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "32")  # else code for shapes takes a minute to fill its cache
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    series, ends = await soak.soak(checkpoint("llava"), seconds, "shm")
    table, passed = verdict(series, ends)
    assert passed or seconds < 20, table.text()  # caches still fill in the first seconds
    assert list(series) == ["front end", "E0", "P0", "D0", "D1"]
    assert ends["served"] > 0
    assert ends["left"] > 0
