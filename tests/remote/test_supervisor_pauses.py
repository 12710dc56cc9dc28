"""SupervisorCore: pauses before the restarts of an instance, which grow while it dies again and again."""

from __future__ import annotations

from itertools import pairwise

from remote.supervision.test_supervisor_core import come_up, core_of
from trinity.core.messages import Tick
from trinity.remote.supervision.supervisor_core import (
    BACKOFF_S,
    LONGEST_AWAY_S,
    LONGEST_BACKOFF_S,
    LONGEST_BY_HAND_S,
    STEADY_S,
    SupervisorCore,
)
from trinity.remote.supervision.supervisor_messages import Ended, Launch, Lost


def pauses(core: SupervisorCore, name: str, times: int, serves_s: float | None) -> list[float]:
    """Lost so many times, after serving for a while or before it came up; the pauses before each start."""
    found, now = [], 100.0
    for _ in range(times):
        epoch = core.members[name].epoch
        if serves_s is not None:
            come_up(core, name, epoch, now)
            now += serves_s
        core.handle(Lost(name, epoch, "gone"), now)
        core.handle(Ended(name, epoch), now)
        due = core.next_timer()
        assert due is not None
        found.append(round(due - now, 6))
        now = due
        assert any(isinstance(each, Launch) for each in core.handle(Tick(), now))
    return found


def test_restarts_go_on_for_ever_with_growing_pauses() -> None:
    found = pauses(core_of("D", up=False), "D", 40, None)
    assert found[:4] == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S, 8 * BACKOFF_S]
    assert found == sorted(found)
    assert found[-1] == LONGEST_AWAY_S
    often = core_of("D", up=False)
    assert pauses(often, "D", 20, 1.0)[-1] == LONGEST_BACKOFF_S
    assert pauses(often, "D", 2, None) == [
        BACKOFF_S,
        2 * BACKOFF_S,
    ]  # counted by themselves
    assert pauses(core_of("D", "D", up=False), "D", 20, None)[-1] == LONGEST_BY_HAND_S
    assert set(pauses(core_of("D", up=False), "D", 20, STEADY_S)) == {BACKOFF_S}


def test_one_that_dies_again_and_again_is_left_out_for_longer_and_longer_until_it_has_been_steady() -> None:
    core = core_of("D", up=False)
    found = pauses(core, "D", 12, 1.0)
    assert all(later == min(2 * earlier, LONGEST_BACKOFF_S) for earlier, later in pairwise(found))
    assert [each for each in found if each > 1.0] == [1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0]
    assert pauses(core, "D", 3, STEADY_S - 1.0) == [60.0] * 3
    assert pauses(core, "D", 2, STEADY_S) == [BACKOFF_S] * 2
