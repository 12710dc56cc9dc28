"""What holds threads, loops or memory refuses to be pickled or copied at once, and says what to pass instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import trinity
from trinity.connector import Connector
from trinity.errors import ConfigError
from trinity.pipeline.sync_pipeline import SyncStream
from trinity.runtime.compose import LoadedStage
from trinity.runtime.host import InstanceHost


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
@pytest.mark.parametrize(
    "kind", [trinity.Pipeline, trinity.SyncPipeline, trinity.Stream, SyncStream, InstanceHost, LoadedStage, Connector]
)
def test_a_live_object_is_neither_pickled_nor_copied(kind: type[Any], how: Callable[[object], object]) -> None:
    """``pickle.dumps(pipe)`` took 60 s and ended in an error about a lock."""
    with pytest.raises(ConfigError, match=rf"a {kind.__name__} can be neither pickled nor copied: .*; [a-z]"):
        how(object.__new__(kind))


def test_a_pipeline_in_a_list_refuses_too() -> None:
    pipe = trinity.Pipeline("shapes")
    with pytest.raises(ConfigError, match="make it where it is used, and pass its arguments"):
        pickle.dumps([pipe])


def test_instances_and_placements_are_values() -> None:
    one = trinity.Instance("EP")
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
