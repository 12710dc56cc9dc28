"""SupervisorCore: whatever is lost, and when, all come back in time; one after the other, never two of a name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from support.supervised_world import LOAD_S, STUCK_S, Life, World
from trinity.core.messages import Tick
from trinity.remote.supervision.supervised_lives import MEET_S, RELINK_S, SUSPECT_S, LifePhase
from trinity.remote.supervision.supervisor_core import LONGEST_AWAY_S, SupervisorCore
from trinity.remote.supervision.supervisor_messages import (
    Begin,
    CloseAll,
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
    Retire,
    Separate,
    Suspect,
    Unlinked,
    Up,
)

Fault = Callable[[World], None]
NAMES = "EPD"
WORK_S = 40.0  # of a long step
SOON_S = 5.0  # pauses, fences and channels, without loading


def core_of(names: str, *by_hand: str, up: bool = True) -> SupervisorCore:
    core = SupervisorCore(list(names), by_hand)
    core.handle(Begin(), 0.0)
    for name in names if up else "":
        come_up(core, name, 0, 0.0)
    return core


def come_up(core: SupervisorCore, name: str, epoch: int, now: float) -> list[Event]:
    """It loads, and all it is introduced to are linked at once."""
    out = core.handle(Loaded(name, epoch), now)
    for each in list(out):
        if isinstance(each, Introduce):
            out += core.handle(Linked(each.name, each.epoch, each.peer, each.peer_epoch), now)
    return out


def table(core: SupervisorCore, rows: Sequence[tuple[float, Event | Tick, list[Event]]]) -> None:
    for number, (now, event, expected) in enumerate(rows):
        found = core.handle(event, now)
        assert found == expected, f"row {number}, {event}: {found}"


# ---------------------------------------------------------------- the table


def test_all_start_meet_and_come_up() -> None:
    core = SupervisorCore(["E", "D"])
    table(
        core,
        [
            (0.0, Begin(), [Launch("E", 0), Launch("D", 0)]),
            (1.0, Loaded("E", 0), [Up("E", 0)]),
            (2.0, Loaded("D", 0), [Introduce("D", 0, "E", 0), Introduce("E", 0, "D", 0)]),
            (3.0, Linked("E", 0, "D", 0), []),
            (4.0, Linked("D", 0, "E", 0), [Up("D", 0)]),
        ],
    )


def test_a_loss_is_fenced_told_and_made_good() -> None:
    core = core_of("ED")
    table(
        core,
        [
            (9.0, Lost("E", 0, "gone"), [Fence("E", 0), Separate("D", 0, "E", 0), Down("E", 0, "gone")]),
            (9.0, Lost("E", 0, "once more"), []),
            (9.3, Tick(), []),  # not before it has ended
            (9.5, Ended("E", 0), []),
            (9.5, Tick(), [Launch("E", 1)]),
            (9.6, Loaded("E", 0), []),  # of the old life
            (9.7, Loaded("E", 1), [Introduce("E", 1, "D", 0), Introduce("D", 0, "E", 1)]),
            (9.7, Linked("D", 0, "E", 0), []),
            (9.8, Linked("D", 0, "E", 1), []),
            (9.9, Linked("E", 1, "D", 0), [Up("E", 1)]),
        ],
    )


def test_a_newcomer_waits_no_longer_for_one_that_is_lost() -> None:
    """61 s for two losses close together, when this was a lock around tasks."""
    core = core_of("ED")
    core.handle(Lost("E", 0, "gone"), 9.0)
    core.handle(Ended("E", 0), 9.0)
    core.handle(Tick(), 9.1)
    assert core.handle(Loaded("E", 1), 9.2) == [Introduce("E", 1, "D", 0), Introduce("D", 0, "E", 1)]
    assert core.handle(Lost("D", 0, "gone too"), 9.3)[-1] == Up("E", 1)


def test_a_newcomer_waits_no_longer_for_one_that_is_silent_and_meets_it_later() -> None:
    core = core_of("ED")
    core.handle(Lost("E", 0, "gone"), 9.0)
    core.handle(Ended("E", 0), 9.0)
    core.handle(Tick(), 9.1)
    core.handle(Loaded("E", 1), 9.2)
    table(
        core,
        [
            (9.3, Linked("E", 1, "D", 0), []),
            (11.1, Quiet("D", 0, SUSPECT_S), []),
            (11.2, Quiet("D", 0, SUSPECT_S + 0.1), [Suspect("D", 0, True), Up("E", 1), Suspect("D", 0, True)]),
            (11.3, Quiet("D", 0, SUSPECT_S + 0.2), []),
            (13.0, Quiet("D", 0, 0.1), [Suspect("D", 0, False)]),
            (13.1, Linked("D", 0, "E", 1), []),
            (99.0, Tick(), []),
        ],
    )


def test_a_newcomer_waits_for_none_that_is_silent_at_a_long_step_and_costs_neither() -> None:
    """It was given up after 30 s, and after three of these the one at work was."""
    core = core_of("ED")
    core.handle(Lost("E", 0, "gone"), 9.0)
    core.handle(Ended("E", 0), 9.0)
    core.handle(Tick(), 9.1)
    core.handle(Loaded("E", 1), 9.2)
    at = (50.0, 100.0)  # seconds of its step, and those that were predicted
    table(
        core,
        [
            (9.3, Linked("E", 1, "D", 0), []),
            (11.1, Quiet("D", 0, SUSPECT_S, *at), []),
            (11.2, Quiet("D", 0, SUSPECT_S + 0.1, *at), [Up("E", 1)]),  # requests go to D as before
            (9.2 + MEET_S, Tick(), []),
            (9.1 + 2 * MEET_S, Quiet("D", 0, 0.1), []),  # it speaks again, as the time to meet ends
            (9.2 + 2 * MEET_S, Tick(), []),
            (9.3 + 2 * MEET_S, Linked("D", 0, "E", 1), []),
            (999.0, Tick(), []),
        ],
    )


def test_one_that_comes_while_another_is_at_a_long_step_is_up_at_once() -> None:
    core = core_of("ED")
    core.handle(Lost("E", 0, "gone"), 9.0)
    core.handle(Ended("E", 0), 9.0)
    core.handle(Quiet("D", 0, 5.0, 50.0, 100.0), 9.1)
    core.handle(Tick(), 9.2)
    assert core.handle(Loaded("E", 1), 9.3)[-1] == Up("E", 1)


def test_one_that_speaks_again_and_is_not_met_costs_the_younger() -> None:
    core = core_of("ED", up=False)
    core.handle(Loaded("D", 0), 0.0)
    core.handle(Quiet("D", 0, 5.0, 50.0, 100.0), 0.5)
    assert core.handle(Loaded("E", 0), 1.0)[-1] == Up("E", 0)
    core.handle(Quiet("D", 0, 0.1), 2.0)
    assert core.handle(Tick(), 1.0 + MEET_S)[0] == Fence("E", 0)


def test_one_that_is_silent_for_too_long_is_lost() -> None:
    core = core_of("ED")
    core.handle(Quiet("D", 0, 3.0), 3.0)
    assert Fence("D", 0) in core.handle(Quiet("D", 0, 20.1), 20.1)
    assert core.health("D", 20.2).why == "it said nothing for 20.1 s"


@pytest.mark.parametrize("suspected", [False, True])
def test_two_that_cannot_meet_cost_the_younger(suspected: bool) -> None:
    core = core_of("ED", up=False)
    core.handle(Loaded("D", 0), 0.0)
    core.handle(Loaded("E", 0), 1.0)
    if suspected:  # it may be the other that is at fault: not before that is known
        core.handle(Quiet("D", 0, 3.0), 2.0)
        assert core.handle(Tick(), 1.0 + MEET_S) == []
        core.handle(Quiet("D", 0, 0.0), 40.0)
    found = core.handle(Tick(), 1.0 + 2 * MEET_S)
    assert found[0] == Fence("E", 0)


def test_two_that_lose_each_other_cost_the_younger_unless_one_is_lost() -> None:
    core = core_of("ED")
    core.handle(Unlinked("E", 0, "D", 0), 9.0)
    assert core.next_timer() == 9.0 + RELINK_S
    assert core.handle(Tick(), 9.0 + RELINK_S)[0] == Fence("D", 0)
    core = core_of("ED")
    core.handle(Unlinked("D", 0, "E", 0), 9.0)
    core.handle(Lost("E", 0, "gone"), 9.1)
    assert core.next_timer() is None


def test_of_another_life_nothing_is_heard() -> None:
    core = core_of("ED")
    for event in (Lost("E", 1, ""), Ended("E", 0), Linked("E", 0, "D", 4), Unlinked("E", 0, "X", 0), Quiet("E", 7, 99)):
        assert core.handle(event, 9.0) == []
    assert core.next_timer() is None


# ---------------------------------------------------------------- pauses


def test_health_says_who_is_away_and_why() -> None:
    core = core_of("ED")
    assert core.health("D", 1.0).state == "up"
    core.handle(Quiet("D", 0, 3.0), 3.0)
    assert core.health("D", 3.0).state == "silent"
    core.handle(Lost("D", 0, "it broke"), 4.0)
    assert core.health("D", 4.0) == core.health("D", 5.0)
    core.handle(Ended("D", 0), 4.0)
    found = core.health("D", 4.05)
    assert (found.state, found.losses, found.why) == ("lost", 1, "it broke")
    assert found.next_start_s == pytest.approx(0.05)
    core.handle(Tick(), 4.2)
    assert core.health("D", 4.2).state == "starting"
    core.handle(CloseAll(), 5.0)
    core.handle(Ended("D", 1), 5.0)
    assert core.health("D", 5.0).state == "closed"


# ---------------------------------------------------------------- the end


def test_after_retire_nobody_is_started_and_losses_are_told() -> None:
    core = core_of("ED")
    core.handle(Lost("E", 0, "x"), 1.0)
    core.handle(Ended("E", 0), 1.0)
    table(core, [(1.0, Retire(), []), (9.0, Tick(), []), (9.0, Lost("D", 0, "x"), [Fence("D", 0), Down("D", 0, "x")])])
    core.handle(Ended("D", 0), 9.0)
    assert all(member.phase is LifePhase.CLOSED for member in core.members.values())


def test_a_pipeline_that_is_closed_does_not_wait_for_a_silent_one() -> None:
    core = core_of("ED")
    core.handle(Retire(), 1.0)
    assert core.handle(Quiet("D", 0, 3.9), 4.9) == [Suspect("D", 0, True)]
    assert core.handle(Quiet("D", 0, 4.1), 5.1)[0] == Fence("D", 0)


@pytest.mark.parametrize("seed", range(40))
def test_closed_in_any_phase_all_end_and_nothing_starts(seed: int) -> None:
    world = World(NAMES, seed)
    for _ in range(random.Random(seed).randrange(60)):
        world.step()
        if world.draw.random() < 0.1:
            world.strike(world.life(world.draw.choice(NAMES)))
    world.close()
    world.run(world.now + 60.0)
    assert not any(process.alive for process in world.processes.values())
    assert all(member.phase is LifePhase.CLOSED for member in world.core.members.values())
    assert world.core.next_timer() is None


# ---------------------------------------------------------------- orders of losses


def victims(names: str) -> dict[str, Fault]:
    """Every fault by its name; each strikes whichever life there is."""

    def of(do: Callable[[World, Life], None], name: str) -> Fault:
        return lambda world: do(world, world.life(name))

    found: dict[str, Fault] = {"launcher dies": World.end_launcher}
    found["launcher freezes"] = World.hold_launcher
    found["link cut"] = lambda world: world.cut(world.life(names[0]), world.life(names[1]))
    for name in names:
        found[f"{name} dies"] = of(World.strike, name)
        found[f"{name} freezes"] = of(World.hold, name)
        found[f"{name} stumbles"] = of(stumble, name)
        found[f"{name} works"] = of(work, name)
    return found


def stumble(world: World, life: Life) -> None:
    """Frozen for a while that is no loss yet."""
    world.hold(life)
    world.later(world.draw.uniform(0.5, 8.0), lambda: world.release(life))


def work(world: World, life: Life) -> None:
    """Silent in a long step, which it has announced."""
    world.work(life, world.draw.uniform(0.5, 1.0) * WORK_S, WORK_S)


def play(seed: int, faults: Sequence[tuple[int, str]], names: str = NAMES, **named: float) -> float:
    """Faults after so many steps from the first moment on; the seconds from the last one until all are whole again."""
    world = World(names, seed, silence_s=named.get("silence_s", 20.0))
    known = victims(names)
    if named.get("settled"):
        world.run(20.0, lambda: world.whole)
    began = world.steps
    for at, fault in faults:
        while world.steps - began < at and world.step():
            pass
        known[fault](world)
    struck = world.now
    world.run(struck + 200.0, lambda: world.whole)
    assert world.whole, f"{seed}, {faults}: {world.up}, {world.core.members}"
    return world.now - struck


def bound(faults: Sequence[tuple[int, str]], silence_s: float = 20.0) -> float:
    """What may be needed: silence of who froze, a launcher that does not answer, links, and two times loading."""
    words = [fault for _, fault in faults]
    frozen = any(word.endswith("freezes") and "launcher" not in word for word in words)
    stumbling = any(word.endswith("stumbles") for word in words)
    waits = (silence_s if frozen else 8.0 if stumbling else 0.0) + STUCK_S * ("launcher freezes" in words)
    working = any(word.endswith("works") for word in words)
    waits += 2 * RELINK_S + MEET_S * (stumbling or working or "link cut" in words) + WORK_S * working
    return waits + len(words) * (LOAD_S + SOON_S)


KILLS = [f"{name} dies" for name in NAMES]


@pytest.mark.parametrize("settled", [0.0, 1.0], ids=["at start", "in service"])
def test_two_deaths_at_any_two_moments(settled: float) -> None:
    """Every pair of victims, the second after every number of steps: in every phase of the joining of the first."""
    worst = 0.0
    for one, two, gap in product(KILLS, KILLS, range(40)):
        worst = max(worst, play(gap, [(3, one), (3 + gap, two)], settled=settled))
    assert worst < 2 * (LOAD_S + SOON_S), worst


@pytest.mark.parametrize("first", list(victims(NAMES)))
def test_any_two_faults_at_any_two_moments(first: str) -> None:
    for second, gap in product(victims(NAMES), range(0, 45, 4)):
        faults = [(2, first), (2 + gap, second)]
        assert play(gap, faults, settled=1.0) < bound(faults), faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_two_faults_at_every_two_moments(seed: int) -> None:
    for first, second, gap in product(victims(NAMES), victims(NAMES), range(60)):
        faults = [(seed, first), (seed + gap, second)]
        assert play(seed * 1000 + gap, faults, settled=float(seed % 2)) < bound(faults), faults


@pytest.mark.parametrize("seed", range(60))
def test_while_one_is_at_a_long_step_the_others_come_back_and_it_is_not_lost(seed: int) -> None:
    """Whatever dies meanwhile, however often; about half of the steps end as somebody's time to meet does."""
    world, draw = World(NAMES, seed), random.Random(seed)
    world.run(20.0, lambda: world.whole)
    busy, *others = draw.sample(NAMES, len(NAMES))
    predicted_s = MEET_S + draw.uniform(0.0, 4.0) if seed % 2 else draw.uniform(20.0, 200.0)
    ends = world.now + predicted_s
    world.work(world.life(busy), predicted_s, predicted_s)
    strikes = dict.fromkeys(others, 0)
    while world.now < ends - (LOAD_S + SOON_S):
        struck = draw.choice(others)
        world.strike(world.life(struck))
        strikes[struck] += 1
        world.run(world.now + LOAD_S + SOON_S, lambda: world.up == {busy: 0, **strikes})
        assert world.up == {busy: 0, **strikes}, (struck, world.core.members)
        world.run(min(world.now + draw.choice([0.1, 2 * MEET_S]), ends))
    world.run(ends + 2 * MEET_S)
    assert world.whole, world.core.members
    assert {name: world.core.members[name].epoch for name in NAMES} == {busy: 0, **strikes}


def random_faults(seed: int, most: int) -> list[tuple[int, str]]:
    draw = random.Random(seed)
    known = list(victims(NAMES))
    return sorted((draw.randrange(120), draw.choice(known)) for _ in range(draw.randint(1, most)))


def test_any_number_of_faults_at_random() -> None:
    for seed in range(400):
        faults = random_faults(seed, 8)
        assert play(seed, faults, settled=float(seed % 2)) < bound(faults) + LONGEST_AWAY_S, (seed, faults)


@pytest.mark.slow
def test_any_number_of_faults_at_random_many_times() -> None:
    for seed in range(1000, 11_000):
        faults = random_faults(seed, 12)
        assert play(seed, faults, settled=float(seed % 2)) < bound(faults) + LONGEST_AWAY_S, (seed, faults)
