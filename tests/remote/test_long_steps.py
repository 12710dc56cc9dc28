"""Steps that are long, and steps that hang: whatever is told, and when, only what hangs or is silent is lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from remote.supervision.test_supervisor_core import core_of, table
from remote.test_supervision import emulated
from support.emulated_pipelines import LIVENESS_S, asked, check, serve
from support.freezing import freeze
from trinity.remote import worker as session_module
from trinity.remote.channel.wire import AtStep, decode
from trinity.remote.supervision.supervised_lives import SUSPECT_S
from trinity.remote.supervision.supervisor_core import (
    LEAVING_SILENCE_S,
    STEP_FLOOR_S,
    STEP_TIMES,
    STEP_UNKNOWN_S,
    SupervisorCore,
    find_step_limit,
)
from trinity.remote.supervision.supervisor_messages import Down, Event, Fence, Quiet, Retire, Separate, Suspect
from trinity.remote.worker import InstanceWorker

SILENCE_S, BEAT_S, WATCH_S = 20.0, 1.0, 0.5
KNOWN_S = 12.0  # of a step that is long by its prediction


def lost(why: str) -> list[Event]:
    return [Fence("D", 0), Separate("E", 0, "D", 0), Down("D", 0, why)]


@pytest.mark.parametrize(
    ("predicted_s", "limit_s"),
    [(0.0, STEP_UNKNOWN_S), (0.001, STEP_FLOOR_S), (5.9, STEP_FLOOR_S), (KNOWN_S, STEP_TIMES * KNOWN_S)],
)
def test_a_step_hangs_from_ten_times_its_predicted_time_on(predicted_s: float, limit_s: float) -> None:
    assert find_step_limit(predicted_s) == limit_s
    core = core_of("ED")
    table(core, [(9.0, Quiet("D", 0, 0.1, limit_s, predicted_s), [])])
    told = f"{predicted_s:.2g} s were predicted" if predicted_s else "none was predicted"
    why = f"a step of it hangs: it has taken {limit_s + 0.1:.1f} s, and {told}"
    table(core, [(9.1, Quiet("D", 0, 0.1, limit_s + 0.1, predicted_s), lost(why))])


@pytest.mark.parametrize(
    ("predicted_s", "longest_s"), [(0.0, STEP_FLOOR_S), (0.5, SILENCE_S), (KNOWN_S, STEP_TIMES * KNOWN_S)]
)
def test_silence_at_a_long_step_is_borne_for_as_long_as_that_may_take(predicted_s: float, longest_s: float) -> None:
    core = core_of("ED")
    core.handle(Quiet("D", 0, longest_s, 1.0, predicted_s), 9.0)
    assert core.health("D", 9.0).state != "lost"
    assert core.handle(Quiet("D", 0, longest_s + 0.1, 1.0, predicted_s), 9.1) == lost(
        f"it said nothing for {longest_s + 0.1:.1f} s"
    )


def test_requests_go_past_it_once_it_is_silent_for_longer_than_the_step_was_to_take() -> None:
    core = core_of("ED")
    table(
        core,
        [
            (9.0, Quiet("D", 0, SUSPECT_S + 1, 5.0, KNOWN_S), []),
            (9.1, Quiet("D", 0, KNOWN_S + 0.1, 13.0, KNOWN_S), [Suspect("D", 0, True)]),
            (9.2, Quiet("D", 0, 0.1), [Suspect("D", 0, False)]),
        ],
    )


def test_a_pipeline_that_is_closed_does_not_wait_for_a_long_step_that_is_silent() -> None:
    core = core_of("ED")
    core.handle(Retire(), 1.0)
    assert core.handle(Quiet("D", 0, LEAVING_SILENCE_S + 0.1, 5.0, KNOWN_S), 6.0)[0] == Fence("D", 0)


async def test_short_steps_leave_no_word_of_a_long_one() -> None:
    """A word that is never taken back would be the end of an instance that is idle."""
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        until, heard = time.monotonic() + 4 * BEAT_S, False
        while time.monotonic() < until:
            requests = asked()
            check(await serve(pipe, requests), requests)
            heard = heard or any(each.step is not None for each in pipe.processes.values())
        assert heard, "the first steps are announced"
        while any(each.step is not None for each in pipe.processes.values()):
            await asyncio.sleep(0.01)


async def test_one_that_is_stopped_amid_a_long_step_is_silent() -> None:
    async with emulated() as pipe, asyncio.timeout(STEP_FLOOR_S / 2):
        pipe.processes["P0"].step = (time.monotonic(), 0.0)  # as it says of one whose time is not known
        freeze(pipe.processes["P0"].process)
        while not pipe.health["P0"].losses:
            await asyncio.sleep(0.01)
        assert "it said nothing for" in pipe.health["P0"].why


class Life:
    """One that runs steps in virtual time, and what the front end knows of it."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.now = draw, 0.0
        self.heard, self.step = 0.0, (0.0, 0.0)
        self.at_step = False
        self.core: SupervisorCore = core_of("ED")

    def run(self, seconds: float, predicted_s: float, *, holds: bool, announced: bool) -> bool:
        """Run a step; ``holds``: the interpreter. Return whether it has been given up by its end."""
        began, told = self.now, announced
        if announced:
            self.at_step, self.step = True, (began, predicted_s)
        beat = began + self.draw.uniform(0.0, BEAT_S)
        while self.now < began + seconds:
            self.now = min(self.now + self.draw.uniform(0.1, 1.5) * WATCH_S, began + seconds)
            while not holds and beat <= self.now:
                self.heard = beat
                if beat - began >= BEAT_S or told:
                    self.at_step, told = True, True
                    self.step = (began + self.draw.uniform(0.0, min(BEAT_S, beat - began)), predicted_s)
                beat += BEAT_S
            if self.watch():
                return True
        self.heard, self.at_step = self.now, False
        return self.watch()

    def watch(self) -> bool:
        at = (self.now - self.step[0], self.step[1]) if self.at_step else ()
        return Fence("D", 0) in self.core.handle(Quiet("D", 0, self.now - self.heard, *at), self.now)


@pytest.mark.parametrize("seed", range(60))
def test_in_every_order_a_long_step_is_borne_and_one_that_hangs_is_given_up(seed: int) -> None:
    draw = random.Random(seed)
    life = Life(draw)
    for _ in range(draw.randint(1, 12)):
        predicted_s = draw.choice([0.0, draw.uniform(0.001, 1.0), draw.uniform(1.0, 40.0)])
        holds = draw.random() < 0.4
        announced = not 0.0 < predicted_s < 1.0
        most = STEP_TIMES * predicted_s if predicted_s else STEP_FLOOR_S
        most = max(most, SILENCE_S if holds else STEP_FLOOR_S)
        seconds = draw.uniform(0.0, 0.99) * most
        assert not life.run(seconds, predicted_s, holds=holds, announced=announced)
        life.now += draw.uniform(0.0, BEAT_S)
    began = life.now
    assert life.run(10 * STEP_UNKNOWN_S, predicted_s, holds=holds, announced=announced)
    assert life.now - began <= max(find_step_limit(predicted_s), SILENCE_S) + 2 * BEAT_S


# ---------------------------------------------------------------- what an instance tells of its steps

Steps = dict[tuple[str, int], float]  # predicted seconds, by lane and number
VISION, LANGUAGE = ("vision", 1), ("language", 2)


class Channel:
    """A control channel that keeps what is sent, and when."""

    closed = False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.sent = clock, list[tuple[float, AtStep]]()

    def send(self, frame: bytes) -> None:
        message = decode(frame)
        assert isinstance(message, AtStep)
        self.sent.append((self.clock(), message))


class Over(Exception):
    """The virtual time of a test is."""


async def told(
    monkeypatch: pytest.MonkeyPatch, steps_at: Callable[[float], Steps], until: float, stops: tuple[float, float]
) -> list[tuple[float, AtStep]]:
    """Beat in virtual time; ``stops``: when the process is stopped, and for how long."""
    clock = SimpleNamespace(now=0.0)
    stop, stopped_s = stops

    async def sleep(seconds: float) -> None:
        end = clock.now + seconds
        clock.now = end + stopped_s if clock.now < stop <= end else end
        if clock.now > until:
            raise Over

    session = InstanceWorker(b"s" * 32, "unix:/nowhere", asyncio.Event())
    session.loop = cast(Any, SimpleNamespace(time=lambda: clock.now))
    monkeypatch.setattr(session_module, "asyncio", SimpleNamespace(sleep=sleep))
    channel = Channel(lambda: clock.now)
    host = SimpleNamespace(blocks_digested=0, predict_steps=lambda: steps_at(clock.now))
    with pytest.raises(Over):
        await session._beat_at_work(cast(Any, channel), cast(Any, host))
    return channel.sent


def is_hung(word: AtStep) -> bool:
    return word.seconds is not None and word.seconds > find_step_limit(word.predicted_s)


async def test_time_in_which_the_process_was_stopped_is_none_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy instance was given up for Ctrl-Z, or a pause of its container."""
    found = await told(monkeypatch, lambda now: {LANGUAGE: 5.0}, 80.0, (4.5, 66.0))
    assert not any(is_hung(word) for _, word in found)
    assert found[-1][1].seconds == pytest.approx(80.0 - 66.0, abs=2 * BEAT_S)


async def test_a_step_that_hangs_is_not_hidden_by_a_longer_one_of_another_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told of when the first step at the other stage had ended, after 591 s."""

    def steps_at(now: float) -> Steps:
        return ({VISION: 0.0} if now < 590.0 else {}) | ({LANGUAGE: 0.1} if now >= 2.0 else {})

    found = await told(monkeypatch, steps_at, 700.0, (inf, 0.0))
    first, word = next(each for each in found if is_hung(each[1]))
    assert word.lane == "language"
    assert first <= 2.0 + STEP_FLOOR_S + 2 * BEAT_S
    assert all(word.lane == "vision" for at, word in found if at < first)


async def test_of_two_steps_the_one_that_may_be_silent_for_longest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other would be the end of it: its lane says nothing while this one holds the interpreter."""
    found = await told(
        monkeypatch, lambda now: {LANGUAGE: 0.1} | ({VISION: 40.0} if now >= 3.0 else {}), 9.0, (inf, 0.0)
    )
    assert {word.lane for at, word in found if at < 3.0} == {"language"}
    assert {(word.predicted_s, word.lane) for at, word in found if at >= 3.0} == {(40.0, "vision")}


async def test_a_step_that_begins_does_not_hide_one_that_may_be_silent_for_longer() -> None:
    session = InstanceWorker(b"s" * 32, "unix:/nowhere", asyncio.Event())
    channel, steps = Channel(), dict[tuple[str, int], float]()
    session.host = cast(Any, SimpleNamespace(predict_steps=lambda: steps))
    session._frontend = cast(Any, channel)
    for lane, predicted_s in (("vision", 40.0), ("language", 1.5)):
        steps[lane, len(steps)] = predicted_s
        await asyncio.to_thread(session._announce_step, lane, predicted_s)
    assert [(word.lane, word.predicted_s) for _, word in channel.sent] == [("vision", 40.0)] * 2
