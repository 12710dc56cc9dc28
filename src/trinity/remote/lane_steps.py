"""LaneSteps: for how long an instance's lanes have been at their steps, and which of them its front end is told of."""

from __future__ import annotations

from collections.abc import Mapping

from trinity.remote.channel.wire import AtStep
from trinity.remote.instance_loading import BUSY_BEAT_S
from trinity.remote.supervision.supervisor_core import find_silence_limit, find_step_limit

LaneStep = tuple[str, int]  # a lane, and the number of a step


class LaneSteps:
    """Steps of the lanes, counted by beats: time in which all of the process stood still is none of a step.

    One word is for all lanes. It is of the step that hangs; else of the one that may be silent for longest, as no other
    lane says anything either while that holds the interpreter. ``steps``: predicted seconds of those that are run.
    """

    def __init__(self) -> None:
        self._beats: dict[LaneStep, int] = {}
        self._told = False

    def begin(self, lane: str, predicted_s: float, steps: Mapping[LaneStep, float]) -> AtStep:
        """Return what to tell as a step begins, which may be behind others of its lane."""
        self._told = True
        return self._choose({**steps, (lane, 0): predicted_s})

    def beat(self, steps: Mapping[LaneStep, float]) -> AtStep | None:
        """Count a beat; return what to tell: None where no step is long."""
        self._beats = {each: self._beats.get(each, -1) + 1 for each in steps}
        found = self._choose(steps) if self._told or any(self._beats.values()) else None
        self._told = bool(steps) and found is not None
        return found

    def _choose(self, steps: Mapping[LaneStep, float]) -> AtStep:
        ranks = []
        for each, predicted_s in steps.items():
            seconds = self._beats.get(each, 0) * BUSY_BEAT_S
            hangs = seconds > find_step_limit(predicted_s)
            ranks.append((hangs, find_silence_limit(predicted_s), seconds, predicted_s, each[0]))
        return AtStep(*max(ranks)[2:]) if ranks else AtStep()
