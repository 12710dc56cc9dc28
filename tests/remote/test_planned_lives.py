"""SupervisorCore: an instance's life that is ended on purpose, for the next one; beside losses at any time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from remote.test_supervisor_core import come_up, core_of, table
from support.supervised_world import World
from trinity.core.messages import Tick
from trinity.remote.supervisor_core import BACKOFF_S, LifePhase
from trinity.remote.supervisor_messages import (
    Down,
    Ended,
    Fence,
    Launch,
    Leave,
    Leaving,
    Lost,
    Quiet,
    Replace,
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
            (2.5, Tick(), [Launch("D", 1, 1)]),
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
    assert core.handle(Tick(), 2.0 + BACKOFF_S) == [Launch("D", 1, 1)]
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


@pytest.mark.parametrize("part", range(4))
def test_amid_kills_and_freezes_all_are_whole_in_the_end(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        world = play(seed)
        world.run(world.now + 200.0, partial(getattr, world, "whole"))
        assert world.whole, seed
        told = [each for each in world.told if isinstance(each, (Down, Suspect, Up, Leaving))]
        assert len(told) == len(world.told)


ACTS: list[Callable[[World, tuple[str, int]], None]] = [
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
        draw.choice(ACTS)(world, world.life(draw.choice("EPD")))
        world.run(world.now + draw.choice([0.0, 0.1, 1.0, 5.0]))
    return world
