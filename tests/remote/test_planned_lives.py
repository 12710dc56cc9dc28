"""SupervisorCore: an instance's life that is ended on purpose, for the next one; beside losses at any time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from remote.supervision.test_supervisor_core import come_up, core_of, table
from support.supervised_world import World
from trinity.core.messages import Tick
from trinity.remote.supervision.supervised_lives import LifePhase
from trinity.remote.supervision.supervisor_core import BACKOFF_S, SupervisorCore
from trinity.remote.supervision.supervisor_messages import (
    Add,
    Begin,
    CloseAll,
    Down,
    Ended,
    Fence,
    Launch,
    Leave,
    Leaving,
    Linked,
    Loaded,
    Lost,
    Quiet,
    Remove,
    Removed,
    Replace,
    Retire,
    Separate,
    Suspect,
    Up,
)


def test_it_leaves_and_is_replaced_without_a_pause_or_a_loss() -> None:
    core = core_of("ED")
    table(
        core,
        [
            (1.0, Leave("D", 0), [Leaving("D", 0, True)]),
            (1.1, Leave("D", 0), []),
            (
                2.0,
                Replace("D", 0, "for this test"),
                [Fence("D", 0), Separate("E", 0, "D", 0), Down("D", 0, "for this test", planned=True)],
            ),
            (2.5, Ended("D", 0), []),
            (2.5, Tick(), [Launch("D", 1)]),
        ],
    )
    assert core.members["D"].losses == 0
    assert Up("D", 1) in come_up(core, "D", 1, 3.0)
    assert not core.members["D"].leaving


def test_its_health_says_what_goes_on() -> None:
    core = core_of("ED")
    core.handle(Leave("D", 0), 1.0)
    assert core.health("D", 1.0).state == "leaving"
    core.handle(Quiet("D", 0, 3.0), 1.5)
    assert core.health("D", 1.5).state == "silent"
    core.handle(Replace("D", 0, "for this test"), 2.0)
    assert core.health("D", 2.0).state == "starting"
    core.handle(Ended("D", 0), 2.1)
    assert core.health("D", 2.1).state == "starting"
    core.handle(Tick(), 2.1)
    core.handle(Lost("D", 1, "killed"), 2.2)
    assert core.health("D", 2.2).state == "lost"


def test_it_may_stay_after_all() -> None:
    core = core_of("ED")
    core.handle(Leave("D", 0), 1.0)
    assert core.handle(Leave("D", 0, leaving=False), 2.0) == [Leaving("D", 0, False)]
    assert core.handle(Leave("D", 0, leaving=False), 2.0) == []


def test_of_another_life_or_one_that_is_away_nothing_is_done() -> None:
    core = core_of("ED")
    assert core.handle(Leave("D", 3), 1.0) == core.handle(Replace("D", 3, ""), 1.0) == []
    core.handle(Lost("D", 0, "killed"), 2.0)
    assert core.handle(Leave("D", 0), 2.0) == core.handle(Replace("D", 0, ""), 2.0) == []
    assert core.members["D"].phase is LifePhase.ENDING


def test_lost_while_it_leaves_it_comes_back_after_a_loss_and_leaves_no_more() -> None:
    core = core_of("ED")
    core.handle(Leave("D", 0), 1.0)
    assert Down("D", 0, "killed", planned=False) in core.handle(Lost("D", 0, "killed"), 2.0)
    core.handle(Ended("D", 0), 2.0)
    assert core.handle(Tick(), 2.0 + BACKOFF_S) == [Launch("D", 1)]
    assert core.members["D"].losses == 1
    assert not core.members["D"].leaving


def test_who_comes_up_meanwhile_hears_who_leaves() -> None:
    core = core_of("EPD")
    core.handle(Lost("E", 0, "killed"), 1.0)
    core.handle(Ended("E", 0), 1.0)
    core.handle(Tick(), 1.0 + BACKOFF_S)
    core.handle(Leave("D", 0), 2.0)
    out = come_up(core, "E", 1, 3.0)
    assert out[-2:] == [Up("E", 1), Leaving("D", 0, True)]


def test_its_failures_are_counted_from_its_end() -> None:
    core = core_of("ED")
    core.members["D"].failures = 5
    core.handle(Replace("D", 0, ""), 1.0)
    assert core.members["D"].failures == 0


# ---------------------------------------------------------------- one more, one less


def test_one_more_is_started_and_met() -> None:
    core = core_of("ED")
    table(core, [(1.0, Add("P", False), [Launch("P", 0)])])
    assert come_up(core, "P", 0, 2.0)[-1] == Up("P", 0)
    assert core.health("P", 2.0).state == "up"


def test_the_first_that_is_started_here_takes_a_launcher() -> None:
    core = SupervisorCore(["E"], ["E"])
    core.handle(Begin(), 0.0)
    table(core, [(1.0, Add("P", False), [Launch("P", 0)])])
    table(core, [(1.0, Add("D", True), [Launch("D", 0)])])


def test_one_is_removed_once_it_has_ended() -> None:
    core = core_of("ED")
    table(
        core,
        [
            (1.0, Remove("D", "for this test"), [
                Fence("D", 0), Separate("E", 0, "D", 0), Down("D", 0, "for this test", planned=True)]),
            (1.1, Remove("D", "for this test"), []),
            (1.2, Ended("D", 0), [Removed("D", 0)]),
            (1.3, Tick(), []),
            (1.4, Lost("D", 0, "late"), []),
            (1.4, Quiet("D", 0, 30.0), []),
        ],
    )  # fmt: skip
    assert set(core.members) == {"E"}
    assert core.next_timer() is None


def test_one_that_is_away_is_removed_at_once_or_as_it_has_ended() -> None:
    core = core_of("EPD")
    core.handle(Lost("D", 0, "killed"), 1.0)
    table(core, [(1.1, Remove("D", ""), []), (1.2, Ended("D", 0), [Removed("D", 0)])])
    core.handle(Lost("P", 0, "killed"), 2.0)
    core.handle(Ended("P", 0), 2.0)
    table(core, [(2.1, Remove("P", ""), [Removed("P", 0)]), (9.0, Tick(), [])])


def test_one_that_is_being_started_is_ended_first() -> None:
    core = core_of("ED")
    core.handle(Add("P", False), 1.0)
    table(
        core,
        [
            (
                1.1,
                Remove("P", "never mind"),
                [
                    Fence("P", 0),
                    *(Separate(each, 0, "P", 0) for each in "ED"),
                    Down("P", 0, "never mind", planned=True),
                ],
            ),
            (1.2, Loaded("P", 0), []),
            (1.3, Ended("P", 0), [Removed("P", 0)]),
        ],
    )


def test_the_next_of_its_name_has_the_next_epoch() -> None:
    core = core_of("ED")
    core.handle(Remove("D", ""), 1.0)
    core.handle(Ended("D", 0), 1.0)
    table(core, [(2.0, Add("D", False), [Launch("D", 1)]), (2.1, Loaded("D", 0), [])])


def test_who_waits_to_meet_one_that_is_removed_comes_up() -> None:
    core = core_of("ED")
    core.handle(Add("P", False), 1.0)
    core.handle(Loaded("P", 0), 1.5)
    core.handle(Linked("P", 0, "E", 0), 1.6)
    core.handle(Linked("E", 0, "P", 0), 1.6)
    assert Up("P", 0) in core.handle(Remove("D", ""), 2.0)


def test_nothing_is_added_to_one_that_closes() -> None:
    core = core_of("ED")
    core.handle(Retire(), 1.0)
    table(core, [(1.0, Add("P", False), [])])
    core.handle(CloseAll(), 1.1)
    table(core, [(1.2, Remove("D", ""), []), (1.3, Ended("D", 0), [Removed("D", 0)])])


@pytest.mark.parametrize("part", range(4))
def test_amid_kills_and_freezes_all_are_whole_in_the_end(part: int) -> None:
    grown = 0
    for seed in range(part * 100, part * 100 + 100):
        world = play(seed)
        grown += "X" in world.core.members
        world.run(world.now + 200.0, partial(getattr, world, "whole"))
        assert world.whole, seed
        told = [each for each in world.told if isinstance(each, (Down, Suspect, Up, Leaving, Removed))]
        assert len(told) == len(world.told)
    assert 10 < grown < 60


def add_or_remove(world: World, life: tuple[str, int]) -> None:
    """Of the name X there is one, and then none."""
    world.tell(Remove("X", "for this test") if "X" in world.core.members else Add("X", False))


ACTS: list[Callable[[World, tuple[str, int]], None]] = [
    add_or_remove,
    add_or_remove,
    lambda world, life: world.tell(Leave(*life)),
    lambda world, life: world.tell(Leave(*life, leaving=False)),
    lambda world, life: world.tell(Replace(*life, "for this test")),
    World.strike,
    World.hold,
    World.release,
]


def play(seed: int) -> World:
    """Some acts at random times."""
    world, draw = World("EPD", seed), random.Random(seed)
    world.run(20.0)
    for _ in range(draw.randrange(1, 8)):
        names = [*"EPD", *(["X"] if "X" in world.core.members else [])]
        draw.choice(ACTS)(world, world.life(draw.choice(names)))
        world.run(world.now + draw.choice([0.0, 0.1, 1.0, 5.0]))
    return world
