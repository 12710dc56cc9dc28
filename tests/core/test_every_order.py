"""All orders of events of few requests on real cores, with the death of one instance (``support.every_order``)."""

from __future__ import annotations

from typing import Any

import pytest

from support.core_tables import work
from support.every_order import Search, Whole
from trinity.core.messages import Submit, Value
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.testing.virtual import make_settings

IMAGE = Submit(work("r", 1, "cat*4", max_tokens=3))
TEXT = Submit(work("s", 2, max_tokens=2))
ROOM = {"image": 4, "kv": 8}


def search(placement: str, asked: tuple[Value, ...], victim: str, back: bool = True, **settings: Any) -> Search:
    settings.setdefault("rules", BatchRules(token_budget=64, image_budget=64))
    settings.setdefault("transfers", TransferPolicy(early=False))
    own = make_settings(placement, ROOM, image_block_size=4, kv_block_size=4, prefix_cache=False, **settings)
    return Search(own, asked, victim, back)


@pytest.mark.parametrize("placement", ["E+P+D", "EP+D", "ED+P", "PD+E"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_request_ends_in_every_order_of_one_death(placement: str, victim: int) -> None:
    names = [each.name for each in make_settings(placement, ROOM)]
    if victim < len(names):
        found = search(placement, (IMAGE,), names[victim])
        assert found.run() > 1000
        assert (("r", "length"),) in found.ends
        assert (("r", "StageError"),) in found.ends
