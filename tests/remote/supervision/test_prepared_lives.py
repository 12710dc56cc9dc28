"""Lives that load beside the one that they follow: whatever dies, and when, two of a name never reach one memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from remote.supervision.test_supervisor_core import SOON_S, core_of, table
from support.supervised_world import LOAD_S, STUCK_S, World
from trinity.core.messages import Tick
from trinity.remote.supervision.prepared_lives import LOADING_SILENCE_S
from trinity.remote.supervision.supervised_lives import RELINK_S, SUSPECT_S, LifePhase
from trinity.remote.supervision.supervisor_core import BACKOFF_S, SupervisorCore
from trinity.remote.supervision.supervisor_messages import (
    CloseAll,
    Down,
    DropNext,
    Ended,
    Event,
    Fence,
    Launch,
    Loaded,
    LoadNext,
    Lost,
    NextLoaded,
    NextLost,
    Proceed,
    Quiet,
    Remove,
    Removed,
    Replace,
    Retire,
    Separate,
)

Rows = list[tuple[float, Event | Tick, list[Event]]]
PREPARED: Rows = [(1.0, LoadNext("D", 0), [Launch("D", 1, waits=True)]), (2.0, NextLoaded("D", 1), [])]
AGAIN = [Separate("E", 0, "D", 0), Down("D", 0, "", planned=True)]  # of the others, as D is replaced


def prepared() -> SupervisorCore:
    core = core_of("ED")
    table(core, PREPARED)
    return core


# ---------------------------------------------------------------- the table


def test_it_is_given_the_word_once_the_other_has_ended() -> None:
    core = prepared()
    table(
        core,
        [
            (3.0, Replace("D", 0, ""), [Fence("D", 0), *AGAIN]),
            (3.1, Tick(), []),
            (3.2, Ended("D", 0), []),
            (3.2, Tick(), [Proceed("D", 1)]),
        ],
    )
    assert core.members["D"].phase is LifePhase.LOADING
    assert core.handle(Loaded("D", 1), 3.3)[0].name == "D"  # type: ignore[attr-defined]
    assert core.health("D", 3.3).losses == 0


def test_it_may_be_given_the_word_before_it_has_said_that_it_waits() -> None:
    core = core_of("ED")
    table(core, PREPARED[:1])
    core.handle(Replace("D", 0, ""), 1.1)
    core.handle(Ended("D", 0), 1.2)
    table(core, [(1.2, Tick(), [Proceed("D", 1)]), (1.3, NextLoaded("D", 1), [])])


def test_the_present_life_goes_on_where_the_next_one_is_lost() -> None:
    core = prepared()
    table(
        core,
        [
            (3.0, Lost("D", 1, "killed"), [Fence("D", 1), NextLost("D", 1, "killed")]),
            (3.1, Lost("D", 1, "killed"), []),
            (3.2, Ended("D", 1), []),
            (9.0, Tick(), []),
        ],
    )
    assert core.health("D", 9.0).state == "up"
    assert core.health("D", 9.0).losses == 0


def test_what_follows_without_it_is_launched_and_has_another_epoch() -> None:
    core = prepared()
    core.handle(Lost("D", 1, "killed"), 2.5)
    core.handle(Replace("D", 0, ""), 3.0)
    core.handle(Ended("D", 0), 3.1)
    table(core, [(3.1, Tick(), [Launch("D", 2)]), (3.2, Ended("D", 1), []), (3.3, NextLoaded("D", 1), [])])


def test_after_the_word_it_is_lost_as_any_other() -> None:
    core = prepared()
    core.handle(Replace("D", 0, ""), 3.0)
    core.handle(Ended("D", 0), 3.0)
    core.handle(Tick(), 3.0)
    found = core.handle(Lost("D", 1, "killed"), 3.1)
    assert found[0] == Fence("D", 1)
    assert found[-1] == Down("D", 1, "killed")
    core.handle(Ended("D", 1), 3.1)
    assert core.handle(Tick(), 3.1 + BACKOFF_S) == [Launch("D", 2)]


def test_it_follows_one_that_is_lost_after_the_pause_of_a_loss() -> None:
    core = prepared()
    assert Down("D", 0, "killed") in core.handle(Lost("D", 0, "killed"), 3.0)
    table(core, [(3.0, Ended("D", 0), []), (3.0, Tick(), []), (3.0 + BACKOFF_S, Tick(), [Proceed("D", 1)])])
    assert core.members["D"].losses == 1


def test_what_is_not_wanted_is_ended_and_another_one_prepared_instead() -> None:
    core = prepared()
    table(
        core,
        [
            (3.0, DropNext("D", 0), [Fence("D", 1)]),
            (3.0, DropNext("D", 0), []),
            (3.1, LoadNext("D", 0), [Launch("D", 2, waits=True)]),
            (3.2, LoadNext("D", 0), [Fence("D", 2), Launch("D", 3, waits=True)]),
            (3.3, Ended("D", 1), []),
            (3.4, NextLoaded("D", 2), []),
        ],
    )
    assert not core.members["D"].next.prepared  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "event", [LoadNext("D", 3), DropNext("D", 3), NextLoaded("D", 7), Lost("D", 7, ""), Quiet("D", 7, 99)]
)
def test_of_no_life_that_there_is_nothing_is_done(event: Event) -> None:
    assert prepared().handle(event, 3.0) == []


def test_none_is_prepared_for_one_that_is_away_or_that_somebody_else_starts() -> None:
    core = core_of("ED", "D")
    assert core.handle(LoadNext("D", 0), 1.0) == []
    core.handle(Lost("E", 0, ""), 1.0)
    assert core.handle(LoadNext("E", 0), 1.1) == []


# ---------------------------------------------------------------- silence


def test_one_that_waits_and_is_silent_is_not_relied_on() -> None:
    core = prepared()
    core.handle(Quiet("D", 1, SUSPECT_S + 0.1), 4.0)
    core.handle(Replace("D", 0, ""), 4.1)
    core.handle(Ended("D", 0), 4.2)
    table(core, [(4.2, Tick(), [Fence("D", 1), Launch("D", 2)])])


def test_one_that_speaks_again_or_loads_is_relied_on() -> None:
    core = prepared()
    core.handle(Quiet("D", 1, SUSPECT_S + 0.1), 4.0)
    core.handle(Quiet("D", 1, 0.1), 4.5)
    core.handle(Replace("D", 0, ""), 4.6)
    core.handle(Ended("D", 0), 4.7)
    assert core.handle(Tick(), 4.7) == [Proceed("D", 1)]
    core = core_of("ED")
    table(core, [*PREPARED[:1], (4.0, Quiet("D", 1, 3.0), [])])
    core.handle(Lost("D", 0, ""), 4.1)
    core.handle(Ended("D", 0), 4.1)
    assert core.handle(Tick(), 5.0) == [Proceed("D", 1)]


def test_one_that_is_silent_for_too_long_is_lost() -> None:
    core = prepared()
    assert core.handle(Quiet("D", 1, LOADING_SILENCE_S), 22.0) == []
    found = core.handle(Quiet("D", 1, LOADING_SILENCE_S + 0.1), 22.1)
    assert found == [Fence("D", 1), NextLost("D", 1, "it said nothing for 20.1 s")]
    assert core.handle(Quiet("D", 1, 99.0), 30.0) == []


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("event", [Retire(), CloseAll()])
def test_what_is_prepared_ends_with_the_pipeline(event: Event) -> None:
    core = prepared()
    assert Fence("D", 1) in core.handle(event, 3.0)
    assert core.handle(LoadNext("D", 0), 3.1) == []
    core.handle(CloseAll(), 3.2)
    for name, epoch in (("E", 0), ("D", 0)):
        core.handle(Ended(name, epoch), 3.3)
    assert core.unended == ["D"]
    core.handle(Ended("D", 1), 3.4)
    assert core.unended == []


@pytest.mark.parametrize("last", [0, 1])
def test_one_is_removed_once_both_of_its_lives_have_ended(last: int) -> None:
    core = prepared()
    core.handle(Remove("D", ""), 3.0)
    assert core.handle(Ended("D", 1 - last), 3.1) == []
    assert core.handle(Ended("D", last), 3.2) == [Removed("D", 0)]


# ---------------------------------------------------------------- orders

Act = Callable[[World], None]
ACTS: dict[str, Act] = {
    "next dies": lambda world: world.strike(world.next_life("D")),
    "next freezes": lambda world: world.hold(world.next_life("D")),
    "it dies": lambda world: world.strike(world.life("D")),
    "it freezes": lambda world: world.hold(world.life("D")),
    "other dies": lambda world: world.strike(world.life("E")),
    "launcher dies": World.end_launcher,
    "launcher freezes": World.hold_launcher,
    "not wanted": lambda world: world.tell(DropNext(*world.life("D"))),
    "prepared again": lambda world: world.tell(LoadNext(*world.life("D"))),
    "replaced": lambda world: world.tell(Replace(*world.life("D"), "for this test")),
}


def switch(acts: Sequence[tuple[int, str]], seed: int, end: Callable[[World], bool]) -> World:
    """LoadNext and replace, with acts after so many steps from then on; returns once all is over."""
    world = World("EPD", seed)
    world.run(20.0, lambda: world.whole)
    began = world.steps
    world.tell(LoadNext(*world.life("D")))
    for at, act in acts:
        while world.steps - began < at and world.step():
            pass
        ACTS[act](world)
    world.run(world.now + 200.0, lambda: end(world))
    return world


def settled(world: World) -> bool:
    """True where all are up, and what is still prepared waits."""
    following = world.core.members["D"].next
    return world.whole and (following is None or following.prepared or world.processes["D", following.epoch].frozen)


def bound(acts: Sequence[tuple[int, str]]) -> float:
    words = [act for _, act in acts]
    frozen = "it freezes" in words or "next freezes" in words  # which may have been given the word by then
    return (
        LOADING_SILENCE_S * frozen
        + STUCK_S * ("launcher freezes" in words)
        + 2 * RELINK_S
        + (1 + len(words)) * (LOAD_S + SOON_S)
    )


@pytest.mark.parametrize("act", ACTS)
def test_anything_at_any_moment_of_a_switch(act: str) -> None:
    """Before the word, as it is given and after it; the switch itself at any of these moments, too."""
    for gap, replaced in product(range(0, 44, 3), range(0, 44, 4)):
        acts = sorted([(gap, act), (replaced, "replaced")])
        world = switch(acts, gap, settled)
        assert settled(world), (acts, world.core.members)
        assert world.now < 20.0 + bound(acts), (acts, world.now)
        assert all(member.epoch <= member.newest for member in world.core.members.values())


@pytest.mark.parametrize("seed", range(4))
def test_several_at_random(seed: int) -> None:
    for number in range(150):
        draw = random.Random(seed * 1000 + number)
        acts = sorted((draw.randrange(80), draw.choice(list(ACTS))) for _ in range(draw.randint(2, 7)))
        world = switch(acts, number, settled)
        assert settled(world), (acts, world.core.members)


@pytest.mark.parametrize("act", [Retire(), CloseAll(), Remove("D", "")])
def test_closed_or_removed_at_any_moment_no_process_is_left(act: Event) -> None:
    for gap, replaced in product(range(0, 44, 2), range(0, 44, 4)):
        world = World("EPD", gap)
        world.run(20.0, lambda world=world: world.whole)  # type: ignore[misc]
        world.tell(LoadNext(*world.life("D")))
        for step in range(gap):
            if step == replaced:
                world.tell(Replace(*world.life("D"), "for this test"))
            world.step()
        world.tell(act)
        if isinstance(act, Retire):
            world.close()
        world.run(world.now + 60.0)
        assert not world.running("D"), gap
        assert "D" not in world.core.unended
