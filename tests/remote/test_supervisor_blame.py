"""SupervisorCore: of two that do not get on the right one goes, and newcomers know who is silent."""

from __future__ import annotations

from itertools import pairwise

import pytest

from remote.supervision.test_supervisor_core import come_up, core_of, table
from support.supervised_world import World
from trinity.core.messages import Tick
from trinity.remote.supervision.supervised_lives import MEET_S, MOST_UNMET, SUSPECT_S
from trinity.remote.supervision.supervisor_core import LONGEST_AWAY_S, SupervisorCore
from trinity.remote.supervision.supervisor_messages import (
    Begin,
    Down,
    Ended,
    Event,
    Fence,
    Introduce,
    Launch,
    Linked,
    Loaded,
    Lost,
    Quiet,
    Refused,
    Suspect,
    Up,
)


def restart(core: SupervisorCore, name: str, now: float) -> float:
    """Lose it, have its next life begin, and return when."""
    if core.members[name].epoch >= 0:
        core.handle(Lost(name, core.members[name].epoch, "gone"), now)
    return begin_again(core, name, now)


def begin_again(core: SupervisorCore, name: str, now: float) -> float:
    core.handle(Ended(name, core.members[name].epoch), now)
    due = core.next_timer()
    assert due is not None
    assert [each.name for each in core.handle(Tick(), due) if isinstance(each, Launch)] == [name]
    return due


# ---------------------------------------------------------------- other weights


@pytest.mark.parametrize("speaker", ["D", "E"])
def test_a_newcomer_with_other_weights_goes_alone_whoever_says_so(speaker: str) -> None:
    core = core_of("EPD")
    now = restart(core, "E", 9.0)
    core.handle(Loaded("E", 1), now)
    lives = {"D": ("D", 0), "E": ("E", 1)}
    (peer,) = {"D", "E"} - {speaker}
    found = core.handle(Refused(*lives[speaker], "other weights", *lives[peer]), now)
    assert [each for each in found if isinstance(each, (Fence, Down))] == [Fence("E", 1), Down("E", 1, "other weights")]
    assert core.handle(Refused("P", 0, "other weights", "E", 1), now) == []  # the second that says so
    assert {core.health(name, now).state for name in "PD"} == {"up"}


def test_one_that_is_refused_stays_away_for_long_even_if_it_was_up() -> None:
    core = core_of("PDE")
    now, waits = 9.0, list[float]()
    for epoch in range(20):
        assert Down("E", epoch, "other weights") in core.handle(Refused("E", epoch, "other weights", "P", 0), now)
        due = begin_again(core, "E", now)
        waits.append(due - now)
        come_up(core, "E", epoch + 1, due)
        now = due + 0.5
    assert waits[-1] == LONGEST_AWAY_S
    assert all(one <= two + 1e-6 for one, two in pairwise(waits))
    assert core.members["P"].epoch == core.members["D"].epoch == 0


def test_an_elder_is_not_blamed_for_the_weights_of_newcomers() -> None:
    core = core_of("EPD")
    now = restart(core, "E", 9.0)
    for epoch in range(1, 4 * MOST_UNMET):
        core.handle(Loaded("E", epoch), now)
        assert Fence("E", epoch) in core.handle(Refused("D", 0, "other weights", "E", epoch), now)
        now = begin_again(core, "E", now)
    assert core.members["D"].epoch == core.members["P"].epoch == 0


# ---------------------------------------------------------------- an elder that nobody can reach


def fail_to_meet(core: SupervisorCore, name: str, elder: str, now: float) -> tuple[float, list[Event]]:
    """It meets all but this elder; return when that is given up, and what follows."""
    for each in core.handle(Loaded(name, core.members[name].epoch), now):
        if isinstance(each, Introduce) and elder not in (each.name, each.peer):
            core.handle(Linked(each.name, each.epoch, each.peer, each.peer_epoch), now)
    return now + MEET_S, core.handle(Tick(), now + MEET_S)


def test_after_three_lives_that_could_not_reach_it_an_elder_goes_itself() -> None:
    core = core_of("ABC")
    now = restart(core, "C", 9.0)
    for epoch in range(1, MOST_UNMET):
        now, found = fail_to_meet(core, "C", "A", now)
        assert found[0] == Fence("C", epoch)
        now = begin_again(core, "C", now)
    now, found = fail_to_meet(core, "C", "A", now)
    assert found[0] == Fence("A", 0)
    assert Up("C", MOST_UNMET) in found
    assert "could not reach" in core.health("A", now).why
    now = begin_again(core, "A", now)
    assert Up("A", 1) in come_up(core, "A", 1, now)
    assert core.members["B"].epoch == 0


def test_an_elder_that_others_reach_is_not_blamed() -> None:
    core = core_of("ABC")
    now = restart(core, "C", 9.0)
    for _ in range(MOST_UNMET):
        now, found = fail_to_meet(core, "C", "A", now)
        assert isinstance(found[0], Fence)
        assert found[0].name == "C"
        now = begin_again(core, "C", now)
        b = restart(core, "B", now)
        assert Up("B", core.members["B"].epoch) in come_up(core, "B", core.members["B"].epoch, b)


def test_one_that_reaches_nobody_blames_no_elder() -> None:
    core = core_of("ABC")
    now = restart(core, "A", 9.0)
    for epoch in range(1, 3 * MOST_UNMET):
        core.handle(Loaded("A", epoch), now)
        now += MEET_S
        assert core.handle(Tick(), now)[0] == Fence("A", epoch)
        now = begin_again(core, "A", now)


def test_one_that_cannot_go_on_with_an_elder_counts_as_one_that_could_not_reach_it() -> None:
    core = core_of("ED")
    now = restart(core, "E", 9.0)
    for epoch in range(1, MOST_UNMET + 1):
        core.handle(Loaded("E", epoch), now)
        found = core.handle(Refused("D", 0, "no descriptor is left", "E", epoch, for_good=False), now)
        assert found[0] == (Fence("E", epoch) if epoch < MOST_UNMET else Fence("D", 0))
        now = begin_again(core, "E" if epoch < MOST_UNMET else "D", now)


# ---------------------------------------------------------------- who is silent


def test_a_newcomer_is_told_who_is_silent() -> None:
    core = core_of("EPD")
    core.handle(Quiet("D", 0, SUSPECT_S + 0.5), 9.0)
    now = restart(core, "E", 9.0)
    core.handle(Loaded("E", 1), now)
    core.handle(Linked("E", 1, "P", 0), now)
    assert core.handle(Linked("P", 0, "E", 1), now) == [Up("E", 1), Suspect("D", 0, True)]


def test_all_are_told_of_a_newcomer_that_is_silent() -> None:
    """A's own word of the link comes after B has fallen silent: its suspicion came before it was known."""
    core = SupervisorCore(["A", "B"])
    core.handle(Begin(), 0.0)
    core.handle(Loaded("A", 0), 1.0)
    core.handle(Loaded("B", 0), 1.1)
    table(
        core,
        [
            (1.2, Linked("B", 0, "A", 0), []),
            (3.5, Quiet("B", 0, 2.3), [Suspect("B", 0, True)]),
            (3.6, Linked("A", 0, "B", 0), [Up("B", 0), Suspect("B", 0, True)]),
            (6.2, Quiet("B", 0, 0.1), [Suspect("B", 0, False)]),
        ],
    )


@pytest.mark.parametrize("seed", range(60))
def test_whoever_is_up_knows_who_is_silent(seed: int) -> None:
    """With lives frozen, released and killed at random: a Suspect that holds is repeated after each Up it concerns."""
    world = World("EPD", seed)
    known: set[tuple[str, str]] = set()  # who knows of whom that it is silent
    for _ in range(300):
        before = len(world.told)
        if not world.step():
            break
        name = world.draw.choice("EPD")
        if world.draw.random() < 0.05:
            world.draw.choice([World.strike, World.hold, World.hold, World.release])(world, world.life(name))
        for said in world.told[before:]:
            if isinstance(said, (Up, Down)):
                known = {pair for pair in known if said.name not in pair}
            elif isinstance(said, Suspect):
                others = {each for each in world.up if each != said.name} | {"front end"}
                pairs = {(each, said.name) for each in others if said.name in world.up}
                known = known | pairs if said.suspected else known - pairs
        silent = {name for name in world.up if world.core.members[name].suspected}
        told = {(each, name) for each in {*world.up, "front end"} for name in silent if each != name}
        assert told <= known, told - known
