"""An SLO in milliseconds is noticed."""

from __future__ import annotations

import pytest

from trinity import SLO
from trinity.errors import TrinityWarning


@pytest.mark.parametrize(("ttft", "tbt", "name"), [(2000, 0.1, "ttft"), (100, 0.1, "ttft"), (2, 100.0, "tbt")])
def test_a_bound_that_looks_like_milliseconds_warns(ttft: float, tbt: float, name: str) -> None:
    with pytest.warns(
        TrinityWarning, match=rf"SLO\({name}=\d+\) reads seconds; .* give {name}=(0\.)?\d+\. For no"
    ) as found:
        SLO(ttft=ttft, tbt=tbt)
    assert [one.filename for one in found] == [__file__]


@pytest.mark.parametrize("bound", [99.9, 1e5, 1e9])
def test_bounds_of_seconds_and_none_do_not(bound: float) -> None:
    SLO(bound, bound)
