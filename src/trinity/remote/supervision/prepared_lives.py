"""PreparedLives: next lives of instances, which load beside the present ones; SupervisorCore owns it.

A life that is prepared has a process, and weights where memory allows that; nobody knows it, and it has no pool. It is
given the word to go on in place of a launch, once the present life of its name has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from trinity.remote.supervision.supervised_lives import SUSPECT_S, Member, NextLife
from trinity.remote.supervision.supervisor_messages import (
    Ended,
    Event,
    Fence,
    Launch,
    Lost,
    NextLoaded,
    NextLost,
    OfALife,
    Proceed,
    Quiet,
)

LOADING_SILENCE_S = 20.0  # imports and kernels may hold an interpreter for seconds


class PreparedLives:
    """Lives that wait for the word to go on, at most one of a name. See the table of ``supervisor_core``.

    - ``silence_s``: longest silence of one, where that is longer than one that loads may be silent for.
    """

    def __init__(self, silence_s: float) -> None:
        self._longest_s = max(silence_s, LOADING_SILENCE_S)

    def prepare(self, member: Member) -> list[Event]:
        """Launch the next life of an instance beside the present one, in place of one that was prepared before."""
        commands = self.dismiss(member)
        member.newest += 1
        member.next = NextLife(member.newest)
        return [*commands, Launch(member.name, member.newest, waits=True)]

    def proceed(self, member: Member) -> list[Event]:
        """Give the life that was prepared the word, as the present one; none where there is none to rely on."""
        if member.next is None or member.next.suspected:
            return []
        member.epoch, member.next = member.next.epoch, None
        return [Proceed(member.name, member.epoch)]

    def dismiss(self, member: Member) -> list[Event]:
        """End the life that was prepared, if there is one."""
        if member.next is None:
            return []
        epoch, member.next = member.next.epoch, None
        member.dismissed.add(epoch)
        return [Fence(member.name, epoch)]

    def handle(self, member: Member, event: OfALife) -> list[Event]:
        """Handle an event of the life that is prepared, or of one that was dismissed; none of any other."""
        handler = self._handlers.get(type(event))
        known = event.epoch in member.dismissed or (member.next is not None and member.next.epoch == event.epoch)
        return handler(self, member, event) if handler is not None and known else []

    def _loaded(self, member: Member, event: NextLoaded) -> list[Event]:
        if member.next is not None and member.next.epoch == event.epoch:
            member.next.prepared = True
        return []

    def _lost(self, member: Member, event: Lost) -> list[Event]:
        return self._lose(member, event.why) if event.epoch not in member.dismissed else []

    def _quiet(self, member: Member, event: Quiet) -> list[Event]:
        if member.next is None or event.epoch in member.dismissed:
            return []
        member.next.suspected = member.next.prepared and event.seconds > SUSPECT_S
        if event.seconds <= self._longest_s:
            return []
        return self._lose(member, f"it said nothing for {event.seconds:.1f} s")

    def _ended(self, member: Member, event: Ended) -> list[Event]:
        member.dismissed.discard(event.epoch)
        return []

    def _lose(self, member: Member, why: str) -> list[Event]:
        if member.next is None:
            return []
        epoch = member.next.epoch
        return [*self.dismiss(member), NextLost(member.name, epoch, why)]

    _handlers: ClassVar[dict[type[Event], Callable[[PreparedLives, Member, Any], list[Event]]]] = {
        NextLoaded: _loaded,
        Lost: _lost,
        Quiet: _quiet,
        Ended: _ended,
    }
