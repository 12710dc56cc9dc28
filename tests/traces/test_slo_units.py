"""An SLO in milliseconds is noticed."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import msgspec
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


@pytest.mark.parametrize(
    "pass_on",
    [
        lambda given: msgspec.json.decode(msgspec.json.encode(given), type=SLO),
        lambda given: msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=SLO),
        lambda given: msgspec.structs.replace(given, tbt=2.0),
        lambda given: pickle.loads(pickle.dumps(given)),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_one_that_is_passed_on_was_warned_of_before(pass_on: Callable[[SLO], SLO]) -> None:
    """Each instance in a process decodes the pipeline's: its warning pointed at asyncio, and as an error ended it."""
    with pytest.warns(TrinityWarning, match="reads seconds"):
        given = SLO(ttft=2000, tbt=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pass_on(given).ttft == 2000
