"""The table of phases is walked: what real cores do is in it, all that is in it is done, and each row is needed.

Phases are watched where they are written, so that a walk past ``State.move`` is seen as well. Places, counts and
phases are compared after every event by ``support.virtual.checks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.core_tables import done, image_offer, make_core, work
from support.moving import moving_cluster
from support.paths import ROOT
from support.scenarios import pressed_cluster, random_cluster
from support.virtual.checks import PHASE_QUEUES, check_state
from support.virtual.cluster import VirtualCluster, make_settings
from tools import draw_phases
from trinity.core.instance.phases import MOVES, SPAN, Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import Cancel, Commit, Forget, Pulled, Ready, Release, Submit
from trinity.core.scheduler import BatchRules

Move = tuple[Phase, Phase]
ENOUGH = 1500
Walk = Callable[[], object]
TABLE = {(before, after) for before, followers in MOVES.items() for after in followers}


@contextmanager
def watched() -> Iterator[list[list[Phase]]]:
    """The phases of every request, in order, from now on."""
    walks: dict[int, list[Phase]] = {}
    kept: list[RequestState] = []  # while a state is here, its id is nobody else's

    def write(state: RequestState, name: str, value: Any) -> None:
        if name == "phase":
            if id(state) not in walks:
                kept.append(state)
            walks.setdefault(id(state), []).append(value)
        object.__setattr__(state, name, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestState, "__setattr__", write)
        found: list[list[Phase]] = []
        yield found
        found += walks.values()


def moves_of(walk: Walk) -> set[Move]:
    """List the moves that it makes."""
    with watched() as walks:
        walk()
    return {move for phases in walks for move in pairwise(phases)}


def too_large() -> None:
    make_core("EPD0").handle(Submit(work("r", 1000)), 0.0)


def covered(then: str, attempt: int = 0) -> None:
    """Cached KV covers the image of b, whose features are offered: it is evicted while b waits, or b is cancelled."""
    core = make_core("P0", peers="D0", image_cache=False, kv=5)
    events = [
        image_offer("E0:1", work("a", "cat", 5), (1,)),
        Ready("E0:1", (0,)),
        Pulled("E0:1", 0),
        Commit("E0:1"),
        done(1, a=1),
        Release("P0:1", "pulled"),
        Forget("a"),
        image_offer("E0:2", work("b", "cat", 6, attempt=attempt), (1,)),
    ]
    evicted = [Submit(work("x", 17, text=500, max_tokens=1)), Ready("E0:2", (0,)), Commit("E0:2"), done(2, x=1)]
    for event in [*events, *(evicted if then == "evicted" else [Cancel("b")])]:
        core.handle(event, 0.0)
        check_state(core.state)


def pressed(seed: int) -> Walk:
    return lambda: pressed_cluster(seed).run()


def at_random(seed: int) -> Walk:
    return lambda: random_cluster(seed).run()


def preempted_during_prefill() -> None:
    """The older of two decodes into the last free block while the prompt of the younger is in the middle."""
    rules = BatchRules(token_budget=3, image_budget=4)
    settings = make_settings("PD", {"kv": 12}, kv_block_size=4, reservation="optimistic", rules=rules)
    cluster = VirtualCluster(settings)
    cluster.submit(work("a", 4, max_tokens=24))
    cluster.submit(work("b", 32, max_tokens=2))
    cluster.run()


def encoding(seed: int) -> Walk:
    return lambda: random_cluster(seed, encode_only=0.5).run()


def moving(seed: int) -> Walk:
    return lambda: moving_cluster(seed, deaths=False).run()


def walks() -> Iterator[Walk]:
    """By hand what is rare, then interleavings: first those that once met a rare move, then one after the other."""
    yield from (too_large, preempted_during_prefill, lambda: covered("cancelled"))
    yield from (lambda: covered("evicted"), lambda: covered("evicted", attempt=1))
    yield from (pressed(seed) for seed in (1, 2, 3, 7, 8, 9, 10, 16, 24, 118, 141, 145, 238, 350))
    yield from (at_random(seed) for seed in (4, 46, 72))
    yield from (moving(seed) for seed in (0, 1, 2))
    for seed in range(ENOUGH):
        yield encoding(seed)
        yield pressed(seed)
        yield at_random(seed)
        yield moving(seed)


@pytest.fixture(scope="module")
def taken() -> dict[Move, Walk]:
    """Each move that some walk takes, with that walk."""
    found: dict[Move, Walk] = {}
    for walk in walks():
        found |= dict.fromkeys(moves_of(walk) - found.keys(), walk)
        if found.keys() >= TABLE:
            break
    return found


def test_every_row_of_the_table_is_taken_by_some_walk(taken: dict[Move, Walk]) -> None:
    dead = [f"{before.name} to {after.name}" for before, after in TABLE - taken.keys()]
    assert not dead, f"{ENOUGH} interleavings take no step from {', '.join(dead)}"


@given(seed=st.integers(0, 2**32 - 1), make=st.sampled_from([at_random, encoding, pressed, moving]))
@example(seed=145, make=pressed)
def test_every_walk_keeps_to_the_table(seed: int, make: Callable[[int], Walk]) -> None:
    """From NEW to GONE by rows of the table alone, whatever comes between."""
    with watched() as walks:
        make(seed)()
    for phases in walks:
        assert set(pairwise(phases)) <= TABLE
        assert (phases[0], phases[-1]) == (Phase.NEW, Phase.GONE)


def test_a_core_that_lacks_any_one_row_is_noticed(taken: dict[Move, Walk]) -> None:
    for (before, after), walk in taken.items():
        without = {**MOVES, before: {phase: why for phase, why in MOVES[before].items() if phase is not after}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trinity.core.instance.state.MOVES", without)
            with pytest.raises(AssertionError, match=f"cannot move from {before.name} to {after.name}"):
                walk()


def test_the_table_is_whole() -> None:
    """Every phase has a row and a way out, every one that time is spent in has its span, no occasion is empty."""
    assert MOVES.keys() == set(Phase)
    assert not MOVES[Phase.GONE]
    assert all(Phase.GONE in MOVES[phase] for phase in set(Phase) - {Phase.GONE})
    assert all(Phase.NEW not in followers for followers in MOVES.values())
    assert SPAN.keys() == set(Phase) - {Phase.GONE}
    assert all(why for followers in MOVES.values() for why in followers.values())


def test_the_docs_show_the_table() -> None:
    page = ROOT / draw_phases.PAGE
    text = page.read_text(encoding="utf-8")
    assert draw_phases.drawn(text) == text, "python tools/draw_phases.py draws it anew"


def test_a_changed_table_is_drawn_and_a_page_without_markers_refused(tmp_path: Path) -> None:
    page = tmp_path / draw_phases.PAGE
    page.parent.mkdir()
    page.write_text(f"above\n{draw_phases.BEGIN}\nold\n{draw_phases.END}\nbelow\n")
    assert draw_phases.main(tmp_path) == 0
    text = page.read_text()
    assert "| NEW | KV_OFFER | its KV is offered by another instance |" in text
    assert "\nKV_PULL         → DECODING\n" in text, "every phase may end: that is not drawn"
    assert (text.startswith("above\n"), text.endswith("\nbelow\n"), "old" in text) == (True, True, False)
    with pytest.raises(ValueError, match="needs a line <!-- drawn"):
        draw_phases.drawn("nothing")


def moved(monkeypatch: pytest.MonkeyPatch, after: Callable[[State, RequestState, Phase], None]) -> None:
    """Do this behind every move."""

    def move(s: State, state: RequestState, phase: Phase, *rest: Any, **named: Any) -> None:
        plain(s, state, phase, *rest, **named)
        after(s, state, phase)

    plain = State.move
    monkeypatch.setattr(State, "move", move)


def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "_leave_place", lambda s, state: None)


def comes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "_take_place", lambda s, state, phase, ahead: None)


def is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(s: State, state: RequestState, phase: Phase) -> None:
        if phase in s.arriving:
            s.arriving[phase] += 1

    moved(monkeypatch, twice)


def keeps_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    def former(s: State, state: RequestState, phase: Phase) -> None:
        state.phase = Phase.KV_QUEUE if phase is Phase.MIGRATED_QUEUE else phase

    moved(monkeypatch, former)


def lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(s: State, state: RequestState, phase: Phase) -> None:
        if phase is Phase.GONE:
            s.requests[state.work.request] = state

    moved(monkeypatch, again)


def waits_beside_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(s: State, state: RequestState, phase: Phase) -> None:
        if phase is Phase.IMAGE_PULL:
            s.migrated_queue.append(state.work.request)

    moved(monkeypatch, both)


def is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "_count", lambda s, phase, change: None)


BROKEN = [is_not_counted, stays, comes_nowhere, is_counted_twice, keeps_its_phase, lives_on, waits_beside_its_place]


def some_walks() -> None:
    for seed in range(200):
        at_random(seed)()


@pytest.mark.parametrize("how", BROKEN, ids=[how.__name__ for how in BROKEN])
def test_a_broken_move_is_noticed(how: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    how(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        some_walks()


def test_who_ends_moves_nowhere_else() -> None:
    core = make_core("P0", image_cache=False)
    core.handle(image_offer("E0:1", work("a", "cat", 5), (1,)), 0.0)
    core.handle(Ready("E0:1", (0,)), 0.0)
    s = core.state
    state = s.requests["a"]
    core.handle(Forget("a"), 0.0)
    assert (state.phase, s.arriving[Phase.IMAGE_PULL]) == (Phase.IMAGE_PULL, 1), "its blocks are on their way here"
    with pytest.raises(AssertionError, match="P0: a cannot move from IMAGE_PULL to MIGRATED_QUEUE"):
        s.move(state, Phase.MIGRATED_QUEUE, 0.0)
    core.handle(Pulled("E0:1", 0), 0.0)
    assert (state.phase, s.arriving[Phase.IMAGE_PULL], s.requests) == (Phase.GONE, 0, {})


def test_every_phase_that_waits_or_runs_has_a_place_of_its_own() -> None:
    s = make_core("EPD0").state
    assert len({id(getattr(s, place)) for place in PHASE_QUEUES.values()}) == len(PHASE_QUEUES)
    placeless = set(Phase) - PHASE_QUEUES.keys() - s.arriving.keys()
    assert placeless == {Phase.NEW, Phase.COLLECTING, Phase.COVERED, Phase.GONE}
