"""Runs in virtual time of models whose layers keep states: all that happens to others happens to these too."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from support.together import play, together
from trinity.core.instance import admission, lifecycle, preemption
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.settings import Settings
from trinity.core.messages import KV, STATE
from trinity.core.migration import kv_target, source, target

RUNS = 30


def give_states(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Have every instance with KV blocks hold so many blocks of states as well."""
    before = Settings.__post_init__

    def add(self: Settings) -> None:
        if KV in self.pools:
            object.__setattr__(self, "pools", {**self.pools, STATE: blocks})
        before(self)

    monkeypatch.setattr(Settings, "__post_init__", add)


def play_all(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += play(together(seed))
    return seen


@pytest.mark.timeout(600)
@pytest.mark.parametrize("blocks", [1, 3])
def test_all_at_once_with_states(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of a request's states holds what is due at each of its rows; each holds one, and none is left over."""
    give_states(monkeypatch, blocks)
    seen = play_all(range(100 * blocks, 100 * blocks + RUNS))
    missing = [what for what in ("deaths", "switched", "moved", "length", "stop", "cancelled") if not seen[what]]
    assert not missing, seen


def keep_block(s: Any, state: RequestState) -> None:
    """Break a rule: the block of states is never given back."""


def announce_nothing(s: Any, state: RequestState) -> None:
    """Break a rule: the states are never said to be ready."""


def pull_at_once(incoming: Any, event: Any, now: float) -> None:
    """Break a rule: states are pulled as the first piece of KV is ready, whatever they hold then."""
    QUEUE(incoming, event, now)
    if incoming.offer.state and not event.state and not incoming.states:
        incoming.states = "ready"


def forget_states(s: Any, state: RequestState) -> bool:
    """Break a rule: a decode begins without its states."""
    incoming = state.incoming
    return bool(incoming and incoming.progress and not incoming.progress.missing)


def hold_two(s: Any, state: RequestState) -> None:
    """Break a rule: a request takes two blocks where there are so many."""
    if STATE in s.pools:
        state.hold_state(s.allocate(STATE, min(2, s.pools[STATE].available)))


QUEUE = kv_target.queue_pieces
BROKEN: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "dropped at its end": ((lifecycle, "drop_state", keep_block),),
    "dropped at preemption": ((preemption, "drop_state", keep_block),),
    "said to be ready": ((source, "announce_states", announce_nothing),),
    "here before a decode begins": ((target, "is_kv_here", forget_states),),
    "pulled when they are whole": ((target, "queue_pieces", pull_at_once),),
    "one block": ((admission, "hold_state", hold_two), (kv_target, "hold_state", hold_two)),
    "room": ((admission, "has_state_room", lambda s, taken=0: True),),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_that_is_not_kept_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_states(monkeypatch, 2)
    for module, name, broken in BROKEN[rule]:
        monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError):
        play_all(range(200, 320))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_many_runs_with_states(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    give_states(monkeypatch, blocks)
    play_all(range(1000 * blocks, 1000 * blocks + 400))
